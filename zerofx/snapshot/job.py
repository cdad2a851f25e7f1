"""One rank's part in a save or load, including background saves, and saving of other values."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from zerofx import schema
from zerofx.errors import ArgumentError, SnapshotError, ZerofxError, as_sentence
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.optimizer import check_optimizer, list_of
from zerofx.runtime.store.shards import ShardStore
from zerofx.snapshot import state

log = logging.getLogger("zerofx")

Optimizers = Optimizer | Sequence[Optimizer] | None


class Job:
    """A model, any optimizers, and the directory of the snapshot.

    optimizers: optimizers by the names that their tensors have in the snapshot. called: its name in
        messages, if that of the directory differs between ranks.
    """

    called = ""

    def __init__(self, folder: Path, model: CompiledModule, optimizer: Optimizers) -> None:
        if isinstance(optimizer, CompiledModule):
            raise ArgumentError(
                f"model and optimizer are swapped: the second argument is a "
                f"{type(model).__name__}, the third the model. Call "
                "zerofx.save(folder, model, optimizer) or zerofx.load(folder, model, optimizer)."
            )
        if isinstance(model, (list, tuple, dict)):
            raise ArgumentError(
                f"{folder}: model is a {type(model).__name__}, and a snapshot is of one model. "
                "Call zerofx.save or zerofx.load once for each model, with a folder of its own, "
                "for example run/generator and run/discriminator."
            )
        if not isinstance(model, CompiledModule):
            raise SnapshotError(
                f"{folder}: a snapshot needs a model that zerofx.compile returned, but this is a "
                f"plain {type(model).__name__}. Use torch.save(model.state_dict(), ...)."
            )
        self.optimizers = _named(optimizer)
        for name, each in self.optimizers.items():
            if not hasattr(each, "param_groups"):
                own = getattr(each, "__dict__", {})
                inner = [k for k, v in own.items() if hasattr(v, "param_groups")]
                holds = f" It holds one in .{inner[0]}: pass that." if inner else ""
                raise ArgumentError(
                    f"{name} is of type {type(each).__name__}, not an optimizer.{holds} Call "
                    "zerofx.save(folder, model, optimizer, extra) or zerofx.load(folder, model, "
                    "optimizer), and pass other values, such as its counters, as extra."
                )
        self.folder, self.model = folder, model
        self.store = model._zerofx.engine.store
        self.world = self.store.world
        self.store.settle()  # updates in flight must end first
        finish_background(self.store)

    def check_model(self) -> None:
        """Take over assignments to the model, and refuse optimizers that cannot step shards."""
        self.store.check_bindings()
        for each in self.optimizers.values():
            check_optimizer(each)

    def describe(self) -> dict[str, Any]:
        """Return the names, dtypes and shapes that a save and a model must share."""
        return {
            "parameters": state.describe(self.store.params),
            "buffers": state.describe(state.buffers_of(self.model)),
        }

    def facts(self, step: int | None) -> dict[str, Any]:
        """Return what the manifest says of the model and the job."""
        plan = self.model._zerofx.setting.plan.to_dict()
        facts = {"world_size": self.world.size, "torch": torch.__version__, "step": step}
        kind = type(self.model).__name__
        return {**facts, **self.describe(), "model": kind, "plan": plan}

    def loss_scale(self) -> dict[str, Any]:
        """Return the state of the model's loss scale, if it has one."""
        scaler = self.model.loss_scale
        return dict(scaler.state_dict()) if scaler is not None else {}

    def module_states(self) -> dict[str, Any]:
        """Return the extra states of modules that have one."""
        return {path: m.get_extra_state() for path, m in state.extra_states_of(self.model)}

    def packed(
        self,
        extra: object,
        values: dict[str, Any],
        modules: dict[str, Any],
        others: Mapping[str, Any],
    ) -> bytes:
        """Return all values but tensors. values: of each optimizer, by its name.

        Raises:
            SnapshotError: `extra` is not a mapping, or a value could only be loaded by running
                code; names its key.
        """
        if not isinstance(extra, Mapping):
            raise SnapshotError(f"extra is a {type(extra).__name__}. Give a dict.")
        return pack(
            {
                "extra": dict(extra),
                "optimizer": values.get("optimizer", {}),
                "optimizers": {} if "optimizer" in values else values,
                "modules": modules,
                **others,
            }
        )

    @property
    def label(self) -> str:
        """The name of the snapshot in messages of all ranks, whose paths may differ."""
        if self.called:
            return self.called
        name, series = self.folder.name, self.folder.parent.name
        return f"{series}/{name}" if name.startswith("step-") else name

    def digest(self) -> str:
        """Return the part of the arguments that must be equal on all ranks."""
        kinds = "+".join(type(each).__name__ for each in self.optimizers.values())
        return f"directory={self.folder.name};optimizer={kinds or 'none'}"


def _named(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers of a call by the names that their tensors have in the snapshot."""
    given = list_of(optimizer)
    if len(given) == 1:
        return {"optimizer": given[0]}
    return {f"optimizer{number}": each for number, each in enumerate(given)}


# -- The states of the random generators as tensors, which are saved like all others ---------------
# Each rank's states are saved. At the same world size, every rank loads its own; at another one,
# all ranks load rank 0's. (torch's states are equal on all ranks if the user seeds all ranks alike:
# a program adds the offset of each rank itself.)


_KEY = 624  # words in the state of a Mersenne twister


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return this rank's generator states, 1-D: torch's on host and `device`, Python's, NumPy's.

    Raises:
        SnapshotError: NumPy's global generator is not an MT19937, its default.
    """
    states = {"torch": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states of `random_states`."""
    torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    version, *words, has_gauss, gauss = states["python"].tolist()
    key = tuple(int(word) for word in words)
    random.setstate((int(version), key, gauss if has_gauss else None))
    *words, position, has_gauss, gauss = states["numpy"].tolist()
    key_words = np.array(words).astype(np.uint32)
    np.random.set_state(("MT19937", key_words, int(position), int(has_gauss), gauss))


def _python_state() -> Tensor:
    """Return [version, 624 words, position, has_gauss, gauss]; float64 represents each exactly."""
    version, key, gauss = random.getstate()
    return torch.tensor([version, *key, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _numpy_state() -> Tensor:
    """Return [624 words, position, has_gauss, gauss]."""
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    if state["bit_generator"] != "MT19937":
        raise SnapshotError(
            f"NumPy's global generator is a {state['bit_generator']}, and only the state of the "
            "default MT19937 can be saved. Use a numpy.random.Generator of your own "
            "and put its state into extra=."
        )
    inner = state["state"]
    assert len(inner["key"]) == _KEY
    values = [*inner["key"].tolist(), inner["pos"], state["has_gauss"], state["gauss"]]
    return torch.tensor(values, dtype=torch.float64)


# -- Values other than the model's tensors, stored so that loading them runs no code ---------------


def pack(values: Mapping[str, Any]) -> bytes:
    """Return `values` in the format of torch.save.

    Raises:
        SnapshotError: a value could only be loaded by running code; names its key.
    """
    data, problem = _try(dict(values))
    if problem is None:
        return data
    where, culprit = _find_culprit(values, "")
    raise SnapshotError(
        f"{where} is a {type(culprit).__name__}, which could only be loaded by running code. Give "
        "tensors, numbers, strings and containers of them (for a scheduler or a scaler, its "
        f"state_dict()): {as_sentence(problem)}"
    )


def unpack(file: BinaryIO, path: Path) -> dict[str, Any]:
    """Return the values that `pack` packed, with tensors on the host.

    path: the name of the file in errors.

    Raises:
        SnapshotError: the file was not written by `pack`.
    """
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
        schema.check(found, _VALUES)
    except schema.DAMAGE as error:
        raise SnapshotError(f"{path}: {as_sentence(_first_line(error))}") from error
    return found  # type: ignore[no-any-return]


def optimizers_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was packed of each optimizer, by its name."""
    one = values["optimizer"]
    return {"optimizer": one} if one else values.get("optimizers", {})


_MAP = schema.mapping(schema.anything, schema.anything)
_BY_NAME = schema.mapping(schema.text(), _MAP)
_OPTIMIZER = schema.record(
    {
        "type": schema.text(),
        "groups": schema.sequence(schema.record({"params": schema.sequence(schema.text())})),
        "pieces": schema.mapping(schema.text(), schema.sequence(schema.text())),
        "others": _BY_NAME,
    },
    whole=_BY_NAME,
)
_VALUES = schema.record(
    {
        "extra": _MAP,
        "optimizer": schema.either(schema.one_of([{}]), _OPTIMIZER),
        "modules": schema.mapping(schema.text(), schema.anything),
    },
    optimizers=schema.mapping(schema.text(), _OPTIMIZER),  # snapshots of 0.1.0 have at most one
    loss_scale=_MAP,
)


def _try(value: Any) -> tuple[bytes, str | None]:
    """Return (packed bytes, None), or (b"", the reason why the value cannot be packed)."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), map_location="cpu", weights_only=True)
    except (ZerofxError, pickle.PickleError, TypeError, AttributeError, RuntimeError) as error:
        return b"", _first_line(error)
    return stream.getvalue(), None


def _find_culprit(value: Any, where: str) -> tuple[str, Any]:
    """Return the path and value of the innermost part of `value` that cannot be packed."""
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


# -- Saves in the background: one at a time for each model -----------------------------------------


_NICE = 10  # of the thread: training has priority
_UNDER_WAY: weakref.WeakKeyDictionary[ShardStore, Future[Path]] = weakref.WeakKeyDictionary()


def write_in_background(store: ShardStore, name: str, write: Callable[[str], Path]) -> Future[Path]:
    """Start a thread that writes a save; return its future.

    The thread is not a daemon, so Python waits for it before the process ends.

    write: takes a name that is equal on all ranks and unique among the saves of this model.
    """
    count = _COUNTS[store] = _COUNTS.get(store, 0) + 1
    future: Future[Path] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # threads have priorities only on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            future.set_result(write(f"save/{count}"))
        except BaseException as error:  # noqa: BLE001  (raised when the result is read)
            log.error("zerofx: a save in the background failed: %s", as_sentence(error))
            future.set_exception(error)

    _UNDER_WAY[store] = future
    threading.Thread(target=run, name=name).start()
    return future


_COUNTS: weakref.WeakKeyDictionary[ShardStore, int] = weakref.WeakKeyDictionary()


def finish_background(store: ShardStore) -> None:
    """Wait for the save of this model that is being written, if any.

    Raises: the exception of that save, once.
    """
    future = _UNDER_WAY.pop(store, None)
    if future is not None:
        future.result()
