"""Programs of more layers, made from a short one by repeating two layers in its middle.

To capture an operator and to place its values over ranks takes milliseconds, to copy it
microseconds. Two neighbouring pairs of layers in the middle of the stack are compared node by node:
operators, arguments, forms of values, and what each pair reads of the pair before it and, in
backward, of the one after it. If they are equal, copies of the second pair make the program that
capture, and the passes up to `place`, make of a longer model. Otherwise nothing is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import fx

from zerofx.compat.graphs import LazyGraphModule, copied_node
from zerofx.ir.meta import KEY, Info, OutputInfo, Phase, Role, info, value
from zerofx.ir.program import JOINT, ParamInfo, Program

PAIR = 2  # masks and slots may alternate between neighbours
LEAST = 1 + 2 * PAIR + 1  # layers of the short program: the first, both pairs, and the last

_P = TypeVar("_P", bound=Program)
_T = TypeVar("_T")


def lengthened(program: _P, stack: str, length: int) -> _P | None:
    """Return the program of a stack of `length` layers, None if its layers do not repeat.

    program: of fewer layers, by an even number, before the pass `split`; it stays as it is.
    """
    layers = _Layers(stack)
    aliases = (alias for p in program.params.values() for alias in p.aliases)
    if JOINT not in program.graphs or any(layers.number(alias) >= 0 for alias in aliases):
        return None
    pairs = _found(program, layers)
    if pairs is None or (length - pairs.length) % PAIR or length < pairs.length:
        return None
    return _Longer(program, layers, pairs, (length - pairs.length) // PAIR).made()  # type: ignore[return-value]


@dataclass(frozen=True)
class _Layers:
    """The names of a stack's layers, and of what is inside of them."""

    stack: str

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<![\w.]){re.escape(self.stack)}\.(\d+)(?!\w)")

    def number(self, name: str) -> int:
        """Return the number of a name's layer, -1 if it is in none."""
        found = self._pattern.search(name)
        return int(found[1]) if found else -1

    def is_in(self, name: str, first: int) -> bool:
        """Tell whether a name is in the pair of layers that begins with `first`."""
        return first <= self.number(name) < first + PAIR

    def moved(self, name: str, by: int, first: int = 0) -> str:
        """Return a name `by` layers further, if its layer is `first` or a later one."""

        def further(found: re.Match[str]) -> str:
            number = int(found[1])
            return f"{self.stack}.{number + by if number >= first else number}"

        return self._pattern.sub(further, name)

    def info(self, where: Info, by: int, first: int = 0) -> Info:
        """Return the Info of a node that many layers further."""
        old = where.name, where.module, where.unit
        name, module, unit = (self.moved(text, by, first) for text in old)
        if (name, module, unit) == old:
            return where
        return replace(where, name=name, module=module, unit=unit)

    def param(self, p: ParamInfo, by: int, more: int, first: int = 0, above: int = -1) -> ParamInfo:
        """Return a parameter that many layers further; its numbers `above` one get `more`."""
        uses = (
            replace(
                u, number=u.number + (more if u.number > above else 0),
                unit=self.moved(u.unit, by, first),
            )
            for u in p.uses
        )  # fmt: skip
        return replace(
            p, name=self.moved(p.name, by, first), unit=self.moved(p.unit, by, first),
            tile=p.tile and replace(p.tile, name=self.moved(p.tile.name, by, first)),
            uses=tuple(uses),
        )  # fmt: skip


# -- Two pairs of layers that are equal ------------------------------------------------------------


@dataclass
class _Pairs:
    """Two neighbouring pairs of layers, the late one next to the last layer.

    length: layers of the program. first: the number of the late pair's first layer.
    early, late: their nodes in forward. early_back, late_back: in backward, the late ones first.
    early_end, late_end: at the end, where gradients are brought to the form of their parameters.
    leaves: the placeholders of the late pair's parameters and buffers.
    behind: what the late pair's backward reads of the layers after it -> the node of the late pair
        that the early one reads in its place.
    """

    length: int
    first: int
    early: list[fx.Node]
    late: list[fx.Node]
    early_back: list[fx.Node]
    late_back: list[fx.Node]
    early_end: list[fx.Node]
    late_end: list[fx.Node]
    leaves: list[fx.Node]
    behind: dict[fx.Node, fx.Node] = field(default_factory=dict)


def _found(program: Program, layers: _Layers) -> _Pairs | None:
    """Return the pairs of a program if they are equal."""
    nodes = [n for n in program.graph(JOINT).nodes if n.op not in ("placeholder", "output")]
    starts: dict[tuple[Phase, int], int] = {}
    for at, node in enumerate(nodes):
        number = layers.number(info(node).module)
        if number >= 0:
            starts.setdefault((info(node).phase, number), at)
    length = 1 + max((number for _, number in starts), default=-1)
    first = length - 1 - PAIR
    if length < LEAST:
        return None
    bounds = [(Phase.FORWARD, first + i * PAIR) for i in (-1, 0, 1)]
    bounds += [(Phase.BACKWARD, first + 1 - i * PAIR) for i in (0, 1, 2)]
    found = list(pairwise(starts.get(bound, -1) for bound in bounds))
    if any(not 0 <= a < b for a, b in found):
        return None
    early, late, _, late_back, early_back = (nodes[a:b] for a, b in found)
    leaves = [n for n in _leaves(program) if layers.is_in(info(n).name, first)]
    rest = nodes[found[-1][1] :]
    early_end, late_end = (_end_of(back, rest, layers) for back in (early_back, late_back))
    pairs = _Pairs(
        length, first, early, late, early_back, late_back, early_end, late_end, leaves
    )  # fmt: skip
    return pairs if _Comparison(program, layers, pairs).holds() else None


def _end_of(back: Sequence[fx.Node], rest: Sequence[fx.Node], layers: _Layers) -> list[fx.Node]:
    """Return the nodes in no layer that read a pair's backward alone."""
    found = dict.fromkeys(back)
    for node in rest:
        is_in_layer = layers.number(info(node).module) >= 0
        if not is_in_layer and node.all_input_nodes and found.keys() >= {*node.all_input_nodes}:
            found[node] = None
    return list(found)[len(back) :]


def _leaves(program: Program) -> list[fx.Node]:
    """Return the placeholders of parameters and buffers."""
    given = program.placeholders(JOINT)
    return [n for n in given if info(n).role in (Role.PARAM, Role.BUFFER)]


class _Comparison:
    """The comparison of two pairs of layers, and of what others read of them.

    later: a node of the early pair -> that of the late pair. own: the nodes of the late pair.
    ahead: a node of the early pair that the late one reads -> what the early one reads instead.
    everywhere: what both read, such as a mask.
    """

    def __init__(self, program: Program, layers: _Layers, pairs: _Pairs) -> None:
        self.program, self.layers, self.pairs = program, layers, pairs
        self.first = pairs.first - PAIR  # of the early pair
        self.own = {*pairs.late, *pairs.late_back, *pairs.late_end, *pairs.leaves}
        self.later: dict[fx.Node, fx.Node] = {}
        self.ahead: dict[fx.Node, fx.Node] = {}
        self.everywhere: set[fx.Node] = set()

    def holds(self) -> bool:
        """Tell whether the pairs are equal, and others read of both what they read of each."""
        given = self.pairs
        parts = [(given.early, given.late), (given.early_back, given.late_back)]
        parts.append((given.early_end, given.late_end))
        if any(len(early) != len(late) for early, late in parts):
            return False
        for early, late in parts:
            self.later.update(zip(early, late, strict=True))
        calls = list(self.later.items())
        return (
            self._leaves_are_equal()
            and self._params_are_equal()
            and all(self._is_equal(early, late) for early, late in calls)
            and self.everywhere.isdisjoint(given.behind)
            and self._is_alone()
            and self._results_are_equal()
        )

    def _leaves_are_equal(self) -> bool:
        known: dict[tuple[Any, ...], list[fx.Node]] = {}
        for node in self.pairs.leaves:
            known.setdefault((info(node), _form(value(node))), []).append(node)
        for node in _leaves(self.program):
            if self.layers.is_in(info(node).name, self.first):
                key = self.layers.info(info(node), PAIR), _form(value(node))
                if not known.get(key):
                    return False
                self.later[node] = known[key].pop(0)
        return not any(known.values())

    def _params_are_equal(self) -> bool:
        early = _params_of(self.program, self.layers, self.first)
        late = _params_of(self.program, self.layers, self.pairs.first)
        moved = [self.layers.param(p, PAIR, _count(late)) for p in early]
        return list(map(_all_of, moved)) == list(map(_all_of, late))

    def _is_equal(self, early: fx.Node, late: fx.Node) -> bool:
        return (
            (early.op, early.target) == (late.op, late.target)
            and _form(value(early)) == _form(value(late))
            and self.layers.info(info(early), PAIR) == info(late)
            and self._are_equal(early.args, late.args)
            and self._are_equal(early.kwargs, late.kwargs)
        )

    def _are_equal(self, early: Any, late: Any) -> bool:
        """Compare arguments: equal plain values, and nodes with the same part in both pairs."""
        if isinstance(early, fx.Node) and isinstance(late, fx.Node):
            return self._reads_equally(early, late)
        if type(early) is not type(late):
            return False
        if isinstance(early, (tuple, list)):
            pairs = zip(early, late, strict=False)
            return len(early) == len(late) and all(self._are_equal(a, b) for a, b in pairs)
        if isinstance(early, dict):
            both = early.keys() == late.keys()
            return both and all(self._are_equal(early[k], late[k]) for k in early)
        return bool(early == late)

    def _reads_equally(self, early: fx.Node, late: fx.Node) -> bool:
        is_outside = early not in self.later and early not in self.own
        if late in self.own:
            return self.later.get(early) is late
        if late in self.later:  # of the early pair, which itself reads what is before it
            is_read = late.op != "placeholder" and is_outside
            return is_read and self.ahead.setdefault(late, early) is early
        if early is late:
            self.everywhere.add(early)
            return True
        # of the layers after the late pair, where the early one reads of the late one
        return early in self.own and self.pairs.behind.setdefault(late, early) is early

    def _is_alone(self) -> bool:
        """Tell whether others read of a pair what the late one reads of the early one, if at all.

        The layers after the late pair may, up to their backward; in backward those before it may.
        """
        place = {node: at for at, node in enumerate(self.program.graph(JOINT).nodes)}
        begins = place[self.pairs.late_back[0]]
        inside = self.own | self.later.keys()
        crossing = {self.later[node] for node in self.ahead}

        def others(node: fx.Node) -> list[fx.Node]:
            return [u for u in node.users if u not in inside and u.op != "output"]

        back = set(self.pairs.early_back)
        only_own = (*self.pairs.late_back, *self.pairs.late_end, *self.pairs.leaves)
        return (
            not any(others(node) for node in self.later if node not in back)
            and not any(others(node) for node in only_own)
            and all(
                node in crossing and place[user] < begins
                for node in self.pairs.late
                for user in others(node)
            )
        )

    def _results_are_equal(self) -> bool:
        """Tell whether both pairs return the same: gradients of their parameters, say."""
        late: dict[tuple[Role, str], Any] = {}
        early: dict[tuple[Role, str], Any] = {}
        given = zip(self.program.outputs[JOINT], self.program.results(JOINT), strict=True)
        for spec, result in given:
            if self.layers.is_in(spec.name, self.pairs.first):
                late[spec.role, spec.name] = result
            elif self.layers.is_in(spec.name, self.first):
                early[spec.role, self.layers.moved(spec.name, PAIR)] = result
            elif result in self.later or result in self.own:
                return False
        moved = {k: self.later.get(r) if isinstance(r, fx.Node) else r for k, r in early.items()}
        return moved == late and all(r is None or r in self.own for r in late.values())


def _form(val: Any) -> Any:
    """Return what values of equal layers have in common."""
    if isinstance(val, torch.Tensor):
        return tuple(val.shape), val.stride(), val.dtype
    if isinstance(val, (tuple, list)):
        return tuple(map(_form, val))
    return val


def _params_of(program: Program, layers: _Layers, first: int) -> list[ParamInfo]:
    """Return the parameters of a pair of layers."""
    return [p for p in program.params.values() if layers.is_in(p.name, first)]


def _count(params: Sequence[ParamInfo]) -> int:
    """Return how many of the model's numbered names are those of parameters."""
    return len({use.number for p in params for use in p.uses})


def _all_of(p: ParamInfo) -> tuple[Any, ...]:
    """Return all fields, with those that `==` leaves out."""
    return p, p.layer, p.style, p.outputs, p.uses


# -- The longer program ----------------------------------------------------------------------------


class _Longer:
    """A program under construction, with copies of the late pair.

    copies: by number, the given graph's nodes -> those of the copy. Number 1 is what was there; the
        last, `count` + 1, is next to the layers after the pair.
    """

    def __init__(self, program: Program, layers: _Layers, pairs: _Pairs, count: int) -> None:
        self.program, self.layers, self.pairs, self.count = program, layers, pairs, count
        self.graph = fx.Graph()
        self.copies: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count + 2)]
        self.env = self.copies[1]
        self.own = {*pairs.late, *pairs.late_back, *pairs.late_end, *pairs.leaves}
        self.before = dict(zip(pairs.early, pairs.late, strict=True))
        self.numbers = range(2, count + 2)
        self.further, self.after = PAIR * count, pairs.first + PAIR

    def made(self) -> Program:
        """Return the longer program."""
        given, pairs = self.program, self.pairs
        back, begins = set(pairs.late_back), pairs.late_back[0]
        leaves = {r: [n for n in pairs.leaves if info(n).role is r] for r in Role}
        is_between = False  # the forward and the backward of the repeated layers
        for node in given.graph(JOINT).nodes:
            if node.op == "output":
                continue
            if node is begins:
                is_between = False
                for number in reversed(self.numbers):
                    self._repeat(pairs.late_back, number)
            read = self._behind if node in back else self.env.__getitem__
            new = copied_node(self.graph, node, self._between if is_between else read)
            self.env[node] = new
            if is_between:
                self._move(new, self.further, pairs.first)
            elif node.op == "placeholder":
                self._move(new, self.further, self.after)
                alike = leaves[info(node).role or Role.INPUT]
                if alike and node is alike[-1]:
                    for number in self.numbers:
                        self._repeat(alike, number)
            for part in (pairs.late, pairs.late_end):
                if part and node is part[-1]:
                    is_between = part is pairs.late
                    for number in self.numbers:
                        self._repeat(part, number)
        outputs = self._results()
        gm = LazyGraphModule(given.graphs[JOINT], self.graph)
        return replace(
            given, graphs={**given.graphs, JOINT: gm}, outputs={**given.outputs, JOINT: outputs},
            params=self._params(), buffers=self._buffers(), captured="",
        )  # fmt: skip

    def _repeat(self, nodes: Sequence[fx.Node], number: int) -> None:
        """Append a copy of nodes of the late pair."""

        def read(node: fx.Node) -> fx.Node:
            if node in self.own:
                return self.copies[number][node]
            if node in self.before:
                return self.copies[number - 1][self.before[node]]
            if node in self.pairs.behind and number <= self.count:
                return self.copies[number + 1][self.pairs.behind[node]]
            return self.env[node]

        for node in nodes:
            new = self.copies[number][node] = copied_node(self.graph, node, read)
            self._move(new, PAIR * (number - 1))

    def _between(self, node: fx.Node) -> fx.Node:
        """Return what a node reads that comes after the repeated layers."""
        return self.copies[self.count + 1 if node in self.own else 1][node]

    def _behind(self, node: fx.Node) -> fx.Node:
        """Return what the late pair's backward reads, which has other layers after it now."""
        later = self.pairs.behind.get(node)
        return self.copies[2][later] if later is not None and self.count else self.env[node]

    def _move(self, node: fx.Node, by: int, first: int = 0) -> None:
        node.meta[KEY] = self.layers.info(info(node), by, first)

    def _each(
        self, items: Sequence[_T], label: Callable[[_T], tuple[Any, str]]
    ) -> list[tuple[_T, int, str]]:
        """Return (item, number of its copy, its name there); copies follow the late pair's.

        label: (kind, name) of an item. Copies follow the last item of their kind.
        """
        found: list[tuple[_T, int, str]] = []
        late: list[tuple[_T, str]] = []
        labels = [*map(label, items), (None, "")]
        for item, (kind, name), following in zip(items, labels, labels[1:], strict=False):
            found.append((item, 1, self.layers.moved(name, self.further, self.after)))
            if self.layers.is_in(name, self.pairs.first):
                late.append((item, name))
            if following[0] != kind or not self.layers.is_in(following[1], self.pairs.first):
                for number in self.numbers:
                    step = PAIR * (number - 1)
                    found += [(each, number, self.layers.moved(n, step)) for each, n in late]
                late = []
        return found

    def _results(self) -> tuple[OutputInfo, ...]:
        """Append the results to the graph, and return what they are."""
        given = list(zip(self.program.outputs[JOINT], self.program.results(JOINT), strict=True))
        specs: list[OutputInfo] = []
        results: list[Any] = []
        for (spec, result), number, name in self._each(given, lambda g: (g[0].role, g[0].name)):
            specs.append(replace(spec, name=name))
            is_node = isinstance(result, fx.Node)
            results.append(self.copies[number][result] if is_node else result)
        output = self.graph.output(tuple(results))
        output.meta.update(self.program.graph(JOINT).output_node().meta)
        return tuple(specs)

    def _params(self) -> dict[str, ParamInfo]:
        late = _params_of(self.program, self.layers, self.pairs.first)
        step = _count(late)
        above = max((use.number for p in late for use in p.uses), default=-1)
        found: dict[str, ParamInfo] = {}
        given = list(self.program.params.values())
        for p, number, name in self._each(given, lambda p: ("", p.name)):
            by, more = PAIR * (number - 1), step * (number - 1)
            if number > 1:
                found[name] = self.layers.param(p, by, more)
            else:
                more = step * self.count
                found[name] = self.layers.param(p, self.further, more, self.after, above)
        return found

    def _buffers(self) -> tuple[str, ...]:
        return tuple(name for _, _, name in self._each(self.program.buffers, lambda b: ("", b)))
