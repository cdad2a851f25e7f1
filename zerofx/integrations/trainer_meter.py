"""TrainerMeter: makes transformers' Trainer log the metrics of `zerofx.meter` with its own.

    from zerofx.integrations.trainer_meter import TrainerMeter

    trainer.add_callback(TrainerMeter(trainer))
    trainer.train()

They go through `Trainer.log`: to TensorBoard, W&B and all other targets of `report_to`, to the
terminal and to `trainer.state.log_history`.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer, TrainerCallback

from zerofx.hardware import Hardware
from zerofx.tools.meter import Meter


class TrainerMeter(TrainerCallback):
    """Logs means of `zerofx.meter`'s metrics since the last time, every `logging_steps` steps.

    Samples are counted as full batches; tokens are counted if `include_num_input_tokens_seen` is
    set.

    trainer: the Trainer that this callback is added to.
    hardware: gives the peak rate for MFU; without it there is no MFU.
    """

    def __init__(
        self, trainer: Trainer, hardware: Hardware | str | os.PathLike[str] | None = None
    ) -> None:
        self._trainer, self._hardware = trainer, hardware
        self._meter: Meter | None = None
        self._steps = self._tokens = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        """Start counting."""
        self._meter = Meter(model, self._hardware)
        self._steps, self._tokens = state.global_step, state.num_input_tokens_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Log, if the Trainer is about to log."""
        if not control.should_log or self._meter is None:
            return
        steps = state.global_step - self._steps
        tokens = state.num_input_tokens_seen - self._tokens  # of all ranks
        self._steps, self._tokens = state.global_step, state.num_input_tokens_seen
        samples = steps * args.train_batch_size * args.gradient_accumulation_steps
        numbers = self._meter.step(samples=samples, tokens=tokens // args.world_size)
        self._trainer.log(self._meter.loggable(numbers))
        # Restores the Trainer's own decision, which logging the metrics has reset.
        control.should_log = True

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stop counting."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None
