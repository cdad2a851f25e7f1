"""The model that a command line names: `package.module:function`, `file.py:function`, `hf:config`.

A function returns `(module, args, kwargs)`: a model and one example call. On the meta device they
take no memory; a function with an argument `device` is told where they are wanted: "meta" for what
is done on paper, "cpu" for what trains.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zerofx.errors import TargetError, ZerofxError

FORMS = "package.module:function, file.py:function, or hf:path/config.json"


@dataclass(frozen=True)
class Target:
    """A model and the call that is to be compiled."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def resolve(spec: str, batch: int = 1, seq: int = 128, device: str = "meta") -> Target:
    """Return what `spec` names; `batch` and `seq` shape the inputs of an `hf:` model.

    device: where an `hf:` model and its inputs are made, random where that is not meta; and what a
        function with an argument of that name is given.

    Raises:
        TargetError: nothing is there, or it is not a model with an example call.
    """
    if spec.startswith("hf:"):
        return _from_config(Path(spec[3:]), batch, seq, torch.device(device))
    place, colon, name = spec.rpartition(":")
    if not colon or not name:
        raise TargetError(f"model {spec!r}: give {FORMS}")
    return _call(_function(spec, place, name), spec, device)


@contextlib.contextmanager
def own_errors(spec: str, doing: str) -> Iterator[None]:
    """Raise a TargetError for what the user's own code raises, with its line.

    doing: what it was asked for, in words that follow "model ...: ". What comes from torch or from
    zerofx alone passes as it is.
    """
    try:
        yield
    except ZerofxError:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or spec.split(".")[0].split(":")[0] == error.name.split(".")[0]:
            raise
        raise TargetError(f"model {spec!r}: it needs {error.name!r}, which is missing") from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise TargetError(f"model {spec!r}: {where} is no Python: {error.msg}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if _is_own(f.filename)]
        if not own:
            raise
        said = (str(error).strip().splitlines() or [""])[0]
        at = f"{own[-1].filename}:{own[-1].lineno}"
        raise TargetError(
            f"model {spec!r}: {doing} raised {type(error).__name__} at {at}: {said}"
        ) from error


_LIBRARY = sysconfig.get_path("stdlib")
_FOREIGN = tuple(str(p) + os.sep for p in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def _is_own(path: str) -> bool:
    """Tell whether code is the user's: of neither torch, zerofx nor Python's own library."""
    is_library = path.startswith(_LIBRARY) and "site-packages" not in path
    return not (is_library or path.startswith((*_FOREIGN, "<")))


def _function(spec: str, place: str, name: str) -> Callable[..., Any]:
    module = _module_of_file(spec, Path(place)) if place.endswith(".py") else _module(spec, place)
    function = getattr(module, name, None)
    if not callable(function):
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise TargetError(
            f"model {spec!r}: {place} has no function {name!r}; it has {', '.join(found) or 'none'}"
        )
    return function


# Names that people have in their notes and scripts, and where the modules are now.
_MOVED = {"zerofx.demo.targets": "zerofx.tools.demo.targets"}


def _module(spec: str, place: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # as `python -m` does; the installed script does not
        sys.path.insert(0, os.getcwd())
    try:
        with own_errors(spec, f"importing {place}"):
            return importlib.import_module(_MOVED.get(place, place))
    except ModuleNotFoundError as e:
        raise TargetError(f"model {spec!r}: no module {e.name!r}; give {FORMS}") from e


def _module_of_file(own: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"model {own!r}: file {path} does not exist")
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours, as when it is run
    name = f"zerofx_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with own_errors(own, f"running {path}"):
        spec.loader.exec_module(module)
    return module


def _call(function: Callable[..., Any], spec: str, device: str) -> Target:
    takes = inspect.signature(function).parameters
    given = {"device": device} if "device" in takes else {}
    needs = [n for n, p in takes.items() if p.default is p.empty and p.kind in _NAMED]
    if missing := [n for n in needs if n not in given]:
        raise TargetError(
            f"model {spec!r}: the function needs {', '.join(missing)}, and nothing but an argument "
            "named device is given; give the others a default"
        )
    with own_errors(spec, "the function"):
        found = function(**given)
    fits = isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module)
    if not fits or not isinstance(found[1], (tuple, list)) or not isinstance(found[2], dict):
        shown = type(found).__name__
        if isinstance(found, tuple):
            shown = f"({', '.join(type(v).__name__ for v in found)})"
        raise TargetError(f"model {spec!r} returned {shown}; return (module, args, kwargs)")
    target = Target(spec, found[0], tuple(found[1]), found[2])
    _check_call(target)
    return target


_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD,
          inspect.Parameter.KEYWORD_ONLY)  # fmt: skip


def _check_call(target: Target) -> None:
    """Refuse an example call that the model's forward does not take."""
    kind, takes = type(target.module).__name__, inspect.signature(target.module.forward)
    try:
        takes.bind(*target.args, **target.kwargs)
    except TypeError as error:
        raise TargetError(
            f"model {target.name!r}: its example call has {len(target.args)} arguments"
            f"{''.join(f', {name}=' for name in target.kwargs)}, and {kind}.forward takes "
            f"({', '.join(takes.parameters)}): {error}"
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
    """Build a transformers model with random weights, and a training call of it."""
    try:
        import transformers
    except ModuleNotFoundError as e:
        raise TargetError("hf: models need transformers; pip install transformers") from e
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TargetError(f"hf:{path}: no such file; give the path of a model's config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(file))
    except ValueError as e:
        raise TargetError(f"hf:{path}: {e}") from e
    config.use_cache = False  # a cache is no result of a training step
    with device:
        model = _architecture(transformers, config, path)
    model.train()
    call = _example(model, config, batch, seq)
    if device.type != "meta":
        call = {name: _filled(t, config).to(device) for name, t in call.items()}
    return Target(f"hf:{path}", model, (), call)


def _filled(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return random values of that form: pixels, tokens, or labels of what is classified."""
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
        f"hf:{path}: no trainable architecture for {type(config).__name__}; name a class of "
        'transformers in "architectures"'
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
