"""Races between the host, the compute and two lanes of copies, found without a GPU.

On CUDA a copy under way reads one memory and writes another while the host, and the compute, go on.
Here copies are made at once, but each is noted, with who may rely on its having ended: the compute
behind `join`, the host behind `settle`, a lane behind what it waited for. Every operator that then
touches memory of a copy which those who run it do not know to have ended is a race; so is a request
to or from NVMe, whose thread knows what it has settled itself.

    with Races() as races:
        model = zerofx.compile(...)
        races.watch(model)
        ...
    assert not races.found
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerofx.nvme.store import NvmeStore
from zerofx.runtime.tiers import homes, host_updates
from zerofx.runtime.tiers import host_tier as host_memory
from zerofx.runtime.tiers.nvme_values import Spill

Known = frozenset[int]  # numbers of copies that have ended, as far as somebody knows
Range = tuple[int, int]  # addresses


def span(tensor: Tensor) -> Range:
    """Return the addresses from a tensor's first element to its last."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()


def overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


@dataclass
class Noted:
    """A copy that was launched."""

    number: int
    lane: str
    source: Range
    dest: Range


class TrackedLane:
    """A lane whose copies are noted; its events are what is known to have ended behind them."""

    def __init__(self, races: Races, name: str) -> None:
        self.races, self.name = races, name
        self.known: Known = frozenset()

    def copy(self, out: Tensor, source: Tensor, behind: Known | None) -> Known:
        races = self.races
        known = self.known | races.compute | (behind or frozenset())
        noted = Noted(len(races.copies), self.name, span(source), span(out))
        for memory, is_write in ((noted.source, False), (noted.dest, True)):
            races.check(memory, is_write, known, f"{self.name} copy {noted.number}")
        races.copies.append(noted)
        with races.unseen(), torch.no_grad():
            out.copy_(source)
        self.known = known | {noted.number}
        return self.known

    def join(self, event: Known) -> None:
        if (
            threading.current_thread() is threading.main_thread()
        ):  # others have streams of their own
            self.races.compute |= event

    def settle(self, event: Known) -> None:
        if threading.current_thread() is threading.main_thread():
            self.races.host |= event
        else:
            self.races.beside |= event


class Races(TorchDispatchMode):
    """Watches every operator. found: what touched memory that a copy under way uses.

    host, compute: the copies that each of them knows to have ended; beside: that other threads of
        the host do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copies: list[Noted] = []
        self.host: Known = frozenset()
        self.compute: Known = frozenset()
        self.beside: Known = frozenset()
        self._stores = {name: getattr(NvmeStore, name) for name in ("read", "write")}
        self._own = threading.local()  # whether a thread is making a copy itself
        self._host_memory: list[Range] = []
        self._kept: list[Tensor] = []  # so that no address comes twice

    def __enter__(self) -> Any:
        real = self._real = host_memory.host_memory

        def noted(nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
            made, held = real(nbytes, device)
            self._host_memory.append(span(made))
            self._kept.append(made)
            return made, held

        host_memory.host_memory = homes.host_memory = noted  # type: ignore[attr-defined]
        for name, request in self._stores.items():
            setattr(NvmeStore, name, self._requested(name, request))
        end = self._end = Spill.end

        def ended(spill: Spill) -> None:
            end(spill)
            self.host |= self.beside  # who waits for a request knows what its thread knew

        Spill.end = ended  # type: ignore[method-assign]
        self._updates = host_updates._run, host_updates.HostUpdates._failures
        self._watch_updates(*self._updates)
        return super().__enter__()

    def _watch_updates(self, run: Any, failures: Any) -> None:
        """Watch the thread of updates too, and let who waits for it know what it knew."""

        def watched(update: Callable[[], None]) -> None:
            with _Beside(self):
                run(update)

        def joined(updates: Any, bucket: int | None = None) -> Any:
            found = failures(updates, bucket)
            self.host |= self.beside
            return found

        host_updates._run = watched
        host_updates.HostUpdates._failures = joined  # type: ignore[method-assign]

    def _requested(self, name: str, request: Any) -> Any:
        def checked(store: Any, extent: str, tensor: Tensor, *more: Any) -> Any:
            self.check(span(tensor), name == "read", self.host | self.beside, f"nvme {name}")
            return request(store, extent, tensor, *more)

        return checked

    def __exit__(self, *error: Any) -> None:
        host_memory.host_memory = homes.host_memory = self._real  # type: ignore[attr-defined]
        for name, request in self._stores.items():
            setattr(NvmeStore, name, request)
        Spill.end = self._end  # type: ignore[method-assign]
        host_updates._run = self._updates[0]
        host_updates.HostUpdates._failures = self._updates[1]  # type: ignore[method-assign]
        super().__exit__(*error)

    def watch(self, model: Any) -> None:
        """Let a compiled model's copies run on lanes that are noted."""
        model._engine.host._lanes = TrackedLane(self, "d2h"), TrackedLane(self, "h2d")

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Do not watch what this thread does: it is the copy."""
        self._own.is_copying = True
        yield
        self._own.is_copying = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.run(func, args, kwargs or {}, self.host, "host")

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Any, known: Known, who: str) -> Any:
        """Check an operator of a thread of the host (`who`), by what that knows; run it."""
        if not getattr(self._own, "is_copying", False) and not _is_view(func):
            for memory, is_write in _touched(func, args, kwargs):
                is_host = any(overlap(memory, host) for host in self._host_memory)
                ended = known if is_host else self.compute
                self.check(memory, is_write, ended, f"{who if is_host else 'compute'}: {func}")
        return func(*args, **kwargs)

    def check(self, memory: Range, is_write: bool, known: Known, who: str) -> None:
        """Note where a read meets a copy's destination, or a write either end of it, too early."""
        for copy in self.copies:
            if copy.number in known:
                continue
            if overlap(memory, copy.dest) or (is_write and overlap(memory, copy.source)):
                verb = "writes" if is_write else "reads"
                self.found.append(f"{who} {verb} what {copy.lane} copy {copy.number} uses")


class _Beside(TorchDispatchMode):
    """Watches the thread of updates, which was launched by the host and knows what that knew."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races, self.launched = races, races.host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        races = self.races
        return races.run(func, args, kwargs or {}, self.launched | races.beside, "update")


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _touched(func: Any, args: tuple[Any, ...], kwargs: Any) -> list[tuple[Range, bool]]:
    """Return (addresses, whether they are written) of an operator's tensors."""
    found = []
    for position, formal in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(formal.name)
        is_write = formal.alias_info is not None and formal.alias_info.is_write
        tensors = [t for t in tree_leaves(given) if isinstance(t, Tensor) and not t.is_meta]
        found += [(span(t), is_write) for t in tensors]
    return found
