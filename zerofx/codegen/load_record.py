"""Recording: emitted source runs on fake tensors, and every op becomes a node."""

from __future__ import annotations

import contextlib
import linecache
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.text import read_comment, read_origin
from zerofx.compat.graphs import LazyGraphModule, TorchDispatchMode, op_name, pytree, schema_of
from zerofx.compat.operators import out_of_place
from zerofx.compat.tracing import memory_of
from zerofx.errors import ProgramError
from zerofx.ir.graphs import call, is_alias, is_random
from zerofx.ir.meta import Phase, Role, set_info
from zerofx.ir.text import identifier
from zerofx.ir.verify_fault import file_lines


class Recorder(TorchDispatchMode):
    """The recorder of one graph: compute is recorded on dispatch, communication through `Calls`.

    Values are identified by the tensor objects that represent them. `region` is the present region
    of compute; compute in schedule.py itself gets regions of its own. `written` converts values
    computed from varying sizes to the form that a graph contains.
    """

    def __init__(
        self,
        directory: Path,
        phase: Phase,
        region_files: tuple[str, ...],
        written: Callable[[Any], Any] = lambda size: size,
    ) -> None:
        super().__init__()
        self._written = written
        self.graph = fx.Graph()
        self.phase, self.region_files = phase, region_files
        self.schedule = str(directory / "schedule.py")
        self.shards: Any = None  # set by the reader: creates placeholders on demand
        self.root = torch.nn.Module()  # holds the constants
        self._constants: dict[str, Tensor] = {}
        self.num_regions = 0
        self._region: int | None = None  # of the region call that is running
        self._loose: int | None = None  # of consecutive compute in schedule.py itself
        self._unit = ""
        self._place = ""
        # id of a value -> it (kept alive), its node, and how often its memory had been written to
        self._of: dict[int, tuple[Any, fx.Node, int]] = {}
        self._writes: dict[Any, int] = {}  # memory that compute has written to -> how often
        self._own: set[Any] = set()  # memory that the present region has allocated
        self._is_paused = False

    # -- values -----------------------------------------------------------------------------------
    def bind(self, made: Any, node: fx.Node) -> Any:
        """Associate a value with a node from now on; return the value."""
        writes = self._writes.get(_memory(made), 0) if self._writes else 0
        self._of[id(made)] = made, node, writes
        return made

    def node(self, made: Any, what: str) -> fx.Node:
        """Return the node that a value is associated with.

        Raises:
            ProgramError: the function did not compute this value, or has written over it.
        """
        found = self._of.get(id(made))
        if found is None:
            raise self.refuse(f"{what} is {_describe(made)}, which this function did not compute.")
        if self._writes and self._writes.get(_memory(made), 0) != found[2]:
            raise self.refuse(
                f"{what} is {_describe(made)}, which an operator has written over through another "
                "view. Compute a new value there."
            )
        return found[1]

    def refuse(self, message: str) -> ProgramError:
        """Return an error that shows the lines of schedule.py around the one that is running."""
        place = self.place()
        line = int(place.partition(":")[2] or 1)
        return ProgramError(f"{place}: {message}\n" + "\n".join(file_lines(self.schedule, line)))

    def place(self) -> str:
        """Return `schedule.py:41`, the line of the schedule that is running."""
        return f"schedule.py:{self._line_in(self.schedule)[0]}"

    def _line_in(self, *paths: str) -> tuple[int, str]:
        """Return the current line of the innermost frame in one of these files."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in paths:
                return frame.f_lineno, frame.f_code.co_filename
            frame = frame.f_back  # type: ignore[assignment]
        return 1, self.schedule

    # -- nodes ------------------------------------------------------------------------------------
    def placeholder(self, role: Role, val: Tensor, name: str, **fields: Any) -> Tensor:
        node = self.graph.placeholder(identifier(name))
        node.meta["val"] = val
        set_info(node, role=role, phase=self.phase, name=name, **fields)
        return self.bind(val, node)

    def constant(self, name: str, held: Tensor) -> Tensor:
        """Return the tensor of a constant in this graph; it is created at its first use."""
        if name not in self._constants:
            node = self.graph.create_node("get_attr", name)
            dtype = str(held.dtype).removeprefix("torch.")
            val = self.fake(dtype, list(held.shape), list(held.stride()), held.device.type)
            node.meta["val"] = val
            set_info(node, phase=self.phase, place=self.place())
            self.root.register_buffer(name, held)
            self._constants[name] = self.bind(val, node)
        return self._constants[name]

    def fake(self, dtype: str, shape: list[int], stride: list[int], device: str) -> Tensor:
        """Create a fake tensor without recording it."""
        with self.paused():
            return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)

    def communicate(
        self, target: Any, *arguments: Any, named: dict[str, Any] | None = None, **fields: Any
    ) -> fx.Node:
        """Append a zerofx op; its arguments are nodes and constants."""
        self._loose = None
        with self.paused():
            node = call(self.graph, target, arguments, named=named, shares_value=False)
        set_info(node, phase=self.phase, place=self.place(), **fields)
        if isinstance(node.meta["val"], Tensor):
            self.bind(node.meta["val"], node)
        return node

    def unit_here(self) -> str:
        """Return the unit in the comment on the line that is running."""
        return "".join(self.comment_here()[:1])

    def comment_here(self) -> list[str]:
        """Return the fields of the comment on the line that is running."""
        line, file = self._line_in(self.schedule)
        return read_comment(linecache.getline(file, line))

    @contextlib.contextmanager
    def region(self, unit: str) -> Iterator[None]:
        """Record the compute inside the block as one region."""
        assert self._region is None, "a region inside a region"
        self._region, self._loose, self._unit = self.num_regions, None, unit
        self._own.clear()
        self._place = self.place()
        self.num_regions += 1
        try:
            yield
        finally:
            self._region = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not self._is_paused and func is not torch.ops.prim.device.default:
            if schema_of(func).is_mutable:
                self._overwrite(func, args, kwargs)
            else:
                self._record(func, args, kwargs, made)
        return made

    def _overwrite(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Record an operator that writes over its first argument as one that computes a new value.

        From then on that argument has the new value. Its views must not be read again.
        """
        compute = out_of_place(func)
        is_own = self._region is not None and _memory(args[0]) in self._own
        if compute is func or not is_own:
            raise self.refuse(
                f"{func} writes in place. Emitted files compute new values only, except that a "
                "region may write those of pointwise operators over memory that it has allocated."
            )
        self._record(compute, args, kwargs, made := compute(*args, **kwargs))
        memory = _memory(args[0])
        self._writes[memory] = self._writes.get(memory, 0) + 1
        self.bind(args[0], self.node(made, "its result"))

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        results = made if isinstance(made, (tuple, list)) else [made]
        if not any(isinstance(r, Tensor) for r in results):
            return
        taken, named = pytree.tree_map(lambda a: self._taken(func, a), (tuple(args), kwargs))
        base = op_name(func)[1]
        node = self.graph.create_node("call_function", func, taken, named, name=base)
        node.meta["val"] = made
        self._describe_node(node)
        if not is_alias(node):
            self._own.update(_memory(r) for r in results)
        if made is results:
            self.items(node)
        else:
            self.bind(made, node)

    def items(self, node: fx.Node) -> Any:
        """Return a node's value; if it is several tensors, each gets a node that takes it out."""
        made = node.meta["val"]
        for k, result in enumerate(made if isinstance(made, (tuple, list)) else ()):
            if isinstance(result, Tensor):
                item = self.graph.call_function(operator.getitem, (node, k))
                item.meta = {**node.meta, "val": result}
                set_info(item, is_random=False)
                self.bind(result, item)
        return made

    def _taken(self, func: Any, argument: Any) -> Any:
        is_value = isinstance(argument, Tensor)
        return (
            self.node(argument, f"an argument of {func}") if is_value else self._written(argument)
        )

    def _describe_node(self, node: fx.Node) -> None:
        """Give a compute node its region, and the module and line from its statement's comment."""
        if self._region is None and self._loose is None:
            self._loose = self.num_regions
            self.num_regions += 1
        is_loose = self._region is None
        region = self._loose if is_loose else self._region
        line, file = self._line_in(self.schedule, *self.region_files)
        module, user_line = read_origin(linecache.getline(file, line))
        unit = "" if is_loose else self._unit
        set_info(
            node,
            phase=self.phase,
            region=region,
            unit=unit,
            module=".".join(t for t in (unit, module) if t),
            line=user_line,
            is_random=is_random(node),
            place=f"schedule.py:{line}" if is_loose else self._place,
        )

    def finish(self, results: tuple[Any, ...], line: int) -> fx.GraphModule:
        """Close the graph: add the result tuple (at this line) and erase unread getitems."""
        set_info(self.graph.output(results), place=f"schedule.py:{line}")
        for node in reversed(list(self.graph.nodes)):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        return LazyGraphModule(self.root, self.graph)


def _memory(value: Any) -> Any:
    return memory_of(value) if isinstance(value, Tensor) else None


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
