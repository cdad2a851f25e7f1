"""Models named on the command line: `package.module:function`, `file.py:function`, `hf:config`.

A function returns `(module, args, kwargs)`: a model and one example call. On the meta device they
take no memory. A function with an argument `device` gets the device to use: "meta" for planning,
"cpu" for training.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zerofx.errors import TargetError, ZerofxError, as_sentence
from zerofx.tools.words import counted

FORMS = "package.module:function, file.py:function, or hf:path/config.json"


@dataclass(frozen=True)
class Target:
    """A model and the call to compile it for.

    again: builds another one in the same way, as far as the user's code does; None if unknown.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    again: Callable[[], Target] | None = field(default=None, compare=False, repr=False)


def resolve(spec: str, batch: int = 1, seq: int = 128, device: str = "meta") -> Target:
    """Return the model that `spec` names; `batch` and `seq` shape the inputs of an `hf:` model.

    device: of an `hf:` model and its inputs, which are random on every device but meta; also
        passed to a function that has an argument of this name.

    Raises:
        TargetError: `spec` names nothing, or no model with an example call.
    """
    if spec.startswith("hf:"):
        return _from_config(Path(spec[3:]), batch, seq, torch.device(device))
    place, colon, name = spec.rpartition(":")
    if not colon or not name:
        raise TargetError(f"model {spec!r} names no function. Give {FORMS}.")
    return _call(_function(spec, place, name), spec, device)


@contextlib.contextmanager
def own_errors(spec: str, doing: str) -> Iterator[None]:
    """Turn exceptions of the user's own code into a TargetError with its file and line.

    Within the block, the arguments of the process are those of a script that was given none.

    doing: the code that runs in the block, in words that follow "model ...: ". Exceptions of torch
    and zerofx alone pass unchanged.
    """
    before, sys.argv = sys.argv, [spec.rpartition(":")[0] or spec]
    try:
        yield
    except ZerofxError:
        raise
    except SystemExit as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(f.filename)]
        at = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        raise TargetError(
            f"model {spec!r}: {doing} ended the process (exit status {error.code!r}){at}. Any "
            "message of its own is above. It gets no arguments. Give each a default, and put what "
            'only a run of the script needs below the line if __name__ == "__main__".'
        ) from error
    except ModuleNotFoundError as error:
        if error.name is None or spec.split(".")[0].split(":")[0] == error.name.split(".")[0]:
            raise
        raise TargetError(
            f"model {spec!r} needs the module {error.name!r}, which is not installed. Install it."
        ) from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise TargetError(
            f"model {spec!r} has a syntax error at {where}: {error.msg}. Correct it."
        ) from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if _is_own(f.filename)]
        if not own:
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        at = f"{own[-1].filename}:{own[-1].lineno}"
        raise TargetError(
            f"model {spec!r}: {doing} raised {type(error).__name__} at {at}: {as_sentence(said)}"
        ) from error
    finally:
        sys.argv = before


_LIBRARY = sysconfig.get_path("stdlib")
_FOREIGN = tuple(str(p) + os.sep for p in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def _is_own(path: str) -> bool:
    """Tell whether code is the user's: not of torch, zerofx or Python's own library."""
    is_library = path.startswith(_LIBRARY) and "site-packages" not in path
    return not (is_library or path.startswith((*_FOREIGN, "<")))


def _function(spec: str, place: str, name: str) -> Callable[..., Any]:
    module = _module_of_file(spec, Path(place)) if place.endswith(".py") else _module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        found = _candidates(module)
        near = difflib.get_close_matches(name, found, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        some = f"Its functions are {', '.join(found)}." if found else "It has no model function."
        raise TargetError(f"model {spec!r}: {place} has no function {name!r}. {some}{hint}")
    return function


def _candidates(module: ModuleType) -> list[str]:
    """Return the functions of a module that can be named as a model, in order of their names."""
    return sorted(
        name
        for name, each in vars(module).items()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and not name.startswith("_")
        and not _missing(each)
    )


# Former names of modules, which notes and scripts may still use.
_MOVED = {"zerofx.demo.targets": "zerofx.tools.demo.targets"}


def _module(spec: str, place: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # as `python -m` does; the installed script does not
        sys.path.insert(0, os.getcwd())
    try:
        with own_errors(spec, f"importing {place}"):
            return importlib.import_module(_MOVED.get(place, place))
    except ModuleNotFoundError as e:
        raise TargetError(f"model {spec!r}: there is no module {e.name!r}. Give {FORMS}.") from e


def _module_of_file(own: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(
            f"model {own!r}: file {path} does not exist. Give the path of a Python file."
        )
    sys.path.insert(0, str(path.resolve().parent))  # it imports its neighbours, as in a run of it
    name = f"zerofx_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with own_errors(own, f"running {path}"):
        spec.loader.exec_module(module)
    return module


def _call(function: Callable[..., Any], spec: str, device: str) -> Target:
    if isinstance(function, type):
        kind = function.__name__
        raise TargetError(
            f"model {spec!r} is the class {kind}. Name a function without arguments that returns "
            f"the model and an example call, (module, args, kwargs), such as `def build(): return "
            f"{kind}(...), (x,), {{}}`. The page docs/tutorial.md shows one."
        )
    if missing := _missing(function):
        raise TargetError(
            f"model {spec!r} is a function with the arguments {', '.join(missing)}. Only an "
            "argument named device is passed. Give the others a default."
        )
    given = {"device": device} if "device" in inspect.signature(function).parameters else {}
    with own_errors(spec, "the function"):
        found = function(**given)
    fits = isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module)
    if not fits or not isinstance(found[1], (tuple, list)) or not isinstance(found[2], dict):
        shown = type(found).__name__
        if isinstance(found, tuple):
            shown = f"({', '.join(type(v).__name__ for v in found)})"
        raise TargetError(f"model {spec!r} returned {shown}. Return (module, args, kwargs).")
    again = partial(_call, function, spec, device)
    target = Target(spec, found[0], tuple(found[1]), found[2], again)
    _check_call(target)
    return target


def _missing(function: Callable[..., Any]) -> list[str]:
    """Return the arguments that a model function needs and does not get."""
    takes = inspect.signature(function).parameters
    needs = [n for n, p in takes.items() if p.default is p.empty and p.kind in _NAMED]
    return [name for name in needs if name != "device"]


_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
          inspect.Parameter.KEYWORD_ONLY)  # fmt: skip


def _check_call(target: Target) -> None:
    """Refuse an example call that does not fit the signature of the model's forward."""
    kind, takes = type(target.module).__name__, inspect.signature(target.module.forward)
    try:
        takes.bind(*target.args, **target.kwargs)
    except TypeError as error:
        raise TargetError(
            f"model {target.name!r} has an example call with "
            f"{counted(len(target.args), 'argument')}"
            f"{''.join(f', {name}=' for name in target.kwargs)}. {kind}.forward takes "
            f"({', '.join(takes.parameters)}): {error}. Return arguments that it takes."
        ) from error


# -- transformers -----------------------------------------------------------------------------
_AUTO = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
)


def _from_config(path: Path, batch: int, seq: int, device: torch.device) -> Target:
    """Build a transformers model with random weights, and a training call for it."""
    try:
        import transformers
    except ModuleNotFoundError as e:
        raise TargetError(
            "hf: models need transformers, which is not installed. Run pip install transformers."
        ) from e
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TargetError(
            f"hf:{path} does not exist. Give the path of a config.json, or of its directory."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(str(file))
    except ValueError as e:
        raise TargetError(f"hf:{path}: {as_sentence(e)}") from e
    config.use_cache = False  # a training step returns no cache
    with device:
        model = _architecture(transformers, config, path)
    model.train()
    call = _example(model, config, batch, seq)
    if device.type != "meta":
        call = {name: _filled(t, config).to(device) for name, t in call.items()}
    again = partial(_from_config, path, batch, seq, device)
    return Target(f"hf:{path}", model, (), call, again)


def _filled(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a tensor of this shape with random pixels, tokens, or class labels."""
    if tensor.is_floating_point():
        return torch.randn(tensor.shape)
    most = getattr(config, "vocab_size", 2) if tensor.dim() > 1 else config.num_labels
    return torch.randint(most, tensor.shape)


def _architecture(transformers: Any, config: Any, path: Path) -> nn.Module:
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)(config)
    for mapping, auto in _AUTO:
        if type(config) in getattr(transformers, mapping):
            return getattr(transformers, auto).from_config(config)
    raise TargetError(
        f"hf:{path}: transformers has no model to train for {type(config).__name__}. Name one of "
        'its classes in "architectures" of the file.'
    )


def _example(model: Any, config: Any, batch: int, seq: int) -> dict[str, Any]:
    """Return the keyword arguments of one training call, on meta."""
    kind = type(model).__name__
    with torch.device("meta"):
        labels = torch.zeros(batch, seq, dtype=torch.long)
        if model.main_input_name == "pixel_values":
            sides = getattr(config, "image_size", 224)
            sides = (sides, sides) if isinstance(sides, int) else tuple(sides)
            pixels = torch.zeros(batch, getattr(config, "num_channels", 3), *sides)
            return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
        if model.main_input_name == "input_features":
            frames = 2 * config.max_source_positions
            return {
                "input_features": torch.zeros(batch, config.num_mel_bins, frames), "labels": labels
            }  # fmt: skip
        call = {"input_ids": torch.zeros(batch, seq, dtype=torch.long)}
        if "Classification" in kind and "Token" not in kind:
            labels = torch.zeros(batch, dtype=torch.long)
        return call | {"labels": labels}
