"""save and load, in reading order: a training run to a directory and back, at any world size.

    zerofx.save("run/step-1000", model, optimizer, extra={"step": 1000})
    extra = zerofx.load("run/step-1000", model, optimizer)

What is kept: parameters, buffers, optimizer states and options, the random generators of torch,
Python and NumPy, and `extra`. A snapshot is loaded by any number of ranks at any stage. Ranks on
several hosts need a file system that all of them see. See snapshot_files.py for what lies on disk
and how an interrupted save leaves the one before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx import snapshot_files as files
from zerofx import snapshot_state as state
from zerofx.errors import SnapshotError
from zerofx.module import CompiledModule
from zerofx.snapshot_dcp import INDEX, LoadSteps, SaveSteps, written_files
from zerofx.snapshot_export import export
from zerofx.snapshot_random import random_states, set_random_states
from zerofx.snapshot_ranks import together
from zerofx.snapshot_values import pack, unpack

__all__ = ["export", "load", "save"]


def save(
    folder: str | os.PathLike[str],
    model: CompiledModule,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save a training run to a directory of its own; a collective call, all ranks make it.

    The directory appears whole or not at all: one that is there is replaced only when the new one
    is complete and on disk.

    extra: what else to keep, rank 0's: numbers, strings, tensors and containers of them, such as
        the `state_dict()` of a learning rate scheduler or of a GradScaler.

    Raises:
        SnapshotError: something cannot be saved, or the file system refuses; nothing is published.
        DesyncError: a rank did not make this call; names it.
    """
    world = _checked(model, "save")._engine.world
    target = files.place(folder)
    world.agree("zerofx.save", f"directory={target.name};optimizer={type(optimizer).__name__}")

    def prepare() -> tuple[Path | None, bytes]:
        values = _values(model, optimizer, extra) if world.rank == 0 else b""
        if world.rank != 0:
            return None, values
        files.check_place(target)
        return files.begin(target), values

    written, values = together(world, f"zerofx.save to {target}", prepare)[0]
    assert written is not None
    try:
        _write(model, optimizer, written, values, target)
    finally:
        if world.rank == 0:
            files.discard(written)  # nothing is there any more once it is published


def _checked(model: CompiledModule, call: str) -> CompiledModule:
    if not isinstance(model, CompiledModule):
        raise SnapshotError(
            f"zerofx.{call} takes what zerofx.compile returned, but was given a "
            f"{type(model).__name__}"
        )
    return model


def _values(
    model: CompiledModule, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> bytes:
    if not isinstance(extra, Mapping | None):
        raise SnapshotError(f"extra is a {type(extra).__name__}; give a dict")
    return pack(
        {
            "extra": dict(extra or {}),
            "optimizer": None if optimizer is None else state.optimizer_values(model, optimizer),
            "modules": {path: m.get_extra_state() for path, m in state.extra_states_of(model)},
        }
    )


@torch.no_grad()
def _write(
    model: CompiledModule,
    optimizer: Optimizer | None,
    written: Path,
    values: bytes,
    target: Path,
) -> None:
    world = model._engine.world
    what = f"zerofx.save to {target}"
    if not written.is_dir():
        pass
    tensors = state.sort_tensors(
        state.model_tensors(model),
        {} if optimizer is None else state.optimizer_tensors(model, optimizer),
        state.one_row(random_states(world.device), world.rank, world.size),
    )
    steps = SaveSteps(written, world.rank, tensors)
