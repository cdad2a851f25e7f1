"""Captured programs and states for the oracle, made once a session for each model of models.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from models import CASES
from oracle import Outcome, State, execute, make_tangents
from torch import Tensor, nn

from zerofx.capture import call as trees
from zerofx.capture import capture
from zerofx.hardware import hardware_for
from zerofx.ir.program import Captured, Planned, Program
from zerofx.passes.base import Pass
from zerofx.passes.order import Setting, build
from zerofx.passes.pipeline import run_pass
from zerofx.plan.plan import Plan

# Finer units than blocks: more buckets than slots, so that places change hands.
FINE = ("blocks.*.attn", "blocks.*.mlp")
OPTIMIZER = (("optimizer", "cpu"),)
PARAMETERS = (("parameters", "cpu"),)
BOTH = OPTIMIZER + PARAMETERS
STORED = (("optimizer", "nvme"), ("parameters", "nvme"), ("path", "/nowhere"))
SPILLED = (("activations", "nvme"), ("path", "/nowhere"))


@cache
def captured(case: str, units: tuple[str, ...] = (), dtype: torch.dtype | None = None) -> Planned:
    """Return the captured training call of a case. Do not change it: tests share it."""
    args, kwargs = CASES[case].batch(0)
    model = CASES[case].make()
    return capture(model, args, kwargs, units=units or "auto", compute_dtype=dtype)


def captured_inference(case: str) -> Captured:
    """Return the captured call of a case in eval mode under no_grad."""
    args, kwargs = CASES[case].batch(0)
    with torch.no_grad():
        return capture(CASES[case].make().eval(), args, kwargs)


@cache
def make_state(case: str, world_size: int, team: int = 1) -> State:
    """Return weights, and for each rank a batch, incoming gradients and a seed of its own.

    team: neighbours of so many share all of that.
    """
    if team > 1:
        data = make_state(case, world_size // team)
        ranks = [rank // team for rank in range(world_size)]
        each = ([given[r] for r in ranks] for given in (data.inputs, data.tangents, data.seeds))
        return State(data.params, data.buffers, *each)
    model, program = CASES[case].make(), captured(case)
    inputs = []
    for rank in range(world_size):
        args, kwargs = CASES[case].batch(rank)
        _, leaves, _ = trees.flatten_call(model.forward, args, kwargs)
        inputs.append({i: v for i, v in enumerate(leaves) if isinstance(v, Tensor)})
    return State(
        params={name: p.detach() for name, p in model.named_parameters()},
        buffers=_buffers(model),
        inputs=inputs,
        tangents=[make_tangents(program, 100 + rank) for rank in range(world_size)],
        seeds=[200 + rank for rank in range(world_size)],
    )


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers, each counter at another value, so that none passes for another."""
    return {
        name: torch.full_like(b, 3 + i) if b.dtype is torch.int64 and b.dim() == 0 else b
        for i, (name, b) in enumerate(model.named_buffers())
    }


@cache
def expected(case: str, world_size: int) -> list[Outcome]:
    """Return what the captured program computes: each rank on its own, gradients averaged."""
    return execute([captured(case)] * world_size, make_state(case, world_size))


def following_rank_0(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the same with rank 0's buffers on every rank: what sync-buffers is for."""
    first = {key: value for key, value in outcomes[0].results.items() if key[0] == "buffer"}
    return [replace(o, results={**o.results, **first}) for o in outcomes]


@dataclass(frozen=True)
class Choice:
    """A plan and a world size, with a label for test ids.

    The default sizes give the tests' models several buckets, some with several units in them.
    """

    stage: int
    world_size: int = 2
    activations: str | float | tuple[tuple[str, str], ...] = "keep"  # patterns as pairs
    budget: int | None = None
    shard_axis_size: int | None = None
    prefetch: str | int = "auto"
    units: tuple[str, ...] = ()
    bucket_bytes: int = 6000
    persist_below: int = 100
    update: str = "step"
    tiling: tuple[tuple[str, int], ...] = ()
    offload: tuple[tuple[str, Any], ...] = ()
    precision: str = "fp32"
    parallel: tuple[tuple[str, Any], ...] = ()
    secondary_shard_size: int | None = None
    hierarchical_size: int | None = None
    numerics: str = "bitwise"

    def __str__(self) -> str:
        chosen = self.activations
        if isinstance(chosen, tuple):
            chosen = "-".join(dict.fromkeys(choice for _, choice in chosen))
        parts = [f"stage{self.stage}", f"world{self.world_size}", str(chosen)]
        parts += ["budget"] if self.budget else []
        parts += [f"axis{self.shard_axis_size}"] if self.shard_axis_size else []
        parts += [f"nodes-of-{self.secondary_shard_size}"] if self.secondary_shard_size else []
        parts += [f"by-nodes-of-{self.hierarchical_size}"] if self.hierarchical_size else []
        parts += [f"ahead{self.prefetch}"] if self.prefetch != "auto" else []
        parts += ["units"] if self.units else []
        parts += ["tiled"] if self.tiling else []
        parts += [self.update] if self.update != "step" else []
        parts += [f"{k}-{v}" for k, v in self.offload if k != "path"]
        parts += [self.precision] if self.precision != "fp32" else []
        parts += [k if v is True else f"{k}{v}" for k, v in self.parallel if k != "placements"]
        return "-".join(parts)

    @property
    def dtype(self) -> torch.dtype | None:
        """The format that a program is captured in for this."""
        return {"fp32": None, "bf16": torch.bfloat16}[self.precision]

    def plan(self) -> Plan:
        return Plan(
            stage=self.stage,
            activations=dict(self.activations)
            if isinstance(self.activations, tuple)
            else self.activations,
            memory_budget=self.budget,
            shard_axis_size=self.shard_axis_size,
            prefetch=self.prefetch,
            units=self.units or "auto",
            bucket_bytes=self.bucket_bytes,
            persist_below=self.persist_below,
            update=self.update,
            tiling=dict(self.tiling) or "off",
            offload=dict(self.offload),
            precision=self.precision,
            parallel=self._parallel(),
            secondary_shard_size=self.secondary_shard_size,
            hierarchical_size=self.hierarchical_size,
            numerics=self.numerics,
        )

    def _parallel(self) -> dict[str, Any] | None:
        fields = dict(self.parallel)
        if "placements" in fields:
            fields["placements"] = dict(fields["placements"])
        return fields or None

    @property
    def team(self) -> int:
        """How many ranks have the same samples."""
        fields = dict(self.parallel)
        return fields.get("tensor", 1) * fields.get("context", 1)

    def setting(self) -> Setting:
        machine = replace(hardware_for("cpu"), offload_min_bytes=0)  # the models are tiny
        return Setting(self.plan(), self.world_size, machine)


def stages(program: Program, choice: Choice) -> list[tuple[Pass, Planned]]:
    """Run the pipeline pass by pass; return each pass with the program behind it."""
    done: list[tuple[Pass, Planned]] = []
    program = program.planned().clone()
    setting = choice.setting()
    program.plan, program.hardware = setting.plan, setting.hardware
    for made in build(setting).passes:
        program = run_pass(program, made)
        done.append((made, program))
    return done


@cache
def final(case: str, choice: Choice) -> Planned:
    """Return the program behind the whole pipeline. Do not change it: tests share it."""
    return stages(captured(case, choice.units, choice.dtype), choice)[-1][1]
