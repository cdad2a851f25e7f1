"""What a snapshot holds beside tensors of the model: stored so that loading it runs no code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from zerofx.errors import SnapshotError, ZerofxError


def pack(values: Mapping[str, Any]) -> bytes:
    """Return `values` as torch.save writes them.

    Raises:
        SnapshotError: something in it would need code to run when it is loaded; names its key.
    """
    data, problem = _try(dict(values))
    if problem is None:
        return data
    where, culprit = _find_culprit(values, "")
    raise SnapshotError(
        f"{where} is a {type(culprit).__name__}, which cannot be saved so that loading it runs no "
        "code; give tensors, numbers, strings and containers of them (of a scheduler or a scaler "
        f"its state_dict()): {problem}"
    )


def unpack(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return what `pack` packed, tensors on the host.

    path: what errors call the file.

    Raises:
        SnapshotError: the file is not one of ours.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise SnapshotError(f"{path}: {_first_line(error)}") from error
    if not isinstance(found, dict):
        raise SnapshotError(f"{path}: it holds a {type(found).__name__}, not a dict")
    return found


def _try(value: Any) -> tuple[bytes, str | None]:
    """Return (packed bytes, None), or what stands against packing the value."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), map_location="cpu", weights_only=True)
    except (ZerofxError, pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
        return b"", _first_line(error)
    return stream.getvalue(), None


def _find_culprit(value: Any, where: str) -> tuple[str, Any]:
    """Return the innermost part of `value` that cannot be packed, with the path to it."""
    parts: list[tuple[Any, Any]] = []
    if type(value) in (list, tuple):
        parts = list(enumerate(value))
    elif isinstance(value, Mapping):
        parts = list(value.items())
    for key, part in parts:
        if _try(part)[1] is not None:
            return _find_culprit(part, f"{where}[{key!r}]" if where else str(key))
    return where, value


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
