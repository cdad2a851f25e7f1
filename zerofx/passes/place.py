"""place: cut the values of a graph over an axis, and convert them where they must change.

Over the tensor axis, the cuts of parameters are the seeds. Over the context axis, parameters are
whole, and the seeds are the values looked up for each position of a sequence: from there on values
are cut along the sequence, except for attention, which is cut by heads. The pass visits every call
of the joint graph once and picks the cheapest way (`ir.placing`) to compute it. The cost of a way
is the bytes that conversions of its arguments send, plus the work that every rank repeats. With the
seeds of Megatron-LM the resulting collectives are those of Megatron-LM, and with the seeds of the
context axis they are those of DeepSpeed-Ulysses.

Rules that the counts rest on: a partial sum is reduced once, for all of its readers; parameters are
never moved; a product that computes a parameter's gradient delivers it with the parameter's
placement; a conversion applies once to the base of views; a value gathered in forward is gathered
again in backward, unless it is small. Over the context axis no gradient of a parameter is summed
here: the reduction of its bucket does that, over all data ranks.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from zerofx import ops
from zerofx.compat.graphs import LazyGraphModule, copied_node, reserve_names
from zerofx.ir.graphs import call, is_alias
from zerofx.ir.meta import (
    Hole,
    Info,
    OutputInfo,
    Placed,
    Role,
    filled,
    info,
    nbytes,
    set_info,
    shape_of,
    tensors_of,
    value,
)
from zerofx.ir.placing import (
    Operand,
    Way,
    WholeCall,
    has_owners,
    is_item,
    item,
    seen,
    ways,
    whole_way,
)
from zerofx.ir.program import JOINT, ParamInfo, Planned
from zerofx.ir.spec import spec_of
from zerofx.ir.text import few
from zerofx.ir.verify_values import SAME_VALUES, Numbering
from zerofx.layout.buckets import CONTEXT
from zerofx.layout.placements import (
    Cut,
    Owned,
    P,
    Part,
    Placement,
    R,
    fits,
    num_chunks,
    serves,
)
from zerofx.layout.styles import divides_experts
from zerofx.ops.placed import CONVERSIONS
from zerofx.passes.base import Fact, Pass, Report
from zerofx.passes.parts import with_parts
from zerofx.plan.parts import Parallel

log = logging.getLogger("zerofx")
_aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # the reductions of a loss
_NEVER = 1e15  # the price of a conversion that is forbidden: moving a parameter


@dataclass(frozen=True)
class OpenProducts(Pass):
    """Split products with a bias whose weight is cut by rows: each rank would add the bias."""

    name: ClassVar[str] = "open-products"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})

    parallel: Parallel

    def run(self, program: Planned) -> Report:
        if self.parallel.tensor == 1 or self.parallel.brings_slices:
            return Report(False, "no product is cut here")
        parts = {p.name: p.part for p in with_parts(program.params.values(), self.parallel)}
        parts |= {a: parts[p.name] for p in program.params.values() for a in p.aliases}
        opened = 0
        for gm in program.graphs.values():
            for node in list(gm.graph.nodes):
                if node.target is _aten.addmm.default and not node.kwargs:
                    opened += self._open(gm.graph, node, parts)
        return Report(opened > 0, f"{opened} products taken apart")

    def _open(self, graph: fx.Graph, node: fx.Node, parts: dict[str, Part | None]) -> int:
        bias, a, b = node.args
        weight, is_turned = b, False
        while isinstance(weight, fx.Node) and weight.target is _aten.t.default:
            weight, is_turned = weight.args[0], not is_turned
        where = info(weight)  # type: ignore[arg-type]
        part = parts.get(where.name) if where.role is Role.PARAM else None
        if part is None or part.cut.dim != (1 if is_turned else 0):
            return 0
        with graph.inserting_before(node):
            product = call(graph, _aten.mm.default, (a, b))
        node.replace_all_uses_with(product)
        last = product
        readers = list(product.users)
        is_viewed = len(readers) == 1 and readers[0].target in _VIEWS
        if is_viewed and value(readers[0]).shape[-1] == value(product).shape[-1]:
            last = readers[0]  # to the sum, which has the shape of its reader
        with graph.inserting_after(last):
            total = call(graph, _aten.add.Tensor, (last, bias))
        last.replace_all_uses_with(total, lambda user: user is not total)
        for new in (product, total):
            new.meta = {k: v for k, v in node.meta.items() if k != "val"} | {"val": new.meta["val"]}
        graph.erase_node(node)
        return 1

    def options(self) -> dict[str, object]:
        return {"tensor": self.parallel.tensor}


@dataclass(frozen=True)
class OpenLosses(Pass):
    """Take cross-entropies apart, so that each rank can sum those of its own positions or classes.

    A mean over a sequence is no sum of means over its parts: the number of positions that count is
    of the whole. So over the context axis a loss becomes a sum over what each position adds,
    divided by that number, which is computed from all labels. Over the tensor axis the logits of a
    layer that is cut by its outputs stay cut along the classes: see `_open_classes`.
    """

    name: ClassVar[str] = "open-losses"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.CAPTURED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})

    parallel: Parallel

    def run(self, program: Planned) -> Report:
        if not self.parallel.value_axes:
            return Report(False, "one rank")
        parts = {p.name: p.part for p in with_parts(program.params.values(), self.parallel)}
        parts |= {a: parts[p.name] for p in program.params.values() for a in p.aliases}
        opened = 0
        for gm in program.graphs.values():
            for node in list(gm.graph.nodes):
                if node.target is not _aten.nll_loss_forward.default or not _is_plain(node):
                    continue
                if (loss := _loss_of_classes(node, parts)) is not None:
                    _open_classes(gm.graph, loss, self.parallel.tensor)
                    opened += 1
                elif self.parallel.context > 1:
                    _open_loss(gm.graph, node)
                    opened += 1
        return Report(opened > 0, f"{opened} losses taken apart")

    def options(self) -> dict[str, object]:
        return {"context": self.parallel.context, "tensor": self.parallel.tensor}


def _is_plain(node: fx.Node) -> bool:
    """Say whether a loss has no weights of classes, and is a mean or a sum over [n, classes]."""
    logs, _, weight, reduction, _ = node.args
    is_rows = value(logs).dim() == 2  # type: ignore[arg-type]
    return weight is None and reduction in (_MEAN, _SUM) and is_rows


def _open_loss(graph: fx.Graph, node: fx.Node) -> None:
    """Replace (loss, number of rows that count) of log-probabilities by what they are made of."""
    logs: Any
    target: Any
    logs, target, _, reduction, ignored = node.args
    given = {k: v for k, v in node.meta.items() if k != "val"}

    def make(op: Any, *args: Any, **named: Any) -> fx.Node:
        made = call(graph, op, args, named=named)
        made.meta = given | {"val": made.meta["val"]}
        return made

    dtype = value(logs).dtype
    with graph.inserting_before(node):
        counts = make(_aten.ne.Scalar, target, ignored)
        total = make(_aten._to_copy.default, make(_aten.sum.default, counts), dtype=dtype)
        zero = make(_aten.scalar_tensor.default, 0, dtype=value(target).dtype,
                    device=value(target).device)  # fmt: skip
        ids = make(_aten.where.self, counts, target, zero)
        picked = make(_aten.gather.default, logs, 1, make(_aten.unsqueeze.default, ids, 1))
        lost = make(_aten.neg.default, make(_aten.squeeze.dim, picked, 1))
        none = make(_aten.scalar_tensor.default, 0.0, dtype=dtype, device=value(logs).device)
        loss = make(_aten.sum.default, make(_aten.where.self, counts, lost, none))
        if reduction == _MEAN:
            loss = make(_aten.div.Tensor, loss, total)
    for part in list(node.users):
        part.replace_all_uses_with((loss, total)[part.args[1]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)


@dataclass(frozen=True)
class _ClassLoss:
    """A cross-entropy whose logits are the outputs of a layer that is cut by its outputs.

    logits: [rows, classes]. softmax: their log-probabilities. loss: nll_loss_forward. backward: the
    two calls of its gradient, loss before softmax; empty if the graph has no backward.
    """

    logits: fx.Node
    softmax: fx.Node
    loss: fx.Node
    backward: tuple[fx.Node, ...]


def _loss_of_classes(loss: fx.Node, parts: dict[str, Part | None]) -> _ClassLoss | None:
    """Return the loss if nothing else reads its log-probabilities, else None."""
    softmax: Any = loss.args[0]
    if softmax.target is not _aten._log_softmax.default or softmax.args[2]:
        return None
    logits: Any = softmax.args[0]
    if value(logits).dtype not in (torch.float32, torch.float64):
        return None
    if softmax.args[1] not in (1, -1) or not _is_cut_by_columns(logits, parts):
        return None
    readers = [user for user in _readers(softmax) if user is not loss]
    backward: list[fx.Node] = []
    if readers:
        first = [user for user in readers if user.target is _aten.nll_loss_backward.default]
        then = _readers(first[0]) if len(first) == 1 else []
        if len(then) != 1 or then[0].target is not _aten._log_softmax_backward_data.default:
            return None
        backward = [*first, *then]
    if set(readers) - {*backward}:
        return None
    return _ClassLoss(logits, softmax, loss, tuple(backward))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return what reads a value, also through detached aliases of it."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        found |= dict.fromkeys(_readers(user) if user.target in _SAME else [user])
    return list(found)


def _is_cut_by_columns(node: fx.Node, parts: dict[str, Part | None]) -> bool:
    """Return whether the last dimension counts the outputs of a layer that are cut evenly."""
    classes = value(node).shape[-1]
    while node.target in _KEEPS_CLASSES and value(node).shape[-1] == classes:
        node = node.args[0]  # type: ignore[assignment]
    if node.target not in (_aten.mm.default, _aten.addmm.default):
        return False
    weight: Any = node.args[-1]
    is_turned = False
    while isinstance(weight, fx.Node) and weight.target is _aten.t.default:
        weight, is_turned = weight.args[0], not is_turned
    where = info(weight)
    part = parts.get(where.name) if where.role is Role.PARAM else None
    return part is not None and part.cut == Cut(0 if is_turned else 1)


def _open_classes(graph: fx.Graph, loss: _ClassLoss, ranks: int) -> None:
    """Compute a cross-entropy from logits that stay cut along the classes.

    Each rank has the largest of its logits, the sum of their exponentials and the logit of the
    label if it is among its classes; these few numbers per row are joined. The gradient, the
    softmax less one at the label, is computed where the logits are. Source: Shoeybi et al. 2019,
    "Megatron-LM", section 3 (the parallel cross-entropy). A label outside the classes is an error,
    as in the loss itself: it is looked up in a table of as many zeros.
    """
    logits: Any = loss.logits
    target: Any
    _, target, _, reduction, ignored = loss.loss.args
    classes = value(logits).shape[-1]
    dtype, device = value(logits).dtype, value(logits).device
    given: dict[str, Any] = {}

    def make(op: Any, *args: Any, **named: Any) -> fx.Node:
        made = call(graph, op, args, named=named)
        made.meta = given | {"val": made.meta["val"]}
        return made

    @contextlib.contextmanager
    def at(node: fx.Node) -> Iterator[None]:
        given.clear()
        given.update({k: v for k, v in node.meta.items() if k != "val"})
        with graph.inserting_before(node), value(logits).fake_mode:  # of tensors made of nothing
            yield

    def is_label() -> fx.Node:
        every = make(_aten.arange.default, classes, dtype=value(target).dtype, device=device)
        return make(_aten.eq.Tensor, every, make(_aten.unsqueeze.default, target, 1))

    with at(loss.softmax):
        shares = make(_aten.view.default, logits, [-1, ranks, classes // ranks])
        highest = make(_aten.amax.default, shares, [2])
        top = make(_aten.amax.default, highest, [1], True)
        powers = make(_aten.exp.default, make(_aten.sub.Tensor, logits, top))
        total = make(_aten.sum.dim_IntList, powers, [1], True)
        log_total = make(_aten.add.Tensor, make(_aten.log.default, total), top)
    with at(loss.loss):
        counts = make(_aten.ne.Scalar, target, ignored)
        number = make(_aten._to_copy.default, make(_aten.sum.default, counts), dtype=dtype)
        none = make(_aten.scalar_tensor.default, 0.0, dtype=dtype, device=device)
        first = make(_aten.scalar_tensor.default, 0, dtype=value(target).dtype, device=device)
        zeros = make(_aten.full.default, [classes], 0.0, dtype=dtype, device=device)
        known = make(_aten.gather.default, zeros, 0, make(_aten.where.self, counts, target, first))
        own = make(_aten.where.self, is_label(), logits, none)
        picked = make(_aten.sum.dim_IntList, own, [1])
        lost = make(_aten.sub.Tensor, make(_aten.squeeze.dim, log_total, 1), picked)
        lost = make(_aten.add.Tensor, lost, known)
        summed = make(_aten.sum.default, make(_aten.where.self, counts, lost, none))
        mean = make(_aten.div.Tensor, summed, number) if reduction == _MEAN else summed
    if loss.backward:
        first_back, last_back = loss.backward
        upstream: Any = first_back.args[0]
        with at(last_back):
            share = upstream
            if reduction == _MEAN:
                share = make(_aten.div.Tensor, upstream, number)
            weights = make(_aten.where.self, make(_aten.unsqueeze.default, counts, 1), share, none)
            likely = make(_aten.exp.default, make(_aten.sub.Tensor, logits, log_total))
            less = make(_aten.sub.Scalar, likely, 1)
            steps = make(_aten.where.self, is_label(), less, likely)
            grad = make(_aten.mul.Tensor, steps, weights)
        last_back.replace_all_uses_with(grad)
    gone = {loss.softmax, loss.loss, *loss.backward, *loss.loss.users}
    for part in list(loss.loss.users):
        part.replace_all_uses_with((mean, number)[part.args[1]])  # type: ignore[index]
    for node in list(graph.nodes):
        if node.target in _SAME and node.args[0] in gone:
            gone.add(node)
    for node in reversed(list(graph.nodes)):
        if node in gone:
            graph.erase_node(node)


@dataclass(frozen=True)
class Place(Pass):
    """Cut parameters and values over the ranks of an axis."""

    name: ClassVar[str] = "place"
    keeps_bits: ClassVar[bool] = False
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT})

    parallel: Parallel

    def run(self, program: Planned) -> Report:
        axes = self.parallel.value_axes
        if not axes:
            return Report(False, "one rank")
        cut = {p.name: p for p in with_parts(program.params.values(), self.parallel)}
        if self.parallel.tensor > 1:
            _warn_of_whole(program, cut)
        if self.parallel.experts and not any(divides_experts(p.part) for p in cut.values()):
            log.warning(
                "%s: Plan.parallel.experts divides nothing: no plan of the model names stacked "
                "weights of experts whose number tensor = %d divides. Name parameters [experts, "
                "out, in], as in Plan(parallel={'placements': {'*.experts.up': 'experts'}}).",
                program.model_name, self.parallel.tensor,
            )  # fmt: skip
        program.params = cut  # the given program keeps the old dictionary
        sent: Counter[str] = Counter()
        for axis in axes:  # the parts of values over one are cut over the next
            sent += self._cut(program, axis)
        told = ", ".join(f"{n} {kind}" for kind, n in sorted(sent.items())) or "nothing sent"
        number = sum(p.part is not None for p in cut.values())
        what = {"tensor": f"{number} parameters", CONTEXT: "sequences"}
        named = ", ".join(f"{what[axis]} cut over {ranks} ranks" for axis, ranks in axes.items())
        return Report(True, f"{named}; {told}")

    def _cut(self, program: Planned, axis: str) -> Counter[str]:
        """Cut all values over one axis; return the conversions that communicate, by name."""
        sent: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        for name in list(program.graphs):
            walk = Placing(program, name, self.parallel, axis)
            program.graphs[name] = LazyGraphModule(program.graphs[name], walk.run())
            walk.warn()
            sent += walk.sent
            whole.update(
                {
                    f"{target} ({line})": n
                    for (target, line), n in walk.whole.items()
                    if line not in walk.gathered  # told already
                }
            )
        if whole:
            named = [f"{what}, {n} times" if n > 1 else what for what, n in whole.most_common()]
            log.warning(
                "%s: no rule says how ranks compute parts of %s. The inputs are gathered, and each "
                "of %d ranks computes all of it. Results are the same; this work takes as long as "
                "on one rank. `zerofx schedule` shows where.",
                program.model_name, few(named), self.parallel.value_axes[axis],
            )  # fmt: skip
        return sent

    def options(self) -> dict[str, object]:
        chosen: dict[str, object] = {}
        if self.parallel.context > 1:
            chosen["context"] = self.parallel.context
        if self.parallel.is_zigzag:
            chosen["attention"] = self.parallel.attention
        if self.parallel.experts:
            chosen["experts"] = True
        if self.parallel.capacity is not None:
            chosen["capacity"] = self.parallel.capacity
        return {"tensor": self.parallel.tensor, "sequence": self.parallel.sequence} | chosen


def _warn_of_whole(program: Planned, cut: Mapping[str, ParamInfo]) -> None:
    """Warn of kinds of blocks whose linear layers no plan, name or graph says how to cut."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    units: dict[str, list[ParamInfo]] = {}
    for param in cut.values():
        units.setdefault(param.unit, []).append(param)
    for unit, held in units.items():
        inside = [p for p in held if p.layer == "linear" and p.name.startswith(f"{unit}.")]
        names = [p.name.removeprefix(f"{unit}.").rpartition(".")[0] for p in inside]
        if any(p.style or p.part is not None for p in held) or len(names) < 2 or not unit:
            continue
        kinds.setdefault(tuple(names), []).append(unit)
    for kind, found in kinds.items():
        log.warning(
            "%s: no layer of %s is cut over Plan.parallel.tensor = %d: neither names nor the graph "
            "say how, and each of these ranks computes all of it. Name layers whose outputs and "
            "inputs are to be divided, such as Plan(parallel={'placements': {'*.%s': 'colwise', "
            "'*.%s': 'rowwise'}}).",
            program.model_name, few(found), program.plan.parallel.tensor, kind[0], kind[-1],
        )  # fmt: skip


@dataclass
class Placing:
    """Builder of one rank's graph from the whole graph, node by node.

    new: node of the whole graph -> node of one rank's graph. lies: its placement. made: existing
        conversions.
    sent: the conversions that communicate, by name. whole: calls on sharded values that no way
        fits. They run on whole values, and are listed with their source lines.
    streams: over the context axis, the (batch, length) of each value cut along its sequence.
    batches: the sizes of the samples' first dimension. odd: the lengths that cannot be cut.
    gathered: lines of attention that runs on whole values. returned: the results that are gathered.
    """

    program: Planned
    name: str
    parallel: Parallel
    axis: str
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    lies: dict[fx.Node, Any] = field(default_factory=dict)
    made: dict[Any, fx.Node] = field(default_factory=dict)
    views: dict[Any, fx.Node] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    whole: Counter[tuple[str, str]] = field(default_factory=Counter)
    narrowed: dict[fx.Node, bool] = field(default_factory=dict)
    named: Counter[str] = field(default_factory=Counter)
    streams: set[tuple[int, int]] = field(default_factory=set)
    batches: set[int] = field(default_factory=lambda: {1})
    odd: set[int] = field(default_factory=set)
    gathered: dict[str, int] = field(default_factory=dict)
    returned: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = self.parallel.value_axes[self.axis]
        self.by_context = self.axis == CONTEXT
        self.zigzag = self.by_context and self.parallel.is_zigzag
        self.chunks = num_chunks(self.ranks, self.zigzag)
        # names of one walk over a graph must not be those of the other
        self.suffix = f"_{self.axis}" if len(self.parallel.value_axes) > 1 else ""
        self.old = self.program.graph(self.name)
        self.graph = fx.Graph()
        self.wanted = self._wanted()
        self.digests: dict[fx.Node, Any] = {}
        if has_owners(self.program) and not self.by_context:
            self.digests = Numbering(self.program, (self.name,)).of

    def run(self) -> fx.Graph:
        given = self.program.placeholders(self.name)
        for node in given:
            self._placeholder(node)
            if info(node).role is Role.INPUT and isinstance(value(node), torch.Tensor):
                self.batches.update(value(node).shape[:1])
        rest = list(self.old.nodes)[len(given) :]
        self.at = rest[0]
        self._cut_inputs(given)
        for node in rest:
            self.at = node
            if node.op == "get_attr":
                self.new[node] = self._copied(node, R)
                self.lies[node] = R
            elif node.op == "output":
                self._output()
            elif is_item(node):
                self._item(node)
            else:
                self._call(node)
        for node in reversed(list(self.graph.nodes)):
            is_call = node.op in ("call_function", "get_attr")
            if is_call and not node.users and not node.is_impure():
                self.graph.erase_node(node)
        reserve_names(self.graph)
        return self.graph

    # -- inputs -----------------------------------------------------------------------------
    def _placeholder(self, node: fx.Node) -> None:
        lies: Placement = R
        part = self._part(node)
        if part is not None:
            lies = part.cut
        new = self._copied(node, lies)
        if part is not None:
            new.meta["val"] = value(node).new_empty(part.local)
        self.new[node], self.lies[node] = new, lies

    def _cut_inputs(self, given: list[fx.Node]) -> None:
        """Cut what the model is given of each position of a sequence: [batch, length, width]."""
        for node in given:
            if info(node).role is Role.INPUT and (cut := self._of_sequence(node)):
                self.new[node], self.lies[node] = self.to(node, cut), cut

    def _of_sequence(self, node: fx.Node) -> Cut | None:
        """Return the cut of a value that begins a stream of [batch, length, width], if it can be.

        Over the context axis only.
        """
        val = value(node)
        if not self.by_context or not isinstance(val, torch.Tensor):
            return None
        if val.dim() != 3 or not val.is_floating_point():
            return None
        batch, length = val.shape[:2]
        if batch not in self.batches:  # a table of pairs of positions, say
            return None
        cut = self._in_stream(node)
        if not fits(val.shape, cut, self.chunks):
            self.odd.add(length)
            return None
        self.streams |= {(batch, length), (batch, length // cut.groups)}
        return cut

    def _in_stream(self, node: fx.Node) -> Cut:
        """Return how a value of a stream is cut along its sequence.

        If the tensor axis cuts sequences too, ranks have a part of each of its parts, so that what
        is whole over it is cut in as many groups.
        """
        placed = info(node).placed
        is_part = placed is not None and isinstance(placed.gives, Cut) and placed.gives.dim == 1
        return Cut(1, self.parallel.tensor if self.parallel.sequence and not is_part else 1)

    def _part(self, node: fx.Node) -> Part | None:
        where = info(node)
        return self._part_of(where.name) if where.role is Role.PARAM else None

    def _part_of(self, name: str) -> Part | None:
        """Return the part of a parameter that this walk cuts: none, over the context axis."""
        return None if self.by_context else self.program.params[name].part

    def _copied(self, node: fx.Node, lies: Placement) -> fx.Node:
        new = copied_node(self.graph, node, self.new.__getitem__)
        set_info(new, placed=Placed(lies, shape_of(value(node)), outer=info(node).placed))
        return new

    def _output(self) -> None:
        results: list[Any] = []
        specs = self.program.outputs[self.name]
        for spec, node in zip(specs, self.program.results(self.name), strict=True):
            if not isinstance(node, fx.Node):
                results.append(node)
                continue
            if spec.role is Role.OUTPUT and isinstance(self.lies[node], Cut):
                self.returned.append(spec.name)
            if self.by_context:  # conversions of a result belong to its phase
                self.at = node
            results.append(self.to(node, self._due(spec)))
        self.graph.output(tuple(results))

    def _due(self, spec: OutputInfo) -> Placement:
        """Return the placement of a result: its parameter's for a gradient, otherwise whole.

        Over the context axis a gradient is a partial sum, which its bucket's reduction sums.
        """
        if spec.role is Role.GRAD:
            part = self._part_of(spec.name)
            return part.cut if part is not None else P if self.by_context else R
        return R

    def _wanted(self) -> dict[fx.Node, Placement]:
        """Return the placement wanted for the products that compute parameter gradients.

        It is the parameter's own. For a whole parameter, the products stay partial sums if rows are
        cut.
        """
        found: dict[fx.Node, Placement] = {}
        if self.name != JOINT:
            return found
        specs = self.program.outputs[JOINT]
        for spec, node in zip(specs, self.program.results(JOINT), strict=True):
            if spec.role is not Role.GRAD or not isinstance(node, fx.Node):
                continue
            due = self._due(spec)
            self._want(node, P if due == R else due, found)
        return found

    def _want(self, node: Any, want: Placement, found: dict[fx.Node, Placement]) -> None:
        while isinstance(node, fx.Node):
            found[node] = want
            if self.by_context and node.target is _aten.add.Tensor:  # of a parameter that is tied
                for each in node.all_input_nodes:
                    self._want(each, want, found)
                return
            if node.target is _aten.t.default and isinstance(want, Cut):
                want = Cut(1 - want.dim, want.groups)
            elif node.target not in (_aten.t.default, _aten.view.default, *CONVERSIONS) or (
                node.target is _aten.view.default and isinstance(want, Cut)
            ):
                return
            node = node.args[0]

    # -- calls --------------------------------------------------------------------------------
    def _item(self, node: fx.Node) -> None:
        source, index = node.args
        lies = item(self.lies[source], index)  # type: ignore[index,arg-type]
        new = self.graph.call_function(node.target, (self.new[source], index))  # type: ignore[index,arg-type]
        _name(new, node.name)
        new.meta.update(node.meta)
        new.meta["val"] = value(self.new[source])[index]  # type: ignore[index]
        set_info(new, placed=Placed(lies, shape_of(value(node)), outer=info(node).placed))
        self.new[node], self.lies[node] = new, lies

    def _call(self, node: fx.Node) -> None:
        whole = self._whole(node)
        if not whole.operands:  # no inputs: the same value on every rank
            self.lies[node] = gives = whole_way(whole).gives
            self.new[node] = new = copied_node(self.graph, node, self.new.__getitem__)
            _name(new, node.name)
            set_info(new, placed=self._placed(node, gives, whole))
            return
        way = self._choose(node, whole)
        given = [self.to(a, need) for a, need in zip(tensors_of(node), way.needs, strict=True)]
        local = filled(way.args if way.args is not None else whole.args, given)
        named = filled(whole.kwargs, given)
        target = getattr(ops, way.op) if way.op else node.target
        self.new[node] = self._emit(node, target, local, named, way.gives, whole)
        self.lies[node] = way.gives
        if self.by_context and self._is_stream(node):
            cut = self._in_stream(node)
            self.new[node], self.lies[node] = self.to(node, cut), cut

    def _is_stream(self, node: fx.Node) -> bool:
        """Say whether a value, which is cut, is one that is cut along the sequence between layers.

        What attention gives by heads is brought back there as soon as its heads are one dimension.
        """
        val = value(node)
        if not isinstance(self.lies[node], Cut) or val.dim() != 3:
            return False
        return tuple(val.shape[:2]) in self.streams and val.is_floating_point()

    def _whole(self, node: fx.Node) -> WholeCall:
        operands: list[Operand] = []

        def hole(argument: fx.Node) -> Any:
            digest = str(self.digests.get(argument, ""))
            operands.append(Operand(tuple(value(argument).shape), self.lies[argument], digest))
            return Hole(len(operands) - 1)

        args = fx.node.map_arg(node.args, hole)
        named = fx.node.map_arg(node.kwargs, hole)
        whole = WholeCall(
            node.target, tuple(args), dict(named), tuple(operands), value(node), self.ranks,
            axis=self.axis, zigzag=self.zigzag,
        )  # fmt: skip
        return replace(whole, hints=self._hints(node, whole))

    def _hints(self, node: fx.Node, whole: WholeCall) -> tuple[Cut, ...]:
        if not self.by_context:
            settled = self._settled(whole)
            return () if settled is None else (settled,)
        if node.target in _LOOKUPS and self._is_weight(node.args[0]):  # type: ignore[arg-type]
            cut = self._of_sequence(node)
            return () if cut is None else (cut,)
        if node.target is _aten.bmm.default:  # [batch * heads, ...]: by heads, of each sample
            rows = whole.shape[0]
            return tuple(
                Cut(0, b) for b, _ in sorted(self.streams) if rows % (b * self.chunks) == 0
            )
        return ()

    def _choose(self, node: fx.Node, whole: WholeCall) -> Way:
        if info(node).is_random:  # all ranks draw the same numbers, for whole values
            return whole_way(whole)
        is_seed = self.by_context and node.target in _LOOKUPS and whole.hints
        if is_seed:
            return next(way for way in ways(whole) if way.gives == whole.hints[0])
        if node.target in _ATTENTION and not self.by_context:
            heads = min(operand.shape[1] for operand in whole.operands[:3])
            if heads % self.ranks:
                self.gathered[info(node).line] = heads
        if node.target is ops.expert_slots and not self.by_context:  # of a part of the tokens each
            return next(ways(whole))
        if node not in self.wanted and all(operand.now == R for operand in whole.operands):
            return whole_way(whole)
        found = list(ways(whole))
        is_cut = any(isinstance(o.now, Cut) for o in whole.operands)
        is_joined = node.target is _aten.amax.default and value(node).numel() * self.ranks == (
            value(tensors_of(node)[0]).numel()
        )  # the largest of the ranks' largest logits, which `OpenLosses` asks for
        if len(found) == 1 and is_cut and not is_joined:
            self.whole[str(node.target), info(node).line] += 1
        costs = [self._cost(node, whole, way) for way in found]
        way = found[costs.index(min(costs))]
        is_gathered = is_cut and way.needs == whole_way(whole).needs
        if node.target in _ATTENTION and self.by_context and is_gathered:
            self.gathered[info(node).line] = whole.operands[0].shape[1]
        return way

    def warn(self) -> None:
        """Tell of a graph that is not cut over the axis as its user will expect."""
        model, ranks = self.program.model_name, self.ranks
        is_second = self.axis != next(iter(self.parallel.value_axes))
        left = f" left by Plan.parallel.tensor = {self.parallel.tensor}" if is_second else ""
        for line, heads in self.gathered.items():
            log.warning(
                "%s (%s): %s not divided by %sPlan.parallel.%s = %d: attention is "
                "gathered, and each of these ranks computes all of it. Results are the same; a "
                "number that divides the heads divides their work too.",
                model, line, f"{heads} heads{left} are" if heads != 1 else f"1 head{left} is",
                "2 x " if self.zigzag else "", self.axis, ranks,
            )  # fmt: skip
        if not self.by_context:
            return
        if self.odd:
            lengths = ", ".join(map(str, sorted(self.odd)))
            also = f" x tensor = {self.parallel.tensor}" if self.parallel.sequence else ""
            log.warning(
                "%s: a sequence of %s positions is not cut over Plan.parallel.context = %d%s, "
                "which %s not divide it: each of these ranks computes all of it. "
                "Pad the sequences.",
                model, lengths, ranks, also, "twice does" if self.zigzag else "does",
            )  # fmt: skip
        elif not self.streams:
            log.warning(
                "%s: no values of [batch, length, width] are given to it or looked up in a table, "
                "so that nothing is cut over Plan.parallel.context = %d: each of these ranks "
                "computes all.",
                model, ranks,
            )  # fmt: skip
        has_loss = self.name == JOINT and self.program.calling.loss is not None
        if self.returned and has_loss and self.program.plan.differentiate != "all":
            log.warning(
                "%s returns %s with its loss, which is gathered on each of the %d ranks that "
                "share a sequence. Plan(outputs='loss') leaves it out.",
                model, ", ".join(self.returned), ranks,
            )  # fmt: skip

    def _cost(self, node: fx.Node, whole: WholeCall, way: Way) -> float:
        """Return the bytes that a way sends, plus its repeated computation converted to bytes."""
        tensors = tensors_of(node)
        cost = sum(self._move(a, need) for a, need in zip(tensors, way.needs, strict=True))
        made = nbytes(value(node))
        is_product = node.target in _PRODUCTS or str(node.target) in _PRODUCTS
        if all(need == R for need in way.needs):
            cost += (0.5 if is_product else 0.2) * made
        if node.target in _SCALED and {*way.needs} == {P, R}:
            summand = tensors[way.needs.index(P)]
            cost += 0.0 if self._is_narrowed(_seen_by(summand)) else _NEVER / 1e6
        gives = way.gives if isinstance(way.gives, tuple) else (way.gives,)
        want = self.wanted.get(node)
        if P in gives and P not in way.needs:
            share = (self.ranks - 1) / self.ranks
            cost += -0.5 * made if want == P else made * share
        if (want is not None and gives[0] == want and way.needs and R not in way.needs[:1]) or (
            isinstance(want, Cut) and gives[0] == want
        ):
            cost = 1e-3 * cost - 1e6
        settled = whole.hints[:1]
        if not self.by_context and settled and P in [o.now for o in whole.operands]:
            cost += 0.0 if gives[0] in (*settled, P) else _NEVER / 1e6
        return cost

    def _settled(self, whole: WholeCall) -> Cut | None:
        """Return the placement of the stream between layers if the sequence is sharded.

        The stream is [batch, length, width]; partial sums are reduced to that placement.
        """
        if not self.parallel.sequence or isinstance(whole.result, (list, tuple)):
            return None
        if len(whole.shape) != 3 or P not in [o.now for o in whole.operands]:
            return None
        return Cut(1) if fits(whole.shape, Cut(1), self.ranks) else None

    def _is_narrowed(self, node: fx.Node) -> bool:
        """Return whether all readers of a partial sum reduce it to something smaller.

        Then less is sent if products with whole values are applied to the summands. For example,
        experts' outputs are weighted and summed per token before the ranks' summands are added.
        """
        if node not in self.narrowed:
            self.narrowed[node] = bool(node.users) and all(
                self._narrows(user, node) for user in node.users
            )
        return self.narrowed[node]

    def _narrows(self, reader: fx.Node, source: fx.Node) -> bool:
        if reader.op != "call_function" or not isinstance(value(reader), torch.Tensor):
            return False
        made, given = value(reader).numel(), value(source).numel()
        if reader.target is _aten.sum.dim_IntList:
            return made < given
        is_linear = reader.target is _aten.mul.Tensor or (
            reader.target in _ROWS and reader.args[0] is source
        )
        return is_linear and made <= given and self._is_narrowed(reader)

    # -- conversions --------------------------------------------------------------------------
    def _move(self, node: fx.Node, to: Placement) -> float:
        """Return the cost of converting a value to the given placement."""
        now = self.lies[node]
        if serves(now, to) or self._key(node, to) in self.made:
            return 0.0
        if to == P or isinstance(to, Owned) or isinstance(now, tuple):
            return _NEVER
        if isinstance(now, Cut) and self._is_weight(node):
            return _NEVER / 1e3
        size, share = nbytes(value(node)), (self.ranks - 1) / self.ranks
        if now == R:
            return 1e-3 * size / self.ranks
        if serves(now, P):
            return (2.0 if to == R else 1.0) * size * share
        if to == R or _is_recut(now, to):
            # which every rank then holds, where sequences are cut to save just that
            return (2.0 if self.by_context else 1.0) * size * share
        return size / self.ranks * share + 1.0

    def _is_weight(self, node: fx.Node) -> bool:
        while node.op == "call_function" and is_alias(node) and not is_item(node):
            node = node.all_input_nodes[0]
        return info(node).role is Role.PARAM

    def _key(self, node: fx.Node, to: Placement) -> Any:
        phase = info(self.at).phase if to == R else None
        return self.new[node], to, phase

    def to(self, node: fx.Node, to: Placement) -> fx.Node:
        """Return one rank's value of a node with the requested placement."""
        now, new = self.lies[node], self.new[node]
        if serves(now, to):
            return new
        key = self._key(node, to)
        if key in self.made:
            return self.made[key]
        is_turned = node.target in _TURNED and isinstance(now, Cut) and to == R
        if is_turned or self._is_of_a_sum(node, to):
            source = self.to(node.args[0], R)  # type: ignore[arg-type]
            whole = self._whole(node)
            made = self._emit(node, node.target, (source, *node.args[1:]), {}, R, whole)
        elif _is_recut(now, to):
            made = self._convert(node, self.to(node, R), R, to)
        elif (base := self._turned_base(node, to)) is not None:
            whole = self._whole(node)
            made = self._emit(node, node.target, (base, *node.args[1:]), {}, to, whole)
        elif now == R and isinstance(to, Cut) and self._is_spread(node):
            made = self._spread(node, to) or self._convert(node, new, now, to)
        else:
            made = self._convert(node, new, now, to)
        self.made[key] = made
        if now == P:  # a partial sum is reduced once, for all readers
            self.new[node], self.lies[node] = made, to
        return made

    def _turned_base(self, node: fx.Node, to: Placement) -> fx.Node | None:
        """Return what a transposed value views, if it was converted to that placement already."""
        if node.target not in _TURNED or not isinstance(to, Cut):
            return None
        source: Any = node.args[0]
        dims = [d % value(node).dim() for d in node.args[1:]] or [0, 1]
        before = Cut({dims[0]: dims[1], dims[1]: dims[0]}.get(to.dim, to.dim), to.groups)
        return self.made.get(self._key(source, before))

    def _is_spread(self, node: fx.Node) -> bool:
        """Return whether a value is computed element by element from smaller ones.

        Such are masks: of labels against all classes, of positions against positions.
        """
        if node.target is _aten.eq.Tensor:
            return True
        if not self.zigzag or node.target not in _MASKS or info(node).is_random:
            return False
        sources = tensors_of(node)
        size = value(node).numel()
        return all(self.lies[a] == R for a in sources) and (
            all(value(a).numel() < size for a in sources) or any(map(self._is_spread, sources))
        )

    def _spread(self, node: fx.Node, to: Cut) -> fx.Node | None:
        """Return a rank's part of such a value, made from parts of what it is computed from.

        The whole mask is then made nowhere: what was emitted first has no reader. None if no rule
        gives this part.
        """
        whole = self._whole(node)
        needs = [seen(operand, to, whole.shape) for operand in whole.operands]
        cut = tuple(replace(o, now=need) for o, need in zip(whole.operands, needs, strict=True))
        found = ways(replace(whole, operands=cut, hints=(to,)))
        way = next((way for way in found if way.gives == to), None)
        if way is None:
            return None
        given = [self.to(a, at) for a, at in zip(tensors_of(node), needs, strict=True)]
        local = filled(way.args if way.args is not None else whole.args, given)
        return self._emit(node, node.target, local, filled(whole.kwargs, given), to, whole)

    def _is_of_a_sum(self, node: fx.Node, to: Placement) -> bool:
        """Return whether a node views or negates a partial sum that other nodes read too."""
        if to != R or self.lies[node] != P or node.target not in {_aten.neg.default, *_VIEWS}:
            return False
        source: Any = node.args[0]
        return self.lies[source] == P and len(source.users) > 1

    def _convert(self, node: fx.Node, new: fx.Node, now: Placement, to: Placement) -> fx.Node:
        more: tuple[int, ...]
        if to == P:  # a gradient, which is summed later
            op, more = ops.summand, ()
            if isinstance(now, Cut):
                op, more = ops.padded, (now.dim, now.groups, self.ranks)
        elif now == R:
            assert isinstance(to, Cut)
            op, more = ops.part, (to.dim, to.groups, self.ranks)
        elif serves(now, P) and to == R:
            op, more = ops.reduce_values, ()
        elif serves(now, P):
            assert isinstance(to, Cut)
            op, more = ops.scatter_values, (to.dim, to.groups, self.ranks)
        elif to == R:
            assert isinstance(now, Cut)
            op, more = ops.gather_values, (now.dim, now.groups, self.ranks)
        else:
            assert isinstance(now, Cut) and isinstance(to, Cut)
            ends = (now.dim, now.groups, to.dim, to.groups)
            op, more = ops.swap_values, (*ends, self.ranks)
        made = call(self.graph, op, (new, self.axis, *more))
        made.name += self.suffix
        if (spec := spec_of(made)) is not None and spec.is_agreed:
            self.sent[spec.name] += 1
        at, placed = info(self.at), info(node).placed
        outer = None if placed is None else placed.lies
        made.meta["zfx"] = Info(
            phase=at.phase, module=at.module, line=at.line, unit=at.unit,
            placed=Placed(to, tuple(value(node).shape), outer=outer),
        )  # fmt: skip
        for key in ("partitioner_tag", "is_gradient_acc", "autograd_backward"):
            if key in self.at.meta:
                made.meta[key] = self.at.meta[key]
        return made

    def _emit(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], named: dict[str, Any], gives: Any,
        whole: WholeCall,
    ) -> fx.Node:  # fmt: skip
        made = self._called(target, args, named)
        if "zfx" in made.meta:  # an equal view that exists already
            return made
        again = self.named[node.name]  # a view is made twice, if it is read in two ways
        self.named[node.name] += 1
        _name(made, f"{node.name}_again{self.suffix}{again}" if again else node.name)
        made.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        set_info(made, placed=self._placed(node, gives, whole))
        return made

    def _placed(self, node: fx.Node, gives: Any, whole: WholeCall) -> Placed:
        first = next(iter(node.all_input_nodes), None)
        is_same = node.target in SAME_VALUES and _form(node) == _form(first)
        return Placed(
            gives, shape_of(value(node)), node.target, whole.args, whole.kwargs, is_same,
            info(node).placed,
        )  # fmt: skip

    def _called(self, target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> fx.Node:
        """Append a call; if a shard's strides do not allow a view, view a dense copy instead.

        Equal views of one value are one node, so that their base is converted only once.
        """
        told = tuple(id(a) if isinstance(a, fx.Node) else repr(a) for a in args)
        key = (target, told, info(self.at).phase)
        if target in _SHARED and key in self.views:
            return self.views[key]
        try:
            made = self.views[key] = call(self.graph, target, args, named=named)
            return made
        except (RuntimeError, ValueError):
            if target not in _VIEWS:
                raise
            self.graph.erase_node(next(reversed(list(self.graph.nodes))))
            source = args[0]
            with_format = {"memory_format": torch.contiguous_format}
            dense = call(self.graph, _aten.clone.default, (source,), named=with_format)
            dense.name += self.suffix
            dense.meta["zfx"] = replace(info(source), placed=_dense(info(source).placed))
            return call(self.graph, target, (dense, *args[1:]), named=named)


def _is_recut(now: Placement, to: Placement) -> bool:
    """Return whether a value is cut along one dimension in other groups: that is no all-to-all.

    Of the part of one rank, another one would get all or nothing.
    """
    return isinstance(now, Cut) and isinstance(to, Cut) and now.dim == to.dim


def _name(node: fx.Node, name: str) -> None:
    """Name a node; setting a name, even the same one, searches the tables of the graph."""
    if node.name != name:
        node.name = name


def _form(node: fx.Node | None) -> Any:
    val = value(node) if node is not None else None
    return (tuple(val.shape), tuple(val.stride())) if isinstance(val, torch.Tensor) else node


def _dense(placed: Placed | None) -> Placed:
    assert placed is not None
    named = {"memory_format": torch.contiguous_format}
    target = _aten.clone.default
    outer = None if placed.outer is None else _dense(placed.outer)
    return Placed(placed.gives, placed.shape, target, (Hole(0),), named, True, outer)


def _seen_by(node: fx.Node) -> fx.Node:
    """Return the base of a value that is a reshaped or negated view of it."""
    while node.target in _ROWS and node.target is not _aten.index.Tensor:
        node = node.args[0]  # type: ignore[assignment]
    return node


_PRODUCTS = {
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten._grouped_mm.default,
    "transformers.grouped_mm_fallback.default",
    "transformers.grouped_mm_fallback_backward.default",
}  # fmt: skip
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}  # fmt: skip
_LOOKUPS = {_aten.embedding.default, ops.embedding_rows}
_SCALED = {_aten.mul.Tensor, _aten.div.Tensor}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_SAME = {_aten.detach.default, _aten.alias.default}
_KEEPS_CLASSES = {
    *_VIEWS, *_SAME, _aten.slice.Tensor, _aten.clone.default, _aten._to_copy.default,
    _aten.transpose.int, _aten.mul.Scalar, _aten.div.Scalar,
}  # fmt: skip
_MASKS = {
    _aten.eq.Tensor, _aten.ne.Tensor, _aten.le.Tensor, _aten.lt.Tensor, _aten.ge.Tensor,
    _aten.gt.Tensor, _aten.bitwise_and.Tensor, _aten.bitwise_or.Tensor, _aten.bitwise_not.default,
    _aten.logical_and.default, _aten.logical_or.default, _aten.logical_not.default,
    _aten.where.self, _aten.masked_fill.Scalar, _aten.add.Tensor, _aten.sub.Tensor,
    _aten.mul.Tensor, _aten.mul.Scalar, _aten.rsub.Scalar, _aten._to_copy.default,
    _aten.expand.default,
}  # fmt: skip
_ROWS = {
    *_VIEWS, _aten.index.Tensor, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.neg.default,
}  # fmt: skip
_TURNED = {_aten.t.default, _aten.transpose.int}
_SHARED = _VIEWS | {
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default,
    _aten.expand.default,
}  # fmt: skip
