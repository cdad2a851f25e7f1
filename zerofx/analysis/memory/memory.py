"""The memory of a rank in bytes, from the start of forward to the optimizer's step.

It counts one rank's tensors in the steady state of an ordinary loop: the user holds the batch until
the step ends, and gradients were dropped before it (zero_grad). With several backwards per step, it
describes one of the step's micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from zerofx.analysis.memory.host_places import place_bytes
from zerofx.analysis.memory.liveness import lifetimes
from zerofx.analysis.memory.micro import Micro, calls_of, micros
from zerofx.analysis.memory.standing import is_slot, slot_name, standing
from zerofx.analysis.memory.storage import Category, Compiled, Lifetimes, Storage
from zerofx.ir.program import Planned

# How regions are counted: run op by op, or as compiled by Inductor.
ATEN, COMPILED = BASES = ("aten", "compiled")
ADAMW_STATE_BYTES = 8  # two fp32 moments per element


@dataclass(frozen=True)
class Held:
    """A holder of memory at one time."""

    category: Category
    name: str
    nbytes: int
    module: str = ""
    line: str = ""
    is_slot: bool = False


@dataclass(frozen=True)
class Memory:
    """One rank's memory over a step.

    storages: the storages of the graphs' values except those in slots, and the memory outside of
        graphs.
    in_slots: the storages in slots; the slots' own bytes are among `storages`.
    curve: total bytes at each of `life`'s times.
    on_host: storages in host memory, which are counted separately from all of the above.
    place_bytes: the bytes of the host places that borrowed values occupy in turn.
    on_nvme: storages in files.
    micro: the micro-batch of the step, chosen for its peak.
    """

    life: Lifetimes
    storages: tuple[Storage, ...]
    in_slots: tuple[Storage, ...]
    curve: tuple[int, ...]
    on_host: tuple[Storage, ...] = ()
    on_nvme: tuple[Storage, ...] = ()
    place_bytes: int = 0
    micro: Micro = field(default_factory=Micro)

    @property
    def nvme_bytes(self) -> int:
        """The bytes in files, without their headers."""
        return max(_curve(self.on_nvme, len(self.life.nodes)), default=0)

    @property
    def host_bytes(self) -> int:
        """The peak of host memory: values kept there, and places, which persist between steps."""
        live = tuple(s for s in self.on_host if not s.is_lent)
        return max(_curve(live, len(self.life.nodes)), default=0) + self.place_bytes

    @property
    def peak_bytes(self) -> int:
        return max(self.curve, default=0)

    @property
    def peak_time(self) -> int:
        return self.curve.index(self.peak_bytes) if self.curve else 0

    def held_at(self, time: int) -> list[Held]:
        """Return all holders of memory at a time, largest first; slots include their content."""
        live = _at(self.in_slots, time)
        inside = {slot_name(s.slot): f"{s.category.value} {s.name}" for s in live}
        found = []
        for s in _at(self.storages, time):
            name = f"{s.name}: {inside.get(s.name, 'free')}" if is_slot(s) else s.name
            module = s.where.module or s.where.unit
            found.append(Held(s.category, name, s.nbytes, module, s.where.line, is_slot(s)))
        return sorted(found, key=lambda h: (-h.nbytes, h.name, h.module))

    def by_category(self, time: int) -> dict[Category, int]:
        """Return the bytes of each category at a time; every category is included."""
        found = dict.fromkeys(Category, 0)
        for storage in _at((*self.storages, *self.on_host, *self.on_nvme), time):
            found[storage.category] += storage.nbytes
        return found

    def lasting(self) -> dict[Category, int]:
        """Return the bytes of each category that are held at all times, including between steps."""
        found = dict.fromkeys(Category, 0)
        for s in self.storages:
            if s.birth == 0 and s.death == self.life.end:
                found[s.category] += s.nbytes
        found[Category.HOST], found[Category.NVME] = self.host_bytes, self.nvme_bytes
        return found


def _at(storages: tuple[Storage, ...], time: int) -> list[Storage]:
    return [s for s in storages if s.birth <= time <= s.death and s.nbytes]


def runs_compiled(program: Planned) -> bool:
    """Return whether a program's plan compiles its regions with Inductor."""
    return program.plan.kernels != "aten" and not program.plan.debug


def memory(
    program: Planned,
    optimizer_bytes: int = ADAMW_STATE_BYTES,
    compiled: Compiled | None = None,
    keeps_results: bool = True,
    accumulation: int | None = None,
    no_sync: bool | None = None,
) -> Memory:
    """Compute the memory of one step, or of its micro-batch with the highest peak.

    optimizer_bytes: bytes of optimizer state per element of a trainable parameter.
    compiled: the allocations of regions that Inductor compiled; other regions are counted op by op.
    keeps_results: the user holds all results to the end of the step; otherwise only the loss.
    accumulation, no_sync: backwards per step (in a pipeline, calls of the model), and whether all
        but the last run under no_sync; None uses the values for which the program was compiled.

    Raises:
        PlanError: see `micros`.
    """
    found = micros(
        program,
        calls_of(program) if accumulation is None else accumulation,
        program.loop.no_sync if no_sync is None else no_sync,
    )
    each = [_of(program, optimizer_bytes, compiled, keeps_results, micro) for micro in found]
    return max(each, key=lambda m: m.peak_bytes)


def _of(
    program: Planned,
    optimizer_bytes: int,
    compiled: Compiled | None,
    keeps_results: bool,
    micro: Micro,
) -> Memory:
    """Compute the memory of one micro-batch of a step."""
    life = lifetimes(program, compiled, keeps_results, micro)
    beside = standing(program, life, optimizer_bytes, micro)
    placed = [s for s in (*life.storages, *beside) if s.slot < 0]
    apart = (Category.HOST, Category.NVME)
    storages = tuple(s for s in placed if s.category not in apart)
    on_host, on_nvme = (tuple(s for s in placed if s.category is kind) for kind in apart)
    in_slots = tuple(s for s in life.storages if s.slot >= 0)
    curve = _curve(storages, len(life.nodes))
    lent = tuple(s for s in on_host if s.is_lent)
    places = place_bytes(program, lent, optimizer_bytes)
    return Memory(life, storages, in_slots, curve, on_host, on_nvme, places, micro)


def _curve(storages: tuple[Storage, ...], end: int) -> tuple[int, ...]:
    """Return the bytes of storages at each time."""
    change = [0] * (end + 1)
    for storage in storages:
        change[storage.birth] += storage.nbytes
        change[storage.death + 1] -= storage.nbytes
    return tuple(accumulate(change[:-1]))


def peak_bytes(program: Planned, optimizer_bytes: int = ADAMW_STATE_BYTES) -> int:
    """Return the high-water mark of one rank over a step."""
    return memory(program, optimizer_bytes).peak_bytes
