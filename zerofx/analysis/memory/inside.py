"""The peak inside a compiled region: which of its inputs, results and temporaries lie side by side.

A region is one step of the walk, but not one moment: it frees inputs before it makes its last
results. Around the moment at which it holds most, an input that is already freed ends one time
earlier, and a result that is not there yet begins one time later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from zerofx.analysis.memory.storage import Category, CompiledRegion, Storage
from zerofx.analysis.memory.workspace import convolution_bytes
from zerofx.compat.wrapper import Moment
from zerofx.ir.meta import info

_TARGETS = {
    "convolution": torch.ops.aten.convolution.default,
    "convolution_backward": torch.ops.aten.convolution_backward.default,
}


@dataclass
class CompiledCall:
    """One call of a compiled region at `time`; given: the storages that each input lies in."""

    region: CompiledRegion
    time: int
    given: list[tuple[Storage, ...]]
    made: dict[int, Storage] = field(default_factory=dict)  # allocation -> a result's storage

    def result(self, made: int, name: str) -> Storage:
        """Return the storage of a result that lies in allocation `made`."""
        if made not in self.made:
            size, where = self.region.trace.size_bytes[made], info(self.region.nodes[0])
            kind = Category.TEMPORARIES
            self.made[made] = Storage(kind, size, name, self.time, self.time, where)
        return self.made[made]

    def settle(self) -> Storage:
        """Move the ends of inputs and results around the peak; return what else lies there."""
        freed = self._freed()
        trace = self.region.trace
        peak = max(
            trace.moments,
            key=lambda m: trace.made_bytes(m) + _held(freed, m) + self._inside_bytes(m),
        )
        for storage, positions in freed.items():
            if not positions & peak.inputs:
                storage.death = self.time - 1
        for made, storage in self.made.items():
            if made not in peak.made:
                storage.birth = self.time + 1
                storage.death = max(storage.death, storage.birth)
        inside = sum(trace.size_bytes[m] for m in peak.made if m not in self.made)
        inside += self._inside_bytes(peak)
        where = info(self.region.nodes[0])
        name = "inside a compiled region"
        return Storage(Category.TEMPORARIES, inside, name, self.time, self.time, where)

    def _inside_bytes(self, moment: Moment) -> int:
        """Return what the operator that runs at a moment allocates inside."""
        if moment.inside is None:
            return 0
        alike = [n for n in self.region.nodes if n.target is _TARGETS[moment.inside.kind]]
        if len(alike) <= moment.inside.number:  # the compiler has made others of them
            return 0
        is_channels_last = moment.inside in self.region.trace.channels_last
        return convolution_bytes(alike[moment.inside.number], is_channels_last)

    def _freed(self) -> dict[Storage, set[int]]:
        """Return the storages that nothing needs behind this call, with the inputs in each."""
        found: dict[Storage, set[int]] = {}
        for position, storages in enumerate(self.given):
            for storage in storages:
                if storage.death == self.time and storage.slot < 0:
                    found.setdefault(storage, set()).add(position)
        return found


def _held(freed: dict[Storage, set[int]], moment: Moment) -> int:
    return sum(s.nbytes for s, positions in freed.items() if positions & moment.inputs)
