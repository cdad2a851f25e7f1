"""How many bytes a rank holds, from the start of forward to the optimizer's step.

What is counted is one rank's tensors in the steady state of an ordinary loop: the batch is held by
the user until the step ends, and gradients were dropped before it (zero_grad). With several
backwards a step it is one of its micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from zerofx.analysis.memory.host_places import place_bytes
from zerofx.analysis.memory.liveness import lifetimes
from zerofx.analysis.memory.micro import Micro, micros
from zerofx.analysis.memory.standing import is_slot, slot_name, standing
from zerofx.analysis.memory.storage import Category, Compiled, Lifetimes, Storage
from zerofx.ir.program import Planned

# What regions are counted as: run op by op, or as Inductor compiles them.
ATEN, COMPILED = BASES = ("aten", "compiled")
ADAMW_STATE_BYTES = 8  # an element's two moments in fp32


@dataclass(frozen=True)
class Held:
    """Something that occupies memory at a time."""

    category: Category
    name: str
    nbytes: int
    module: str = ""
    line: str = ""
    is_slot: bool = False


@dataclass(frozen=True)
class Memory:
    """One rank's memory over a step.

    storages: what the graphs' values lie in, but for those in slots, and what stands beside them.
    in_slots: what lies in slots, whose own bytes are among `storages`.
    curve: total bytes at each of `life`'s times.
    on_host: what waits in host memory, which is counted apart from all of the above.
    place_bytes: of the places of the host that its lent values lie in, one after the other.
    on_nvme: what lies in files.
    micro: which micro-batch of the step it is: the one in which most is held.
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
        """The bytes that lie in files, but for their headers."""
        return max(_curve(self.on_nvme, len(self.life.nodes)), default=0)

    @property
    def host_bytes(self) -> int:
        """The most bytes of the host: what lives there, and places, which stay between steps."""
        live = tuple(s for s in self.on_host if not s.is_lent)
        return max(_curve(live, len(self.life.nodes)), default=0) + self.place_bytes

    @property
    def peak_bytes(self) -> int:
        return max(self.curve, default=0)

    @property
    def peak_time(self) -> int:
        return self.curve.index(self.peak_bytes) if self.curve else 0

    def held_at(self, time: int) -> list[Held]:
        """Return everything held at a time, largest first; slots with what lies in them."""
        live = _at(self.in_slots, time)
        inside = {slot_name(s.slot): f"{s.category.value} {s.name}" for s in live}
        found = []
        for s in _at(self.storages, time):
            name = f"{s.name}: {inside.get(s.name, 'free')}" if is_slot(s) else s.name
            module = s.where.module or s.where.unit
            found.append(Held(s.category, name, s.nbytes, module, s.where.line, is_slot(s)))
        return sorted(found, key=lambda h: (-h.nbytes, h.name, h.module))

    def by_category(self, time: int) -> dict[Category, int]:
        """Return the bytes of each category at a time; every category is there."""
        found = dict.fromkeys(Category, 0)
        for storage in _at((*self.storages, *self.on_host, *self.on_nvme), time):
            found[storage.category] += storage.nbytes
        return found

    def lasting(self) -> dict[Category, int]:
        """Return the bytes of each category that are held at all times, so also between steps."""
        found = dict.fromkeys(Category, 0)
        for s in self.storages:
            if s.birth == 0 and s.death == self.life.end:
                found[s.category] += s.nbytes
        found[Category.HOST], found[Category.NVME] = self.host_bytes, self.nvme_bytes
        return found


def _at(storages: tuple[Storage, ...], time: int) -> list[Storage]:
    return [s for s in storages if s.birth <= time <= s.death and s.nbytes]


def runs_compiled(program: Planned) -> bool:
    """Tell whether a program's plan has Inductor compile its regions."""
    return program.plan.kernels != "aten" and not program.plan.debug


def memory(
    program: Planned,
    optimizer_bytes: int = ADAMW_STATE_BYTES,
    compiled: Compiled | None = None,
    keeps_results: bool = True,
    accumulation: int | None = None,
    no_sync: bool | None = None,
) -> Memory:
    """Walk the program's storages through one step, or the micro-batch that holds most of it.

    optimizer_bytes: bytes of optimizer state for each element of a trainable parameter.
    compiled: what the regions that Inductor compiled allocate; others are taken op by op.
    keeps_results: the user holds all results to the end of the step; else the loss only.
    accumulation, no_sync: backwards a step, and whether all but the last run under no_sync; None
        is what the program was compiled for.

    Raises:
        PlanError: see `micros`.
    """
    loop = program.loop
    found = micros(
        program,
        loop.accumulation if accumulation is None else accumulation,
        loop.no_sync if no_sync is None else no_sync,
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
    """Walk through one micro-batch of a step."""
    life = lifetimes(program, compiled, keeps_results, micro.packs_apart)
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
