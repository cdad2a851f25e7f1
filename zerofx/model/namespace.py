"""Namespace: everything that zerofx adds to a model, as `model.zerofx`."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerofx.capture import guard
from zerofx.capture.call import IgnoredPlace, flatten, ignored_of, unflatten, with_ignored
from zerofx.capture.explain import shorten
from zerofx.capture.formats import cast_modules, compute_dtypes
from zerofx.capture.original import MODEL, Entry, Original, original
from zerofx.capture.signature import signature_key
from zerofx.capture.units import find_units
from zerofx.comm.world import World
from zerofx.compat.autograd import is_transforming
from zerofx.compat.callers import reducer_of
from zerofx.compat.modules import (
    call_uncompiled,
    global_module_hooks,
    handles_in,
    hooks_of,
    intercept,
    own_buffers,
)
from zerofx.errors import (
    BudgetError,
    CaptureError,
    GradientError,
    PlanError,
    ShardError,
    as_sentence,
)
from zerofx.ir.program import Planned
from zerofx.layout.buckets import Layout
from zerofx.model import islands
from zerofx.model.full_state import sharded_state_of
from zerofx.model.islands import Island
from zerofx.model.programs import Bound, Programs, ProgramTable, load_directory
from zerofx.passes.order import Setting
from zerofx.passes.placement import compute_dtype, module_dtypes
from zerofx.plan.parts import LossScale, Parallel
from zerofx.plan.plan import Plan
from zerofx.policy import reduction
from zerofx.policy.schedules import num_micro_batches
from zerofx.runtime.capacity import Dropped
from zerofx.runtime.engine import Engine
from zerofx.runtime.loss_scale import LossScaler, ScaleRule
from zerofx.runtime.regions.swap import Running

if TYPE_CHECKING:
    from zerofx.model.module import CompiledModule

# -- Detect module hooks added or removed after compile: programs have captured them ---------------


class HookWatch:
    """Finds the hooks of a module tree, at the cost of one comparison per call if there are none.

    Every new hook takes a handle from one counter, so the tree is searched only if that counter
    moved. Known hooks are checked each time, since a removal leaves no trace. Handles are unique
    within a process and a deep copy keeps them, so that equal handles mean equal hooks there too.

    Hooks of all modules (`register_module_forward_hook` and similar) count as each module's. Of the
    model's own hooks, only those that existed before compilation count (`Original`).
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._dicts = [hooks for m in modules.values() for hooks in hooks_of(m)]
        self._dicts += global_module_hooks()
        self._seen = -1
        self._occupied: list[dict] = []

    def handles(self) -> tuple[tuple[int, ...], ...]:
        """Return the handles of all hooks, in the order of their calls; () if there are none."""
        if RemovableHandle.next_id != self._seen:
            self._occupied = [d for d in self._dicts if d]
            self._seen = RemovableHandle.next_id
        if not self._occupied:
            return ()
        return tuple(filter(None, map(handles_in, self._occupied)))


# -- `to`, `half`, `cuda` and similar conversions of a compiled model ---------------------------


def check_shards_stay(engine: Engine, fn: Callable[[Tensor], Tensor]) -> None:
    """Refuse a conversion that would give the shards another dtype or device."""
    for bucket in engine.layout.buckets:
        before = torch.empty(0, dtype=bucket.dtype, device=engine.world.device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise ShardError(
                f"a compiled model holds {before.dtype} shards on {before.device}, and moving it "
                f"to {after.dtype} on {after.device} would need another layout. Convert the model "
                "before zerofx.compile, or pass device=."
            )


def convert_buffers(model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Convert buffers to another dtype; a buffer held in several places stays one tensor.

    Raises:
        ShardError: a buffer would move to another device; nothing was converted.
    """
    made: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        for key, buffer in own_buffers(module).items():
            if buffer is None:
                continue
            after = fn(torch.empty(0, dtype=buffer.dtype, device=buffer.device))
            if after.device != buffer.device:
                raise ShardError(
                    f"{path or 'the model'}: buffer {key} is on {buffer.device} and cannot move to "
                    f"{after.device}. Pass device= to zerofx.compile."
                )
            if after.dtype != buffer.dtype:
                made.setdefault(id(buffer), fn(buffer))
    for module in model.modules():
        for key, buffer in own_buffers(module).items():
            own_buffers(module)[key] = made.get(id(buffer), buffer)


# -- From a plan's loss scale to the scaler that runs ----------------------------------------------


def make_scaler(plan: Plan, world: World) -> LossScaler | None:
    """Return the scaler that a plan requires, or None if nothing is scaled here."""
    asked = plan.precision.loss_scale
    if not plan.precision.is_scaled:
        return None
    assert isinstance(asked, LossScale)
    if world.other_axes:
        raise PlanError(
            "Plan(precision='fp16') skips a step whose gradients overflow. The ranks along the "
            f"mesh axes {world.other_axes} would not skip it, since the model is compiled over a "
            "slice of that mesh. Compute in bf16."
        )
    return LossScaler(rule_of(asked), world.device)


def rule_of(asked: LossScale) -> ScaleRule:
    """Convert a plan's loss scale to a rule of the runtime, which does not know plans."""
    return ScaleRule(
        initial=asked.initial,
        growth_interval=asked.growth_interval if asked.dynamic else 0,
        growth=asked.growth,
        backoff=asked.backoff,
        minimum=asked.minimum,
        hysteresis=asked.hysteresis,
    )


# -- Calls that differ only in sizes and values ----------------------------------------------------


def form_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the modes and the kinds of arguments of a call, without its sizes and values."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, _form(args), tuple([(k, _form(v)) for k, v in kwargs.items()])


def _form(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return kind, value.ndim, value.dtype, value.requires_grad
    if kind in (tuple, list):
        return kind, frozenset(map(_form, value))
    if kind is dict:
        return kind, frozenset([(str(k), _form(v)) for k, v in value.items()])
    return kind


# -- Division into micro-batches -------------------------------------------------------------------


def micro_batches(
    args: tuple[Any, ...], kwargs: dict[str, Any], parallel: Parallel
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each micro-batch of a call, in order.

    Tensors whose dimension 0 is as long as that of the first tensor are cut along it. All other
    tensors and values are passed to every micro-batch.

    Raises:
        PlanError: the batch cannot be cut into as many as the plan requests; names both numbers.
    """
    leaves, spec = flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    batch = len(tensors[0]) if tensors else 0
    num = num_micro_batches(parallel.micro_batches, batch, parallel.pipeline, parallel.interleave)
    if not num and parallel.micro_batches == "auto" and batch:
        raise PlanError(
            f"Plan.parallel.schedule = 'interleaved' takes a multiple of pipeline = "
            f"{parallel.pipeline} micro-batches, and none divides the batch of {batch} samples "
            "(dimension 0 of the first tensor among the arguments). Give a batch that is such a "
            "multiple."
        )
    if not num:
        raise PlanError(
            f"Plan.parallel.micro_batches = {parallel.micro_batches!r} does not divide the batch "
            f"of {batch} samples (dimension 0 of the first tensor among the arguments). Give a "
            "batch that it divides, or leave micro_batches out."
        )

    def piece(leaf: Any, i: int) -> Any:
        is_cut = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == batch
        return leaf[i * batch // num : (i + 1) * batch // num] if is_cut else leaf

    return [unflatten([piece(leaf, i) for leaf in leaves], spec) for i in range(num)]


def _what_is_cut(args: tuple[Any, ...], kwargs: dict[str, Any], num: int) -> str:
    """Describe the tensors of a call that are cut into micro-batches, for an error of theirs."""
    leaves = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.ndim]
    shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves if len(leaf) == len(leaves[0]))
    return (
        f"Plan.parallel.pipeline runs the model on {num} micro-batches, for which all tensors as "
        f"long as the first one are cut along dimension 0: those of {shapes}. If dimension 0 of "
        "one of them is not the samples, register it as a buffer, or give it a first dimension of "
        "1."
    )


# -- The namespace `model.zerofx` ------------------------------------------------------


class Namespace:
    """Attributes that zerofx adds to a model, as `model.zerofx`: its plan, programs and state.

    original: the model before compilation; `original.kind` is the user's class.
    setting, engine, table: the objects that run it.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, engine: Engine, other: ProgramTable | None = None
    ) -> None:
        self.model = cast("CompiledModule", model)
        self.setting, self.engine = setting, engine
        self.table = ProgramTable(model, setting, engine, other)
        self._hooks = {MODEL: HookWatch(MODEL.modules(model))}  # before its hooks are moved away
        self._islands: dict[Entry, dict[Any, Island]] = {}  # by the form of their calls
        self._named = islands.named_islands(model, self.plan.islands)
        self._covered: list[str] = []  # modules whose calls run eagerly
        self._ignored: dict[Entry, tuple[IgnoredPlace, ...]] = {}
        self.table.handles = self._handles
        self.original = Original(model)
        engine.turns.buffers = lambda: dict(model.named_buffers())
        engine.double_backward = lambda: islands.double_backward(model, self.plan)

    def __repr__(self) -> str:
        found, world = self.programs, self.world
        counts = [f"{len(found)} program{'s' * (len(found) != 1)}"]
        if eager := self.islands:
            counts.append(f"{len(eager)} island{'s' * (len(eager) != 1)}")
        return f"zerofx(stage={self.plan.stage}, world={world.size}, {', '.join(counts)})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ShardError(
            "this would copy or pickle what belongs to a compiled model: a part of it, or the "
            "model within zerofx.whole. Copy the whole model outside of the block (copy.deepcopy "
            "gives a second compiled model), or load its state_dict into a plain one."
        )

    # -- properties ---------------------------------------------------------------------------
    @property
    def plan(self) -> Plan:
        return self.setting.plan

    @property
    def world(self) -> World:
        """The ranks that the model is compiled over."""
        return self.engine.world

    @property
    def data_rank(self) -> int:
        """This rank's share of the samples: the `rank` argument of a DistributedSampler.

        Ranks that share the layers of a model have the same value, and need the same samples.
        """
        return self.engine.world.data_rank

    @property
    def data_world(self) -> int:
        """The number of ranks that divide the samples: a DistributedSampler's `num_replicas`."""
        return self.engine.world.data_size

    @property
    def device(self) -> torch.device:
        """The device that computes with the shards."""
        return self.engine.world.device

    @property
    def layout(self) -> Layout:
        """The assignment of parameters to buckets."""
        return self.engine.layout

    @property
    def programs(self) -> list[Planned]:
        """The programs that are ready to run, one per signature, in the order of first calls.

        Empty before the first call, and at most Plan.max_programs long. A program that was evicted
        and whose call has come back is last.
        """
        return Programs(b.program for b in self.table.bound.values())

    @property
    def kernels(self) -> list[Running]:
        """What the regions of each program run as, in the order of `programs`, and since when.

        Under Plan(kernels="auto") a program begins on ATen: `since` is its first call that ran
        compiled regions, counted from 1, the same on all ranks.
        """
        return self.table.kernels

    @property
    def islands(self) -> list[Island]:
        """The functions of the model that run eagerly, with the reason, innermost first.

        Their own computation is not proved; the programs that they call are.
        """
        return [next(iter(by_form.values())) for by_form in self._islands.values()]

    @property
    def loss_scale(self) -> LossScaler | None:
        """The scale of fp16 gradients and the number of skipped steps; None without scaling."""
        return self.engine.gradients.scaler

    @property
    def dropped_tokens(self) -> dict[str, Dropped]:
        """The rows of this rank that got no slot of their expert, and of how many, per layer.

        Those of the last forward with Plan(parallel={"experts": True, "capacity": ...}); a token
        has one row for each of its experts. Reading it waits for the device.
        """
        return self.engine.drops.read()

    # -- calls --------------------------------------------------------------------------------
    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program of a call; the first call of each signature compiles it.

        A function that cannot be captured runs as an island.
        """
        if not self.original.is_whole_in_part:
            self.engine.store.check_bindings()
        self._check_caller()
        name = entry.describe(self.model)
        guard.check_foreign_call(name, self.engine.store.ledger, entry.is_model)
        if self.plan.parallel.pipeline > 1:
            return self._run_pipeline(entry, args, kwargs)
        known = self._islands.get(entry)
        if known is not None and (island := known.get(self._form(entry, args, kwargs))) is not None:
            return islands.run(self, island, args, kwargs)
        try:
            program, taken = self._program_of(entry, args, kwargs)
        except Exception as error:
            shorten(error)
            is_refusal = isinstance(error, CaptureError) and not error.is_final
            if not is_refusal or not self._may_be_island(entry):
                raise error  # not a bare raise: Python 3.10 would use an earlier traceback
            refused = cast("CaptureError", error)
        else:
            return program(args, taken)
        form, island = self._form(entry, args, kwargs), islands.island_of(self, entry, refused)
        try:
            result = islands.run(self, island, args, kwargs)
        except Exception as error:
            # A mistake in the call, not in the capture.
            if type(error) is type(refused.torch_error):
                raise refused from None
            raise
        # Tell the user only now that eager PyTorch has run it successfully.
        if entry not in self._islands and not self.is_named(entry.path):
            islands.say(self, island)
        self._islands.setdefault(entry, {})[form] = island
        return result

    def _check_caller(self) -> None:
        """Raise inside wrappers, transformations and tracers, which a compiled call cannot obey."""
        if wrapper := reducer_of(self.engine.store.params.values()):
            raise self.is_parallel(wrapper)
        if is_transforming():
            raise GradientError(
                f"{self.original.kind.__name__}: grad, jvp and vmap of torch.func cannot look "
                "inside a compiled call. Use them inside forward, which is captured with them, or "
                "on the uncompiled model."
            )
        if torch.jit.is_tracing():
            raise CaptureError(
                f"{self.original.kind.__name__}: torch.jit.trace, which some exporters use, cannot "
                "look inside a compiled call. Trace the model inside `with zerofx.whole(model):`, "
                "where it is the uncompiled one with its whole parameters."
            )

    def _program_of(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Return the program of a call, and the keyword arguments that it takes.

        Raises:
            CaptureError: there is none, or the plan lets this function run eagerly.
        """
        if (reason := self._named.get(entry.path)) and not entry.is_parameters:
            raise CaptureError(as_sentence(reason))
        taken = with_ignored(kwargs, self._ignored_of(entry))
        key = signature_key(self.table.state(entry), args, taken), self._handles(entry), 0
        return self.table.find(key, args, taken), taken

    def _run_pipeline(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a model that is divided into pipeline stages, one micro-batch at a time.

        Without gradients, the whole batch is one micro-batch.
        """
        if entry != MODEL:
            raise PlanError(
                f"{entry.describe(self.model)} is called by itself, but with "
                f"Plan.parallel.pipeline = {self.plan.parallel.pipeline} a rank has only some of "
                "the layers. Call the model."
            )
        pieces = [(args, kwargs)]
        if torch.is_grad_enabled():
            pieces = micro_batches(args, kwargs, self.plan.parallel)
        ignored = self._ignored_of(entry)
        pieces = [(args, with_ignored(kwargs, ignored)) for args, kwargs in pieces]
        state, turns = self.table.state(entry), range(self.plan.parallel.interleave)
        stages: list[Bound] = []
        failure: BudgetError | None = None
        try:
            stages += [
                self.table.find(
                    (signature_key(state, *pieces[0]), self._handles(entry), turn), *pieces[0]
                )
                for turn in turns
            ]
        except BudgetError as error:
            failure = error
        except Exception as error:
            shorten(error)
            if isinstance(error, CaptureError) and len(pieces) > 1:
                raise CaptureError(f"{error}\n{_what_is_cut(args, kwargs, len(pieces))}") from error
            raise error  # not a bare raise, which Python 3.10 gives the traceback from before
        if self.plan.memory_budget is not None:
            self._agree_on_budget(failure)
        return stages[0].run(pieces, stages)

    def _agree_on_budget(self, failure: BudgetError | None) -> None:
        """Raise on all ranks if the program of a pipeline stage does not meet the budget.

        failure: the error of this rank's stage. Each stage has a program of its own, and one may
            fit where another does not.

        Raises:
            BudgetError: the error of the stage that needs the most.
        """
        mine = "" if failure is None else f"{failure.least_bytes} {failure}".replace(";", ",")
        what = f"budget of {self.original.kind.__name__}'s pipeline stages"
        said = self.world.agree_but_for(what, "", f"unmet={mine}")
        unmet = [each.partition("=")[2].partition(" ") for each in said]
        failed = [(int(needed), text) for needed, _, text in unmet if needed]
        if failed:
            needed, text = max(failed)
            raise BudgetError(text, needed) from failure

    def _ignored_of(self, entry: Entry) -> tuple[IgnoredPlace, ...]:
        """Return the parameters that the programs of an entry take as inputs."""
        if not (names := self.engine.store.ignored):
            return ()
        found = self._ignored.get(entry)
        if found is None:
            found = self._ignored[entry] = ignored_of(self.model, names, entry)
        return found

    def _handles(self, entry: Entry) -> tuple[tuple[int, ...], ...]:
        """Return the handles of the hooks of an entry's modules."""
        watch = self._hooks.get(entry)
        if watch is None:
            watch = self._hooks[entry] = HookWatch(entry.modules(self.model))
        return watch.handles()

    def _form(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a key that tells calls apart of which one may be an island and another may not."""
        return entry.module(self.model).training, form_of(args, kwargs)

    def _may_be_island(self, entry: Entry) -> bool:
        plan = self.plan
        is_possible = plan.update == "step" and not plan.cuda_graph
        return plan.islands != "refuse" and is_possible and not entry.is_parameters

    def watch_calls(self) -> None:
        """Redirect calls of submodules with parameters to `enter`."""
        for path, module in self.model.named_modules():
            if path and next(module.parameters(), None) is not None:
                intercept(module, functools.partial(self.enter, path, weakref.ref(module)))

    def enter(self, path: str, module: weakref.ref[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
        """Call a submodule: eagerly inside captured or eager code, otherwise its program.

        path: its name at compile. When it runs eagerly, it may have another name by now: merged
            adapters leave the layer inside them in their place.
        """
        if self.original.is_captured or self.is_covered(path):
            if self.casts and not self.original.is_captured:
                args, kwargs = islands.cast_arguments(args, kwargs, self.casts.get(path))
            called = module()
            assert called is not None, "a module was called after it was freed"
            return call_uncompiled(called, args, kwargs)
        return self.call(Entry(path), args, kwargs)

    def is_named(self, path: str) -> bool:
        """Return whether the plan lets a submodule run eagerly, by its name or one inside it."""
        return path in self._named

    def is_covered(self, path: str) -> bool:
        """Return whether the parameters of a submodule are whole now, so that it runs eagerly."""
        return any(map(f"{path}.".startswith, self._covered))

    def enter_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the model that reads its parameters, as a program or as an island."""
        if self.original.is_captured or self.is_covered("") or self.original.is_whole_in_part:
            return getattr(self.original.kind, name)(self.model, *args, **kwargs)
        return self.call(Entry("", name), args, kwargs)

    @contextlib.contextmanager
    def passing_through(self, path: str) -> Iterator[None]:
        """Let modules inside one run eagerly, on parameters that are whole there."""
        self._covered.append(f"{path}." if path else "")
        try:
            yield
        finally:
            self._covered.pop()

    @functools.cached_property
    def units(self) -> dict[str, str]:
        """The unit of every parameter, by name."""
        with original(self.model):
            return find_units(self.model, self.plan.units)

    @functools.cached_property
    def casts(self) -> dict[str, torch.dtype]:
        """The dtype of the inputs of modules, for modules that have one of their own."""
        compute, modules = compute_dtype(self.plan.precision), module_dtypes(self.plan.precision)
        if modules is None:
            return {}
        with original(self.model):
            computes = compute_dtypes(self.model, compute, modules)
            return cast_modules(self.model, self.units, computes, compute, modules)

    def adopt(
        self, program: Planned | str | os.PathLike[str], *, allow_changed_math: bool = False
    ) -> Planned:
        """Run a program, such as an emitted directory edited by hand, in place of the compiled one.

        It takes over the calls of its own signature (the same inputs, parameters and captured
        mathematics, as listed in fingerprint.json): calls that are already compiled at once, others
        at their first call. The directory itself is run; later edits need another `adopt`. Every
        rank must adopt the same program. If collectives differ between ranks, the call raises.

        program: the directory, or a Program from `load_program` or `rewrite`.
        allow_changed_math: as in `load_program`.

        Raises:
            ProgramError: it is broken, or was made for other ranks or another layout; nothing
                changed.
        """
        if not isinstance(program, Planned):
            program = load_directory(program, allow_changed_math)
        return self.table.adopt(program, allow_changed_math)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients locally until the first backward outside, which reduces the whole sum.

        At stage 0, `p.grad` is the local sum until then, as under DistributedDataParallel. At stage
        1, it represents the sum: it can be zeroed or set to None (by any `zero_grad`), which drops
        the sum, and every other operation raises. At stages 2 and 3, and if the optimizer is
        offloaded, whole gradients are never held. There each backward reduces into the shards,
        which gives the same sum, and no_sync changes nothing. It also changes nothing with a
        pipeline, which reduces once per call.

        Raises:
            GradientError: the plan updates parameters inside every backward.
        """
        if self.engine.store.updates is not None:
            raise GradientError(
                "no_sync() postpones the reduction of gradients, but Plan(update='in-backward') "
                "updates the parameters inside every backward. Use Plan(update='step') to "
                "accumulate."
            )
        gradients, before = self.engine.gradients, self.engine.gradients.no_sync
        gradients.no_sync = self.plan.parallel.pipeline == 1 and reduction.is_put_off(
            self.engine.layout, self.plan
        )
        try:
            yield
        finally:
            gradients.no_sync = before

    def refresh(self) -> None:
        """Gather every resident parameter again at the next forward; wait for delayed updates."""
        self.engine.store.settle()
        self.engine.forget_resident()

    def sharded_state_dict(self, *, flat: bool = False) -> dict[str, Any]:
        """Return the state for torch.distributed.checkpoint: this rank's shards, and the buffers.

        Tensors share memory with the model, so that `dcp.load` fills it in place. In a saved folder
        they have the model's own names and shapes. Models of any world size and stage, FSDP2 and
        plain modules can load them, and this model can load theirs. On one rank or at stage 0,
        parameters are plain tensors.

        flat: return every parameter as a flat tensor instead, as early versions saved it, to load
            files that `dcp.save(model.sharded_state_dict())` of such a version wrote.
        """
        return sharded_state_of(self.model, flat)

    # -- queries of the model's methods--------------------------------------------------------
    def is_setting(self, name: str) -> bool:
        """Return whether programs may have the value of an attribute baked in.

        False for new attributes, since no capture has read them, and for those that every module
        has.
        """
        is_known = name in vars(self.model) or hasattr(self.original.kind, name)
        is_own = is_known and not hasattr(nn.Module, name)
        return is_own and self.table.state().may_read(name)

    def is_parallel(self, wrapper: str) -> ShardError:
        """Return the error to raise if another wrapper is applied to the model."""
        return ShardError(
            f"{wrapper} is applied to a {self.original.kind.__name__} that zerofx.compile has "
            f"already made data-parallel (stage {self.plan.stage}, {self.world.size} ranks). Drop "
            f"{wrapper}, and train the compiled model as it is."
        )
