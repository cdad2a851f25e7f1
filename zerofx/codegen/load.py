"""Loading: parse an emitted directory, also after a manual edit, into a Program and verify it."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.facts import (
    FORMAT,
    check_facts,
    checksum_of,
    read_hardware,
    read_reference,
    read_sizes,
    read_stage,
)
from zerofx.codegen.load_calls import Calls, Shards
from zerofx.codegen.load_record import Recorder
from zerofx.codegen.moves import NAME as MOVES
from zerofx.codegen.moves import read_moves
from zerofx.codegen.placed_calls import NAME as PLACEMENTS
from zerofx.codegen.placed_calls import Placements, read_placements
from zerofx.compat.graphs import pytree
from zerofx.compat.tracing import Symbols, is_symbolic, new_fake_mode
from zerofx.errors import ProgramError, ZerofxError, as_sentence
from zerofx.ir.meta import OutputInfo, Phase, Role, info
from zerofx.ir.program import BACKWARD, FORWARD, Calling, Entry, Fact, ParamInfo, Planned, Unproved
from zerofx.ir.settle import Written, settle
from zerofx.ir.sizes import NUMBER, Sizes, evaluate
from zerofx.ir.verify import verify
from zerofx.ir.verify_fault import file_lines
from zerofx.kernels.launch import plain_forms
from zerofx.layout.buckets import Bucket, Layout
from zerofx.plan.plan import Plan
from zerofx.runtime.regions.load import MOST_BYTES, import_file, read_by
from zerofx.runtime.standalone import layout_from_facts
from zerofx.schema import FormError, parse_json, read_text

# -- Read an emitted directory: check presence, integrity and format of its files; find edited ones


log = logging.getLogger("zerofx")
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class Emitted:
    """An emitted directory: the content of fingerprint.json, and the files that differ from it."""

    directory: Path
    facts: dict[str, Any]
    edited: tuple[str, ...]


def read_directory(directory: Path) -> Emitted:
    """Read an emitted directory.

    Raises:
        ProgramError: a file is missing, truncated or foreign; the message names it.
    """
    facts = _read_facts(directory)
    edited = []
    if facts.pop("checksum", None) not in (None, checksum_of(facts)):
        edited.append(FINGERPRINT)
    for name, digest in facts["files"].items():
        try:
            text = read_text(directory / name, MOST_BYTES)
        except FileNotFoundError:
            raise _broken(directory / name, "is missing") from None
        except FormError as error:
            raise _broken(directory / name, f"is damaged: {error}") from None
        except OSError as error:
            raise _broken(directory / name, f"cannot be read: {error.strerror}") from None
        if hashlib.sha256(text.encode()).hexdigest()[:16] != digest:
            edited.append(name)
    if facts["torch"] != torch.__version__:
        log.warning(
            "%s was emitted with torch %s, this is %s: its regions are compiled again, and bits "
            "may differ.", directory, facts["torch"], torch.__version__,
        )  # fmt: skip
    if "plan.yaml" in edited:
        log.warning("%s: plan.yaml was edited, but the schedule is not regenerated.", directory)
    return Emitted(directory, facts, tuple(edited))


def _broken(path: Path, what: str) -> ProgramError:
    return ProgramError(
        f"{path} {what}. Restore it, or write the directory again with program.emit(directory)."
    )


def _read_facts(directory: Path) -> dict[str, Any]:
    path = directory / FINGERPRINT
    try:
        facts = parse_json(read_text(path, MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise ProgramError(
            f"{directory} holds no emitted program: {FINGERPRINT} is missing. "
            "Write one with program.emit(directory)."
        ) from None
    except OSError as error:
        raise _broken(path, f"cannot be read: {error.strerror}") from None
    except FormError as error:
        raise _broken(path, f"cannot be read: {error}") from None
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != FORMAT:
        raise ProgramError(
            f"{path} is of format {found!r}. This zerofx reads {FORMAT}. Emit the program again."
        )
    try:
        return check_facts(facts)
    except FormError as error:
        raise _broken(path, f"is damaged: {error}") from None


def read_params(facts: dict[str, Any]) -> dict[str, ParamInfo]:
    """Return the parameters that fingerprint.json describes."""
    return {
        name: ParamInfo(
            name,
            tuple(shape),
            getattr(torch, dtype),
            grad,
            unit,
            tuple(aliases),
            getattr(torch, compute),
        )
        for name, (shape, dtype, grad, unit, aliases, compute) in facts["params"].items()
    }


def read_calling(facts: dict[str, Any]) -> Calling:
    """Return the calling convention over flat leaves: trees and constants are not in the files.

    A CompiledModule that adopts the program restores its own trees.
    """
    said = facts["calling"]
    return Calling(
        in_spec=pytree.tree_structure([0] * said["in_leaves"]),
        out_spec=pytree.tree_structure([0] * said["out_leaves"]),
        tensor_leaves=tuple(said["tensor_leaves"]),
        output_names=tuple(said["output_names"]),
        loss=said["loss"],
        differentiable=tuple(said["differentiable"]),
        dropped=tuple(said["dropped"]),
    )


# -- The other files of an emitted directory while its schedule is read: regions and constants -----


class Files:
    """The provider of recording regions and constants for the schedule.

    recorder: of the function that is running. paths: the paths of the region files.
    """

    def __init__(self, directory: Path) -> None:
        self.recorder: Recorder | None = None
        self.functions = {
            p.stem: _function(p) for p in sorted((directory / "regions").glob("*.py"))
        }
        self.paths = tuple(str(directory / "regions" / f"{name}.py") for name in self.functions)

    def regions(self, directory: Path) -> Any:
        return _Regions(self)

    def constants(self, directory: Path) -> Any:
        return _Constants(self, import_file(directory / "constants.py", "zerofx_constants"))

    def kernels(self, directory: Path) -> Any:
        return _Kernels(self, import_file(directory / "kernels.py", "zerofx_kernels"))

    def now(self) -> Recorder:
        assert self.recorder is not None, "a region or constant is used outside the two functions"
        return self.recorder


def _function(path: Path) -> Callable[[list[Any]], Any]:
    function = getattr(import_file(path, f"zerofx_region_{path.stem}"), path.stem, None)
    if not callable(function):
        raise ProgramError(
            f"{path} has no function {path.stem}. Restore it, or emit the program again."
        )
    return function


class _Regions:
    """A stand-in for the loaded regions: calling one runs its source on the recorder."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Callable[[list[Any]], Any]:
        if name not in self._files.functions:
            known = ", ".join(self._files.functions)
            raise ProgramError(f"schedule.py: regions/{name}.py is missing. There are {known}.")
        return lambda args: self._run(name, args)

    def _run(self, name: str, args: list[Any]) -> Any:
        recorder = self._files.now()
        if type(args) is not list:
            kind = type(args).__name__
            raise recorder.refuse(f"{name} takes one list, which it empties. This is a {kind}.")
        for arg in args:
            if not is_symbolic(arg):
                recorder.node(arg, f"an argument of {name}")
        with recorder.region(recorder.unit_here()):
            return self._files.functions[name](args)


class _Kernels:
    """A stand-in for the loaded kernels: calling one records its fused op."""

    def __init__(self, files: Files, module: ModuleType) -> None:
        self._files, self._module = files, module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name, None)
        if not callable(function):
            raise self._files.now().refuse(f"kernels.py has no function {name}.")
        return lambda *args: self._run(function, args)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        recorder = self._files.now()
        with recorder.region(recorder.unit_here()), plain_forms():
            return function(*args)


class _Constants:
    """A stand-in for the loaded constants: reading one creates a node."""

    def __init__(self, files: Files, module: ModuleType) -> None:
        self._files, self._module = files, module

    def __getattr__(self, name: str) -> Tensor:
        held = getattr(self._module, name, None)
        if not isinstance(held, Tensor):
            raise self._files.now().refuse(f"constants.py has no tensor {name}.")
        return self._files.now().constant(name, held)


# -- Read schedule.py: its two functions run on fake tensors and become graphs ---------------------


@dataclass
class Reading:
    """A run of the schedule's functions, forward first: backward receives what forward saves."""

    emitted: Emitted
    placements: Placements | None = None
    outputs: dict[str, tuple[OutputInfo, ...]] = field(default_factory=dict)
    saved: list[tuple[OutputInfo, Tensor, fx.Node]] = field(default_factory=list)
    saved_sizes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory, self.facts = self.emitted.directory, self.emitted.facts
        self.sizes = read_sizes(self.facts.get("sizes"))
        self.symbols = Symbols(self.sizes.hints) if self.sizes else None
        self.written: Any = lambda size: size
        if self.symbols is not None:
            self.written = Written(self.symbols, self.sizes.hints)
        self.mode = self.symbols.mode() if self.symbols is not None else new_fake_mode()
        with self.mode:
            self.stage = read_stage(self.facts.get("stage"))
        layout: Layout = layout_from_facts(self.facts["layout"])
        self.layout = replace(layout, position=self.stage.position % layout.pipeline_size)
        self.params: dict[str, ParamInfo] = read_params(self.facts)
        if self.placements is not None:
            self.stage = self.placements.of_stage(self.stage)
            self.layout = self.placements.of_layout(self.layout)
            self.params = self.placements.of_params(self.params)
        rows = self.facts["placeholders"][FORWARD]
        self.device: str = rows[0][4][3] if rows else "cpu"

    def import_schedule(self) -> ModuleType:
        self.files = Files(self.directory)
        with read_by(self.files), self._explained():
            return import_file(self.directory / "schedule.py", "zerofx_schedule")

    # -- the two functions ------------------------------------------------------------------------
    def forward(self, function: Callable[..., Any]) -> fx.GraphModule:
        with self._recording(FORWARD) as (recorder, calls, given):
            leaves = given[Role.INPUT]
            count = self.facts["calling"]["in_leaves"] + len(self.stage.taken(FORWARD))
            inputs = [leaves.get(i) for i in range(count)]
            for symbol in self.sizes.symbols:
                if symbol.dims[0].dim == NUMBER and self.symbols is not None:
                    inputs[symbol.dims[0].leaf] = self.symbols.sizes[symbol.name]
            returned = function(calls, recorder.shards, given[Role.BUFFER], inputs)
            outs, updates, saved = self._lists(recorder, returned)
            specs = self._specs(FORWARD)
            results = self._match(recorder, specs, Role.OUTPUT, outs)
            roles = (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
            results += self._match(recorder, specs, roles, updates)
            order = {s: i for i, s in enumerate(specs)}
            results.sort(key=lambda result: order[result[0]])
            self.saved = self._saved(recorder, specs, saved)
            results += [(spec, node) for spec, _, node in self.saved]
            return self._finish(recorder, FORWARD, results, function)

    def backward(self, function: Callable[..., Any]) -> fx.GraphModule:
        with self._recording(BACKWARD) as (recorder, calls, given):
            returned = function(
                calls,
                recorder.shards,
                [*(v for _, v in sorted(given[Role.SAVED].items())), *self.saved_sizes],
                given[Role.TANGENT],
            )
            if inspect.isgenerator(returned):
                returned = self._resume(recorder, returned)
            if not isinstance(returned, list):
                raise recorder.refuse(
                    f"backward gives a {type(returned).__name__}, and not the list of the "
                    "gradients of inputs, which it returns, or yields at its pause."
                )
            specs = self._specs(BACKWARD)
            results = self._match(recorder, specs, Role.INPUT_GRAD, returned)
            for spec in specs:
                if spec.role is Role.SHARD_GRAD:
                    results.append((spec, calls.stored.get(spec.index)))
            return self._finish(recorder, BACKWARD, results, function)

    def _resume(self, recorder: Recorder, parts: Iterator[Any]) -> Any:
        """Run both parts of a backward that pauses; return what the first one hands out."""
        handed = next(parts, None)
        for _ in parts:
            raise recorder.refuse("backward yields twice. It pauses once.")
        return handed

    @contextmanager
    def _recording(self, name: str) -> Iterator[tuple[Recorder, Calls, dict[Role, dict]]]:
        phase = Phase.BACKWARD if name == BACKWARD else Phase.FORWARD
        recorder = Recorder(self.directory, phase, self.files.paths, self.written)
        recorder.shards = Shards(recorder, self.layout, self.device)
        calls = Calls(recorder, self.layout, self.params, self.device)
        calls.numbers = {k: info(node).index for k, (_, _, node) in enumerate(self.saved)}
        self.files.recorder = recorder
        with self._explained(), _plain_modes(self.device), self.mode, recorder:
            yield recorder, calls, self._placeholders(recorder, name)

    def _placeholders(self, recorder: Recorder, name: str) -> dict[Role, dict]:
        """Create the function's inputs: saved values from forward, the others from the facts."""
        kinds = (Role.INPUT, Role.BUFFER, Role.TANGENT, Role.SAVED)
        given: dict[Role, dict] = {role: {} for role in kinds}
        left = dict(enumerate(self.saved))
        received = Role.INPUT if name == FORWARD else Role.TANGENT
        made_there = {wire.leaf: wire.digest for wire in self.stage.taken(name)}
        for text, label, index, unit, spec in self.facts["placeholders"][name]:
            role = Role(text)
            fields = {"name": label, "index": index, "unit": unit}
            if role is Role.SAVED:
                if index not in left:
                    continue
                _, val, node = left.pop(index)
                spec, fields = _spec(val), fields | _origin(node)
            if role is received and index in made_there:
                fields["digest"] = made_there[index]
            made = recorder.placeholder(role, self._fake(recorder, spec), **fields)
            if role is Role.SHARD:
                recorder.shards.add(index, made)
            else:
                given[role][label if role is Role.BUFFER else index] = made
        if name == BACKWARD:
            for k, (said, val, node) in left.items():
                fields = {"name": said.name, "index": k, **_origin(node)}
                fake = recorder.fake(*_spec(val))
                given[Role.SAVED][k] = recorder.placeholder(Role.SAVED, fake, **fields)
        return given

    def _fake(self, recorder: Recorder, spec: Any) -> Tensor:
        """Create a fake of a form that may contain expressions of sizes."""
        dtype, shape, stride, device = spec
        if self.symbols is not None:
            known: Any = self.symbols.sizes
            shape, stride = (
                [evaluate(n, known) if isinstance(n, str) else n for n in sizes]
                for sizes in (shape, stride)
            )
        return recorder.fake(dtype, shape, stride, device)

    def settle(self, graphs: Iterable[fx.GraphModule]) -> Sizes:
        """Replace symbols by sizes; return the sizes that the graphs serve."""
        if self.symbols is None:
            return self.sizes
        mode = new_fake_mode()
        for gm in graphs:
            settle(gm.graph, self.symbols, self.sizes.hints, mode)
        both = dict.fromkeys((*self.sizes.conditions, *self.symbols.conditions()))
        return replace(self.sizes, conditions=tuple(both))

    # -- results of the functions -----------------------------------------------------------------
    def _specs(self, name: str) -> list[OutputInfo]:
        return [OutputInfo(Role(r), n, i) for r, n, i in self.facts["outputs"][name]]

    def _lists(self, recorder: Recorder, returned: Any) -> tuple[list, list, list]:
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise recorder.refuse("forward returns three lists: outputs, updates, saved values.")
        return returned  # type: ignore[return-value]

    def _match(
        self, recorder: Recorder, specs: list[OutputInfo], roles: Any, values: list[Any]
    ) -> list[tuple[OutputInfo, fx.Node | None]]:
        """Pair the returned values with their specs, by position."""
        wanted = roles if isinstance(roles, tuple) else (roles,)
        mine = [s for role in wanted for s in specs if s.role is role]
        what = " and ".join(f"{r.value}s" for r in wanted)
        if len(mine) != len(values):
            raise recorder.refuse(f"{len(values)} {what} are returned, not {len(mine)}.")
        return [
            (spec, None if v is None else recorder.node(v, f"{spec.role.value} {spec.name}"))
            for spec, v in zip(mine, values, strict=True)
        ]

    def _saved(
        self, recorder: Recorder, specs: list[OutputInfo], values: list[Any]
    ) -> list[tuple[OutputInfo, Tensor, fx.Node]]:
        names = [s.name for s in specs if s.role is Role.SAVED]
        found = []
        while values and is_symbolic(values[-1]):
            self.saved_sizes.insert(0, values.pop())
        for k, v in enumerate(values):
            node = recorder.node(v, f"saved value {k}")
            name = names[k] if len(names) == len(values) else info(node).name or node.name
            found.append((OutputInfo(Role.SAVED, name, k), v, node))
        return found

    def _finish(
        self,
        recorder: Recorder,
        name: str,
        results: list[tuple[OutputInfo, Any]],
        function: Any,
    ) -> fx.GraphModule:
        self.outputs[name] = tuple(spec for spec, _ in results)
        last = max(line for _, _, line in function.__code__.co_lines() if line)
        return recorder.finish(tuple(node for _, node in results), last)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert exceptions raised by the files to errors with the lines around them."""
        try:
            yield
        except ProgramError:
            raise
        except Exception as error:
            files = {str(self.directory / "schedule.py"), *self.files.paths}
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
            if not frames:
                raise
            at = frames[-1]
            lines = "\n".join(file_lines(at.filename, at.lineno or 1))
            raise ProgramError(
                f"{Path(at.filename).name}:{at.lineno}: {_said(error)}. A schedule is a straight-"
                f"line sequence of calls that reads no values\n{lines}"
            ) from error


@contextmanager
def _plain_modes(device: str) -> Iterator[None]:
    """Read the files as they will run: without the caller's autocast, grad and inference modes."""
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                yield
        else:
            yield


def _spec(val: Tensor) -> tuple[str, list[int], list[int], str]:
    dtype = str(val.dtype).removeprefix("torch.")
    return dtype, list(val.shape), list(val.stride()), val.device.type


def _origin(node: fx.Node) -> dict[str, str]:
    """Return the line and module that computed a saved value."""
    return {"line": info(node).line, "module": info(node).module}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


# -- Parse an emitted directory, also after a manual edit, into a Program, and verify it -----------


def load(directory: str | os.PathLike[str], allow_changed_math: bool = False) -> Planned:
    """Run the directory's schedule on fake tensors, record it as a Program, and verify that.

    The files are Python and are executed: load only trusted files. Any edit is accepted that leaves
    a correct schedule: moved launches and waits, names, comments, statements split or moved into
    helpers. Trees and constants of the call are not in the files; `CompiledModule.adopt` takes them
    from the model.

    allow_changed_math: accept regions that compute something other than what was captured. Order
        and gradients are checked as usual.
    Raises:
        ProgramError: a file is missing or invalid, or the schedule is wrong; the message shows the
            lines of schedule.py around the fault.
    """
    emitted = read_directory(Path(directory).resolve())
    try:
        return _load(emitted, allow_changed_math)
    except ZerofxError:
        raise
    except Exception as error:
        if not emitted.edited:  # unchanged files: this is a fault of zerofx
            raise
        raise ProgramError(
            f"{emitted.directory}: its files are inconsistent ({_said(error)}). Edited: "
            f"{', '.join(emitted.edited)}. Restore them, or emit the program again."
        ) from error


def _load(emitted: Emitted, allow_changed_math: bool) -> Planned:
    plan = Plan.load(emitted.directory / "plan.yaml")
    placements = _read_placements(emitted, plan)
    reading = Reading(emitted, placements)
    module = reading.import_schedule()
    facts = emitted.facts
    graphs = {FORWARD: reading.forward(_graph_function(emitted, module, FORWARD))}
    if facts["training"]:
        graphs[BACKWARD] = reading.backward(_graph_function(emitted, module, BACKWARD))
    sizes = reading.settle(graphs.values())
    edited = f"edited: {', '.join(emitted.edited) or 'nothing'}"
    num_nodes = sum(len(gm.graph.nodes) for gm in graphs.values())
    program = Planned(
        graphs=graphs,
        outputs=reading.outputs,
        calling=read_calling(facts),
        params=reading.params,
        buffers=tuple(facts["buffers"]),
        model_name=facts["model"],
        is_training=facts["training"],
        world_size=facts["world_size"],
        hardware=read_hardware(facts.get("hardware")),
        plan=plan,
        layout=reading.layout,
        facts=frozenset(Fact),
        history=[Entry("load", edited, num_nodes)],
        slot_bytes=tuple(facts["slots"]),
        reference=Unproved.GIVEN_UP if allow_changed_math else read_reference(facts["reference"]),
        signature=facts["signature"],
        directory=emitted.directory,
        sizes=sizes,
        stage=reading.stage,
    )
    _verify(program, emitted, placements)
    if MOVES in facts["files"]:
        path = emitted.directory / MOVES
        read_moves(program, read_text(path, MOST_BYTES), path)
    return program


def _read_placements(emitted: Emitted, plan: Plan) -> Placements | None:
    path = emitted.directory / PLACEMENTS
    try:
        return read_placements(emitted.facts["files"], path, plan.parallel)
    except FormError as error:
        raise _broken(path, f"is damaged: {error}") from None


def _verify(program: Planned, emitted: Emitted, placements: Placements | None) -> None:
    try:
        if placements is not None:
            placements.recall(program)
        verify(program)
    except ProgramError as error:
        what, _, lines = str(error).partition("\n")
        if emitted.edited:
            what = f"{as_sentence(what)} Edited: {', '.join(emitted.edited)}."
        raise ProgramError(f"{emitted.directory}: {what}\n{lines}") from None


def _graph_function(emitted: Emitted, module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise ProgramError(
            f"{emitted.directory / 'schedule.py'} has no function {name}: it is truncated. "
            "Restore it, or write the directory again with program.emit(directory)."
        )
    return function


# -- Whether a loaded program fits a running model: the same ranks, each parameter at its place ----


def check_fits(program: Planned, layout: Layout, world_size: int) -> None:
    """Check that a program runs on these ranks and that its layout is the model's.

    Raises:
        ProgramError: names the first difference, both numbers, and the fix.
    """
    if program.world_size != world_size:
        raise _unfit(
            program, f"it is for {program.world_size} ranks, this model runs on {world_size}"
        )
    mine = program.layout
    if mine.mesh != layout.mesh:
        raise _unfit(
            program,
            f"it shards over {mine.shard_size} ranks and replicates over {mine.replicate_size}, "
            f"the model over {layout.shard_size} and {layout.replicate_size}",
        )
    if len(mine.buckets) != len(layout.buckets):
        raise _unfit(
            program, f"it has {len(mine.buckets)} buckets, the model {len(layout.buckets)}"
        )
    for a, b in zip(mine.buckets, layout.buckets, strict=True):
        if a != b:
            raise _unfit(program, _difference(a, b))


def check_wires(program: Planned, compiled: Planned) -> None:
    """Check that values lie between pipeline stages as in the program that it replaces.

    The other stages send and receive them so; the proof of one stage takes it as given.

    Raises:
        ProgramError: names the value, and how it lies in both.
    """
    if len(program.stage.wires) != len(compiled.stage.wires):
        raise _unfit(
            program,
            f"its stages exchange {len(program.stage.wires)} values, those of the model "
            f"{len(compiled.stage.wires)}",
        )
    for mine, due in zip(program.stage.wires, compiled.stage.wires, strict=True):
        if mine.digest != due.digest or mine.lies != due.lies:
            raise _unfit(
                program,
                f"{mine.name}, which stage {mine.source} sends to stage {mine.target}, lies as "
                f"{mine.lies} in it, and as {due.lies} in the model's other stages",
            )


def _unfit(program: Planned, what: str) -> ProgramError:
    where = program.directory or program.model_name
    return ProgramError(
        f"{where} does not fit this model: {what}. Emit a program of this model under its plan "
        "(model.programs[0].emit(directory)) and edit that."
    )


def _difference(a: Bucket, b: Bucket) -> str:
    for left, right in zip(a.params, b.params, strict=False):
        if left != right:
            return (
                f"bucket {a.index} has {left.name}{list(left.shape)} at {left.offset}, the model's "
                f"{right.name}{list(right.shape)} at {right.offset}"
            )
    if (a.home, a.source) != (b.home, b.source):
        return (
            f"bucket {a.index} ({a.label()}) lives on the {a.home.value} and is gathered from the "
            f"{a.source.value}, the model's on the {b.home.value} and from the {b.source.value}"
        )
    return (
        f"bucket {a.index} has {len(a.params)} parameters in {a.numel} elements of {a.dtype}, the "
        f"model's {len(b.params)} in {b.numel} of {b.dtype}"
    )
