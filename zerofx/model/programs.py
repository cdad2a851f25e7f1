"""Programs of one model: compiled at a signature's first call, adopted, bound to its shards."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.analysis.memory.micro import calls_of, loop_of
from zerofx.analysis.memory.standing import with_other_stages
from zerofx.capture import call as trees
from zerofx.capture import capture
from zerofx.capture.effects import Change
from zerofx.capture.model_state import ModelState
from zerofx.capture.original import MODEL, Entry, original
from zerofx.capture.signature import describe_difference, describe_sizes
from zerofx.codegen.load import check_fits, check_wires, load
from zerofx.codegen.moves import Steps
from zerofx.compat.modules import own_buffers
from zerofx.compat.tensors import version_of
from zerofx.compat.tracing import without_dispatch_modes
from zerofx.errors import ArgumentError, BudgetError
from zerofx.ir.graphs import alias_source
from zerofx.ir.meta import Role, info, nbytes, value
from zerofx.ir.program import BACKWARD, FORWARD, Captured, Loop, Planned, Pool, Unproved, Wire
from zerofx.ir.settle import with_sizes
from zerofx.ir.sizes import Sizes, Symbol, at, form, names_in
from zerofx.ir.spec import Kind, OpSpec, bucket_of, gradients_of, spec_of
from zerofx.ir.text import few
from zerofx.ir.verify import verify
from zerofx.layout.tiers import Tier
from zerofx.model.blame import Blame
from zerofx.model.budget import (
    are_left_over,
    can_accumulate,
    excess_bytes,
    fits,
    fits_beside_gradients,
    holds_in,
    joined,
    loop_so_far,
    margin_for,
    slots_of,
    warn_of_regions,
    warn_of_slots,
)
from zerofx.model.digest import (
    collective_digest,
    describe_graph,
    describe_layout,
    graph_hashes,
)
from zerofx.model.emitted import write_to_cache
from zerofx.model.lengths import Key, Lengths
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import Proof, run
from zerofx.passes.placement import capture_options
from zerofx.plan.fields import Patterns
from zerofx.plan.rules import lets_sizes_vary, starts_on_aten
from zerofx.policy import reduction
from zerofx.process import paused_collector
from zerofx.runtime.cuda_graph.recorded import Recorded, Room
from zerofx.runtime.cuda_graph.recorder import CudaRecorder, Recorder
from zerofx.runtime.engine import Engine
from zerofx.runtime.pipeline import OwnStage, Parcel, PipelineRun
from zerofx.runtime.regions.cache import prepare_regions
from zerofx.runtime.regions.load import Later, compiled_later, import_file
from zerofx.runtime.regions.progress import Wait
from zerofx.runtime.regions.swap import Running, Swap
from zerofx.runtime.step import Contract, Executable, Reach, TangentForm
from zerofx.runtime.store.tree import check_summable
from zerofx.runtime.turns import GATHER, REDUCE, REFRESH, SYNC, Share

# -- A program bound to a model: takes the user's call, returns the result -------------------------


class Bound:
    """Calls an executable with the user's arguments and rebuilds the user's result.

    slots: the slots that its program needs.
    last_use: the number of its latest call, among those of all programs of the model.
    """

    def __init__(
        self, program: Planned, executable: Executable, slots: Pool, model: nn.Module
    ) -> None:
        self.program, self.executable, self.slots = program, executable, slots
        self._model = model
        self.last_use = -1
        calling = program.calling
        self._pipeline: PipelineRun | None = None
        self._others: list[Bound] = []
        self._leaves = executable.contract.outputs
        if program.stage.size > 1:
            self._leaves = tuple(wire.leaf for wire in program.stage.results)
        self._num_outputs = calling.out_spec.num_leaves
        self._is_single = calling.out_spec.is_leaf() and self._leaves == (0,)
        self._has_numbers = bool(names_in(calling.constants))

    @functools.cached_property
    def fits_beside_gradients(self) -> bool:
        """Whether its forward meets the budget while gradients of another step are held."""
        return fits_beside_gradients(self.program)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = _leaves(args, kwargs)
        return self._result(self.executable(leaves), leaves)

    def run(
        self,
        micro_batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        stages: Sequence[Bound],
    ) -> Any:
        """Run a call of a pipeline, given the arguments of each of its micro-batches.

        stages: all of this rank's, in order, of which this is the first.
        """
        if self._pipeline is None or self._others != [*stages[1:]]:
            programs = [stage.program for stage in stages]
            with_other_stages(programs)
            self._others = [*stages[1:]]
            self._pipeline = PipelineRun(
                [stage.executable for stage in stages],
                [own_stage(program) for program in programs],
                Steps(self.program),
            )
        leaves = [_leaves(*each) for each in micro_batches]
        return self._result(self._pipeline(leaves), leaves[0])

    def _result(self, outs: list[Tensor], leaves: Sequence[Any]) -> Any:
        calling = self.program.calling
        for change in calling.left:
            change.apply(self._model)
        if self._is_single:
            return outs[0]
        constants = calling.constants
        if self._has_numbers:
            constants = at(constants, self.program.sizes.of(leaves))
        results: list[Any] = [constants.get(i) for i in range(self._num_outputs)]
        for leaf, out in zip(self._leaves, outs, strict=True):
            results[leaf] = out
        return trees.unflatten(results, calling.out_spec)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    flat = [*args, *kwargs.values()]
    if all(type(v) is Tensor for v in flat):
        return flat
    return trees.flatten((args, kwargs))[0]


def own_stage(program: Planned) -> OwnStage:
    """Return the runtime's description of the pipeline stage that a program implements."""
    stage, parallel = program.stage, program.plan.parallel

    def crossing(wire: Wire) -> Parcel:
        v = wire.value
        return Parcel(
            wire.name, wire.source, wire.target, wire.graph, wire.output, wire.leaf,
            tuple(v.shape), v.stride(), v.dtype,
        )  # fmt: skip

    graphs = (FORWARD, BACKWARD)
    held = {p.owner: b.positions for b in program.layout.buckets for p in b.params}
    layout = describe_layout(program.layout, program.plan)
    wires = [(*map(str, (w.name, w.source, w.target, w.graph, w.digest)),) for w in stage.wires]
    return OwnStage(
        position=stage.position,
        schedule=parallel.schedule,
        taken={graph: tuple(map(crossing, stage.taken(graph))) for graph in graphs},
        sent={graph: tuple(map(crossing, stage.sent(graph))) for graph in graphs},
        results=tuple(map(crossing, stage.results)),
        handed=tuple(map(crossing, stage.handed)),
        written=dict(stage.written),
        follows_first=program.plan.buffers == "rank0",
        trained=stage.trained,
        shared={n: held[n] for n in stage.trained if len(held[n]) > 1},
        loss=program.calling.loss,
        constant=frozenset(
            wire.output
            for wire in stage.results
            if wire.output in program.calling.detached
            or not (wire.value.is_floating_point() or wire.value.is_complex())
        ),
        puts_off=reduction.is_put_off(program.layout, program.plan),
        digest=f"{wires} {sorted(stage.sums.items())} {layout}",
    )


# -- The signatures of a program's functions, in the form that the runtime needs ------------------


def contract(program: Planned, sizes: str = "") -> Contract:
    """Return the signatures of the program's functions; `sizes` are those of its inputs."""
    specs = program.outputs[FORWARD]
    outputs = [s for s in specs if s.role is Role.OUTPUT]
    calling = program.calling
    tangents: dict[int, Any] = {}
    input_grads: list[int] = []
    if program.is_training:
        for node in program.placeholders(BACKWARD, Role.TANGENT):
            tangents[info(node).index] = (*form(node), value(node).dtype)
        input_grads = [s.index for s in program.outputs[BACKWARD] if s.role is Role.INPUT_GRAD]
    updates: list[tuple[str, str | int]] = [
        ("buffer", s.name) for s in specs if s.role is Role.BUFFER_UPDATE
    ]
    updates += [("input", s.index) for s in specs if s.role is Role.INPUT_UPDATE]
    return Contract(
        outputs=tuple(s.index for s in outputs),
        differentiable=frozenset(calling.differentiable),
        names=dict(enumerate(calling.output_names)),
        inputs={info(n).index: info(n).name for n in program.placeholders(FORWARD, Role.INPUT)},
        tangents=tangents,
        input_grads=tuple(input_grads),
        updates=tuple(updates),
        guarded=_guarded(program),
        shared=_shared(program),
        returned=_returned(program),
        detached=_detached(program, input_grads),
        constant=frozenset(i for i, s in enumerate(outputs) if s.index in calling.detached),
        reach=_reach(program, tuple(tangents)) if program.is_training else {},
        is_training=program.is_training,
        draws=frozenset(
            name
            for name, gm in program.graphs.items()
            if any(info(n).is_random for n in gm.graph.nodes)
        ),
        label=program.model_name,
        digest=collective_digest(program),
        shares={name: _shares(program, name) for name in program.graphs},
        graph=graph_hashes(sizes, program.captured),
        tangents_at=_tangents_at(program.sizes, tangents) if program.sizes else None,
    )


def _shares(program: Planned, graph: str) -> str:
    """Return the collectives of a graph in order, in the format of `runtime.turns`."""
    found: list[Share] = []
    packed: dict[int, tuple[int, ...]] = {}
    for node in program.graph(graph).nodes:
        spec = spec_of(node)
        if spec is None or spec.is_value:  # conversions of values: all ranks call alike
            continue
        if spec.kind is Kind.PACK:
            members = program.layout.buckets[info(node).index].params
            places = {p.offset: i for i, p in enumerate(members)}
            offsets: Any = node.args[2]
            before = packed.get(info(node).index, ())
            packed[info(node).index] = (*before, *(places[o] for o in offsets))
        elif spec.kind is Kind.SYNC:
            found.append(Share(SYNC, names=_synced(program, node)))
        elif spec.axis and spec.is_gather:
            found.append(Share(REFRESH if spec.stays else GATHER, bucket_of(node)))
        elif spec.axis:
            scale: Any = node.args[3]
            bucket = bucket_of(node)
            found.append(Share(REDUCE, bucket, packed[bucket], scale))
    return " ".join(map(str, found))


def _synced(program: Planned, node: fx.Node) -> tuple[str, ...]:
    """Return the names of the buffers whose new values follow rank 0's at this node."""
    pairs = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    names = {n: s.name for s, n in pairs if s.role is Role.BUFFER_UPDATE}
    parts = {n.args[1]: n for n in node.users}
    return tuple(names[parts[i]] for i in range(len(parts)))


def _tangents_at(
    sizes: Sizes, tangents: dict[int, TangentForm]
) -> Callable[[Sequence[Any]], dict[int, TangentForm]]:
    if not any(names_in(form) for form in tangents.values()):
        return lambda leaves: tangents
    return lambda leaves: at(tangents, sizes.of(leaves))


def _reach(program: Planned, outputs: tuple[int, ...]) -> dict[int, Reach]:
    """Return the gradients that each of these outputs contributes to, found from its tangent.

    A gradient that depends on no tangent is zero for every loss, and counts for all outputs.
    """
    bits = {leaf: 1 << i for i, leaf in enumerate(outputs)}
    everything = (1 << len(outputs)) - 1
    masks: dict[fx.Node, int] = {}  # by node: the tangents that it depends on
    params: dict[str, int] = {}
    for node in program.graph(BACKWARD).nodes:
        if info(node).role is Role.TANGENT:
            masks[node] = bits[info(node).index]
            continue
        masks[node] = functools.reduce(operator.or_, (masks[a] for a in node.all_input_nodes), 0)
        if taken := gradients_of(node):
            owners = {p.offset: p.owner for p in program.layout.buckets[info(node).index].params}
            for grad, offset in taken:
                name = owners[offset]
                params[name] = params.get(name, 0) | (masks[grad] or everything)
    pairs = zip(program.outputs[BACKWARD], program.results(BACKWARD), strict=True)
    inputs = {s.index: masks[n] or everything for s, n in pairs if s.role is Role.INPUT_GRAD}
    return {
        leaf: Reach(
            frozenset(name for name, mask in params.items() if mask & bit),
            frozenset(index for index, mask in inputs.items() if mask & bit),
        )
        for leaf, bit in bits.items()
    }


def written_out(program: Planned) -> dict[str, int]:
    """Return the bytes of each value that forward leaves on NVMe, by name."""
    launches = [(n, spec_of(n)) for n in program.graph(FORWARD).nodes]
    nodes = [n for n, spec in launches if spec and spec.is_copy and spec.lands is Tier.NVME]
    return {f"{n.args[1]} {info(n).index}": nbytes(value(n)) for n in nodes}


def _results(program: Planned, role: Role) -> list[Any]:
    """Return forward's results of one role, in order."""
    pairs = zip(program.outputs[FORWARD], program.results(FORWARD), strict=True)
    return [result for spec, result in pairs if spec.role is role]


def _guarded(program: Planned) -> tuple[tuple[str, str | int], ...]:
    """Return the owners of the saved values' memory, as far as the user can write to it."""
    outputs: dict[fx.Node, int] = {}
    for position, node in enumerate(_results(program, Role.OUTPUT)):
        outputs.setdefault(alias_source(node), position)
    found: dict[tuple[str, str | int], None] = {}
    for node in _results(program, Role.SAVED):
        root = alias_source(node) if isinstance(node, fx.Node) else None
        if root is None:
            continue
        if info(root).role is Role.INPUT:
            found["input", info(root).index] = None
        elif info(root).role is Role.BUFFER:
            found["buffer", info(root).name] = None
        elif root in outputs:
            found["output", outputs[root]] = None
    return tuple(found)


def _shared(program: Planned) -> tuple[int, ...]:
    """Return the positions of saved values that are outputs too."""
    outputs = set(_results(program, Role.OUTPUT))
    return tuple(i for i, n in enumerate(_results(program, Role.SAVED)) if n in outputs)


def _returned(program: Planned) -> dict[int, int]:
    """Return the positions of outputs that are inputs themselves, with the inputs' leaves."""
    outputs = enumerate(_results(program, Role.OUTPUT))
    return {i: info(n).index for i, n in outputs if info(n).role is Role.INPUT}


def _detached(program: Planned, input_grads: list[int]) -> frozenset[int]:
    """Return the positions of outputs that share memory with inputs without a gradient."""
    roots = enumerate(alias_source(n) for n in _results(program, Role.OUTPUT))
    inputs = {i: info(n).index for i, n in roots if info(n).role is Role.INPUT}
    return frozenset(i for i, leaf in inputs.items() if leaf not in input_grads)


# -- The programs of one model ---------------------------------------------------------------------


log = logging.getLogger("zerofx")
CORRECTIONS = 3  # attempts to correct a budget, once the regions are compiled
KEPT = 2  # times Plan.max_programs: limit for compiled programs kept, bound or not


class Programs(list[Planned]):
    """The programs of a model; indexing explains why there is none yet."""

    def __getitem__(self, index: Any) -> Any:
        if not self:
            raise IndexError("no program yet: one is compiled at the first call of each signature.")
        return super().__getitem__(index)


class Constants:
    """The tensors whose values a program has baked in, with their versions at capture.

    It keeps none of them alive, since a tensor that is gone cannot be read again.
    """

    def __init__(self, tensors: list[Tensor], buffers: Sequence[dict[str, Any]] = ()) -> None:
        counted = [t for t in tensors if not t.is_inference()]  # those have no version counter
        self._read = [(weakref.ref(t), version_of(t)) for t in counted]
        slots = [(held, key, id(t)) for held in buffers for key, t in held.items()]
        self._slots = [slot for slot in slots if slot[2] in set(map(id, tensors))]

    def __bool__(self) -> bool:
        return bool(self._read)

    def have_changed(self) -> bool:
        """Return whether one was written to since, or a buffer is another tensor now."""
        for ref, version in self._read:
            tensor = ref()
            if tensor is not None and version_of(tensor) != version:
                return True
        return any(id(held.get(key)) != number for held, key, number in self._slots)


class ProgramTable:
    """Finds the program of a call; compiles it if there is none.

    `bound` has the programs that are ready to run, bound to shards and buffers, in the order
    of binding: at most Plan.max_programs. A further one replaces the least recently used.
    `known` has compiled programs without slots, recordings or loaded regions. Binding one again
    needs no capture and no passes. It is bounded too. Each rank decides by itself what to evict,
    since neither compiling nor binding is a collective call.

    The table of a model's deep copy starts with the original's `known`; `bound` is its own.
    `recorder` records every call for replay; Plan(cuda_graph=True) creates one for CUDA graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        engine: Engine,
        other: ProgramTable | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._model, self._setting, self._engine = model, setting, engine
        self._states: dict[Entry, ModelState] = {}
        self.bound: dict[Key, Bound] = {}
        # A copy of the model has copies of the tensors that a program has read.
        known = other.known.items() if other else ()
        self.known: dict[Key, tuple[Planned, Path]] = {
            key: made for key, made in known if other and key not in other._constants
        }
        self._titles: dict[Key, str] = {}
        self._num_titles: Counter[str] = Counter()
        # signature -> the program that runs instead
        self._adopted: dict[str, Planned] = dict(other._adopted) if other else {}
        if recorder is None and setting.plan.cuda_graph:
            recorder = CudaRecorder(engine.world.device)
        self._room = Room(engine, recorder) if recorder is not None else None
        self._watches = can_accumulate(setting.plan)
        self._constants: dict[Key, Constants] = {}  # of programs that read some
        # What a rank's next pipeline stage is cut from: of which call, and its key once captured.
        self._of_stages: tuple[tuple[Any, ...], Captured, Key] | None = None
        declared = setting.plan.dynamic if isinstance(setting.plan.dynamic, Patterns) else {}
        self._lengths: Lengths | None = None
        if lets_sizes_vary(setting.plan) and self._room is None:
            self._lengths = Lengths(self._admits, declared)
            if other is not None and other._lengths is not None:
                self._lengths.learn(other._lengths)
        self.on_bound: Callable[[Bound], None] | None = None  # called with each new one
        # Returns the handles of the hooks of an entry's modules, for keys.
        self.handles: Callable[[Entry], tuple[tuple[int, ...], ...]] = lambda entry: ()
        self._uses = count()
        engine.turns.is_ready, engine.turns.swap = self._are_compiled, self._swap
        self._has_warned = self._has_warned_of_constants = self._has_warned_of_leaks = False

    def state(self, entry: Entry = MODEL) -> ModelState:
        """Return the state of the model that the calls of an entry depend on."""
        found = self._states.get(entry)
        if found is None:
            found = self._states[entry] = ModelState(self._model, entry)
        return found

    def find(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the bound program of a call; compile it if the call is the first of its signature.

        Under a budget, a program is compiled again when the loop turns out to accumulate gradients
        and the program would exceed the budget with them (see `budget`).
        """
        own, key = key, self._serving(key)
        if key in self._constants and self._constants[key].have_changed():
            self._forget(key)
        bound = self.bound.get(key)
        if bound is not None:
            bound.last_use = next(self._uses)
            if not (self._watches and bound.program.is_training):
                return bound
        setting, is_beside = self._setting, False
        if self._watches:
            loop = loop_so_far(self._engine, setting.loop)
            is_beside = loop != setting.loop and are_left_over(self._engine, setting.plan)
            setting = replace(setting, loop=setting.loop if is_beside else loop)
        if bound is None or not self._holds(bound.program, setting.loop):
            bound = self._compiled(key, args, kwargs, setting, own)
        if is_beside and bound.program.is_training and not bound.fits_beside_gradients:
            setting = replace(setting, loop=loop)
            if not self._holds(bound.program, loop):
                bound = self._compiled(key, args, kwargs, setting, own)
        bound.last_use = next(self._uses)
        if bound.program.is_training:  # what an evaluation finds says nothing of the loop
            self._setting = setting
        return bound

    def _compiled(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], setting: Setting, own: Key
    ) -> Bound:
        """Compile a call, and tell the other ranks of it."""
        what = f"compiling {key[0].entry.describe(self._model)}"
        with self._engine.world.busy(what), without_dispatch_modes():
            try:
                return self.compile(key, args, kwargs, setting, own)
            except BaseException as error:  # Ctrl-C and sys.exit too: others wait for this
                is_agreed_on = setting.plan.parallel.pipeline > 1  # later, by all stages
                if not (is_agreed_on and isinstance(error, BudgetError)):
                    self._engine.world.report_failure(repr(error))
                raise

    def _serving(self, key: Key) -> Key:
        """Return the key of the program for a call: its own, or that of one for many sizes."""
        if self._lengths is None or key in self.bound or self._is_adopted(key):
            return key
        while (found := self._lengths.key_of(key)) != key:
            if found in self.bound:
                return found
            if found in self.known and (self.known[found][1] / "schedule.py").is_file():
                return found
            self._lengths.forget(found)  # it was evicted: perhaps another one serves the call
        return key

    def _is_adopted(self, key: Key) -> bool:
        return bool(self._adopted) and (
            key in self.known and self.known[key][0].signature in self._adopted
        )

    def _admits(self, key: Key, sizes: Mapping[str, int]) -> bool:
        """Return whether a program meets its budget at sizes that it serves.

        Adopted programs are not checked.
        """
        if key not in self.known:
            return True
        program, _ = self.known[key]
        is_bounded = program.plan.memory_budget is not None and program.is_training
        if not is_bounded or program.signature in self._adopted:
            return True
        hints = program.sizes.hints
        is_smaller = all(size <= hints[name] for name, size in sizes.items())
        return is_smaller or fits(with_sizes(program, sizes))

    def _holds(self, program: Planned, loop: Loop) -> bool:
        """Return whether a program stays within its budget in a loop; if so, record the loop.

        Adopted programs are not checked.
        """
        if program.signature not in self._adopted:
            return holds_in(program, loop)
        if calls_of(program) < loop.accumulation:
            program.loop = loop_of(program, loop)
        return True

    @paused_collector()
    def compile(
        self,
        key: Key,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        setting: Setting | None = None,
        own: Key | None = None,
    ) -> Bound:
        """Compile a call, write the directory, and bind it in place of the call's earlier program.

        own: the key of the call itself, if `key` is that of a program for many sizes.

        Raises:
            BudgetError: nothing meets the budget; the call's earlier program stays.
        """
        if key not in self.bound:
            self._make_room(key)
            if key in self.known and (self.known[key][1] / "schedule.py").is_file():
                return self._bind(key)
        others = [b.slots for k, b in self.bound.items() if k != key]
        setting = replace(setting or self._setting, pool=joined(others))
        first, size = self._setting.position, setting.plan.parallel.pipeline
        setting = replace(setting, position=first + key[2] * size)
        kind = "training" if torch.is_grad_enabled() else "inference"
        what = f"capturing and scheduling {key[0].entry.describe(self._model)} ({kind})"
        with Wait(what) as self._wait:
            captured, made, key = self._scheduled(key, args, kwargs, setting, own)
        if made.sizes and self._lengths is not None:
            call = trees.Call.of(self._model, args, kwargs)
            own, key = key, self._lengths.serve(key, call, made.sizes)
            if own in self._constants:
                self._constants[key] = self._constants.pop(own)
        bound = self._install(key, made)
        for _ in range(CORRECTIONS):
            excess = excess_bytes(bound.program)
            if not excess or bound.program.signature in self._adopted:
                break
            setting = replace(setting, margin_bytes=margin_for(bound.program, excess))
            try:
                made = self._planned(captured, setting)
            except BudgetError:  # there is no smaller one: the warning gives the excess
                break
            bound = self._install(key, made)
        warn_of_regions(bound.program)
        if made.sizes:
            self._give_up_served(key)
        return bound

    def _scheduled(
        self,
        key: Key,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        setting: Setting,
        own: Key | None,
    ) -> tuple[Captured, Planned, Key]:
        """Capture a call and schedule it, with sizes that vary if one program can have them."""
        captured, key = self._capture_once(args, kwargs, setting, own or key)
        try:
            return captured, self._planned(captured, setting), key
        except Exception as error:
            if not captured.sizes:
                raise
            call, symbols = trees.Call.of(self._model, args, kwargs), captured.sizes.symbols
            self._fix(key, call, symbols)
            fixed = key
            captured, key = self._capture(args, kwargs, setting, key)
            made = self._planned(captured, setting)  # if no budget suffices, this says so
            self._warn_of_fixed(fixed, symbols, error)
            return captured, made, key

    def _give_up_served(self, key: Key) -> None:
        """Evict the programs whose calls the program of this key serves from now on."""
        assert self._lengths is not None, "a program has sizes that vary under dynamic='off'"
        for other in {*self.bound, *self.known} - {key}:
            if not self._is_adopted(other) and self._lengths.is_served_by(other, key):
                if other in self.bound:
                    self._give_up(other)
                self.known.pop(other, None)
                self._constants.pop(other, None)
                self._lengths.forget(other)

    def _install(self, key: Key, made: Planned) -> Bound:
        """Write a program's directory and bind it in place of the call's earlier program."""
        if key in self.bound:
            self._give_up(key)
        directory = made.directory or write_to_cache(made)
        log.info("%s: program %s for world %d", made.model_name, directory, made.world_size)
        self.known[key] = made, directory
        return self._bind(key)

    def _make_room(self, key: Key) -> None:
        """Evict the least recently used programs, so that one more stays within the plan's limit.

        Warn once about what varies from call to call.
        """
        entry, limit = key[0].entry, self._setting.plan.max_programs
        bound = {k: b for k, b in self.bound.items() if (k[0].entry, k[2]) == (entry, key[2])}
        if len(bound) < limit:
            return
        if not self._has_warned:
            self._has_warned = True
            before, state = reversed(bound), self.state(entry)  # of similar ones, the latest
            said = [describe_difference(key[0], other[0], state) for other in before]
            varies = min(said, key=lambda text: text.count(";")).replace("nothing", "module hooks")
            log.warning(
                "%s needs more programs than Plan.max_programs = %d allows. The latest call "
                "differs from the most similar one in %s. From now on, a further program replaces "
                "the least recently used one, which is bound again when its call comes back. Let "
                "what varies take few values (pad inputs to a few shapes), or raise "
                "max_programs.%s",
                entry.describe(self._model), limit, varies, _way_to_generate(key),
            )  # fmt: skip
        used = sorted(bound, key=lambda k: bound[k].last_use)
        self._give_up(*used[: len(used) - limit + 1])

    def _give_up(self, *keys: Key) -> None:
        """Unbind programs, and free their slots, files, recordings and loaded regions.

        A call whose forward has run keeps its program, which takes its slots again for backward.
        """
        engine = self._engine
        for key in keys:
            bound = self.bound.pop(key)
            bound.executable.slots = bound.slots.sizes
            if bound.executable.swap is not None:
                bound.executable.swap.drop()
            engine.values.forget(written_out(bound.program))
        pool = joined(b.slots for b in self.bound.values())
        if pool != Pool(engine.slots.sizes, engine.forward_slots):
            engine.forget_slots()
            engine.reserve(pool.sizes, pool.stay)
            for each in self.bound.values():
                each.program.pool = pool

    def _forget(self, key: Key) -> None:
        """Drop a program that has old values of tensors baked in."""
        del self._constants[key]
        if not self._has_warned_of_constants:
            self._has_warned_of_constants = True
            log.warning(
                "%s: a program depends on the values of a tensor that was changed in place. It is "
                "captured again each time. If forward only computes with the tensor, register it "
                "with register_buffer. If control flow depends on it, pass the decision as an "
                "argument.",
                key[0].entry.describe(self._model),
            )
        if key in self.bound:
            self._give_up(key)
        self.known.pop(key, None)

    def _capture_once(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], setting: Setting, key: Key
    ) -> tuple[Captured, Key]:
        """Capture a call, once for all pipeline stages that this rank has of it."""
        last = setting.plan.parallel.interleave - 1
        if key[2] and self._of_stages is not None and self._of_stages[0] == key[:2]:
            _, captured, (signature, handles, _) = self._of_stages
            found = captured, (signature, handles, key[2])
        else:
            found = self._capture(args, kwargs, setting, key)
        self._of_stages = (key[:2], *found) if key[2] < last else None
        return found

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], setting: Setting, key: Key
    ) -> tuple[Captured, Key]:
        """Capture a call; return its program, and the key of the next call like it.

        The key differs from `key` if forward has changed settings that are part of it.
        """
        for name, param in self._engine.store.params.items():
            check_summable(name, param)  # it may have been frozen when it was sharded
        entry, plan, device = key[0].entry, setting.plan, self._engine.world.device
        name, state = entry.describe(self._model), self.state(entry)
        if plan.kernels != "aten" and not starts_on_aten(plan, device.type):
            prepare_regions(device)
        read: list[Tensor] = []
        left: list[Change] = []
        options = capture_options(plan)
        if plan.parallel.pipeline > 1 and torch.is_grad_enabled():
            options["outputs"] = "loss"  # the rest stays on the stage that computes it
        if not entry.is_model:
            options |= {"differentiate": "all", "outputs": "all"}
        captured = self._captured(
            args, kwargs, key, device=device, constants=read, changes=left, **options
        )
        with original(self._model):
            for change in left:
                change.apply(self._model)
        if unread := tuple(change for change in left if not change.is_read):
            state.leave_out((change.path, change.name) for change in unread)
            captured = replace(captured, calling=replace(captured.calling, left=unread))
        if changed := state.leave_out_changed():
            log.warning(
                "%s: forward, or a hook, changes %s, which is one of its settings. That happens at "
                "capture only, and the values read there are baked into the program. Keep a value "
                "that changes from call to call in a buffer, or pass it as an argument.",
                name, ", ".join(changed),
            )  # fmt: skip
        if (leaked := state.leaked()) and not self._has_warned_of_leaks:
            self._has_warned_of_leaks = True
            log.warning(
                "%s: forward, or a hook, keeps tensors in %s. It did so while it was captured, "
                "so they have no values, and no later call sets them. Return them from forward.",
                name, ", ".join(leaked),
            )  # fmt: skip
        *_, attributes = state.read()
        handles = self.handles(entry) if left else key[1]
        key = key[0]._replace(attributes=attributes), handles, key[2]
        if constants := Constants(read, [*map(own_buffers, self._model.modules())]):
            self._constants[key] = constants
        if self._engine.world.size > 1:
            captured.captured = describe_graph(captured)
        return captured, key

    def _captured(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, **options: Any
    ) -> Captured:
        """Capture a call, with symbols for the sizes that vary."""
        entry = key[0].entry
        take = functools.partial(capture, self._model, args, kwargs, entry=entry, **options)
        if self._lengths is None or entry.is_parameters:
            return take()
        call = trees.Call.of(entry.function(self._model), args, kwargs)
        varying = self._lengths.varying(key, call)
        if entry.is_model and not self.known:  # the first call
            for name, instead in self._lengths.undeclared(call).items():
                log.warning(
                    "%s: Plan.dynamic names %s, which this call does not have%s",
                    entry.describe(self._model), name, instead,
                )  # fmt: skip
        if not varying:
            return take()
        dims = few([str(dim) for symbol in varying for dim in symbol.dims])
        self._wait.what += f", once for all values of {dims}"
        try:
            captured = take(varying=varying)
        except Exception as error:  # noqa: BLE001 - raised again without symbols
            captured = take()
            self._fix(key, call, varying)
            self._warn_of_fixed(key, varying, error)
            return captured
        free = {symbol.name for symbol in captured.sizes.symbols}
        if fixed := [symbol for symbol in varying if symbol.name not in free]:
            self._fix(key, call, fixed)
            why = "control flow, or a number computed from it, needs its value"
            self._warn_of_fixed(key, fixed, why)
        return captured

    def _fix(self, key: Key, call: trees.Call, symbols: Sequence[Symbol]) -> None:
        """Compile one program per value of these sizes from now on."""
        assert self._lengths is not None, "no size varies under dynamic='off'"
        self._lengths.fix(key, call, symbols)

    def _warn_of_fixed(self, key: Key, symbols: Sequence[Symbol], why: str | Exception) -> None:
        log.warning(
            "%s: %s cannot vary within one program (%s). Each value is compiled separately.%s",
            key[0].entry.describe(self._model),
            few([str(dim) for symbol in symbols for dim in symbol.dims]),
            str(why).partition("\n")[0] or type(why).__name__,
            _way_to_generate(key),
        )

    def _planned(self, captured: Captured, setting: Setting) -> Planned:
        """Run the passes on a captured call, unless a program was adopted for it."""
        program = run(captured, setting, proof=Proof.END)
        return self._instead_of(program) if program.signature in self._adopted else program

    def adopt(self, program: Planned, allow_changed_math: bool) -> Planned:
        """Verify a program, and let it take over the calls of its signature."""
        if allow_changed_math:
            program = replace(program, reference=Unproved.GIVEN_UP)
        verify(program)
        check_fits(program, self._engine.layout, self._engine.world.size)
        for compiled, _ in self.known.values():
            if compiled.signature == program.signature:
                check_wires(program, compiled)
        self._adopted[program.signature] = program
        for key, (compiled, _) in list(self.known.items()):
            if compiled.signature == program.signature:
                mine = self._instead_of(compiled)
                self.known[key] = mine, mine.directory or write_to_cache(mine)
                if key in self.bound:  # its next call binds it again
                    self._give_up(key)
        return program

    def drop(self) -> None:
        """Forget the programs of the model's own functions, as an attribute of it has changed.

        Programs of submodules and of parameters stay.
        """

        def is_own(key: Key) -> bool:
            return not (key[0].entry.path or key[0].entry.is_parameters)

        self._give_up(*filter(is_own, self.bound))
        self.known = {key: made for key, made in self.known.items() if not is_own(key)}
        for key in filter(is_own, list(self._constants)):
            del self._constants[key]

    def _instead_of(self, compiled: Planned) -> Planned:
        """Return the adopted program, with the call convention of the compiled one."""
        adopted = self._adopted[compiled.signature]
        check_wires(adopted, compiled)
        return replace(adopted, calling=compiled.calling, captured=describe_graph(adopted))

    def _bind(self, key: Key) -> Bound:
        """Import the emitted schedule and bind it to this model's shards and buffers."""
        program, directory = self.known.pop(key)
        if program.directory is None and not (directory / "schedule.py").exists():  # it was pruned
            directory = write_to_cache(program)
        self.known[key] = program, directory  # the latest
        alike = [k for k in self.known if (k[0].entry, k[2]) == (key[0].entry, key[2])]
        spare = [k for k in alike if k not in self.bound and k != key]
        for old in spare[: max(0, len(alike) - KEPT * self._setting.plan.max_programs)]:
            del self.known[old]
        slots = slots_of(program)
        self._reserve(program, slots)
        self._engine.reserve_values(written_out(program), program.model_name)
        later: list[Later] = []
        starts = starts_on_aten(program.plan, self._engine.world.device.type)
        with compiled_later() if starts else contextlib.nullcontext(later) as later:
            module = import_file(directory / "schedule.py", f"zerofx_program_{directory.name}")
        backward = module.backward if program.is_training else None
        made, forward = contract(program, describe_sizes(key[0])), module.forward
        self._engine.world.publish(made.graph[8:].hex(), program.captured)
        if self._room is not None:
            stored = (
                _buckets(program, BACKWARD, lambda op: op.kind is Kind.STORE)
                if program.is_training
                else []
            )
            refreshed = _buckets(program, FORWARD, lambda op: op.is_gather and op.stays)
            recorded = Recorded(self._room, made, (forward, backward), refreshed, stored)
            forward, backward = recorded.forward, recorded.backward
        buffers, blame = self._buffers_of(program), Blame(program, directory)
        executable = Executable(forward, backward, made, self._engine, buffers, blame)
        executable.is_auto, title = starts, self._title(key)
        if later:
            parallel, busy = program.plan.parallel, self._engine.world.busy
            compares = parallel.tensor == parallel.context == 1
            executable.swap = Swap(later[0], (forward, backward), title, busy, compares)
        self.bound[key] = bound = Bound(program, executable, slots, self._model)
        if self.on_bound is not None:
            self.on_bound(bound)
        return bound

    # -- Plan(kernels="auto") ---------------------------------------------------------------------
    @property
    def kernels(self) -> list[Running]:
        """What the regions of each bound program run as."""
        found = []
        for key, bound in self.bound.items():
            run, program = bound.executable, bound.program
            is_plain = run.swap is not None or program.plan.kernels == "aten" or program.plan.debug
            state = "" if run.swap is None else run.swap.state
            timed = sum(1 for region in run.contested.values() if not region.is_chosen)
            if timed:
                state = f"{timed} of {len(run.contested)} regions still timed in both forms"
            on_aten = tuple(name for name, region in run.contested.items() if region.is_aten)
            form = "aten" if is_plain else "inductor"
            found.append(Running(self._title(key), form, run.since, state, on_aten))
        return found

    def _title(self, key: Key) -> str:
        """Name a program: `GPT (training)`, and later ones `GPT (training, program 2)`."""
        if key not in self._titles:
            program, _ = self.known[key]
            kind = f"{program.model_name} ({'training' if program.is_training else 'inference'}"
            self._num_titles[kind] += 1
            number = self._num_titles[kind]
            self._titles = {k: title for k, title in self._titles.items() if k in self.known}
            self._titles[key] = f"{kind}, program {number})" if number > 1 else f"{kind})"
        return self._titles[key]

    def _are_compiled(self) -> bool:
        """Tell whether each program that is bound has its compiled regions, or could swap them."""
        runs = [bound.executable for bound in self.bound.values()]
        return all(run.form().endswith("=ready") for run in runs)

    def _swap(self) -> None:
        for bound in self.bound.values():
            if bound.executable.swap is not None:
                bound.executable.compiled()

    def _reserve(self, program: Planned, slots: Pool) -> None:
        """Allocate a program's slots; the memory of other programs then counts them too."""
        engine = self._engine
        engine.reserve(slots.sizes, slots.stay)
        program.pool = pool = Pool(engine.slots.sizes, engine.forward_slots)
        others = [b.program for b in self.bound.values() if b.program.pool != pool]
        for other in others:
            other.pool = pool
        warn_of_slots(others)

    def _buffers_of(self, program: Planned) -> Callable[[], dict[str, Tensor]]:
        owners: list[tuple[str, dict[str, Any], str]] = []
        for name in program.buffers:
            path, _, key = name.rpartition(".")
            owners.append((name, own_buffers(self._model.get_submodule(path)), key))
        return lambda: {name: held[key] for name, held, key in owners}


def _way_to_generate(key: Key) -> str:
    """Return, for a call without gradients, how to run many lengths without a program for each."""
    if key[0].takes_gradients:
        return ""
    return " To generate or to sample, call it within zerofx.whole(model), which compiles nothing."


def _buckets(program: Planned, graph: str, test: Callable[[OpSpec], bool]) -> list[int]:
    """Return the buckets for which a graph calls an op that passes a test."""
    called = [(n, spec_of(n)) for n in program.graph(graph).nodes]
    return [bucket_of(n) for n, spec in called if spec is not None and test(spec)]


def load_directory(directory: str | os.PathLike[str], allow_changed_math: bool = False) -> Planned:
    """Load an emitted directory with the plan that it contains (`zerofx.load_program`)."""
    if not isinstance(directory, (str, os.PathLike)):
        raise ArgumentError(
            f"a program was expected, but this is a {type(directory).__name__}. Give the directory "
            "that program.emit(directory) wrote."
        )
    return load(directory, allow_changed_math)
