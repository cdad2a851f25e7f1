"""Seeds: which linear layers of a captured graph are cut over the tensor axis, and how.

For layers that neither the model's own plan nor their names tell (`layout.styles`). A layer may be
cut by its outputs ("colwise") if these reach other layers' inputs without being mixed: through
operators that have a way to compute a part of their result from the same part of what they read
(`ir.placing`), such as an activation, a gating product, or attention by heads. The layers that they
reach are then cut by their inputs ("rowwise"), and one sum serves both. Layers that meet on the
way, such as queries, keys and values, are cut together. Outputs that are divided into groups on the
way (a fused product of queries, keys and values) are cut within each group.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3, for the pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from zerofx.ir.meta import Hole, Phase, Role, info, value
from zerofx.ir.placing import Operand, WholeCall, is_item, item, ways
from zerofx.ir.program import ParamInfo
from zerofx.layout.placements import Cut, P, R
from zerofx.layout.styles import listed

log = logging.getLogger("zerofx")
_aten = torch.ops.aten
_GROUPS = (1, 3, 2)  # of a layer's outputs: one value, queries with keys and values, gates
_RANKS = (2, 3)  # of which one must divide heads
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_CASTS = {_aten._to_copy.default, _aten.detach.default, _aten.alias.default}


@dataclass(eq=False)
class Layer:
    """A weight that a graph multiplies values by.

    outputs: the dimension that counts its outputs. biases: parameters that are added to them.
    products: the calls. style: that of its plan or name, or the one that was found.
    """

    weight: str
    outputs: int
    style: str = ""
    biases: list[str] = field(default_factory=list)
    products: list[fx.Node] = field(default_factory=list)

    @property
    def groups(self) -> int:
        return int(self.style.partition("/")[2] or 1)


def left_whole(model: nn.Module, params: Mapping[str, ParamInfo]) -> list[str]:
    """Return the weights of linear layers of repeated blocks whose style is not known.

    A plan of the model's own is complete, unless it names none of these layers.
    """
    inside = listed(model)
    found = [
        p for p in params.values() if p.layer == "linear" and p.requires_grad and inside(p.name)
    ]
    has_own = bool(getattr(model, "tp_plan", None)) and any(p.style for p in found)
    return [] if has_own else [p.name for p in found if not p.style]


def with_seeds(
    model: nn.Module, params: dict[str, ParamInfo], graph: fx.Graph
) -> dict[str, ParamInfo]:
    """Return the parameters with the styles that a captured graph shows, for layers without one."""
    left = set(left_whole(model, params))
    if not left:
        return params
    found = dict(params)
    for layer in matched(graph, params, left):
        for name in (layer.weight, *layer.biases):
            outputs = layer.outputs if name == layer.weight else 0
            found[name] = replace(found[name], style=layer.style, outputs=outputs)
    return found


def matched(graph: fx.Graph, params: Mapping[str, ParamInfo], left: Iterable[str]) -> list[Layer]:
    """Return the layers among `left` that can be cut, with their styles."""
    walk = _Matching(graph, params)
    layers = [layer for layer in walk.layers.values() if layer.weight in {*left}]
    return [layer for layer in layers if layer.style or walk.cut(layer)]


class _Matching:
    """The walks over the forward part of a graph.

    layers: by weight, in the order of their first product. of: product -> its layer. first: the
        first name of a parameter by each of its names. at: the position of each node.
    """

    def __init__(self, graph: fx.Graph, params: Mapping[str, ParamInfo]) -> None:
        self.params = params
        self.first = {alias: p.name for p in params.values() for alias in (p.name, *p.aliases)}
        self.layers: dict[str, Layer] = {}
        self.of: dict[fx.Node, Layer] = {}
        self.nodes = [
            node
            for node in graph.nodes
            if node.op == "call_function" and info(node).phase is Phase.FORWARD
        ]
        self.at = {node: number for number, node in enumerate(self.nodes)}
        for node in self.nodes:
            if node.target in _PRODUCTS:
                self._note(node)
        self._above: dict[fx.Node, frozenset[Layer]] = {}

    def _note(self, node: fx.Node) -> None:
        weight, is_turned = self._weight_of(node.args[-1])
        if weight is None or len(self.params[weight].shape) != 2:
            return
        given = self.params[weight]
        if given.layer == "embedding" or any(use.layer == "embedding" for use in given.uses):
            return
        layer = self.layers.setdefault(weight, Layer(weight, int(not is_turned), given.style))
        layer.products.append(node)
        self.of[node] = layer
        if node.target is _aten.addmm.default:
            bias, _ = self._weight_of(node.args[0])
            if bias is not None and len(self.params[bias].shape) == 1:
                layer.biases.append(bias)

    def _weight_of(self, node: Any) -> tuple[str | None, bool]:
        """Return the parameter that a value is, and whether it is transposed."""
        is_turned = False
        while isinstance(node, fx.Node) and node.op == "call_function":
            if node.target is _aten.t.default or (
                node.target is _aten.transpose.int and value(node).dim() == 2
            ):
                is_turned = not is_turned
            elif node.target not in _CASTS:
                return None, False
            node = node.args[0]
        if not isinstance(node, fx.Node) or info(node).role is not Role.PARAM:
            return None, False
        return self.first[info(node).name], is_turned

    # -- one layer and those that are cut with it ---------------------------------------------
    def cut(self, layer: Layer) -> bool:
        """Find the styles of a layer and of those that must be cut with it; say if there are."""
        for ranks in _RANKS:
            for groups in _GROUPS:
                columns: dict[Layer, int] | None = {layer: groups}
                while columns is not None:
                    more, rows = self._reached(columns, ranks)
                    if rows is None:
                        columns = None
                    elif more:
                        columns |= more
                    elif rows:
                        self._settle(columns, rows)
                        return True
                    else:
                        return False  # its outputs reach no layer
        return False

    def _settle(self, columns: Mapping[Layer, int], rows: Mapping[Layer, int]) -> None:
        for kind, layers in (("colwise", columns), ("rowwise", rows)):
            for layer, groups in layers.items():
                layer.style = layer.style or (kind if groups == 1 else f"{kind}/{groups}")

    def _reached(
        self, columns: Mapping[Layer, int], ranks: int
    ) -> tuple[dict[Layer, int], dict[Layer, int] | None]:
        """Follow the outputs of layers that are cut by them to the layers that read them.

        Returns the layers that must be cut by their outputs too, if there are any, and those that
        are cut by their inputs; None for these if an operator on the way mixes the outputs.
        """
        lies: dict[fx.Node, Any] = {}
        rows: dict[Layer, int] = {}
        ours = [self.at[product] for layer in columns for product in layer.products]
        number, last = min(ours), max(ours)
        while number <= last:  # the last that reads what is cut
            node = self.nodes[number]
            number += 1
            layer = self.of.get(node)
            if layer is not None and layer in columns:
                if any(a in lies for a in node.all_input_nodes):
                    return {}, None
                lies[node] = Cut(1, columns[layer])
            elif is_item(node):
                source, index = node.args
                if source in lies:
                    lies[node] = item(lies[source], index)  # type: ignore[arg-type,index]
            elif any(lies.get(a, R) != R for a in node.all_input_nodes):
                if layer is not None:
                    taken = lies.get(node.args[-2], R)  # type: ignore[arg-type]
                    if not _reads_parts(layer, taken):
                        return {}, None
                    rows[layer] = taken.groups
                    continue
                more, lies[node] = self._passed(node, lies, columns, ranks)
                if lies[node] is None:
                    return {}, None
                if more:
                    return more, rows
            if node in lies:
                last = max(last, *(self.at.get(user, 0) for user in node.users), 0)
        return {}, rows

    def _passed(
        self, node: fx.Node, lies: Mapping[fx.Node, Any], columns: Mapping[Layer, int], ranks: int
    ) -> tuple[dict[Layer, int], Any]:
        """Return the placement of the result of an operator that reads outputs which are cut.

        None if no way of it keeps them cut. The first is what it needs of other layers: those whose
        outputs it reads beside these.
        """
        tensors: list[fx.Node] = []

        def hole(argument: fx.Node) -> Any:
            tensors.append(argument)
            return Hole(len(tensors) - 1)

        args, named = fx.node.map_arg((node.args, node.kwargs), hole)
        if info(node).is_random:  # a mask that is drawn for each element
            first = next(lies[a] for a in tensors if a in lies)
            made = value(node) if isinstance(value(node), tuple) else (value(node),)
            is_alike = all(m.shape == value(tensors[0]).shape for m in made)
            gives = (first,) * len(made) if isinstance(value(node), tuple) else first
            return {}, gives if is_alike else None
        operands = tuple(Operand(tuple(value(a).shape), lies.get(a, R)) for a in tensors)
        call = WholeCall(node.target, tuple(args), dict(named), operands, value(node), ranks)
        for way in ways(call):
            each = way.gives if isinstance(way.gives, tuple) else (way.gives,)
            if P in way.needs or P in each or not any(isinstance(g, Cut) for g in each):
                continue
            others = [
                a
                for a, operand, need in zip(tensors, operands, way.needs, strict=True)
                if operand.now != need
            ]
            if any(lies.get(a, R) != R for a in others):
                continue
            more = {layer for a in others for layer in self._sources(a)} - {*columns}
            if any(layer.style.startswith("rowwise") for layer in more):
                continue
            return {layer: layer.groups for layer in more}, way.gives
        return {}, None

    def _sources(self, node: fx.Node) -> frozenset[Layer]:
        """Return the layers whose outputs a value is computed from, with no layer between."""
        stack = [node]
        while stack:
            at = stack[-1]
            if at in self._above:
                stack.pop()
            elif at in self.of:
                self._above[at] = frozenset({self.of[at]})
            elif waiting := [a for a in at.all_input_nodes if a not in self._above]:
                stack += waiting
            else:
                self._above[at] = frozenset().union(*(self._above[a] for a in at.all_input_nodes))
        return self._above[node]


def _reads_parts(layer: Layer, taken: Any) -> bool:
    """Return whether a layer can be cut by its inputs, of which it reads parts."""
    is_free = not layer.style or layer.style.startswith("rowwise")
    return is_free and isinstance(taken, Cut) and taken.dim == 1


# -- before there is a graph ----------------------------------------------------------------------
_BATCH, _LENGTH = 2, 8
Show = Callable[[nn.Module, tuple[Any, ...]], Mapping[str, ParamInfo]]


def guessed(model: nn.Module, params: dict[str, ParamInfo], show: Show) -> dict[str, ParamInfo]:
    """Return the parameters with the styles that graphs show, before the model has been called.

    How parameters are cut is decided when a model is compiled, and its inputs come later. So it is
    captured with made-up ones: ids of tokens, then hidden values. If it does not take them, each
    kind of block is captured alone, or the modules in it.

    show: captures a module and returns its parameters with the styles that its graph shows.
    """
    if not left_whole(model, params):
        return params
    found = _shown(model, "", show)
    known = {name: p for name, p in found.items() if p.style}
    alike = {_kind(model, name): p for name, p in known.items()}
    made = dict(params)
    for name, param in params.items():
        seed = known.get(name) or alike.get(_kind(model, name))
        if not param.style and seed is not None and seed.shape == param.shape:
            made[name] = replace(param, style=seed.style, outputs=seed.outputs)
    return made


def _kind(model: nn.Module, name: str) -> tuple[Any, ...]:
    """Return what a parameter of a repeated block has in common with that of the other blocks."""
    parts = name.split(".")
    return (tuple("*" if part.isdigit() else part for part in parts),
            tuple(model.get_parameter(name).shape))  # fmt: skip


def _shown(module: nn.Module, path: str, show: Show) -> dict[str, ParamInfo]:
    """Return the parameters of a module with styles, from whatever of it can be captured."""
    for args in _guesses(module, is_whole=not path):
        try:
            found = show(_Listed(module) if path else module, args)
        except Exception as error:  # noqa: BLE001 - whatever a module raises on inputs it rejects
            log.debug("%s is not called with %d guessed inputs: %s", path, len(args), error)
            continue
        return {
            name.replace("modules_.0", path, 1) if path else name: p for name, p in found.items()
        }
    inner: dict[str, ParamInfo] = {}
    seen: set[Any] = set()
    for name, child in module.named_children():
        kind = type(child), tuple((n, tuple(p.shape)) for n, p in child.named_parameters())
        if kind in seen or sum(isinstance(m, nn.Linear) for m in child.modules()) < 2:
            continue
        seen.add(kind)
        inner |= _shown(child, f"{path}.{name}" if path else name, show)
    return inner


class _Listed(nn.Module):
    """A module as the only one of a list, as the block that it is, or is in."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList([module])

    def forward(self, *args: Any) -> Any:
        return self.modules_[0](*args)


def _guesses(module: nn.Module, is_whole: bool) -> Iterator[tuple[Any, ...]]:
    """Yield inputs that a module may take."""
    if type(module).forward in (nn.Module.forward, nn.ModuleList.forward):
        return
    devices = (p.device for p in module.parameters())
    device = next((d for d in devices if d.type != "meta"), torch.device("cpu"))
    if is_whole and any(isinstance(m, nn.Embedding) for m in module.modules()):
        ids = torch.zeros(_BATCH, _LENGTH, dtype=torch.int64, device=device)
        yield (ids,)
        yield ids, ids
    widths = [p.shape[-1] for p in module.parameters() if p.dim() == 1]
    first = next((m.in_features for m in module.modules() if isinstance(m, nn.Linear)), None)
    for width in dict.fromkeys([*([first] if first else []), *widths[:1]]):
        yield (torch.zeros(_BATCH, _LENGTH, width, device=device),)
