"""placements.json: how the values of an emitted program lie over the ranks that share them.

The text of a program has the calls of one rank, on its parts. What these are parts of is not in
them: a view of [4, 8] may be of a whole [8, 8] or a whole [4, 16]. This file has the cut of each
parameter, and each call on parts that occurs with the call on whole values that it is a part of. A
call is known by its operator, its arguments, and the placements, whole shapes and strides of what
it reads, so that it is found again wherever an edit moves it. Nothing here is trusted: `verify`
follows the placements through the text, and accepts a row only as a way that the rule table has,
with the digest of what was captured.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from zerofx import schema
from zerofx.compat.graphs import OpOverload, op_name
from zerofx.ir.meta import Hole, Placed, info, set_info, tensors_of, value
from zerofx.ir.placing import Operands, by_name, check_placed
from zerofx.ir.program import ParamInfo, Planned, Stage
from zerofx.layout.buckets import Layout
from zerofx.layout.placements import Cut, Owned, P, Part, Placement, R
from zerofx.plan.parts import Parallel
from zerofx.runtime.regions.load import MOST_BYTES
from zerofx.schema import FormError

NAME = "placements.json"

_COUNT = schema.integer()
_SHAPE = schema.sequence(_COUNT, most=64)
_LIES = schema.text(r"R|P|S\(\d{1,9}(, groups=\d{1,9})?\)|D\(\d{1,9}, [0-9a-f]{16}\)")
_EACH = schema.either(schema.sequence(_LIES), _LIES)
_SHAPES = schema.either(_SHAPE, schema.sequence(schema.optional(_SHAPE)))
_WHOLE = schema.row(schema.text(), schema.sequence(schema.anything), schema.anything)
_GIVEN = {"gives": _EACH, "shape": _SHAPES, "is_same": schema.boolean}
_OUTER = schema.record(
    {"reads": schema.sequence(schema.row(_LIES, _SHAPES)), "whole": schema.optional(_WHOLE)}
    | _GIVEN
)
_ROW = schema.record(
    {
        "call": schema.text(),
        "args": schema.anything,
        "reads": schema.sequence(schema.row(_LIES, _SHAPE, _SHAPE)),
        "whole": _WHOLE,
    }
    | _GIVEN,
    outer=_OUTER,
)
_PLACEMENTS = schema.record(
    {
        "parts": schema.mapping(schema.text(), schema.row(_SHAPE, _LIES)),
        "wires": schema.sequence(
            schema.either(schema.row(_LIES, _SHAPE, _LIES, _SHAPE), schema.row(_LIES, _SHAPE))
        ),
        "calls": schema.sequence(_ROW),
    }
)


# -- write ----------------------------------------------------------------------------------------
def has_placements(program: Planned) -> bool:
    """Return whether values or parameters of a program are cut over an axis."""
    return _ranks(program.plan.parallel) > 1


def _ranks(parallel: Parallel) -> int:
    return parallel.tensor if parallel.brings_slices else parallel.value_ranks


def render_placements(program: Planned) -> str:
    """Return the text of placements.json, one parameter, value sent or call per line."""
    rows: dict[str, None] = {}

    def visit(node: fx.Node, operands: Operands) -> Placed | None:
        placed = info(node).placed
        is_call = placed is not None and placed.target is not None
        if placed is not None and is_call and not _is_plain(node, operands, placed):
            rows[json.dumps(_row(node, operands, placed))] = None
        return placed

    check_placed(program, visit)
    cut = {p.name: p.part for b in program.layout.buckets for p in b.params if p.part}
    parts = [f"{json.dumps(n)}: {json.dumps([p.shape, str(p.cut)])}" for n, p in cut.items()]
    wires = [json.dumps(_wired(w.lies)) for w in program.stage.wires]
    return (
        f'{{\n"parts": {{{_lines(parts)}}},\n"wires": [{_lines(wires)}],\n'
        f'"calls": [{_lines(list(rows))}]\n}}\n'
    )


def _lines(rows: list[str]) -> str:
    return "\n " + ",\n ".join(rows) + "\n" if rows else ""


def _wired(lies: Placed) -> list[Any]:
    outer = [] if lies.outer is None else _wired(lies.outer)
    return [str(lies.gives), lies.shape, *outer]


def _is_plain(node: fx.Node, operands: Operands, placed: Placed) -> bool:
    """Return whether a call is on whole values, so that the text itself says all of it.

    Of a conversion over the axis that was cut first, what it converts need not be whole over that.
    """
    note: Placed | None = placed
    for each in operands:
        if note is None or note.target is None:
            return True
        gives = note.gives if isinstance(note.gives, tuple) else (note.gives,)
        if any(one != R for one in gives) or any(one.now != R for one in each):
            return False
        if node.target is not note.target:
            return False
        note = note.outer
    return True


def _row(node: fx.Node, operands: Operands, placed: Placed) -> dict[str, Any]:
    row = _local(node, operands) | _noted(placed)
    if "outer" in row:
        row["outer"] |= _noted(placed.outer or Placed(R, placed.shape))
    return row


def _noted(placed: Placed) -> dict[str, Any]:
    is_tuple = isinstance(placed.gives, tuple)
    whole = None
    if placed.target is not None:
        whole = [_name(placed.target), _written(placed.args), _written(placed.kwargs)]
    return {
        "gives": list(map(str, placed.gives)) if is_tuple else str(placed.gives),
        "shape": placed.shape,
        "is_same": placed.is_same,
        "whole": whole,
    }


def _local(node: fx.Node, operands: Operands) -> dict[str, Any]:
    """Return a rank's call: its arguments by name, with a hole for each tensor that it reads."""
    tensors = tensors_of(node)
    holes = map(Hole, range(len(tensors)))

    def hole(_: fx.Node) -> Any:
        return next(holes)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), hole)
    named = by_name(node.target, args, kwargs)
    read, *outer = operands
    row = {
        "call": _name(node.target),
        "args": {name: _written(argument) for name, argument in sorted(named.items())},
        "reads": [
            [str(each.now), list(each.shape), list(value(tensor).stride())]
            for each, tensor in zip(read, tensors, strict=True)
        ],
    }
    for each in outer:  # one at most
        row["outer"] = {"reads": [[str(one.now), list(one.shape)] for one in each]}
    return row


def _name(target: Any) -> str:
    assert isinstance(target, OpOverload), f"{target} is placed, and no operator"
    return ".".join(op_name(target))


def _written(argument: Any) -> Any:
    """Return an argument of a call as JSON data; those that JSON lacks are tagged."""
    if isinstance(argument, Hole):
        return {"hole": argument.number}
    if isinstance(argument, (list, tuple)):
        return [_written(each) for each in argument]
    if isinstance(argument, Mapping):
        return {"named": {name: _written(each) for name, each in argument.items()}}
    if isinstance(argument, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(argument).removeprefix("torch.")}
    if isinstance(argument, torch.device):
        return {"device": str(argument)}
    if isinstance(argument, complex):
        return {"complex": [_written(argument.real), _written(argument.imag)]}
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": str(argument)}
    assert argument is None or isinstance(argument, (bool, int, float, str)), repr(argument)
    return argument


# -- read -----------------------------------------------------------------------------------------
class Placements:
    """The content of placements.json: the cuts of parameters and of values sent, and the calls.

    Raises:
        FormError: it is damaged; names the field.
    """

    def __init__(self, said: Any, parallel: Parallel) -> None:
        schema.check(said, _PLACEMENTS)
        ranks, is_given = parallel.tensor, parallel.brings_slices
        self.parts: dict[str, Part] = {}
        for name, (shape, lies) in said["parts"].items():
            cut = _placement(lies)
            if not isinstance(cut, Cut) or cut.dim >= len(shape):
                raise FormError(f"parts.{name} is {lies} of {shape}, which is no part of it")
            self.parts[name] = Part(tuple(shape), cut, ranks, is_given)
        self.wires = [_lies(row) for row in said["wires"]]
        self.calls: dict[str, list[Placed]] = {}  # several only of experts, each with its owners
        for number, row in enumerate(said["calls"]):
            placed = _placed(row, f"calls[{number}]")
            if "outer" in row:
                placed = replace(placed, outer=_placed(row["outer"], f"calls[{number}].outer"))
            self.calls.setdefault(_key(row), []).append(placed)

    def of_params(self, params: Mapping[str, ParamInfo]) -> dict[str, ParamInfo]:
        """Return the parameters with their cuts."""
        return {n: replace(p, part=self.parts.get(n)) for n, p in params.items()}

    def of_layout(self, layout: Layout) -> Layout:
        """Return the layout with the cuts of the parameters in its buckets."""
        buckets = (
            replace(b, params=tuple(replace(p, part=self.parts.get(p.name)) for p in b.params))
            for b in layout.buckets
        )
        return replace(layout, buckets=tuple(buckets))

    def of_stage(self, stage: Stage) -> Stage:
        """Return the pipeline stage with the placements of what it sends and receives.

        Raises:
            FormError: the file is of another stage.
        """
        if len(stage.wires) != len(self.wires):
            raise FormError(f"wires has {len(self.wires)} rows for {len(stage.wires)} values sent")
        wires = zip(stage.wires, self.wires, strict=True)
        return replace(stage, wires=tuple(replace(w, lies=lies) for w, lies in wires))

    def recall(self, program: Planned) -> None:
        """Give each call of a program that was read its placement, as far as it is known.

        Raises:
            ProgramError: a value does not lie as its reader needs it; shows the lines.
        """

        def visit(node: fx.Node, operands: Operands) -> Placed | None:
            is_tensors = all(isinstance(value(t), torch.Tensor) for t in tensors_of(node))
            if not isinstance(node.target, OpOverload) or not is_tensors:
                return None
            alike = self.calls.get(_key(_local(node, operands)))
            if alike is None:
                return None
            found = next((each for each in alike if _is_owned_by(each, operands)), alike[-1])
            set_info(node, placed=found)
            return found

        check_placed(program, visit)


def _is_owned_by(placed: Placed, operands: Operands) -> bool:
    """Return whether rows that a call gives by owner are divided as one of its operands says.

    Layers of experts make equal calls, and each divides rows by the ends of its own groups.
    """
    gives = placed.gives if isinstance(placed.gives, tuple) else (placed.gives,)
    own = {each.ends for each in gives if isinstance(each, Owned)}
    read = operands[0]
    return own <= {
        *(each.digest for each in read),
        *(each.now.ends for each in read if isinstance(each.now, Owned)),
    }


def read_placements(files: Container[str], path: Path, parallel: Parallel) -> Placements | None:
    """Return what placements.json says; None for a program in which nothing is cut.

    files: the names of the emitted files.

    Raises:
        FormError: it is missing or damaged; names the field.
    """
    if _ranks(parallel) == 1:
        return None
    if NAME not in files:
        raise FormError(f"it is missing, and the plan cuts values over {_ranks(parallel)} ranks")
    return Placements(schema.parse_json(schema.read_text(path, MOST_BYTES)), parallel)


def _key(row: Mapping[str, Any]) -> str:
    outer = [row["outer"]["reads"]] if "outer" in row else []
    return json.dumps([row["call"], row["args"], row["reads"], *outer], sort_keys=True)


def _placement(text: str) -> Placement:
    if text in ("R", "P"):
        return R if text == "R" else P
    if text.startswith("D"):
        of_rows, ends = text[2:-1].split(", ")
        return Owned(int(of_rows), ends)
    dim, *groups = map(int, re.findall(r"\d+", text))
    return Cut(dim, *groups)


def _lies(row: list[Any]) -> Placed:
    lies, shape, *outer = row
    return Placed(_placement(lies), tuple(shape), outer=_lies(outer) if outer else None)


def _placed(row: Mapping[str, Any], where: str) -> Placed:
    gives, shape = row["gives"], row["shape"]
    is_tuple = isinstance(gives, list)
    if is_tuple and len(gives) != len(shape):
        raise FormError(f"{where} gives {len(gives)} values of {len(shape)} shapes")
    placed = Placed(
        tuple(map(_placement, gives)) if is_tuple else _placement(gives),
        tuple(None if s is None else tuple(s) for s in shape) if is_tuple else tuple(shape),
        is_same=row["is_same"],
    )
    if row["whole"] is None:
        return placed
    target, args, kwargs = row["whole"]
    return replace(
        placed,
        target=_operator(target, where),
        args=tuple(_read(each, where) for each in args),
        kwargs=_read(kwargs, where),
    )


def _operator(name: str, where: str) -> Any:
    space, _, rest = name.partition(".")
    found, _, overload = rest.rpartition(".")
    try:
        op = getattr(getattr(getattr(torch.ops, space), found), overload)
    except (AttributeError, RuntimeError):
        op = None
    if not isinstance(op, OpOverload):
        raise FormError(f"{where} calls {name}, which is no operator here")
    return op


def _read(said: Any, where: str) -> Any:
    if isinstance(said, list):
        return [_read(each, where) for each in said]
    if not isinstance(said, dict):
        return said
    ((tag, inner),) = said.items() if len(said) == 1 else [("", None)]
    if tag == "hole" and type(inner) is int:
        return Hole(inner)
    if tag == "named" and isinstance(inner, dict):
        return {name: _read(each, where) for name, each in inner.items()}
    if tag == "torch" and isinstance(inner, str):
        found = getattr(torch, inner, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    if tag == "device" and isinstance(inner, str) and re.fullmatch(r"[a-z]+(:\d{1,4})?", inner):
        return torch.device(inner)
    if tag == "complex" and isinstance(inner, list) and len(inner) == 2:
        return complex(*(_read(each, where) for each in inner))
    if tag == "float" and inner in ("inf", "-inf", "nan"):
        return float(inner)
    raise FormError(f"{where} has an argument {schema.shown(said, 60)}, which is none")
