"""One rank's part in a save or a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer

from zerofx.errors import ArgumentError, SnapshotError
from zerofx.model.module import CompiledModule
from zerofx.runtime.store.optimizer import check_optimizer
from zerofx.snapshot import state


class Job:
    """A model, perhaps its optimizer, and the directory that they go to or come from."""

    def __init__(self, folder: Path, model: CompiledModule, optimizer: Optimizer | None) -> None:
        if isinstance(optimizer, CompiledModule):
            raise ArgumentError(
                f"model and optimizer are swapped: the second argument is a "
                f"{type(model).__name__}, the third the model. Call "
                "zerofx.save(folder, model, optimizer) or zerofx.load(folder, model, optimizer)"
            )
        if not isinstance(model, CompiledModule):
            raise SnapshotError(
                f"{folder}: a snapshot is of what zerofx.compile returned, and this is a plain "
                f"{type(model).__name__}; use torch.save(model.state_dict(), ...)"
            )
        if optimizer is not None and not hasattr(optimizer, "param_groups"):
            raise ArgumentError(
                f"optimizer is of type {type(optimizer).__name__}, not an optimizer. Call "
                "zerofx.save(folder, model, optimizer, extra) or zerofx.load(folder, model, "
                "optimizer); other values go to extra"
            )
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.store = model._engine.store
        self.world = self.store.world
        self.store.settle()  # updates under way come first

    def check_model(self) -> None:
        """Take in what was assigned to the model; refuse an optimizer that cannot step shards."""
        self.store.check_bindings()
        if self.optimizer is not None:
            check_optimizer(self.optimizer)

    def describe(self) -> dict[str, Any]:
        """Return the names, dtypes and shapes that a save and a model must share."""
        return {
            "parameters": state.describe(self.store.params),
            "buffers": state.describe(state.buffers_of(self.model)),
        }

    def digest(self) -> str:
        """Return what all ranks must have asked for alike."""
        kind = "none" if self.optimizer is None else type(self.optimizer).__name__
        return f"directory={self.folder.name};optimizer={kind}"
