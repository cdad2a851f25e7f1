"""The plans that a search looks at: every combination of choices that a plan may make."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zerofx.errors import PlanError
from zerofx.hardware import Hardware
from zerofx.plan.plan import Plan

MIB = 2**20
NVME = "/nvme"  # what plans call the folder, where nothing is said
# Fields that a search sets; what the user's plan sets of them stays as it is.
SEARCHED = (
    "stage", "shard_axis_size", "activations", "tiling", "offload", "update", "prefetch",
    "bucket_bytes",
)  # fmt: skip
TILES = 4


@dataclass(frozen=True)
class Choice:
    """One plan and the loop that it is for.

    samples: of one micro-batch of one rank. accumulation: micro-batches a step. no_sync: all but
    the last run under it. place: the order in which choices are made, which settles ties.
    """

    plan: Plan
    samples: int
    accumulation: int
    no_sync: bool
    place: int = 0

    @property
    def shape(self) -> tuple[Any, ...]:
        """What decides compute and saved activations: the rest is where bytes lie and travel."""
        plan = self.plan
        # Copies of activations run as far ahead as gathers do.
        ahead = plan.prefetch if plan.offload.activations != "none" else "auto"
        return self.samples, plan.activations, plan.offload.activations, plan.tiling, ahead

    @property
    def kin(self) -> tuple[Any, ...]:
        """What choices share that differ only in how far gathers run ahead, and in buckets."""
        plan = replace(self.plan, prefetch="auto", bucket_bytes=None)
        return plan, self.samples, self.accumulation, self.no_sync

    def holds(self, hardware: Hardware) -> tuple[int, int]:
        """Return (bytes of a bucket, prefetch distance): the less of them, the less is held."""
        plan = self.plan
        distance = hardware.prefetch if plan.prefetch == "auto" else int(plan.prefetch)
        return plan.bucket_bytes or hardware.bucket_bytes, distance

    def words(self) -> str:
        """Say what was chosen, in a line."""
        plan = self.plan
        words = [f"stage {plan.stage}"]
        if plan.shard_axis_size:
            words.append(f"shards over {plan.shard_axis_size}")
        words.append(f"{self.accumulation} x {self.samples} samples")
        words.append(f"activations {plan.activations}")
        tiers = [f"{k} {v}" for k, v in plan.offload.tiers.items() if v != "none"]
        words += [f"offload {', '.join(tiers)}"] if tiers else []
        words += ["tiled"] if plan.tiling != "off" else []
        words += ["update in backward"] if plan.update != "step" else []
        words += [f"prefetch {plan.prefetch}"] if plan.prefetch != "auto" else []
        words += [f"buckets {plan.bucket_bytes // MIB} MiB"] if plan.bucket_bytes else []
        words += ["no_sync"] if self.no_sync else []
        return ", ".join(words)


@dataclass(frozen=True)
class Space:
    """What may be combined: a hardware, a world, a global batch, and what the user has settled.

    settled: plan fields that stay as they are. tiled: name patterns of large linears. nvme: the
    folder that plans name where they use that tier. most_samples: of a micro-batch, None for any.
    """

    hardware: Hardware
    world_size: int
    global_samples: int
    base: Plan
    settled: frozenset[str]
    tiled: tuple[str, ...]
    nvme: str
    most_samples: int | None = None

    def choices(self) -> Iterator[Choice]:
        """Yield every choice that contradicts nothing, the plainest first."""
        return (each for each in self._made() if isinstance(each, Choice))

    def contradiction(self) -> str:
        """Say what is wrong with most of the choices that contradict themselves."""
        found = Counter(str(each) for each in self._made() if isinstance(each, PlanError))
        return max(found, key=lambda text: found[text], default="none is left to choose")

    def _made(self) -> Iterator[Choice | PlanError]:
        place = itertools.count()
        for samples, accumulation in self.batches():
            for fields in self._fields(accumulation):
                for no_sync in self._loops(fields, accumulation):
                    try:
                        plan = Plan.from_dict({**self.base.to_dict(), **fields})
                        plan.axis_sizes(self.world_size)
                    except PlanError as error:  # these fields exclude each other
                        yield error
                        continue
                    yield Choice(plan, samples, accumulation, no_sync, next(place))

    @cached_property
    def plainest(self) -> Choice:
        """The largest micro-batch on one rank, with all activations kept and nothing moved."""
        plan = Plan(precision=self.base.precision, kernels=self.base.kernels)
        return Choice(plan, next(self.batches())[0], 1, False)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield (samples, accumulation) with their product a rank's part, the largest first."""
        part = self.global_samples // self.world_size
        for accumulation in range(1, part + 1):
            samples = part // accumulation
            if part % accumulation == 0 and samples <= (self.most_samples or samples):
                yield samples, accumulation

    def _fields(self, accumulation: int) -> Iterator[dict[str, Any]]:
        axes = ("stage", "shard_axis_size", "activations", "offload", "update", "tiling")
        rest = ("prefetch", "bucket_bytes")
        values = [self._of(name, getattr(self, f"_{name}")()) for name in (*axes, *rest)]
        for found in itertools.product(*values):
            fields = dict(zip((*axes, *rest), found, strict=True))
            if self._is_sensible(fields, accumulation):
                yield fields

    def _of(self, name: str, values: Iterable[Any]) -> list[Any]:
        own, found = self.base.to_dict()[name], list(values)
        if name in self.settled:
            return [own]
        return found if own in found else [own, *found]

    def _is_sensible(self, fields: Mapping[str, Any], accumulation: int) -> bool:
        """Leave out what is another choice by another name, or can gain nothing."""
        stage, offload = fields["stage"], fields["offload"]
        if stage == 0 and self._is_new("shard_axis_size", fields):
            return False
        if stage < 3 and (self._is_new("prefetch", fields) or self._is_new("tiling", fields)):
            return False
        away = offload if isinstance(offload, Mapping) else {}
        if "activations" in away and fields["activations"] not in ("keep", "recompute"):
            return False
        # What is updated inside backward cannot have been accumulated before.
        return fields["update"] == "step" or accumulation == 1

    def _is_new(self, name: str, fields: Mapping[str, Any]) -> bool:
        return name not in self.settled and fields[name] != self.base.to_dict()[name]

    def _loops(self, fields: Mapping[str, Any], accumulation: int) -> tuple[bool, ...]:
        return (True, False) if accumulation > 1 and fields["stage"] <= 1 else (False,)

    # -- values of each field ---------------------------------------------------------------
    def _stage(self) -> list[int]:
        return [0, 1, 2, 3] if self.world_size > 1 else [0, 3]

    def _shard_axis_size(self) -> list[int | None]:
        """All ranks, or the ranks of a node or a part of one: the fast links."""
        node = min(self.hardware.devices_per_node, self.world_size)
        divisors = [d for d in range(2, node + 1) if self.world_size % d == 0]
        return [None, *(d for d in divisors if d < self.world_size)]

    def _activations(self) -> list[Any]:
        return ["keep", "recompute", 0.5]

    def _offload(self) -> list[Any]:
        tiers: list[Any] = ["none", {"activations": "cpu"}]
        for optimizer, parameters in (("cpu", "none"), ("cpu", "cpu"), ("nvme", "nvme")):
            if "nvme" in (optimizer, parameters) and not self.hardware.nvme_bytes:
                continue
            given = {"optimizer": optimizer, "parameters": parameters}
            given = {k: v for k, v in given.items() if v != "none"}
            if "nvme" in given.values():
                given["path"] = self.nvme
            tiers += [given, {**given, "activations": "cpu"}]
        return tiers

    def _update(self) -> list[str]:
        return ["step"] if self.base.precision.loss_scale is not None else ["step", "in-backward"]

    def _tiling(self) -> list[Any]:
        return ["off", dict.fromkeys(self.tiled, TILES)] if self.tiled else ["off"]

    def _prefetch(self) -> list[Any]:
        return ["auto", *(d for d in (1, 3) if d != self.hardware.prefetch)]

    def _bucket_bytes(self) -> list[Any]:
        """The hardware's own size, and one that joins more."""
        return [None, 4 * self.hardware.bucket_bytes]
