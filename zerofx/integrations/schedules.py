"""DeepSpeed's learning rate schedules: they step once per update, and start one step early.

The iteration is -1 until the first step, with the same rate as iteration 0. So the first two
updates have the first rate. A torch scheduler's second update has its second rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerofx.errors import PlanError


class RateSchedule(ABC):
    """Rates as a function of the iteration, which is -1 until the first step."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group at this iteration."""

    def get_last_lr(self) -> list[float]:
        """Return the rates that were last set."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set()

    def _set(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration; the rates follow from it."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved iteration."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _each(self, value: Any, name: str) -> list[Any]:
        """Return one value for each parameter group."""
        groups = self.optimizer.param_groups
        if not isinstance(value, (list, tuple)):
            return [value] * len(groups)
        if len(value) != len(groups):
            raise PlanError(
                f"scheduler.params.{name} has {len(value)} values for {len(groups)} parameter "
                "groups. Give one number, or one per group."
            )
        return list(value)

    def _warmed(self, steps: int, kind: str) -> float | None:
        """Return the fraction of the rate that warm-up has reached, or None after it."""
        if self.last_batch_iteration >= steps:
            return None
        if kind == "log":
            return (1.0 / math.log(steps)) * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / steps


class _Warmup(RateSchedule):
    """Rates from warmup_min_lr to warmup_max_lr in warmup_num_steps, then as given by `_after`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Any,
        warmup_max_lr: Any,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        self.optimizer = optimizer
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(warmup_max_lr, "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    @abstractmethod
    def _after(self) -> float:
        """Return the fraction of the rate after warm-up."""

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        part = self._warmed(self.warmup_num_steps, self.warmup_type)
        part = self._after() if part is None else part
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [least + (most - least) * part for least, most in pairs]


class WarmupLR(_Warmup):
    """Rates from warmup_min_lr to warmup_max_lr (default: the optimizer's), then constant."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: Any = 0.0, warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration,
        )  # fmt: skip

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(_Warmup):
    """Rates from warmup_min_lr to warmup_max_lr, then linearly down until total_num_steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001, warmup_num_steps: int = 1000, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration,
        )  # fmt: skip

    def _after(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(RateSchedule):
    """Ratios of the optimizer's rates: up from warmup_min_ratio, then a cosine to cos_min_ratio."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000, cos_min_ratio: float = 0.0001, warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group."""
        ratio = 0.0 if self.last_batch_iteration < 0 else self._ratio()
        return [rate * ratio for rate in self.base_lrs]

    def _ratio(self) -> float:
        part = self._warmed(self.warmup_num_steps, self.warmup_type)
        if part is not None:
            return self.warmup_min_ratio + part * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class OneCycle(RateSchedule):
    """Rates from cycle_min_lr up to cycle_max_lr and back, momentum the other way, then a decay.

    Source: "A disciplined approach to neural network hyper-parameters" (arXiv 1803.09820).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: float, cycle_max_lr: float,
        decay_lr_rate: float = 0.0, cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None, cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None, decay_step_size: float = 0,
        cycle_momentum: bool = True, cycle_min_mom: float = 0.8, cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.first = float(cycle_first_step_size)
        self.second = (
            self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        )
        self.first_stairs = cycle_first_stair_count
        self.second_stairs = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self.lrs, self.moms = (cycle_min_lr, cycle_max_lr), (cycle_min_mom, cycle_max_mom)
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_momentum(cycle_min_mom)

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group."""
        least, most = self.lrs
        if self.last_batch_iteration < 0:
            rate = least
        elif (decayed := self._decayed()) is None:
            rate = least + (most - least) * self._height()
        else:
            rate = least / (1 + self.decay_lr_rate * decayed)
        return [rate] * len(self.optimizer.param_groups)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration; set rates, and the first beta if there is one."""
        super().step(last_batch_iteration)
        if not self.cycle_momentum:
            return
        least, most = self.moms
        decayed = self._decayed()
        if decayed is None:
            self._set_momentum(most - (most - least) * self._height())
        else:
            self._set_momentum(most * (1 + self.decay_mom_rate * decayed))

    def _set_momentum(self, momentum: float) -> None:
        for group in self.optimizer.param_groups:
            group["betas"] = (momentum, 0.99)

    def _decayed(self) -> float | None:
        """Return the decay intervals since the cycle, or None within it."""
        if self.last_batch_iteration < self.first + self.second:
            return None
        after = self.last_batch_iteration - (self.first + self.second) + 1
        return after / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self) -> float:
        """Return the height of the cycle, from 0 to 1, in stairs if there are any."""
        total = self.first + self.second
        at = self.last_batch_iteration + 1
        x = 1.0 + at / total - math.floor(1 + at / total)
        share = self.first / total
        is_up = x <= share
        stairs = self.first_stairs if is_up else self.second_stairs
        if stairs <= 0:
            return x / share if is_up else (x - 1) / (share - 1)
        within = at % total
        climbed = within / self.first if within <= self.first else (total - within) / self.second
        return math.floor(climbed * stairs) / stairs


class LRRangeTest(RateSchedule):
    """Rates that rise without end, to find the largest one with which a model can be trained."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000, lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.min_lrs = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group."""
        interval = float(self.last_batch_iteration + 1) / self.step_size
        risen = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [least * risen for least in self.min_lrs]
