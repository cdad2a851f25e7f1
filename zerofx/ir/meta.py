"""Node metadata: the typed facts of a node beyond its target and fake value.

Everything zerofx stores on an fx node is one `Info` under `node.meta["zfx"]`; passes read it
through `info(node)` and never parse a node's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
from torch import fx

KEY = "zfx"


class Role(Enum):
    """The meaning of a placeholder or an output."""

    PARAM = "param"  # placeholder: a full parameter (before sharding)
    SHARD = "shard"  # placeholder: this rank's slice of a bucket
    BUFFER = "buffer"  # placeholder: a module buffer
    INPUT = "input"  # placeholder: a leaf of the user's arguments
    TANGENT = "tangent"  # placeholder: incoming gradient of a user output
    SAVED = "saved"  # forward output and backward placeholder: a kept activation
    OUTPUT = "output"  # output: a leaf of the user's result
    GRAD = "grad"  # output: gradient of a full parameter (before sharding)
    INPUT_GRAD = "input-grad"  # output: gradient of a user input
    SHARD_GRAD = "shard-grad"  # output: reduced gradient slice of a bucket
    BUFFER_UPDATE = "buffer-update"  # output: new value of a buffer
    INPUT_UPDATE = "input-update"  # output: new value of a mutated user input


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Hole:
    """A reference, in the arguments of a call, to the tensor with this number."""

    number: int


@dataclass(frozen=True)
class Placed:
    """The placement of a value over an axis, and the call on whole values that computes it.

    gives: one placement, or one for each tensor of a tuple. shape: of the whole value, or of each
        tensor of a tuple. is_same: the whole call keeps its argument's shape and strides.
    target, args, kwargs: the whole call, with a `Hole` for each tensor; None for a placeholder,
        and for a conversion.
    outer: the same of the whole value, if that is a part itself: over two axes, values are cut over
        the tensor axis, and their parts over the context axis.
    """

    gives: Any
    shape: Any
    target: Any = None
    args: Any = None
    kwargs: Any = None
    is_same: bool = False
    outer: Placed | None = None

    @property
    def captured(self) -> Placed:
        """The note whose whole call is the captured one: that over the axis that was cut first."""
        is_first = self.outer is None or self.outer.target is None
        return self if is_first else self.outer.captured  # type: ignore[union-attr]

    @property
    def lies(self) -> Placed:
        """The placements alone, without the calls."""
        outer = None if self.outer is None else self.outer.lies
        return Placed(self.gives, self.shape, outer=outer)

    def __str__(self) -> str:
        return str(self.gives) if self.outer is None else f"{self.gives} of {self.outer}"


@dataclass(frozen=True)
class Info:
    """Metadata of one node.

    name: the user's qualified name (parameter, buffer, `args[0]`, output path), for placeholders.
    module: qualified name of the module whose forward ran this node ("" is the root).
    line: "file.py:12" of the user's code.
    unit: the unit that the node's module belongs to ("" outside any unit).
    index: position among its role (input leaf, output leaf, bucket of a shard).
    tile: the part of a tiled layer that the node computes, or -1; regions are cut between parts.
    region: the compute region the node belongs to; None for communication and glue.
    recomputed: the node is a backward copy of a forward node.
    is_random: the node draws from a generator (directly), so it must never be recomputed.
    place: "schedule.py:41", the line of an emitted directory that the node was loaded from.
    placed: the placement of the value, if the program's values are sharded over an axis.
    digest: the digest of the value's expression, if another pipeline stage computed it.
    draw: the index of a random node's draw among its phase's draws in the whole model; 0 to count
        them.
    """

    phase: Phase = Phase.FORWARD
    role: Role | None = None
    name: str = ""
    module: str = ""
    line: str = ""
    unit: str = ""
    index: int = -1
    tile: int = -1
    region: int | None = None
    recomputed: bool = False
    is_random: bool = False
    place: str = ""
    placed: Placed | None = None
    digest: str = ""
    draw: int = 0


_NOTHING = Info()
_FIELDS = frozenset(f.name for f in fields(Info))


@dataclass(frozen=True)
class OutputInfo:
    """The meaning of one element of a graph's output tuple (kept in Program.outputs)."""

    role: Role
    name: str = ""
    index: int = -1


def info(node: fx.Node) -> Info:
    """Return the node's Info, or a default one if no pass has set it yet."""
    return node.meta.get(KEY) or _NOTHING


def set_info(node: fx.Node, **changes: Any) -> Info:
    """Replace fields of the node's Info and return the new one.

    Passes do this for every node that they make; `dataclasses.replace` takes three times as long.

    Raises:
        TypeError: Info has no such field.
    """
    if not changes.keys() <= _FIELDS:
        raise TypeError(f"Info has no field {', '.join(sorted(changes.keys() - _FIELDS))}.")
    made = object.__new__(Info)
    made.__dict__.update(info(node).__dict__)
    made.__dict__.update(changes)
    node.meta[KEY] = made
    return made


def value(node: fx.Node) -> Any:
    """Return the node's fake value (a tensor, a tuple of tensors, or a Python scalar)."""
    return node.meta.get("val")


def nbytes(val: Any) -> int:
    """Return the bytes of a fake value, with views at their own size."""
    if isinstance(val, torch.Tensor):
        return val.numel() * val.element_size()
    if isinstance(val, (tuple, list)):
        return sum(nbytes(v) for v in val)
    return 0


UPDATES = {Role.BUFFER_UPDATE: Role.BUFFER, Role.INPUT_UPDATE: Role.INPUT}


def place_of(what: OutputInfo | Info) -> tuple[Role | None, str | int]:
    """Identify a buffer by its name or an input by its leaf, from its placeholder or its update."""
    role = UPDATES.get(what.role, what.role) if what.role else None
    return role, what.name if role is Role.BUFFER else what.index


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a call reads, once per use, in the order of holes."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def shape_of(val: Any) -> Any:
    """Return the shape of a fake tensor, a tuple of shapes for several, () for other values."""
    if isinstance(val, (list, tuple)):
        return tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in val)
    return tuple(val.shape) if isinstance(val, torch.Tensor) else ()


def filled(argument: Any, tensors: Sequence[Any]) -> Any:
    """Return arguments with their holes replaced by tensors."""
    if isinstance(argument, Hole):
        return tensors[argument.number]
    if isinstance(argument, (list, tuple)):
        return type(argument)(filled(a, tensors) for a in argument)
    if isinstance(argument, dict):
        return {k: filled(v, tensors) for k, v in argument.items()}
    return argument
