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
from zerofx.plan.parts import Parallel
from zerofx.plan.plan import Plan
from zerofx.tools.words import counted

# Fields that keep their value in plans with axes that the user's plan does not have.
ONLY_WITHOUT_AXES = ("shard_axis_size", "update", "tiling", "prefetch", "bucket_bytes")
MIB = 2**20
NVME = "/nvme"  # the folder of the nvme tier by default
# Fields that a search sets; those that the user's plan sets stay as given.
SEARCHED = (
    "stage", "shard_axis_size", "activations", "tiling", "offload", "update", "prefetch",
    "bucket_bytes", "parallel",
)  # fmt: skip
TILES = 4
INTERLEAVED = 2  # pipeline stages of each rank, where a plan has several
FEWEST = 2  # micro-batches of a pipeline
FEWEST_ROWS = 2  # samples of a micro-batch whose results are put together with those of others


@dataclass(frozen=True)
class Choice:
    """One plan with its training loop.

    samples: of one micro-batch of one rank. accumulation: micro-batches per step, which a pipeline
    has in one call. no_sync: all but the last run under it. place: the position among all choices,
    which settles ties.
    """

    plan: Plan
    samples: int
    accumulation: int
    no_sync: bool
    place: int = 0

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
        words = [*axes_in_words(plan.parallel), f"stage {plan.stage}"]
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


def axes_in_words(parallel: Parallel) -> list[str]:
    """Return the axes of a plan: `tensor 8 with sequence`, `pipeline 4`."""
    words = [f"{axis} {size}" for axis, size in parallel.axes.items()]
    if parallel.sequence:
        words[-1] += " with sequence"
    if parallel.pipeline > 1 and parallel.schedule != "1f1b":
        each = f" {parallel.interleave}" if parallel.interleave > 1 else ""
        words[0] += f" {parallel.schedule}{each}"
    return words


@dataclass(frozen=True)
class Space:
    """The space of choices for some hardware, a world, a global batch, and given plan fields.

    settled: plan fields that stay as given. tiled: name patterns of large linears. nvme: the folder
    of the nvme tier. most_samples: of a micro-batch, None for any. most_stages: pipeline stages
    that the model can be cut into. has_loss: forward returns a loss; without one a pipeline runs
    all forwards first.
    has_sequences: a context axis can divide the model's inputs.
    """

    hardware: Hardware
    world_size: int
    global_samples: int
    base: Plan
    settled: frozenset[str]
    tiled: tuple[str, ...]
    nvme: str
    most_samples: int | None = None
    most_stages: int = 0
    has_sequences: bool = False
    has_loss: bool = True

    def choices(self) -> Iterator[Choice]:
        """Yield every valid choice, the plainest first."""
        return (each for each in self._made() if isinstance(each, Choice))

    def contradiction(self) -> str:
        """Return the most frequent reason why choices are not valid."""
        found = Counter(str(each) for each in self._made() if isinstance(each, PlanError))
        return max(found, key=lambda text: found[text], default="there is nothing to choose")

    def _made(self) -> Iterator[Choice | PlanError]:
        place = itertools.count()
        for parallel in self.parallels():
            for samples, accumulation in self.batches(parallel):
                for fields in self._fields(parallel, accumulation):
                    for no_sync in self._loops(fields, parallel, accumulation):
                        try:
                            plan = Plan.from_dict({**self._plain, **fields})
                            plan.axis_sizes(self.world_size)
                        except PlanError as error:  # these fields exclude each other
                            yield error
                            continue
                        yield Choice(plan, samples, accumulation, no_sync, next(place))

    @cached_property
    def _plain(self) -> dict[str, Any]:
        return self.base.to_dict()

    @cached_property
    def plainest(self) -> Choice:
        """The largest micro-batch on one rank, with all activations kept and nothing offloaded."""
        outputs = self.base.outputs
        if self.has_axes and "outputs" not in self.settled:
            outputs = "loss"
        plan = Plan(precision=self.base.precision, kernels=self.base.kernels, outputs=outputs)
        return Choice(plan, self.largest, 1, False)

    @cached_property
    def largest(self) -> int:
        """The samples of the largest micro-batch.

        It is that of plans without axes, if the batch can be divided among all ranks. Ranks that
        share samples have more of them, in more micro-batches.
        """
        if self.most_samples is not None:
            return self.most_samples
        part, rest = divmod(self.global_samples, self.world_size)
        return 1 if rest or not part else part

    @cached_property
    def has_axes(self) -> bool:
        """Whether plans with different axes are compared."""
        return len(self.parallels()) > 1

    def data_ranks(self) -> list[int]:
        """Return the numbers of ranks, or of groups of them, that may have samples of their own."""
        return sorted({self.world_size // p.num_shared for p in self.parallels()})

    def batches(self, parallel: Parallel) -> Iterator[tuple[int, int]]:
        """Yield (samples, accumulation) whose product is a rank's part, the largest first."""
        part, rest = divmod(self.global_samples, self.world_size // parallel.num_shared)
        for accumulation in range(1, 0 if rest else part + 1):
            samples = part // accumulation
            if part % accumulation or samples > (self.most_samples or samples):
                continue
            if parallel.is_used and samples > self.largest:
                continue
            if parallel.pipeline > 1 and not self.has_loss and samples < FEWEST_ROWS:
                continue
            if parallel.pipeline == 1 or self._divides(parallel, accumulation):
                yield samples, accumulation

    def _divides(self, parallel: Parallel, micro_batches: int) -> bool:
        """Tell whether a pipeline may have this number of micro-batches."""
        if parallel.micro_batches != "auto":
            return micro_batches == parallel.micro_batches
        step = parallel.pipeline if parallel.interleave > 1 else 1
        return micro_batches >= FEWEST and micro_batches % step == 0

    def _fields(self, parallel: Parallel, accumulation: int) -> Iterator[dict[str, Any]]:
        axes = ("stage", "shard_axis_size", "activations", "offload", "update", "tiling")
        rest = ("prefetch", "bucket_bytes")
        fixed: set[str] = {*ONLY_WITHOUT_AXES} if parallel.is_used else set()
        fixed |= {"offload"} if parallel.pipeline > 1 else set()  # a pipeline has none
        values = [
            [self._plain[name]] if name in fixed else self._of(name, getattr(self, f"_{name}")())
            for name in (*axes, *rest)
        ]
        if parallel.is_used:  # activations that are cut are small
            tiers = values[axes.index("offload")]
            tiers[:] = [t for t in tiers if t == self._plain["offload"] or "activations" not in t]
        own: dict[str, Any] = {}
        if parallel.pipeline > 1:
            own["parallel"] = replace(parallel, micro_batches=accumulation).to_plain()
        elif parallel.is_used:
            own["parallel"] = parallel.to_plain()
        if self.has_axes and "outputs" not in self.settled:
            own["outputs"] = "loss"  # logits that were cut need not be put together
        for found in itertools.product(*values):
            fields = dict(zip((*axes, *rest), found, strict=True)) | own
            if self._is_sensible(fields, accumulation):
                yield fields

    def _of(self, name: str, values: Iterable[Any]) -> list[Any]:
        own, found = self._plain[name], list(values)
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
        return name not in self.settled and fields[name] != self._plain[name]

    def _loops(
        self, fields: Mapping[str, Any], parallel: Parallel, accumulation: int
    ) -> tuple[bool, ...]:
        if parallel.pipeline > 1:  # it has them in one call
            return (False,)
        return (True, False) if accumulation > 1 and fields["stage"] <= 1 else (False,)

    # -- the axes, and values of each field ---------------------------------------------------
    def parallels(self) -> list[Parallel]:
        """Return each division of the world among the axes, none of them first.

        Ranks that share layers, or a sequence, are in one node.
        """
        own = self.base.parallel
        if "parallel" in self.settled:
            return [own]
        node = min(self.hardware.devices_per_node, self.world_size)
        within = [d for d in range(1, node + 1) if node % d == 0 and self.world_size % d == 0]
        found = [own, *([Parallel()] if own.is_used else [])]
        for tensor in within:
            # with the sequence cut as well, as much is sent, and less is held
            axes = Parallel(tensor=tensor, sequence=tensor > 1 and self.has_sequences)
            found += [axes, *self._pipelines(axes)]
        if self.has_sequences:
            found += [Parallel(context=size) for size in within]
        return list(dict.fromkeys(found))

    def _pipelines(self, axes: Parallel) -> Iterator[Parallel]:
        """Yield the pipelines of each size, with each schedule that the model can have."""
        left = self.world_size // axes.tensor
        for size in range(2, min(left, self.most_stages) + 1):
            if left % size:
                continue
            if self.has_loss:
                yield replace(axes, pipeline=size)
                yield replace(axes, pipeline=size, schedule="zero-bubble")
                if INTERLEAVED * size <= self.most_stages:
                    yield replace(
                        axes, pipeline=size, schedule="interleaved", interleave=INTERLEAVED
                    )
            yield replace(axes, pipeline=size, schedule="gpipe")

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
