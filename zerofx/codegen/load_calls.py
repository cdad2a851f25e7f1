"""The recording engine and shards that a schedule receives while it is read."""

from __future__ import annotations

import itertools
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.load_record import Recorder
from zerofx.compat.graphs import argument_names
from zerofx.errors import ProgramError
from zerofx.ir.graphs import add_placeholder
from zerofx.ir.meta import Role, info
from zerofx.ir.program import ParamInfo
from zerofx.ir.spec import Kind, OpSpec, bucket_of, specs, target_of
from zerofx.layout.buckets import Bucket, Layout


class Launch:
    """The result of a launch; only `rt.wait` accepts it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return "a launch that was not waited for"


class Calls:
    """A stand-in for `rt`: each call of an engine method appends the op that is written that way.

    The meaning of a call is the `read` of an op's spec, a function of this object and the
    arguments.
    numbers: position of a saved value on the host -> its offload's number. filling: id of a
        gradient buffer -> its bucket. stored: bucket -> the node that stored its gradient in
        p.grad.
    """

    def __init__(
        self, recorder: Recorder, layout: Layout, params: dict[str, ParamInfo], device: str
    ) -> None:
        self._recorder = recorder
        self._exchanges = itertools.count()  # numbers of collectives of values
        self.layout, self.params = layout, params
        self.device = torch.device(device)
        self.numbers: dict[int, int] = {}
        self.filling: dict[int, int] = {}
        self.stored: dict[int, fx.Node] = {}

    def __getattr__(self, name: str) -> Any:
        for spec in specs():
            if spec.call == name:
                return partial(spec.read or partial(read_plainly, spec), self)
        known = sorted(spec.call for spec in specs())
        raise self.refuse(f"the engine has no call {name}. It has {', '.join(known)}.")

    @property
    def graph(self) -> fx.Graph:
        return self._recorder.graph

    @property
    def shards(self) -> Any:
        """The stand-in for the shards, by bucket."""
        return self._recorder.shards

    def refuse(self, message: str) -> ProgramError:
        """Return an error that shows the lines of schedule.py around the one that is running."""
        return self._recorder.refuse(message)

    def value(self, made: Any, what: str) -> fx.Node:
        """Return the node of a value; `what` describes the value in the error if there is none."""
        return self._recorder.node(made, what)

    def append(
        self, target: Any, *arguments: Any, named: dict[str, Any] | None = None, **fields: Any
    ) -> fx.Node:
        """Append a call of an op; its arguments are nodes and constants, `fields` its Info."""
        return self._recorder.communicate(target, *arguments, named=named, **fields)

    def results(self, node: fx.Node) -> Any:
        """Return what a call gives: its value, or its values with a node for each."""
        return self._recorder.items(node)

    def launch(self, node: fx.Node) -> Launch:
        """Return the result of a launch call."""
        return Launch(node)

    def launched(self, launch: fx.Node) -> Bucket:
        """Return the bucket of a launch."""
        return self.layout.buckets[bucket_of(launch)]

    def told(self, node: fx.Node) -> dict[str, Any]:
        """Return the Info fields that a copy takes over from its value."""
        where = info(node)
        return {k: getattr(where, k) for k in ("unit", "module", "line", "name", "index")}

    def of_bucket(self, bucket: Bucket) -> dict[str, Any]:
        """Return the Info fields of a node that belongs to a bucket."""
        return {"unit": bucket.label(), "index": bucket.index}

    def of_value(self, spec: OpSpec) -> dict[str, Any]:
        """Return the Info fields of an op on a value: its unit, and its number if it sends."""
        unit, *form = self._recorder.comment_here() or [""]
        is_sent = spec.is_exchange or spec.is_sync
        return {"unit": unit if form else "", "index": next(self._exchanges) if is_sent else -1}

    def bucket(self, bucket: int) -> Bucket:
        """Return a bucket by its number.

        Raises:
            ProgramError: the layout has no such bucket.
        """
        num = len(self.layout.buckets)
        if type(bucket) is not int or not 0 <= bucket < num:
            raise self.refuse(f"bucket {bucket!r} is none of the layout's {num}.")
        return self.layout.buckets[bucket]

    def members(self, bucket: int, params: tuple[int, ...]) -> list[Any]:
        """Return the parameters at these positions of a bucket."""
        held = self.bucket(bucket).params
        if not isinstance(params, tuple):
            raise self.refuse(f"positions of parameters are a tuple. This is {params!r}.")
        if wrong := [i for i in params if type(i) is not int or not 0 <= i < len(held)]:
            raise self.refuse(
                f"position {wrong[0]!r} is none of the {len(held)} parameters of bucket {bucket}."
            )
        return [held[i] for i in params]


def read_plainly(spec: OpSpec, r: Calls, *given: Any, **named: Any) -> Any:
    """Read an op in the form of `write_plainly`: by the names of its schema."""
    target = target_of(spec)
    names = argument_names(target)
    at = {**dict(zip(names, given, strict=False)), **named}
    if unknown := [k for k in at if k not in names]:
        raise r.refuse(f"rt.{spec.call} has no argument {unknown[0]}.")
    taken = {k: _taken(r, k, v) for k, v in at.items()}
    positional = list(takewhile(lambda k: k in taken, names))
    rest = {k: v for k, v in taken.items() if k not in positional}
    fields: dict[str, Any] = {}
    if spec.bucket is not None:
        fields = r.of_bucket(r.bucket(at.get(names[spec.bucket], -1)))
    elif spec.is_value:
        fields = r.of_value(spec)
    node = r.append(target, *(taken[k] for k in positional), named=rest, **fields)
    return r.launch(node) if spec.kind is Kind.LAUNCH else r.results(node)


def _taken(r: Calls, name: str, given: Any) -> Any:
    """Return an argument with nodes in place of tensors, also of those in a list."""
    if isinstance(given, list):
        return [_taken(r, f"{name}[{k}]", each) for k, each in enumerate(given)]
    return r.value(given, name) if isinstance(given, Tensor) else given


class Shards:
    """A stand-in for `shards`: a placeholder for each bucket that the schedule names."""

    def __init__(self, recorder: Recorder, layout: Layout, device: str) -> None:
        self._recorder, self._layout, self._device = recorder, layout, device
        self._made: dict[int, Tensor] = {}

    def add(self, index: int, shard: Tensor) -> None:
        self._made[index] = shard

    def __getitem__(self, index: int) -> Tensor:
        if index not in self._made:
            num = len(self._layout.buckets)
            if type(index) is not int or not 0 <= index < num:
                raise self._recorder.refuse(f"shards[{index!r}] is none of the layout's {num}.")
            self._made[index] = self._make(self._layout.buckets[index])
        return self._made[index]

    def _make(self, bucket: Bucket) -> Tensor:
        dtype = str(bucket.dtype).removeprefix("torch.")
        val = self._recorder.fake(dtype, [self._layout.shard_numel(bucket)], [1], self._device)
        name = f"shard_{bucket.index}"
        fields: dict[str, Any] = {
            "unit": bucket.label(),
            "index": bucket.index,
            "name": name,
            "phase": self._recorder.phase,
        }
        node = add_placeholder(self._recorder.graph, name, val, Role.SHARD, **fields)
        return self._recorder.bind(val, node)
