"""The demo's command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from zerofx.plan.plan import Plan
from zerofx.tools.demo.gpt import GPTConfig

FEWEST_STEPS = 4  # one compiles, two are measured, one is shown


def option(default: Any, text: str) -> Any:
    """Declare a field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """The options, one per field."""

    ranks: int = option(2, "processes to start")
    stage: int = option(3, "ZeRO stage, 0 to 3")
    steps: int = option(300, f"training steps, at least {FEWEST_STEPS}")
    layers: int = option(4, "transformer blocks")
    width: int = option(128, "width of the residual stream")
    heads: int = option(4, "attention heads")
    seq: int = option(128, "context in bytes")
    batch: int = option(4, "sequences per rank and step")
    dropout: float = option(0.0, "dropout probability")
    lr: float = option(4e-3, "highest learning rate of AdamW")
    kernels: str = option("auto", "auto, inductor or aten")
    out: str = option("zerofx-demo", "folder for the results")
    resume: str = option("", "folder of a snapshot to continue from, with the same model options")

    @property
    def model(self) -> GPTConfig:
        sizes = self.layers, self.width, self.heads, self.seq
        return GPTConfig(*sizes, dropout=self.dropout)

    @property
    def plan(self) -> Plan:
        return Plan(stage=self.stage, kernels=self.kernels)


def parse(argv: list[str]) -> Options:
    """Parse the command line; argparse ends the process with an error message."""
    parser = argparse.ArgumentParser(
        "zerofx demo", description="Train a byte-level GPT on Python's own sources, sharded."
    )
    for name, declared in Options.__dataclass_fields__.items():
        parser.add_argument(
            f"--{name}",
            type=type(declared.default),
            default=declared.default,
            help=f"{declared.metadata['help']} (default: {declared.default})",
        )
    options = Options(**vars(parser.parse_args(argv)))
    if options.steps < FEWEST_STEPS:
        parser.error(f"--steps {options.steps} is too few. Give at least {FEWEST_STEPS}.")
    try:  # here, so that an error is raised before any rank starts
        _ = options.model, options.plan
    except ValueError as mistake:
        parser.error(str(mistake))
    return options
