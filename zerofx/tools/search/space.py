"""The plans of a search: every valid combination of choices."""

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
from zerofx.tools.words import counted

MIB = 2**20
NVME = "/nvme"  # the folder of the nvme tier by default
# Fields that a search sets; those that the user's plan sets stay as given.
SEARCHED = (
    "stage", "shard_axis_size", "activations", "tiling", "offload", "update", "prefetch",
    "bucket_bytes",
)  # fmt: skip
TILES = 4


@dataclass(frozen=True)
class Choice:
    """One plan with its training loop.

    samples: of one micro-batch of one rank. accumulation: micro-batches per step. no_sync: all but
    the last run under it. place: the position among all choices, which settles ties.
    """

    plan: Plan
    samples: int
    accumulation: int
    no_sync: bool
    place: int = 0

    @property
    def shape(self) -> tuple[Any, ...]:
        """The fields that compute and saved activations depend on."""
        plan = self.plan
        # Copies of activations run as far ahead as gathers do.
        ahead = plan.prefetch if plan.offload.activations != "none" else "auto"
        return self.samples, plan.activations, plan.offload.activations, plan.tiling, ahead

    @property
    def kin(self) -> tuple[Any, ...]:
        """A key of choices that differ only in prefetch distance and buckets."""
        plan = replace(self.plan, prefetch="auto", bucket_bytes=None)
        return plan, self.samples, self.accumulation, self.no_sync

    def holds(self, hardware: Hardware) -> tuple[int, int]:
        """Return (bytes of a bucket, prefetch distance), which memory grows with."""
        plan = self.plan
        distance = hardware.prefetch if plan.prefetch == "auto" else int(plan.prefetch)
        return plan.bucket_bytes or hardware.bucket_bytes, distance

    def words(self) -> str:
        """Return the choice as one line of text."""
        plan = self.plan
        words = [f"stage {plan.stage}"]
        if plan.shard_axis_size:
            words.append(f"shards over {plan.shard_axis_size}")
        words.append(f"{self.accumulation} x {counted(self.samples, 'sample')}")
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
    """The space of choices for some hardware, a world, a global batch, and given plan fields.

    settled: plan fields that stay as given. tiled: name patterns of large linears. nvme: the folder
    of the nvme tier. most_samples: of a micro-batch, None for any.
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
        """Yield every valid choice, the plainest first."""
        return (each for each in self._made() if isinstance(each, Choice))

    def contradiction(self) -> str:
        """Return the most frequent reason why choices are not valid."""
        found = Counter(str(each) for each in self._made() if isinstance(each, PlanError))
        return max(found, key=lambda text: found[text], default="there is nothing to choose")

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
        """The largest micro-batch on one rank, with all activations kept and nothing offloaded."""
        plan = Plan(precision=self.base.precision, kernels=self.base.kernels)
        return Choice(plan, next(self.batches())[0], 1, False)

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield (samples, accumulation) whose product is a rank's part, the largest first."""
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
        """Leave out choices that equal another one, or cannot gain anything."""
        stage, offload = fields["stage"], fields["offload"]
        if stage == 0 and self._is_new("shard_axis_size", fields):
            return False
        if stage < 3 and (self._is_new("prefetch", fields) or self._is_new("tiling", fields)):
            return False
        away = offload if isinstance(offload, Mapping) else {}
        if "activations" in away and fields["activations"] not in ("keep", "recompute"):
            return False
        # An update inside backward cannot use accumulated gradients.
        return fields["update"] == "step" or accumulation == 1

    def _is_new(self, name: str, fields: Mapping[str, Any]) -> bool:
        return name not in self.settled and fields[name] != self.base.to_dict()[name]

    def _loops(self, fields: Mapping[str, Any], accumulation: int) -> tuple[bool, ...]:
        return (True, False) if accumulation > 1 and fields["stage"] <= 1 else (False,)

    # -- values of each field ---------------------------------------------------------------
    def _stage(self) -> list[int]:
        return [0, 1, 2, 3] if self.world_size > 1 else [0, 3]

    def _shard_axis_size(self) -> list[int | None]:
        """All ranks, or those of a node or of a part of one, which share fast links."""
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
