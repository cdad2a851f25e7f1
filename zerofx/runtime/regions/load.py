"""Loading of an emitted program's other files: constants, kernels, and regions.

A region runs as ATen or compiled.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import inspect
import linecache
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from zerofx.compat.graphs import OpNamespace
from zerofx.compat.inductor import inductor_problem
from zerofx.compat.operators import ATEN
from zerofx.compat.strides import has_strides, laid_out
from zerofx.errors import NonFiniteError, ProgramError, as_sentence
from zerofx.runtime.regions.cache import Region, artifact_bytes, compile_all, place_of
from zerofx.schema import (
    FormError,
    boolean,
    check,
    mapping,
    one_of,
    parse_json,
    read_file,
    record,
    text,
)

log = logging.getLogger("zerofx")


MOST_BYTES = 1 << 30  # limit for one emitted file
_FACTS = record(
    {"kernels": one_of(("aten", "inductor", "auto")), "debug": boolean},
    regions=mapping(text(), text()), model=text(),
)  # fmt: skip


def import_file(path: Path, name: str) -> ModuleType:
    """Import one emitted file under a module name of its own.

    Always import from the source: cached bytecode could be older than an edit made within one
    second.
    """
    module = ModuleType(name)
    module.__file__ = str(path)
    try:
        code = compile(read_file(path, MOST_BYTES), str(path), "exec")
    except SyntaxError as e:
        raise ProgramError(
            f"{path}:{e.lineno}: {e.msg}. Correct the edit, or emit the program again."
        ) from e
    except (ValueError, RecursionError, MemoryError) as e:
        raise ProgramError(f"{path}: {e}. Correct the edit, or emit the program again.") from e
    exec(code, module.__dict__)
    return module


class Reader(Protocol):
    """Replaces the loader of a schedule's other files, to read a schedule without running it."""

    def regions(self, directory: Path) -> Any: ...

    def constants(self, directory: Path) -> Any: ...

    def kernels(self, directory: Path) -> Any: ...


_READER: ContextVar[Reader | None] = ContextVar("reader", default=None)


@contextlib.contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """Answer imports inside the block with the reader's regions, constants and kernels."""
    token = _READER.set(reader)
    try:
        yield
    finally:
        _READER.reset(token)


def load_constants(schedule_file: str) -> Any:
    """Return the program's constants by name."""
    directory = Path(schedule_file).parent
    if (reader := _READER.get()) is not None:
        return reader.constants(directory)
    return import_file(directory / "constants.py", "zerofx_constants")


def load_kernels(schedule_file: str) -> Any:
    """Return the program's fused kernels by name."""
    directory = Path(schedule_file).parent
    if (reader := _READER.get()) is not None:
        return reader.kernels(directory)
    return import_file(directory / "kernels.py", "zerofx_kernels")


class Later:
    """The regions of a program that begins with ATen, and what compiles them meanwhile.

    modules: the regions' files. plain: the regions that run before, by name.
    """

    def __init__(self, modules: dict[str, ModuleType], facts: Mapping[str, Any]) -> None:
        self.modules = modules
        self.units: Mapping[str, str] = facts.get("regions", {})
        self.label: str = facts.get("model", "model")
        self.plain = SimpleNamespace()

    def compiled(self) -> dict[str, Region]:
        """Return the compiled regions; those that the cache lacks are compiled now."""
        made = compile_all(self.modules, self.units, self.label)
        return {
            name: following(made[name], getattr(module, "OUTPUTS", None))
            for name, module in self.modules.items()
        }

    def artifacts(self) -> dict[str, Path]:
        """Return the paths of the regions that are compiled once, for all sizes.

        Without those that Inductor had nothing to compile of, or failed at.
        """
        whole = {name: m for name, m in self.modules.items() if not hasattr(m, "SIZES")}
        paths = {name: place_of(module)[0] for name, module in whole.items()}
        return {name: path for name, path in paths.items() if artifact_bytes(path)}


_LATER: ContextVar[list[Later] | None] = ContextVar("later", default=None)


@contextlib.contextmanager
def compiled_later() -> Iterator[list[Later]]:
    """Give what is imported inside ATen regions; yield a list of what may take their place."""
    found: list[Later] = []
    token = _LATER.set(found)
    try:
        yield found
    finally:
        _LATER.reset(token)


def with_regions(
    functions: Sequence[Callable[..., Any] | None], later: Later, regions: Mapping[str, Region]
) -> list[Callable[..., Any] | None]:
    """Return functions of a schedule that call other regions, and are the same for the rest."""
    instead = {id(plain): regions[name] for name, plain in vars(later.plain).items()}
    made: list[Callable[..., Any] | None] = []
    for function in functions:
        if function is None:
            made.append(None)
            continue
        assert isinstance(function, FunctionType), f"{function} is no function of a schedule"
        own = {key: instead.get(id(held), held) for key, held in function.__globals__.items()}
        own["regions"] = SimpleNamespace(**regions)
        made.append(FunctionType(function.__code__, own, function.__name__))
    return made


def load_regions(schedule_file: str, kernels: str | None = None) -> Any:
    """Return the program's regions by name, each a function of one list that it empties.

    `kernels` defaults to the entry in fingerprint.json. "inductor" compiles each file once and
    caches the result per user; "aten" runs the file as it is. "auto" is the same as "inductor",
    except for modules that are imported within `compiled_later`.
    """
    directory = Path(schedule_file).parent
    if (reader := _READER.get()) is not None:
        return reader.regions(directory)
    path = directory / "fingerprint.json"
    try:
        facts = check(parse_json(read_file(path, MOST_BYTES)), _FACTS)
    except FormError as error:
        raise ProgramError(f"{path}: {error}. Emit the program again.") from error
    kernels = kernels or facts["kernels"]
    found = SimpleNamespace()
    paths = sorted((directory / "regions").glob("*.py"))
    modules = {p.stem: import_file(p, f"zerofx_region_{p.stem}") for p in paths}
    later = Later(modules, facts)
    compiled: dict[str, Region] = {}
    waiting = _LATER.get() if kernels == "auto" else None
    if waiting is not None:
        waiting.append(later)
        found = later.plain
    elif kernels != "aten" and _has_compiler():
        compiled = compile_all(modules, later.units, later.label)
    for name, module in modules.items():
        plain = _checked(module, name) if facts["debug"] else _direct(getattr(module, name))
        strides = getattr(module, "OUTPUTS", None)  # absent from older programs
        setattr(found, name, following(compiled.get(name) or plain, strides))
    return found


def _direct(function: Region) -> Region:
    """Return a region's function that calls operators by torch's own bindings, if it has them."""
    if not isinstance(function, FunctionType) or "aten" not in function.__globals__:
        return function
    return FunctionType(
        function.__code__, {**function.__globals__, "aten": ATEN}, function.__name__
    )


SIZES = 4096  # limit for remembered sizes of a region's calls
Strides = Sequence[tuple[int, ...]]


def following(function: Region, strides: Strides | Callable[..., Strides] | None) -> Region:
    """Return a region whose results have these strides, on which the rest of the program relies.

    An operator may return other strides than its fake kernel declares, and so may a compiled
    region. The first call determines which results must be copied into place; if there are none,
    later calls check nothing.
    """
    if not strides:  # absent from programs of earlier versions
        return function
    if callable(strides):
        return _following_sizes(function, strides)
    differing: list[int] | None = None

    def run(args: list[Tensor]) -> Any:
        nonlocal differing
        made = function(args)
        if differing is None:  # an edited region may have other results than the emitted one
            pairs = enumerate(zip(made, strides, strict=False))
            alike = [(i, m, s) for i, (m, s) in pairs if m.dim() == len(s)]
            differing = [i for i, m, s in alike if not has_strides(m, s)]
        if not differing:
            return made
        made = list(made)
        for i in differing:
            made[i] = laid_out(made[i], strides[i])
        return made

    return run


def _following_sizes(function: Region, strides: Callable[..., Strides]) -> Region:
    """Do the same for a region whose strides depend on the sizes at the end of its `args`."""
    count = len(inspect.signature(strides).parameters)
    known: dict[tuple[int, ...], list[int]] = {}  # sizes -> indices of results to copy

    def run(args: list[Any]) -> Any:
        sizes = tuple(args[-count:])
        made = function(args)
        differing = known.get(sizes)
        if differing is None:
            pairs = enumerate(zip(made, strides(*sizes), strict=False))
            alike = [(i, m, s) for i, (m, s) in pairs if m.dim() == len(s)]
            differing = [i for i, m, s in alike if not has_strides(m, s)]
            if len(known) >= SIZES:
                known.clear()
            known[sizes] = differing
        if not differing:
            return made
        made, wanted = list(made), strides(*sizes)
        for i in differing:
            made[i] = laid_out(made[i], wanted[i])
        return made

    return run


@functools.cache  # warns once per process
def _has_compiler() -> bool:
    problem = inductor_problem()
    if problem:
        log.warning("kernels='inductor' or 'auto' falls back to ATen: %s", as_sentence(problem))
    return not problem


# -- Plan(debug=True) ----------------------------------------------------------------------------
class _Checked:
    """Replaces `aten` in a region: runs each op and checks its results for NaN."""

    def __init__(self, target: Any, region: str) -> None:
        self._target, self._region = target, region

    def __getattr__(self, name: str) -> _Checked:
        return _Checked(getattr(self._target, name), self._region)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._target(*args, **kwargs)
        made = results if isinstance(results, (tuple, list)) else (results,)
        if any(_has_nan(r) for r in made) and not any(_has_nan(a) for a in args):
            self._report(sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        return results

    def _report(self, filename: str, line: int) -> None:
        text = linecache.getline(filename, line).strip()
        raise NonFiniteError(
            f"{self._region}: NaN first appears in {self._target} from inputs without one, at\n"
            f"  {filename}:{line}\n  {text}\n"
            "(the comment names the module and your line). Set debug=False to train on regardless."
        )


def _has_nan(value: Any) -> bool:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return is_float and bool(value.isnan().any())


def _checked(module: ModuleType, name: str) -> FunctionType:
    """Return the module's region with every op checked; the source and its lines stay the same."""
    function = getattr(module, name)
    watched = {
        key: _Checked(value, name) if isinstance(value, OpNamespace) else value
        for key, value in function.__globals__.items()
    }
    return FunctionType(function.__code__, watched, name)


# -- Constants of an emitted program: tensors that the model's forward contains -------------------


def constant(
    values: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], device: str
) -> Tensor:
    """Make a tensor from nested lists, or from the base64 of its contiguous bytes."""
    kind = getattr(torch, dtype)
    if isinstance(values, str):
        read = torch.frombuffer(bytearray(base64.b64decode(values)), dtype=kind).view(shape)
    else:
        read = torch.tensor(values, dtype=kind)
    return torch.empty_strided(shape, stride, dtype=kind, device=device).copy_(read.view(shape))
