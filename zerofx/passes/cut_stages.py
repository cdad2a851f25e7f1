"""cut-stages: keep one pipeline stage's part of a program; send and receive the rest.

Each unit belongs to one stage, and a forward value belongs to the last stage among those it depends
on. Values that follow from inputs and buffers alone (masks, position tables) are computed in every
stage that reads them. A gradient is computed in the stage of its forward value if everything that
it reads is there or was received. For a transformer, one activation and one gradient cross each
boundary.

With an interleaved schedule a rank has several stages, and a program for each of them.

A stage's program is an ordinary one: the values that it receives are inputs (in backward: gradients
of outputs), and the values that it sends are outputs (in backward: gradients of inputs).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import fx

from zerofx.analysis.recompute.activations import halve, is_param_alias
from zerofx.compat.graphs import LazyGraphModule, copied_node
from zerofx.errors import CaptureError, PlanError
from zerofx.ir.graphs import alias_source, call
from zerofx.ir.meta import (
    Hole,
    OutputInfo,
    Phase,
    Placed,
    Role,
    info,
    set_info,
    shape_of,
    value,
)
from zerofx.ir.names import find_unit_of_module
from zerofx.ir.program import (
    BACKWARD,
    FORWARD,
    JOINT,
    Loop,
    ParamInfo,
    Planned,
    Reference,
    Stage,
    Sum,
    Unproved,
    Wire,
)
from zerofx.ir.verify_values import SHORT, Numbering, label_of, sum_digest
from zerofx.layout.placements import R
from zerofx.passes.base import Fact, Pass, Report
from zerofx.plan.fields import covers, nearest
from zerofx.plan.parts import Parallel
from zerofx.policy.schedules import expected_micro_batches

_aten = torch.ops.aten

# -- The stage of each unit: decided from the model alone, before any capture ----------------------


def unit_positions(params: Iterable[ParamInfo], parallel: Parallel) -> dict[str, int]:
    """Return the position of each unit's pipeline stage, in the order of the model's parameters.

    Raises:
        PlanError: there are fewer units than stages, or a cut names no unit, or the cuts are not in
            order.
    """
    names: dict[int, tuple[str, float]] = {}
    for param in params:
        if is_shared(param, parallel):
            continue
        numel = float(torch.Size(param.shape).numel())
        for use in param.uses:
            if not use.unit:  # held by the model itself: any stage may read it
                continue
            # an embedding looks up rows, which costs almost nothing
            names[use.number] = use.unit, 0.0 if use.layer == "embedding" else numel
    weights: dict[str, float] = {}
    for _, (unit, numel) in sorted(names.items()):
        weights[unit] = weights.get(unit, 0.0) + numel
    units = list(weights)
    if len(units) < parallel.num_stages:
        times = f" x interleave = {parallel.interleave}" if parallel.interleave > 1 else ""
        raise PlanError(
            f"Plan.parallel.pipeline = {parallel.pipeline}{times} stages, and the model has "
            f"{len(units)} units ({', '.join(units) or 'no parameters'}): a stage has one at "
            "least. Use fewer stages, or name smaller ones in Plan(units=[...])."
        )
    if parallel.cuts == "auto":
        starts = balanced([*weights.values()], parallel.num_stages)
    else:
        starts = [0, *(_start(name, units) for name in parallel.cuts)]
        if sorted(set(starts)) != starts:
            raise PlanError(
                f"Plan.parallel.cuts = {list(parallel.cuts)}: the stages begin at units number "
                f"{starts}, which must grow, since each stage has one at least. The model's units "
                f"are {', '.join(units)}."
            )
    return {unit: sum(i >= start for start in starts) - 1 for i, unit in enumerate(units)}


def divided_units(params: Iterable[ParamInfo], parallel: Parallel) -> list[str]:
    """Return the units that the stages of a pipeline divide, in the order of the parameters."""
    left = (param for param in params if not is_shared(param, parallel))
    return list(unit_positions(left, Parallel()))


def is_shared(param: ParamInfo, parallel: Parallel) -> bool:
    """Return whether the plan names a parameter, by any of its names, for every stage."""
    names = (param.name, *param.aliases)
    return any(covers(pattern, name) for pattern in parallel.shared for name in names)


def _start(name: str, units: list[str]) -> int:
    """Return the number of the first unit of a module."""
    for i, unit in enumerate(units):
        if unit == name or unit.startswith(f"{name}."):
            return i
    raise PlanError(f"Plan.parallel.cuts: no unit is named {name!r}{nearest(name, units)}")


def balanced(weights: list[float], parts: int) -> list[int]:
    """Split a sequence into `parts` runs, the heaviest as light as possible; return their starts.

    Every run has at least one element. Among equally good divisions, the smallest sum of squares
    wins.
    """
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    # best[n] for k parts: (the heaviest, sum of squares, starts) for the first n elements
    best = {n: (total[n], total[n] ** 2, [0]) for n in range(1, len(weights) + 1)}
    for part in range(2, parts + 1):
        found = {}
        for n in range(part, len(weights) + 1):
            least = (math.inf, math.inf, [0])
            for start in range(n - 1, part - 2, -1):
                heaviest, squares, starts = best[start]
                own = total[n] - total[start]
                if own > least[0]:  # and so are all longer runs
                    break
                if heaviest <= least[0]:
                    option = max(heaviest, own), squares + own**2, [*starts, start]
                    least = min(least, option)
            found[n] = least
        best = found
    return best[len(weights)][2]


def with_positions(params: Iterable[ParamInfo], parallel: Parallel) -> list[ParamInfo]:
    """Return the parameters with their pipeline stages: the stages whose layers use them.

    Parameters that the model itself holds, outside of all units, are in every stage: any may read
    them. So are those that the plan names in `parallel.shared`.

    Raises:
        PlanError: as in `unit_positions`, or a pattern names no parameter.
    """
    given = list(params)
    if parallel.pipeline == 1:
        return given
    for pattern in parallel.shared:
        names = [name for p in given for name in (p.name, *p.aliases)]
        if not any(covers(pattern, name) for name in names):
            raise PlanError(
                f"Plan.parallel.shared: no parameter is named {pattern!r}{nearest(pattern, names)}"
            )
    at = unit_positions(given, parallel)
    every = tuple(range(parallel.num_stages))
    return [
        replace(p, positions=tuple(sorted({at[u.unit] for u in p.uses})))
        if all(u.unit for u in p.uses) and not is_shared(p, parallel)
        else replace(p, positions=every)
        for p in given
    ]


# -- The pass --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CutStages(Pass):
    """Keep the part of the program that the pipeline stage at `position` computes."""

    name: ClassVar[str] = "cut-stages"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TIED_MERGED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.STAGES_CUT})
    conflicts: ClassVar[frozenset[Fact]] = frozenset({Fact.SPLIT})

    parallel: Parallel
    position: int

    def run(self, program: Planned) -> Report:
        if self.parallel.pipeline == 1:
            return Report(False, "one stage")
        num_params = len(program.params)
        _cutting(program, self.parallel).keep(self.position, program)
        sent = [w for w in program.stage.wires if w.source == self.position]
        taken = [w for w in program.stage.wires if w.target == self.position]
        own = sum(self.position in p.positions for p in program.params.values())
        return Report(
            True,
            f"stage {self.position} of {self.parallel.num_stages} has {own} of {num_params} "
            f"parameters, sends {len(sent)} values and receives {len(taken)}",
        )

    def options(self) -> dict[str, object]:
        return {"pipeline": self.parallel.pipeline, "position": self.position}


def cut(program: Planned, parallel: Parallel, positions: Iterable[int]) -> list[Planned]:
    """Return the programs of several pipeline stages of a program, which stays as it is.

    Each is what the pass makes of a copy. What is found out about the whole graph is found once.
    """
    whole = program.clone()
    cutting = _cutting(whole, parallel)
    found = []
    for position in positions:
        own = replace(
            whole, graphs=dict(whole.graphs), outputs=dict(whole.outputs),
            history=list(whole.history), facts=whole.facts | CutStages.provides,
        )  # fmt: skip
        cutting.keep(position, own)
        found.append(own)
    return found


def _cutting(program: Planned, parallel: Parallel) -> Cutting:
    """Decide what each stage computes of a program, whose parameters get their positions."""
    name = JOINT if JOINT in program.graphs else FORWARD
    check_can_be_cut(program, name, parallel.schedule)
    params = with_positions(program.params.values(), parallel)
    program.params = {p.name: p for p in params}
    number_draws(program.graph(name))
    if program.is_training:
        num = expected_micro_batches(parallel.micro_batches, parallel.pipeline)
        program.loop = Loop(program.loop.accumulation * num, no_sync=True)
    return Cutting(program, name, unit_positions(params, parallel), parallel)


def check_can_be_cut(program: Planned, name: str, schedule: str) -> None:
    """Raise if the program cannot be computed one micro-batch at a time.

    Raises:
        CaptureError: names the obstacle and the alternative.
    """
    specs = program.outputs[name]
    for spec in specs:
        if spec.role is Role.INPUT_UPDATE:
            raise CaptureError(
                f"{program.model_name}: forward writes to the input {spec.name or spec.index}. "
                "With Plan.parallel.pipeline above 1 each stage has some of the layers, and the "
                "others would not see it. Return the new value instead, or use pipeline = 1."
            )
        if spec.role is Role.INPUT_GRAD and spec.index not in program.calling.ignored:
            raise CaptureError(
                f"{program.model_name}: input {spec.index} requires a gradient, which a pipeline "
                "does not hand out. Detach it, or use pipeline = 1."
            )
    if not program.has_loss_outside:
        if program.is_training and program.plan.precision.loss_scale == "external":
            raise CaptureError(
                f"{program.model_name}: forward returns the loss, so that with "
                "Plan.parallel.pipeline above 1 a call runs its backwards, before GradScaler "
                "scales it (Plan.precision.loss_scale = 'external'). Let zerofx scale it "
                "(loss_scale='dynamic'), or compute the loss outside of forward."
            )
        return
    if schedule != "gpipe":
        raise CaptureError(
            f"{program.model_name}: forward returns no loss, and under Plan.parallel.schedule = "
            f"{schedule!r} backward begins before the last part of the batch is through. Give the "
            'labels to the model and return the loss from forward, or set schedule = "gpipe", '
            "which runs all forwards first. Under torch.no_grad() forward may return anything."
        )
    check_results(program, name)


def check_results(program: Planned, name: str) -> None:
    """Raise unless the results of micro-batches make up those of the whole batch.

    They do if each depends on what is cut, and has a row per sample.

    Raises:
        CaptureError: names the result.
    """
    ignored = program.calling.ignored
    inputs = program.placeholders(name, Role.INPUT)
    given = [n for n in inputs if shape_of(value(n)) and info(n).index not in ignored]
    rows = len(value(given[0])) if given else 0
    if rows == 1:
        raise CaptureError(
            f"{program.model_name}: a micro-batch has 1 sample. With Plan.parallel.pipeline above "
            "1 and a loss outside of forward, results of one sample cannot be told from results "
            "of the whole batch. Use fewer micro_batches, or return the loss from forward."
        )
    for leaf, number in program.calling.constants.items():
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            raise CaptureError(
                f"{program.model_name}: {program.calling.output_names[leaf]} is the number "
                f"{number} for a micro-batch of {rows} samples, and may be another one for the "
                "whole batch. With Plan.parallel.pipeline above 1 and a loss outside of forward, "
                "leave it out, or return the loss from forward."
            )
    depends = {n for n in given if len(value(n)) == rows}
    for node in program.graph(name).nodes:
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    for spec, result in zip(program.outputs[name], program.results(name), strict=True):
        is_cut = result in depends and shape_of(value(result))[:1] == (rows,)
        if spec.role is Role.OUTPUT and not is_cut:
            label = program.calling.output_names[spec.index] or "the result"
            raise CaptureError(
                f"{program.model_name}: {label} has the shape {list(shape_of(value(result)))} for "
                f"a micro-batch of {rows} samples. With Plan.parallel.pipeline above 1 and a loss "
                "outside of forward, results are put together along dimension 0, which must be "
                "the samples. Return it so, leave it out, or return the loss from forward."
            )


def number_draws(graph: fx.Graph) -> None:
    """Record on each random node its index among the random draws of the whole model."""
    count: dict[Phase, int] = {}
    for node in graph.nodes:
        where = info(node)
        if node.op == "call_function" and where.is_random and node.target is not operator.getitem:
            count[where.phase] = count.get(where.phase, 0) + 1
            set_info(node, draw=count[where.phase])


@dataclass
class Cutting:
    """The assignment of a graph's values to stages, and the values that cross between them.

    stage: the stage of each node that exactly one stage computes. anywhere: the nodes that every
        stage computes if it reads them.
    again: backward nodes that follow from forward values alone (a gather that is repeated); every
    stage that reads such a node computes it, from values that it has or receives.
    lies: for a parameter or a view of one, the positions that hold it.
    """

    program: Planned
    name: str
    units: dict[str, int]
    parallel: Parallel
    stage: dict[fx.Node, int] = field(default_factory=dict)
    anywhere: set[fx.Node] = field(default_factory=set)
    again: set[fx.Node] = field(default_factory=set)
    lies: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        program, name = self.program, self.name
        self.size = self.parallel.num_stages
        self.graph = program.graph(name)
        if name == JOINT:
            self.forward = set(halve(program).parts.forward)
        else:
            self.forward = {n for n in self.graph.nodes if n.op == "call_function"}
        self.results = list(zip(program.outputs[name], program.results(name), strict=True))
        self.numbering = Numbering(program)
        self.crossing: dict[tuple[str, int], dict[fx.Node, None]] = {}  # (graph, target) -> values
        self.sums = self._sums()
        self.gradients = self._dependent()
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "get_attr":
                self.anywhere.add(node)
            elif node in self.forward:
                self._place(node, self._forward_stage)
        for node in calls:
            if node in self.forward:
                self._receive(node)
        for node in calls:  # the values received so far decide where gradients are computed
            if node not in self.forward:
                self._place(node, self._backward_stage)
                if node not in self.sums:
                    self._receive(node)
        self.grads = {  # (parameter, position) -> the summands of its gradient there
            key: nodes for spec, r in self.results for key, nodes in self._gradients(spec, r)
        }
        self.written = {
            spec.name: self._writer(r) for spec, r in self.results if _is_update(spec, r)
        }
        if self.written:
            self._check_written()

    def _dependent(self) -> set[fx.Node]:
        """Return the nodes that depend on the gradient of the loss."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            is_given = info(node).role is Role.TANGENT
            if is_given or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    # -- which stage computes what ------------------------------------------------------------
    def _placeholder(self, node: fx.Node) -> None:
        where = info(node)
        if where.role is Role.PARAM:
            self.lies[node] = self.program.params[where.name].positions
        else:
            self.anywhere.add(node)

    def _place(self, node: fx.Node, decide: Any) -> None:
        sources = node.all_input_nodes
        if not info(node).is_random:
            if all(a in self.anywhere for a in sources):
                self.anywhere.add(node)
                return
            if is_param_alias(node) and all(a in self.anywhere or a in self.lies for a in sources):
                self.lies[node] = self.lies[alias_source(node)]
                return
            if node not in self.forward and node not in self.gradients:
                self.again.add(node)
                return
        if node.target is operator.getitem:
            self.stage[node] = self.stage[sources[0]]
        else:
            self.stage[node] = decide(node)
        for source in sources:
            if source in self.lies and self.stage[node] not in self.lies[source]:
                self._refuse(node, source)

    def _own(self, node: fx.Node) -> int | None:
        """Return the stage of the unit whose module runs a node, or None outside of all units."""
        unit = find_unit_of_module(info(node).module, self.units)
        return self.units.get(unit) if unit else None

    def _forward_stage(self, node: fx.Node) -> int:
        own, held = self._own(node), [a for a in node.all_input_nodes if a in self.lies]
        found = [self.stage[a] for a in node.all_input_nodes if a in self.stage]
        if own is not None:
            found.append(own)
        if not found and held:  # reads only parameters, outside of all units
            return min(set.intersection(*(set(self.lies[a]) for a in held)), default=0)
        return max(found, default=0)

    def _backward_stage(self, node: fx.Node) -> int:
        own = self._own(node)
        sources = self._sources(node)
        later = [self.stage[a] for a in sources if self._is_gradient(a)]
        reads = [a for a in sources if a not in self.anywhere and not self._is_gradient(a)]
        if own is not None and all(self._can_have(own, a) for a in reads):
            wanted = own
        elif reads:
            wanted = max(self.stage[a] if a in self.stage else self._read_at(a) for a in reads)
        elif own is not None:
            wanted = own
        else:
            wanted = min(later, default=0)
        return min([wanted, *later])

    def _read_at(self, param: fx.Node) -> int:
        """Return the last stage whose forward reads a parameter, or a view of it; else holds it.

        Where forward does not read it, it is not gathered.
        """
        found: set[int] = set()
        stack = [param]
        while stack:
            for user in stack.pop().users:
                if user in self.lies:
                    stack.append(user)
                elif user in self.forward and user in self.stage:
                    found.add(self.stage[user])
        return max(found, default=max(self.lies[param]))

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of a node, with recomputed nodes replaced by their own inputs."""
        found: dict[fx.Node, None] = {}
        stack = list(reversed(node.all_input_nodes))
        while stack:
            source = stack.pop()
            if source in self.again:
                stack += reversed(source.all_input_nodes)
            else:
                found[source] = None
        return list(found)

    def _is_gradient(self, node: fx.Node) -> bool:
        return node in self.stage and node not in self.forward

    def _can_have(self, position: int, node: fx.Node) -> bool:
        """Return whether a stage has a forward value, or can receive it during forward."""
        if node in self.lies:
            return position in self.lies[node]
        return self.stage[node] <= position

    def _writer(self, node: fx.Node) -> int:
        """Return the stage that writes a value to a buffer: that of the layer which makes it."""
        if node in self.lies:
            return self.lies[node][0]
        own = self._own(node)
        return self.stage.get(node, self.size - 1 if own is None else own)

    def _check_written(self) -> None:
        """Raise if a stage reads a buffer that another one writes to.

        Raises:
            CaptureError: names the buffer and both stages.
        """
        held = {info(n).name: n for n in self.program.placeholders(self.name, Role.BUFFER)}
        for position in range(self.size):
            *_, sent = self._wires(position)
            needed = self._needed(position, sent)
            for buffer, at in self.written.items():
                if at != position and held.get(buffer) in needed:
                    raise CaptureError(
                        f"{self.program.model_name}: pipeline stage {at} writes to the buffer "
                        f"{buffer}, which stage {position} reads, and with Plan.parallel.pipeline "
                        "above 1 they run at different times. Choose Plan.parallel.cuts so that "
                        "both are in one stage."
                    )

    # -- what crosses -------------------------------------------------------------------------
    def _receive(self, node: fx.Node) -> None:
        """Send the inputs of a node that another stage computes to the node's stage."""
        if (position := self.stage.get(node)) is None:
            return
        for source in self._sources(node):
            at = self.stage.get(source, position)
            if at != position:
                self._cross(source, position, FORWARD if at < position else BACKWARD)

    def _cross(self, source: fx.Node, target: int, graph: str) -> None:
        if graph == BACKWARD and self._has_received(source, target):
            return
        goes_forward = self.stage[source] < target
        assert goes_forward == (graph == FORWARD), f"{source} goes the wrong way, to stage {target}"
        if not isinstance(value(source), torch.Tensor):
            raise CaptureError(
                f"{self.program.model_name}: {source.name} ({info(source).line}) is no tensor, and "
                f"crosses from pipeline stage {self.stage[source]} to stage {target}. Choose other "
                "Plan.parallel.cuts."
            )
        self.crossing.setdefault((graph, target), {})[source] = None

    def _has_received(self, source: fx.Node, target: int) -> bool:
        return source in self.crossing.get((FORWARD, target), ())

    def _gradients(
        self, spec: OutputInfo, result: Any
    ) -> Iterator[tuple[tuple[str, int], list[fx.Node]]]:
        """Yield the summands of a parameter's gradient, grouped by the stage that sums them."""
        if spec.role is not Role.GRAD or not isinstance(result, fx.Node):
            return
        positions = self.program.params[spec.name].positions
        summands: dict[int, list[fx.Node]] = {}
        for node in self._summands(result) if len(positions) > 1 else [result]:
            at = self.stage.get(node, positions[0])
            own = max((p for p in positions if p <= at), default=None)
            if own is None:
                self._refuse(node, node)
            if own != at:
                self._cross(node, own, BACKWARD)
            summands.setdefault(own, []).append(node)
        for position, nodes in summands.items():
            yield (spec.name, position), nodes

    def _sums(self) -> set[fx.Node]:
        """Return the sums that merge-tied created over gradients of layers in different stages."""
        found: set[fx.Node] = set()
        for spec, result in self.results:
            if spec.role is not Role.GRAD or not isinstance(result, fx.Node):
                continue
            stack = [result] if len(self.program.params[spec.name].positions) > 1 else []
            while stack:
                node = stack.pop()
                if node.target is _aten.add.Tensor and not node.kwargs and len(node.users) == 1:
                    found.add(node)
                    stack += node.all_input_nodes
        return found

    def _summands(self, node: fx.Node) -> list[fx.Node]:
        """Split such a sum into its summands if they are computed in different stages."""
        if not self._is_divided(node):
            return [node]
        return [each for part in node.all_input_nodes for each in self._summands(part)]

    def _is_divided(self, node: fx.Node) -> bool:
        return node in self.sums and len({self.stage.get(a) for a in node.all_input_nodes}) > 1

    def _refuse(self, node: fx.Node, source: fx.Node) -> NoReturn:
        where, param = info(node), info(alias_source(source)).name or node.name
        line = f" ({where.line})" if where.line else ""
        lies = " and ".join(map(str, self.lies.get(source, ())))
        at = self.stage[node]
        first = self._begins(node)
        begun = f"{first} of stage {at} is used before it" if first else f"of what stage {at} makes"
        raise PlanError(
            f"Plan.parallel: {where.module or 'the model itself'}{line} reads {param}, which is in "
            f"pipeline stage {lies}, and runs in stage {at}, because {begun}. Modules are divided "
            "in the order in which they are registered: register them as forward calls them. "
            f"Or let every stage hold it: Plan(parallel={{'shared': [{first or param!r}], ...}})."
        )

    def _begins(self, node: fx.Node) -> str:
        """Return the parameter for which alone a node's inputs are computed as late as they are."""
        seen, stack = {node}, [node]
        while stack:
            for source in stack.pop().all_input_nodes:
                if source in seen or self.stage.get(source) != self.stage[node]:
                    continue
                seen.add(source)
                stack.append(source)
                given = source.all_input_nodes
                held = [a for a in given if a in self.lies]
                if held and not any(a in self.stage for a in given):
                    return info(alias_source(held[0])).name
        return ""

    # -- a stage's program ----------------------------------------------------------------------
    def keep(self, position: int, program: Planned) -> None:
        """Reduce a program to one stage's part: the whole one itself, or a copy without nodes."""
        wires, taken, sent = self._wires(position)
        needed = self._needed(position, sent)
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            if node.op == "placeholder" and node in needed:
                env[node] = copied_node(graph, node, env.__getitem__)
        for (kind, source), wire in taken.items():
            env[source] = self._received(graph, source, wire, kind)
        for node in self.graph.nodes:
            if node.op in ("call_function", "get_attr") and node in needed and node not in env:
                env[node] = copied_node(graph, node, env.__getitem__)
        specs, results = self._results(graph, env, position, sent)
        graph.output(tuple(results))
        graph.lint()
        program.graphs[self.name] = LazyGraphModule(program.graphs[self.name], graph)
        program.outputs[self.name] = tuple(specs)
        trained = tuple(s.name for s, r in self.results if s.role is Role.GRAD and r is not None)
        program.stage = Stage(
            position, self.size, tuple(wires), self._made(Role.OUTPUT, FORWARD),
            self._made(Role.INPUT_GRAD, BACKWARD), self.written, trained, self._captured(),
            self._shared(), *self._counts(program),
        )  # fmt: skip
        rank = position % self.parallel.pipeline  # it holds what its other stages read as well
        whole = self.program.reference
        program.params = {
            n: p for n, p in program.params.items() if rank in self.parallel.holders(p.positions)
        }
        self._take_reference(program, whole, wires, position)
        program.signature = f"{self.program.signature}:{position}"  # no other stage stands for it

    def _made(self, role: Role, graph: str) -> tuple[Wire, ...]:
        """Return the user's results of one role, each with the stage that makes it."""
        return tuple(
            Wire(
                s.name, self.stage.get(r, self.size - 1), -1, graph, s.index, s.index, value(r),
                str(self.numbering.of[r]),
            )
            for s, r in self.results
            if s.role is role and isinstance(r, fx.Node)
        )  # fmt: skip

    def _is_made(self, spec: OutputInfo, result: Any, position: int) -> bool:
        """Return whether a stage makes an output, an update of a buffer, or an input's gradient."""
        if _is_update(spec, result):
            return self.written[spec.name] == position
        is_handed = spec.role in (Role.OUTPUT, Role.INPUT_GRAD) and isinstance(result, fx.Node)
        return is_handed and self.stage.get(result, self.size - 1) == position

    def _captured(self) -> dict[str, str]:
        whole = self.program.reference
        if whole is Unproved.NOT_YET:  # passes run for pricing alone
            return {}
        assert isinstance(whole, Reference), "stages are cut after merge-tied"
        return whole.outputs

    def _shared(self) -> dict[str, Sum]:
        """Return the gradient of each parameter in several stages as the sum of their parts."""
        return {
            s.name: self._sum_of(r, self.program.params[s.name].positions)
            for s, r in self.results
            if s.role is Role.GRAD
            and isinstance(r, fx.Node)
            and len(self.program.params[s.name].positions) > 1
        }

    def _sum_of(self, node: fx.Node, positions: tuple[int, ...]) -> Sum:
        if self._is_divided(node):
            early, late = node.args
            return self._sum_of(early, positions), self._sum_of(late, positions)  # type: ignore[arg-type]
        at = self.stage.get(node, positions[0])
        return max(p for p in positions if p <= at), str(self.numbering.of[node])

    @staticmethod
    def _counts(program: Planned) -> tuple[int, int]:
        return program.calling.in_spec.num_leaves, program.calling.out_spec.num_leaves

    def _wires(
        self, position: int
    ) -> tuple[list[Wire], dict[tuple[str, fx.Node], Wire], dict[tuple[str, fx.Node], int]]:
        """Number the values that cross; return all, and those a stage receives and sends."""
        num_leaves, num_outputs = self._counts(self.program)
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        ahead = [len(self.crossing.get((FORWARD, at), ())) for at in range(self.size)]
        wires: list[Wire] = []
        taken: dict[tuple[str, fx.Node], Wire] = {}
        sent: dict[tuple[str, fx.Node], int] = {}
        outputs: dict[tuple[str, int], dict[fx.Node, int]] = {}
        for graph in (FORWARD, BACKWARD):
            for target in range(self.size):
                values = sorted(self.crossing.get((graph, target), ()), key=order.__getitem__)
                before = num_leaves
                if graph == BACKWARD:  # gradients of outputs, those that are sent among them
                    before = num_outputs + len(outputs.get((FORWARD, target), ()))
                for leaf, source in enumerate(values, before):
                    at = self.stage[source]
                    own = outputs.setdefault((graph, at), {})
                    first = num_outputs if graph == FORWARD else num_leaves + ahead[at]
                    output = own.setdefault(source, first + len(own))
                    made = str(self.numbering.of[source])
                    placed = info(source).placed or Placed(R, shape_of(value(source)))
                    wire = Wire(
                        source.name,
                        at,
                        target,
                        graph,
                        output,
                        leaf,
                        value(source),
                        made,
                        placed.lies,
                    )
                    wires.append(wire)
                    if target == position:
                        taken[graph, source] = wire
                    if wire.source == position:
                        sent[graph, source] = output
        return wires, taken, sent

    def _needed(self, position: int, sent: dict[tuple[str, fx.Node], int]) -> set[fx.Node]:
        """Return the nodes of a stage: its own, and the `anywhere` nodes that they read."""
        own = [n for n in self.graph.nodes if self.stage.get(n) == position]
        stack = [n for n in own if n not in self.sums]
        stack += [n for _, n in sent]
        stack += [n for (_, at), nodes in self.grads.items() if at == position for n in nodes]
        stack += [r for s, r in self.results if self._is_made(s, r, position)]
        found: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in found or self.stage.get(node, position) != position:
                continue
            found.add(node)
            stack += node.all_input_nodes
        return found

    def _received(self, graph: fx.Graph, source: fx.Node, wire: Wire, kind: str) -> fx.Node:
        node = graph.placeholder(f"from_{wire.source}_{source.name}")
        node.meta = {"val": value(source)}
        is_forward = kind == FORWARD
        set_info(
            node,
            role=Role.INPUT if is_forward else Role.TANGENT,
            phase=Phase.FORWARD if is_forward else Phase.BACKWARD,
            name=node.name,
            index=wire.leaf,
            digest=wire.digest,
        )
        return node

    def _results(
        self,
        graph: fx.Graph,
        env: dict[fx.Node, fx.Node],
        position: int,
        sent: dict[tuple[str, fx.Node], int],
    ) -> tuple[list[OutputInfo], list[Any]]:
        specs: list[OutputInfo] = []
        results: list[Any] = []

        def add(role: Role, name: str, index: int, result: Any) -> None:
            specs.append(OutputInfo(role, name, index))
            results.append(result)

        for spec, r in self.results:
            if spec.role is not Role.INPUT_GRAD and self._is_made(spec, r, position):
                add(spec.role, spec.name, spec.index, env[r])
        for (kind, node), output in sent.items():
            if kind == FORWARD:
                add(Role.OUTPUT, f"to_later_{node.name}", output, env[node])
        for spec, _ in self.results:
            if spec.role is Role.GRAD and position in self.program.params[spec.name].positions:
                summands = self.grads.get((spec.name, position), [])
                add(Role.GRAD, spec.name, spec.index, _sum(graph, [env[n] for n in summands]))
        for spec, r in self.results:
            if spec.role is Role.INPUT_GRAD and self._is_made(spec, r, position):
                add(spec.role, spec.name, spec.index, env[r])
        for (kind, node), output in sent.items():
            if kind == BACKWARD:
                add(Role.INPUT_GRAD, f"to_earlier_{node.name}", output, env[node])
        return specs, results

    def _take_reference(
        self, program: Planned, whole: Reference | Unproved, wires: list[Wire], position: int
    ) -> None:
        """Set the stage's reference: what it must send, and its part of the captured outputs."""
        if whole is Unproved.NOT_YET:  # passes run for pricing alone
            return
        assert isinstance(whole, Reference), "stages are cut after merge-tied"
        kinds = {FORWARD: Role.OUTPUT, BACKWARD: Role.INPUT_GRAD}
        due = {(kinds[w.graph], w.output): w.digest for w in wires if w.source == position}
        outputs: dict[str, str] = {}
        for spec in program.outputs[self.name]:
            label = label_of(spec.role, spec.name, spec.index)
            expected = due.get((spec.role, spec.index)) or whole.outputs.get(label)
            if spec.role is Role.GRAD and spec.name in program.stage.sums:
                own = program.stage.summands(spec.name).get(position)
                expected = sum_digest(own) if own else None
            if expected is not None:
                outputs[label] = expected
        values = whole.values | {expected[:SHORT] for expected in outputs.values()}
        program.reference = Reference(outputs, values)


def _is_update(spec: OutputInfo, result: Any) -> bool:
    """Return whether a result is the new value of a buffer."""
    return spec.role is Role.BUFFER_UPDATE and isinstance(result, fx.Node)


def _sum(graph: fx.Graph, summands: list[fx.Node]) -> fx.Node | None:
    """Return the sum of the given summands of a parameter's gradient, or None if there are none."""
    if not summands:
        return None
    total, *others = summands
    for node in others:
        placed = info(total).placed
        total = call(graph, _aten.add.Tensor, (total, node), like=total)
        set_info(total, phase=Phase.BACKWARD, placed=_as_sum(placed))
    return total


def _as_sum(placed: Placed | None) -> Placed | None:
    """Return the note of a sum of two values that lie so."""
    if placed is None:
        return None
    holes = (Hole(0), Hole(1))
    return Placed(
        placed.gives, placed.shape, _aten.add.Tensor, holes, {}, outer=_as_sum(placed.outer)
    )
