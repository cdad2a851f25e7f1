"""CompiledModule: the nn.Module that a user trains; it compiles each signature at its first call."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from zerofx.capture import capture
from zerofx.capture.signature import ModelState, Signature, describe_difference, signature_key
from zerofx.codegen.emit import fingerprint, render, write
from zerofx.errors import CaptureError
from zerofx.ir.program import Program
from zerofx.loading import bind
from zerofx.passes.pipeline import Setting, run
from zerofx.runtime.engine import Engine
from zerofx.runtime.regions import cache_dir
from zerofx.running import Bound

log = logging.getLogger("zerofx")
PROGRAM_LIMIT = 16


class CompiledModule(nn.Module):
    """A model over shards. Called as the model was, with the same outputs and training loop.

    Parameters, buffers and submodules are the model's own containers, so that names, `train()`,
    `state_dict()` keys and attribute access are unchanged; only what they hold is sharded.
    """

    def __init__(self, model: nn.Module, setting: Setting, engine: Engine) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        for container in ("_parameters", "_buffers", "_modules"):
            self.__dict__[container] = model.__dict__[container]
        self.training = model.training
        self.__dict__["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        self._setting, self._engine = setting, engine
        self._state = ModelState(model)
        self._bound: dict[Signature, Bound] = {}

    # -- calls ------------------------------------------------------------------------------
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the first call of each signature compiles it."""
        self._engine.store.check_bindings()
        key = signature_key(self._state, args, kwargs)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = self._compile(key, args, kwargs)
        return bound(args, kwargs)

    def _compile(self, key: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        if len(self._bound) >= PROGRAM_LIMIT:
            last = next(reversed(self._bound))
            raise CaptureError(
                f"{type(self._model).__name__} would need more than {PROGRAM_LIMIT} programs; what "
                f"varies: {describe_difference(last, key)}; pad or bucket it to a few values"
            )
        plan = self._setting.plan
        model = self._model
        model.training = self.training
        program = capture(
            model,
            args,
            kwargs,
            differentiate=plan.differentiate,
            outputs=plan.outputs,
            units=plan.units,
            device=self._engine.world.device,
        )
        program = run(program, self._setting)
        files = render(program)
        directory = write(files, cache_dir() / "programs" / fingerprint(files))
        log.info("%s: program %s for world %d", program.model_name, directory, program.world_size)
        return self.bind(program, directory)

    def bind(self, program: Program, directory: Path) -> Bound:
        """Load an emitted directory and tie it to this model's shards and buffers."""
        self._engine.reserve(program.slots.get("bytes", []))
        return Bound(program, bind(program, directory, self._engine, self._buffers_of(program)))

    def _buffers_of(self, program: Program) -> Any:
        owners = []
        for name in program.buffers:
            path, _, key = name.rpartition(".")
            owners.append((name, self._model.get_submodule(path)._buffers, key))
        return lambda: {name: held[key] for name, held, key in owners}

    # -- what users ask of it -----------------------------------------------------------------
    @property
    def programs(self) -> list[Program]:
        """One Program a signature, in the order of first calls."""
        return [b.program for b in self._bound.values()]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients locally (stages 0 and 1) until the first backward outside."""
        engine, before = self._engine, self._engine.no_sync
        engine.no_sync = self._setting.plan.stage <= 1
        try:
            yield
        finally:
            engine.no_sync = before

    def refresh(self) -> None:
        """Gather every resident parameter anew at the next forward."""
        self._engine.forget_resident()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)


