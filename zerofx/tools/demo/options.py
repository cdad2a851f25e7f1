"""The demo's command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from zerofx.plan.plan import Plan
from zerofx.tools.demo.gpt import GPTConfig

FEWEST_STEPS = 4  # one that compiles, two that are measured, one to show


def option(default: Any, text: str) -> Any:
    """Declare a field with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """One option a field."""

    ranks: int = option(2, "processes to start")
    stage: int = option(3, "ZeRO stage, 0 to 3")
    steps: int = option(300, f"training steps, at least {FEWEST_STEPS}")
    layers: int = option(4, "transformer blocks")
    width: int = option(128, "width of the residual stream")
    heads: int = option(4, "attention heads")
    seq: int = option(128, "context in bytes")
    batch: int = option(4, "sequences a rank and step")
    dropout: float = option(0.0, "dropout probability")
    lr: float = option(4e-3, "highest learning rate of AdamW")
    kernels: str = option("inductor", "inductor, auto or aten")
    out: str = option("zerofx-demo", "folder for what it leaves behind")
    resume: str = option("", "folder of a save to continue from, with the same model options")

    @property
    def model(self) -> GPTConfig:
        sizes = self.layers, self.width, self.heads, self.seq
        return GPTConfig(*sizes, dropout=self.dropout)

    @property
    def plan(self) -> Plan:
        return Plan(stage=self.stage, kernels=self.kernels)


def parse(argv: list[str]) -> Options:
    """Read the command line; argparse ends the process on a mistake, naming it."""
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
        parser.error(f"--steps {options.steps} is too few; give at least {FEWEST_STEPS}")
    try:  # here, so that a mistake shows before any rank is started
        _ = options.model, options.plan
    except ValueError as mistake:
        parser.error(str(mistake))
    return options
