"""Capture: one call of a model becomes a Program, on fake tensors."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from zerofx.capture.call import Call, find_ignored, ignored_of, with_ignored
from zerofx.capture.effects import (
    Change,
    HostGenerators,
    is_same,
    refuse_attribute,
    refuse_host_random,
    refuse_mode,
    refuse_rebinding,
)
from zerofx.capture.explain import explained, shorten
from zerofx.capture.formats import cast_modules, compute_dtypes, dtype_at
from zerofx.capture.guard import check_device, check_graph, check_modules, dense_tables
from zerofx.capture.harness import Harness, Results
from zerofx.capture.lines import LineMode, is_raised_by_model
from zerofx.capture.original import MODEL, Entry, original
from zerofx.capture.roles import (
    Names,
    label_nodes,
    label_placeholders,
    label_results,
    loops_over_sets,
    put_in_one_order,
)
from zerofx.capture.seeds import guessed, with_seeds
from zerofx.capture.swap import Meta, StateSwap, annotated
from zerofx.capture.units import find_units
from zerofx.compat.graphs import LazyGraphModule
from zerofx.compat.strides import TrueStrides
from zerofx.compat.tracing import Symbols, new_fake_mode, rerun_on_fakes, trace_joint
from zerofx.errors import CaptureError
from zerofx.ir.meta import OutputInfo, Role, info
from zerofx.ir.names import find_unit_of_module
from zerofx.ir.program import FORWARD, JOINT, Calling, Captured, ParamInfo, Use
from zerofx.ir.settle import settle, settled_results
from zerofx.ir.sizes import NUMBER, Sizes, Symbol
from zerofx.layout.placements import Part
from zerofx.layout.styles import stacks_of, styles_of
from zerofx.plan.fields import Patterns
from zerofx.process import paused_collector

MANY_OPERATORS, MANY_OF_A_LINE = 10_000, 1_000  # with both, a loop is unrolled, not layers
MOST_PROBED = 8  # attribute names; each costs a run on fake tensors


@paused_collector()
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    differentiate: str = "loss",
    outputs: str = "all",
    units: str | Sequence[str] = "auto",
    param_meta: Mapping[str, Meta] | None = None,
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype | None = None,
    constants: list[Tensor] | None = None,
    varying: Sequence[Symbol] = (),
    entry: Entry = MODEL,
    changes: list[Change] | None = None,
    ignored_params: Sequence[str] = (),
    module_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Captured:
    """Capture `model(*args, **kwargs)`, with its backward if anything requires grad.

    Capture runs on fake tensors only: nothing is computed, moved or materialised. The model is left
    exactly as it was, even if this raises. Of a compiled model, the original model is captured.

    param_meta: global (shape, dtype, requires_grad) by name, if the module holds shards.
    device: the device assumed for tensors on meta; the CPU by default.
    compute_dtype: the format in which parameters and inputs of 32 or 16 bits are used (for example
        bf16, for a plan of that precision); by default each in its own.
    constants: receives the tensors whose values are part of the program. Forward reads them, and
        they are neither arguments nor registered; or they are buffers whose values its control flow
        depends on.
    changes: receives the changes that a first call makes to attributes of modules. The program is
        that of the calls that find these values there.
    varying: the sizes for which the program shall serve many values. Control flow on them takes the
        branch that it takes in this call; `Captured.sizes` records the values for which that holds.
    entry: the function of the model to capture instead of its forward.
    ignored_params: name patterns of parameters that the program takes as inputs, as in
        `Plan(ignored_params=...)`.
    module_dtypes: {name pattern: format} of modules that compute in a format other than
        `compute_dtype`.

    Returns:
        The program with its joint graph of forward and backward, for `zerofx.rewrite`.

    Raises:
        CaptureError: the forward cannot become a static graph; the message names the line and the
            fix.

    Example:
        program = zerofx.capture(model, (tokens, targets))
        print(program.dump(level="units"))
    """
    with original(model):
        place = torch.device(device) if device is not None else None
        check_device(place)
        ignored = find_ignored(model, ignored_params)
        check_modules(model, entry, ignored)
        taken = with_ignored(kwargs or {}, ignored_of(model, ignored, entry))
        call = Call.of(entry.function(model), args, taken)
        unit_of_param = find_units(model, units)

        own = {s.name: s.dims[0].read(call.leaves) for s in varying}
        symbols = Symbols(own) if varying else None
        mode = symbols.mode() if symbols is not None else new_fake_mode()
        sizes = symbols.sizes if symbols is not None else {}
        standing = {(d.leaf, d.dim, d.is_stride): sizes[s.name] for s in varying for d in s.dims}
        numbers = {leaf: size for (leaf, dim, _), size in standing.items() if dim == NUMBER}
        fakes = call.fakes(mode, place, standing)
        own_dtypes = Patterns(module_dtypes) if module_dtypes else None
        computes = compute_dtypes(model, compute_dtype, own_dtypes)
        swap = StateSwap(model, mode, place, param_meta, computes, ignored)
        casts = cast_modules(model, unit_of_param, computes, compute_dtype, own_dtypes)
        given_in = dtype_at(entry.path, compute_dtype, own_dtypes)
        tables = dense_tables(entry.modules(model).values())
        with tables, swap.installed(), annotated(model, casts):
            params = describe_params(model, unit_of_param, computes, swap.held_dtypes, swap.parts)
            buffers = canonical_buffers(model)
            harness = Harness(
                model, call, swap, differentiate, outputs, given_in, entry, tuple(numbers),
                {name: computes[name] for name in ignored},
            )  # fmt: skip
            try:
                gm = trace(harness, (*fakes, *numbers.values()), mode, swap, changes)
            except Exception as error:
                shorten(error)
                raise error  # a bare raise would restore the old traceback on Python 3.10
    if constants is not None:
        constants += harness.lines.constants.values()
        constants += mode.known.read.values()
    warn_of_dropped(model, harness.results)
    warn_of_text(model, harness.lines.text_line)

    names = Names(call, harness.results, unit_of_param, buffers, tuple(numbers))
    gm, infos = label(gm, names)
    warn_of_unrolled(model, gm.graph)
    served = Sizes()
    if symbols is not None:
        served = settled(gm, symbols, varying, own)
        results = harness.results
        results.constants = settled_results(results.constants, symbols, served)
    kinds = {type(module): "forward" for module in entry.modules(model).values()}
    kinds[type(entry.module(model))] = entry.method
    if loops_over_sets(kinds):
        put_in_one_order(gm.graph)
    params = with_seeds(model, params, gm.graph)  # it reads sizes, which are numbers from here on
    is_training = any(info.role in (Role.GRAD, Role.INPUT_GRAD) for info in infos)
    graph_name = JOINT if is_training else FORWARD
    return Captured(
        graphs={graph_name: gm},
        outputs={graph_name: infos},
        calling=make_calling(call, harness.results),
        params=params,
        buffers=tuple(dict.fromkeys(buffers.values())),
        model_name=entry.describe(model),
        is_training=is_training,
        compute_dtype=compute_dtype,
        sizes=served,
    )


def settled(
    gm: fx.GraphModule, symbols: Symbols, varying: Sequence[Symbol], own: Mapping[str, int]
) -> Sizes:
    """Replace symbols by sizes; return the values of the symbols that the graph serves.

    Symbols that control flow has fixed to one value are left out. Fake values have the sizes of the
    requested hints or, if the graph does not serve these, the call's own sizes.
    """
    constants = symbols.constants()
    varying = [s for s in varying if s.name not in constants]
    found = Sizes(tuple(varying), symbols.conditions())
    if not found.allow(found.hints):
        found = replace(found, symbols=tuple(replace(s, hint=own[s.name]) for s in varying))
    settle(gm.graph, symbols, found.hints)
    return found


def trace(
    harness: Harness,
    fakes: tuple[Any, ...],
    mode: TrueStrides,
    swap: StateSwap,
    changes: list[Change] | None = None,
) -> fx.GraphModule:
    """Trace the harness; raise if forward has side effects that a program would have to repeat.

    changes: receives the changes that a first call makes to attributes. The trace is that of later
        calls.
    """

    def rerun() -> None:
        rerun_on_fakes(harness, fakes, mode, harness.says_compiling)

    gm = trace_once(harness, fakes, mode, swap)
    if swap.has_read_updated(gm):  # the value changes with each call and is unknown
        mode.known.holds = False
        gm = trace_once(harness, fakes, mode, swap)
    changed = swap.changed_attribute()
    if changed is None:
        return gm
    left = swap.changes()
    if left:
        with swap.after(left):
            again = trace_once(harness, fakes, mode, swap)
            is_settled = swap.changed_attribute() is None and is_same(gm, again)
        if is_settled:
            if changes is not None:
                changes += told_apart(left, swap, rerun)
            return again
    swap.reset_attributes()
    raise refuse_attribute(*changed, rerun)


def trace_once(
    harness: Harness, fakes: tuple[Tensor, ...], mode: TrueStrides, swap: StateSwap
) -> fx.GraphModule:
    """Trace the harness; raise if forward has side effects other than changed attributes."""

    def rerun() -> None:
        rerun_on_fakes(harness, fakes, mode, harness.says_compiling)

    generators = HostGenerators()
    harness.lines.undecided = ""
    failed: Exception | None = None
    try:
        with explained(harness.lines):
            gm = trace_joint(harness, fakes, harness.says_compiling)
    except Exception as error:  # noqa: BLE001 - raised below, where no exception is being handled
        failed = error
    finally:
        moved = generators.restore()
    if failed is not None:
        if is_check(harness.lines, rerun, mode):
            return trace_once(harness, fakes, mode, swap)
        raised = getattr(failed, "torch_error", None) or failed
        if harness.says_compiling and is_raised_by_model(raised.__traceback__):
            return trace_as_eager(harness, fakes, mode, swap, failed)
        raise failed
    if moved:
        raise refuse_host_random(moved, generators, rerun)
    if harness.changed_mode:
        raise refuse_mode(harness.changed_mode, rerun)
    if harness.lines.seeded_at:
        raise CaptureError(
            f"capture: forward seeds torch's generator, and {harness.lines.seeded_at} runs under "
            "that seed, which a program would not repeat. Draw the numbers outside the model and "
            "pass them in, or keep them in a buffer."
        )
    if harness.changed_state:
        raise refuse_rebinding(harness.changed_state, swap.is_disturbed, rerun)
    return gm


def trace_as_eager(
    harness: Harness,
    fakes: tuple[Tensor, ...],
    mode: TrueStrides,
    swap: StateSwap,
    error: Exception,
) -> fx.GraphModule:
    """Trace a failed forward again without its branches for compilers, a possible cause.

    Raises:
        Exception: this attempt fails too. Raises `error` instead if only that one is a
            CaptureError.
    """
    harness.says_compiling = False
    try:
        return trace_once(harness, fakes, mode, swap)
    except Exception as second:  # noqa: BLE001 - one of the two is raised
        failed = second
    if not isinstance(error, CaptureError):
        raise failed
    harness.says_compiling = True
    raise error


def told_apart(
    changes: Sequence[Change], swap: StateSwap, rerun: Callable[[], None]
) -> list[Change]:
    """Mark the attributes that forward sets without reading their previous values."""
    names = {change.name for change in changes if change.content is None}
    unread = set()
    for name in sorted(names) if len(names) <= MOST_PROBED else ():
        if not swap.reads([c for c in changes if c.name == name and c.content is None], rerun):
            unread.add(name)
    return [replace(c, is_read=c.content is not None or c.name not in unread) for c in changes]


def is_check(lines: LineMode, rerun: Callable[[], None], mode: TrueStrides) -> bool:
    """Return whether a forward raises if a tensor is true (or false), and record the message.

    An `assert`, or an `if` that raises, is then a check that the program performs too. Any other
    control flow on values is not.
    """
    line = lines.undecided
    if not line:
        return False
    said: dict[bool, str] = {}
    for value in (True, False):
        lines.checks[line] = value, ""
        try:
            with mode.known.apart():
                rerun()
        except Exception as error:  # noqa: BLE001 - its kind shows the purpose of the line
            if is_raised_by_model(error.__traceback__) and not isinstance(error, CaptureError):
                first = (str(error).splitlines() or [""])[0]
                said[value] = f"{type(error).__name__}: {first} ({line})"
    del lines.checks[line]
    lines.undecided = ""
    if len(said) != 1:
        return False
    ((bad, text),) = said.items()
    lines.checks[line] = not bad, text
    return True


def warn_of_dropped(model: nn.Module, results: Results) -> None:
    if results.dropped:
        warnings.warn(
            f"zerofx: {type(model).__name__} also returns {', '.join(results.dropped)}, which a "
            "program cannot hand out; it will be None (do not ask the model for it to silence "
            "this, for example with use_cache=False).",
            stacklevel=3,
        )


def warn_of_text(model: nn.Module, line: str) -> None:
    if line:
        warnings.warn(
            f"zerofx: {type(model).__name__} turns a tensor into text (print, str or a log) at "
            f"{line}. Its values are not known during capture, and the program does not run that "
            "line. Return the tensor and print it outside the model.",
            stacklevel=3,
        )


def warn_of_unrolled(model: nn.Module, graph: fx.Graph) -> None:
    """Warn of a loop that has become so many operators that later steps take very long."""
    named = [info(node) for node in graph.nodes if node.op == "call_function"]
    counts = Counter((each.module, each.line) for each in named if each.line)
    if len(named) < MANY_OPERATORS or not counts:
        return
    (module, line), count = counts.most_common(1)[0]
    if count >= MANY_OF_A_LINE:
        warnings.warn(
            f"zerofx: {type(model).__name__} becomes {len(named):,} operators, of which {count:,} "
            f"come from {line}: a loop in Python is captured iteration by iteration. Planning "
            "them takes minutes, and compiling them longer. Compute all iterations with one "
            f"tensor operation, or let the module run eagerly: Plan(islands=[{module!r}]).",
            stacklevel=3,
        )


def label(gm: fx.GraphModule, names: Names) -> tuple[fx.GraphModule, tuple[OutputInfo, ...]]:
    """Put an Info on every node; return the plain graph and descriptions of its results."""
    unit_names = set(names.units.values())
    label_nodes(gm, lambda module: find_unit_of_module(module, unit_names))
    check_graph(gm)
    infos = label_results(gm, names)
    label_placeholders(gm, names)
    gm.graph.set_codegen(CodeGen())  # flat lists in and out, whatever the tracer wrapped
    return LazyGraphModule(gm, gm.graph), infos


def make_calling(call: Call, results: Results) -> Calling:
    """Describe how the user's call maps to the graph and back."""
    assert results.spec is not None, "the harness has not run"
    return Calling(
        in_spec=call.spec,
        out_spec=results.spec,
        tensor_leaves=call.tensors,
        constants=results.constants,
        output_names=results.names,
        loss=results.loss,
        differentiable=results.differentiable,
        detached=results.detached,
        dropped=results.dropped,
        ignored=call.ignored,
    )


def canonical_buffers(model: nn.Module) -> dict[str, str]:
    """Return the first name of every buffer, keyed by each of its names."""
    first: dict[int, str] = {}
    named = model.named_buffers(remove_duplicate=False)
    return {name: first.setdefault(id(buffer), name) for name, buffer in named}


def describe_params(
    model: nn.Module,
    units: dict[str, str],
    computes: Mapping[str, torch.dtype],
    held: Mapping[str, torch.dtype] | None = None,
    parts: Mapping[str, Part] = MappingProxyType({}),
) -> dict[str, ParamInfo]:
    """Return ParamInfo by canonical name, the first one registered; other names are aliases.

    computes: the compute format by name. held: the storage format, if the model's state is swapped.
    parts: the slices that the model brings, by first name; their shapes are those of the parts.
    """
    groups: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    styles, known = styles_of(model), set(units.values())
    stacks = stacks_of(model)
    uses: dict[int, list[Use]] = {}
    for number, (name, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        groups.setdefault(id(param), []).append(name)
        tensors[id(param)] = param
        module = name.rpartition(".")[0]
        unit = find_unit_of_module(module, known) or module
        uses.setdefault(id(param), []).append(Use(number, unit, _layer_of(model, name)))
    return {
        names[0]: ParamInfo(
            name=names[0],
            shape=parts[names[0]].local if names[0] in parts else tuple(tensors[key].shape),
            dtype=tensors[key].dtype if held is None else held[names[0]],
            requires_grad=tensors[key].requires_grad,
            unit=units[names[0]],
            aliases=tuple(names[1:]),
            compute_dtype=computes[names[0]],
            layer=_layer_of(model, names[0]),
            style=next((s for n in names if (s := _style(styles, n))), ""),
            outputs=_outputs_of(model, names[0]),
            uses=tuple(uses[key]),
            part=parts.get(names[0]),
            is_stack=names[0] in stacks,
        )
        for key, names in groups.items()
    }


def describe_uncalled(
    model: nn.Module,
    units: dict[str, str],
    computes: Mapping[str, torch.dtype],
    parts: Mapping[str, Part] = MappingProxyType({}),
) -> dict[str, ParamInfo]:
    """Return what `describe_params` does, of a model that is to be cut before its first call.

    For layers without a style the model, or its blocks, are captured with made-up inputs.
    """
    params = describe_params(model, units, computes, parts=parts)
    return guessed(model, params, lambda module, args: capture(module, args).params)


def _style(styles: Mapping[str, str], name: str) -> str:
    """Return the style of a parameter: its own, or that of its module."""
    return styles.get(name) or styles.get(name.rpartition(".")[0], "")


def _layer_of(model: nn.Module, name: str) -> str:
    """Return the kind of layer whose weight this parameter is: "linear", "embedding" or ""."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if key != "weight":
        return ""
    if isinstance(module, nn.Embedding):
        return "embedding"
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__}
    return "linear" if isinstance(module, nn.Linear) or kinds & _LINEAR else ""


def _outputs_of(model: nn.Module, name: str) -> int:
    """Return the dimension of a parameter that counts its layer's outputs, or -1."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    if key == "bias":
        return 0 if _layer_of(model, f"{path}.weight") == "linear" else -1
    layer = _layer_of(model, name)
    if layer == "embedding":
        return 1
    if layer != "linear":
        is_stacked = key != "weight" and model.get_parameter(name).dim() == 3
        return 1 if is_stacked else -1  # [experts, out, in], as in transformers' plans
    return 0 if isinstance(module, nn.Linear) else 1


_LINEAR = frozenset({"transformers.pytorch_utils.Conv1D"})  # linear, its weight transposed
