"""The world of a rank: its place in the mesh and its collectives, one World per compiled model.

Ranks form a grid of (pipeline, replicate, shard, tensor), numbered as in `layout.Mesh`. Values are
sharded over the shard axis; the replicate axis holds copies of the same shards. The ranks of the
tensor axis share each layer, and those of the pipeline axis have different layers; both have the
same samples. So do the ranks of the context axis, which are neighbours along the shard and
replicate axes.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zerofx.comm import groups
from zerofx.comm.agreement import ENDED, Agreement, Letters, StepLog
from zerofx.comm.board import NO_GRAPH
from zerofx.comm.collectives import COUNTED, Axis, Lane, Traffic, Work
from zerofx.comm.gloo import Algorithm, always_direct
from zerofx.comm.grid import SliceAxis, rank_grid, with_slices
from zerofx.comm.meeting import timeout_s
from zerofx.errors import DesyncError, PlanError
from zerofx.layout.buckets import ACROSS, AXES, CONTEXT, NODE, Mesh
from zerofx.policy import reduction

OverShards = Callable[[Axis, Tensor, Tensor, float, str], Work]
"""Launches a reduction over an axis as `Axis.reduce_scatter` does, with the same arguments."""


class Then(Work):
    """A second collective that starts when the first has finished."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Work, second: Callable[[], Work]) -> None:
        self._first = first
        self._second: Callable[[], Work] | None = second

    def wait(self) -> None:
        if self._second is None:
            return
        self._first.wait()
        second, self._second = self._second, None
        second().wait()


class World:
    """This rank's place among the ranks, its collectives, and counters of what it sent in them.

    `backend` is "single", "gloo", "nccl" or "simulated". `shard_mesh` is the shard axis as a
    DeviceMesh, or None if that axis has one rank. `others` are the axes of a larger mesh of which
    this world is a slice. `slices` is the name of the mesh axis that is the tensor axis here, if
    the model brings its own slices. `label`s name a collective in errors. `give_back` is called
    once the world is dropped.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        backend: str,
        axes: Mapping[str, Axis],
        whole: Axis,
        lane: Lane | None = None,
        agreement: Agreement | None = None,
        shard_mesh: DeviceMesh | None = None,
        give_back: Callable[[], None] | None = None,
        transfers: Callable[[list[int]], Any] | None = None,
        others: Sequence[SliceAxis] = (),
        slices: str = "",
    ) -> None:
        self.device = device
        self.backend = backend
        axes = {name: Axis() for name in (*AXES, CONTEXT, NODE, ACROSS)} | dict(axes)
        sizes = {name: axis.size for name, axis in axes.items() if name != ACROSS}
        self.mesh = Mesh.of(**sizes)
        self.rank = self.mesh.rank({name: axis.rank for name, axis in axes.items()})
        self.size = self.mesh.num_ranks
        self._axes, self._whole, self._shard = dict(axes), whole, axes["shard"]
        self.shard_rank, self.shard_size = self._shard.rank, self._shard.size
        self.replicate_rank, self.replicate_size = axes["replicate"].rank, axes["replicate"].size
        self._legs = [(axes[leg.axis], leg.kind) for leg in reduction.legs(self.mesh)]
        if not self._legs:
            self._legs = [(self._shard, "reduce_scatter")]
        self.shard_mesh, self.others, self.slices = shard_mesh, tuple(others), slices
        self.counters = lane.counters if lane else {kind: Traffic() for kind in COUNTED}
        self._lane, self._agreement, self._transfers = lane, agreement, transfers
        self.steps = StepLog()
        if agreement is not None:
            weakref.finalize(self, _say_goodbye, agreement)
        if give_back is not None:
            weakref.finalize(self, give_back)

    @classmethod
    def single(
        cls, device: torch.device | str | None = None, others: Sequence[SliceAxis] = ()
    ) -> World:
        """Return the world of one process, without a process group."""
        return cls(
            device=groups.place(device),
            backend="single",
            axes={name: Axis() for name in AXES},
            whole=Axis(),
            others=others,
        )

    @classmethod
    def connect(
        cls,
        device: torch.device | str | None = None,
        mesh: DeviceMesh | None = None,
        shard_size: int | None = None,
        algorithm: Algorithm = always_direct,
        start: groups.StartUp | None = None,
        replicates: bool = False,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        slices: SliceAxis | None = None,
        node_size: Callable[[int], int] = lambda shard_size: 1,
    ) -> World:
        """Return the world of this process; a collective call if there are several ranks.

        Uses the existing process group. If there is none, initialises one under torchrun, and is a
        single process otherwise. `mesh` is 1-D (shard) or 2-D (replicate, shard). Without a mesh,
        all ranks are used: contiguous groups of `shard_size` hold the shards, which are replicated
        across the groups. If `replicates`, nothing is sharded and all ranks of the mesh are
        replicas. `tensor` neighbouring ranks share each layer; `context` ranks share each sequence;
        the model is divided into `pipeline` stages. `slices` is the axis, outside of `mesh`, along
        which ranks have slices that the model brings; it becomes the tensor axis. `node_size`
        returns how many neighbours along a shard axis of a given size form a node. `algorithm`
        chooses how gloo moves the bytes of each collective. `start` is the start-up of which this
        is a part; pass one if later exceptions must be reported too.

        Raises:
            PlanError: the shape of the mesh, or `shard_size`, does not fit the ranks, or
                ZEROFX_TIMEOUT_S is not a number of seconds.
            DesyncError: another rank did not arrive within ZEROFX_TIMEOUT_S, or has raised.
        """
        if start is None:
            with groups.StartUp(mesh) as start:
                return cls.connect(
                    device, mesh, shard_size, algorithm, start, replicates, tensor, pipeline,
                    context, slices, node_size,
                )  # fmt: skip
        timeout_s()  # raises where it is no number, before anything waits
        start.initialise(device)
        if not dist.is_initialized():
            if mesh is not None:
                raise PlanError(
                    "mesh was given, but this process has no process group. Launch it with "
                    "torchrun, or leave mesh out."
                )
            sizes = {"tensor": tensor, "pipeline": pipeline, CONTEXT: context}
            for axis, size in sizes.items():
                if size > 1:
                    raise PlanError(
                        f"Plan.parallel.{axis} is {size} but this is a single process. Launch "
                        "it with torchrun, or leave parallel out."
                    )
            if shard_size not in (None, 1):
                raise PlanError(
                    f"shard_axis_size is {shard_size} but this is a single process. Launch it with "
                    "torchrun, or leave shard_axis_size out."
                )
            return cls.single(device)
        grid = rank_grid(mesh, shard_size, replicates, tensor, pipeline, context)
        if slices is not None:
            grid = with_slices(grid, slices)
            start.expect(grid.flatten().tolist())
        others = groups.other_axes(mesh, slices)
        if grid.numel() == 1:
            return cls.single(device, others)
        here = groups.place(device)
        axes = groups.join(grid, here, algorithm, start, context, node_size(grid.shape[2]))
        return cls(
            device=here,
            backend=axes.backend,
            axes=axes.axes,
            whole=axes.whole,
            lane=axes.lane,
            agreement=axes.agreement,
            shard_mesh=axes.shard_mesh,
            give_back=axes.give_back,
            transfers=axes.transfers,
            others=others,
            slices="" if slices is None else slices.name,
        )

    @property
    def other_axes(self) -> str:
        """The names and sizes of `others`, for errors; "" if there are none."""
        return ", ".join(f"{axis.name} ({axis.size})" for axis in self.others)

    @property
    def data_rank(self) -> int:
        """The index of this rank's samples among the ranks with different samples."""
        return (self.replicate_rank * self.shard_size + self.shard_rank) // self.mesh.context

    @property
    def data_size(self) -> int:
        """The number of ranks with different samples."""
        return self.mesh.num_data_ranks

    @property
    def copy_size(self) -> int:
        """The number of ranks that together hold one copy of the model, or of a pipeline stage."""
        return self.shard_size * self.mesh.along("tensor")

    @property
    def copy_rank(self) -> int:
        """The index of this rank among these; the tensor axis varies fastest."""
        return self.rank % self.copy_size

    @property
    def alike(self) -> range:
        """The ranks that hold the same as this one: those along the replicate axis."""
        stride = self.mesh.stride("replicate")
        first = self.rank - self.replicate_rank * stride
        return range(first, first + self.replicate_size * stride, stride)

    def axis(self, name: str) -> Axis:
        """Return one axis of the mesh, with its collectives."""
        return self._axes[name]

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        """Fill `out` [shard_size * k] with the `shard` [k] of every rank of the shard axis."""
        return self._shard.all_gather(out, shard, label)

    def reduce_scatter(
        self,
        out: Tensor,
        full: Tensor,
        scale: float,
        label: str = "reduce-scatter",
        over_shards: OverShards | None = None,
    ) -> Work:
        """Set `out` [k] to scale * the sum over all ranks of this rank's slice of `full`.

        The sum runs in rank order over one axis after the other (see `policy/reduction.py`).

        over_shards: launches the reduction over the shard axis in place of `Axis.reduce_scatter`,
            with the same arguments.

        Shapes: full [shard_size * k]; with several ranks, `out` must not be a part of it.
        """
        first, *later = self._legs
        own_scale = 1.0 if later else scale
        if over_shards is not None and first[0] is self._shard:
            work = over_shards(self._shard, out, full, own_scale, label)
        else:
            work = _launch(first, out, full, own_scale, label)
        for leg in later:
            its_scale = scale if leg is later[-1] else 1.0
            work = Then(work, partial(_launch, leg, out, out, its_scale, label))
        return work

    def all_reduce(self, buf: Tensor, scale: float = 1.0, label: str = "all-reduce") -> Work:
        """Set `buf` [n] in place to scale * the sum over all ranks, in rank order."""
        return self._whole.all_reduce(buf, scale, label)

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        """Set `buf` on every rank to its value on rank `src`."""
        return self._whole.broadcast(buf, src, label)

    def from_first(self, buf: Tensor) -> Work:
        """Set `buf` on every rank to its first value: that of rank 0.

        If the model brings its own slices, each rank gets the value of the first data rank that has
        the same slices.
        """
        if not self.slices:
            return self.broadcast(buf, 0)
        self._shard.broadcast(buf, 0, "broadcast").wait()
        return self._axes["replicate"].broadcast(buf, 0, "broadcast")

    def all_to_all(
        self, receives: Sequence[Tensor], sends: Sequence[Tensor], label: str = "all-to-all"
    ) -> Work:
        """Send `sends[r]` to each rank r of this copy of the model, fill `receives[r]` with r's.

        Sizes may differ between pairs of ranks; both ranks of a pair must know them.
        """
        if self.copy_size == self.shard_size:
            return self._shard.all_to_all(receives, sends, label)
        nothing = [sends[0].new_empty(0)] * self.size  # to and from other copies
        first = self.rank - self.copy_rank
        end = first + self.copy_size
        return self._whole.all_to_all(
            [*nothing[:first], *receives, *nothing[end:]],
            [*nothing[:first], *sends, *nothing[end:]],
            label,
        )

    def rest(self, frees: Callable[[int], bool]) -> None:
        """Free receive buffers for whose bytes `frees` holds, until they are next needed."""
        for axis in (*self._axes.values(), self._whole):
            axis.rest(frees)

    def drain(self) -> None:
        """Wait for everything in flight, for example after an exception, before reusing buffers.

        After a DesyncError, everything in flight is given up, because it would never end. Nor does
        this raise a DesyncError on top of an exception that `report_failure` has reported; the next
        call raises it.

        Raises:
            DesyncError: as for any wait.
        """
        in_flight = self._lane.in_flight if self._lane else {}
        agreement = self._agreement
        try:
            while in_flight and not (agreement and agreement.has_failed):
                next(iter(in_flight)).wait()
        except DesyncError:
            if agreement is None or not agreement.has_broken_off:
                raise
        finally:
            in_flight.clear()

    def agree(self, what: str, digest: str, graph: bytes = NO_GRAPH) -> None:
        """Return once every rank is about to do `what` with the same `digest`.

        Ranks with equal input sizes must have equal graphs too (`graph`, see `Agreement.agree`),
        and every rank must have taken the same optimizer steps since the last agreement.

        Raises:
            DesyncError: a rank is about to do something else, has left, died, or did not arrive.
        """
        if self._agreement is not None:
            self._agreement.agree(what, digest, graph, self.steps.take())

    def publish(self, digest: str, text: str) -> None:
        """Publish the text of a digest, so that ranks with another digest can compare it."""
        if self._agreement is not None:
            self._agreement.publish(digest, text)

    def all_well(self, what: str, is_well: bool) -> bool:
        """Return, once every rank has reached `what`, whether `is_well` holds on all of them.

        It costs as much as an agreement: no collective.

        Raises:
            DesyncError: a rank is about to do something else, has left, died, or did not arrive.
        """
        if self._agreement is None:
            return is_well
        return self._agreement.all_well(what, is_well, self.steps.take())

    def agree_but_for(
        self, what: str, digest: str, choice: str, graph: bytes = NO_GRAPH
    ) -> set[str]:
        """Return all ranks' choices, once each is about to do `what` with the same `digest`.

        choice: a "name=value" item, in which ranks may differ. Like an agreement, this needs no
            collective, and compares `graph` and optimizer steps.

        Raises:
            DesyncError: a rank is about to do something else, has left, died, or did not arrive.
        """
        if self._agreement is None:
            return {choice}
        return self._agreement.agree_but_for(what, digest, choice, graph, self.steps.take())

    @property
    def waited_s(self) -> float:
        """The seconds for which the host has waited for collectives so far."""
        return self._lane.watch.waited_s if self._lane is not None else 0.0

    def letters(self) -> Letters | None:
        """Return the means by which threads of all ranks exchange messages; None for one rank."""
        return None if self._agreement is None else self._agreement.letters(self.size)

    def for_transfers(self, ranks: list[int]) -> tuple[Any, Callable[[], str | None]]:
        """Return a gloo group of some ranks, for use in threads; only these ranks call this.

        The first call with these ranks connects them. Also returns a function that tells why a rank
        will not take part any more, or None if all may.

        Raises:
            DesyncError: a rank did not make this call; names it.
        """
        assert self._transfers is not None and self._agreement is not None
        return self._transfers(ranks), self._agreement.dead

    def level(self) -> None:
        """End a call in which ranks launch different collectives: make their counts equal again.

        Until then, a rank with more launches than others must not count as waiting in vain.
        """
        if self._agreement is not None:
            self._agreement.board.level()

    def report_failure(self, reason: str) -> None:
        """Tell the other ranks that an exception has ended the call that was last agreed on.

        They raise within about a second, naming this rank and the reason, if they wait for a
        collective that it has not launched, or have finished the call. Ranks that failed in the
        same way may continue.
        """
        if self._agreement is not None:
            self._agreement.break_off(reason)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Do something long before the next call, without the time limit of the other ranks.

        They wait as long as this process is alive; `what` completes "rank 0 is busy ...".
        """
        with self._agreement.heartbeat.busy(what) if self._agreement else contextlib.nullcontext():
            yield

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one makes no further call; they raise if they wait."""
        if self._agreement is not None:
            self._agreement.leave(reason)


def _launch(leg: tuple[Axis, str], out: Tensor, source: Tensor, scale: float, label: str) -> Work:
    """Launch one leg of a reduction of `source` into `out`."""
    axis, kind = leg
    if kind == "reduce_scatter":
        return axis.reduce_scatter(out, source, scale, label)
    return axis.all_reduce(out, scale, label, None if source is out else source)


def _say_goodbye(agreement: Agreement) -> None:
    """Leave when the world is dropped or the process ends, with the reason if it is known."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        reason = f"it ended with {type(error).__name__}: {error}"
        agreement.leave(reason)
        agreement.record.end(reason, not isinstance(error, DesyncError), error)
    else:
        agreement.leave(ENDED)
    agreement.record.close()
