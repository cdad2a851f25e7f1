"""The other files of an emitted directory, while its schedule is read: regions and constants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from zerofx.codegen.load_record import Recorder
from zerofx.errors import ProgramError
from zerofx.kernels.launch import plain_forms
from zerofx.runtime.regions.load import import_file


class Files:
    """Gives the schedule regions and constants that record what becomes of them.

    recorder: of the function that runs now. paths: of the region files.
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
            f"{path} has no function {path.stem}; restore it, or emit the program again"
        )
    return function


class _Regions:
    """Stands for the loaded regions: calling one runs its source on the recorder."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Callable[[list[Any]], Any]:
        if name not in self._files.functions:
            known = ", ".join(self._files.functions)
            raise ProgramError(f"schedule.py: regions/{name}.py is missing; there are {known}")
        return lambda args: self._run(name, args)

    def _run(self, name: str, args: list[Any]) -> Any:
        recorder = self._files.now()
        if type(args) is not list:
            kind = type(args).__name__
            raise recorder.refuse(f"{name} takes one list, which it empties; this is a {kind}")
        for arg in args:
            recorder.node(arg, f"an argument of {name}")
        with recorder.region(recorder.unit_here()):
            return self._files.functions[name](args)


class _Kernels:
    """Stands for the loaded kernels: calling one records the fused op that it is."""

    def __init__(self, files: Files, module: ModuleType) -> None:
        self._files, self._module = files, module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._module, name, None)
        if not callable(function):
            raise self._files.now().refuse(f"kernels.py has no function {name}")
        return lambda *args: self._run(function, args)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        recorder = self._files.now()
        with recorder.region(recorder.unit_here()), plain_forms():
            return function(*args)


class _Constants:
    """Stands for the loaded constants: reading one makes a node."""

    def __init__(self, files: Files, module: ModuleType) -> None:
        self._files, self._module = files, module

    def __getattr__(self, name: str) -> Tensor:
        held = getattr(self._module, name, None)
        if not isinstance(held, Tensor):
            raise self._files.now().refuse(f"constants.py has no tensor {name}")
        return self._files.now().constant(name, held)
