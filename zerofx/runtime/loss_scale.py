"""Loss scaling: keeps small fp16 gradients from underflowing, and skips steps that overflowed.

Backward starts from `scale` times the incoming gradient; reduced gradients are unscaled in fp32 and
checked in the same pass, so `p.grad` is never scaled. Where any rank finds an inf or a NaN, every
rank drops all gradients (`p.grad` is None) until the next optimizer step, which therefore changes
no parameter and no state; then the scale is lowered.

    hysteresis: an overflow lowers the scale only once `hysteresis` of them came since it last rose
    growth:     scale * growth after `growth_interval` steps without an overflow
    backoff:    max(scale * backoff, minimum)

Source: Mixed Precision Training (arXiv 1710.03740), section 3.2; hysteresis as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofx.compat.tensors import unscale_and_check
from zerofx.kernels.launch import use_triton
from zerofx.kernels.pack import pack_grads_


@dataclass(frozen=True)
class ScaleRule:
    """How the scale moves; `growth_interval` 0 is a fixed scale."""

    initial: float
    growth_interval: int
    growth: float
    backoff: float
    minimum: float
    hysteresis: int


class LossScaler:
    """The scale of one model's backward passes, and how many steps were skipped.

    scale: what the next backward multiplies by. num_skipped: optimizer steps without gradients.
    """

    def __init__(self, rule: ScaleRule, device: torch.device) -> None:
        self.rule = rule
        self.scale = rule.initial
        self.num_skipped = 0
        self.has_overflowed = False  # since the last optimizer step
        self._num_good = 0
        self._patience = rule.hysteresis
        self._is_pending = False  # a backward ran since the last optimizer step
        with torch.inference_mode(False):
            self._found = torch.zeros(1, device=device)
            self._inverse = torch.ones(1, device=device)

    def begin(self, tangents: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Scale what a backward starts from."""
        self._inverse.fill_(1.0 / self.scale)
        return {leaf: tangent * self.scale for leaf, tangent in tangents.items()}

    def unscaled(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients of inputs as the user is to see them."""
        return [g / self.scale for g in grads]

    def unscale(self, reduced: Tensor, out: Tensor) -> Tensor:
        """Return `out`, which receives `reduced` divided by the scale; note any inf or NaN in it.

        On a GPU a kernel of ours casts, divides and looks in one pass over memory.

        Shapes: both flat; `out` in fp32 (fp16 would lose again what the scale has saved), or it may
        be `reduced` itself.
        """
        if use_triton(out.device):
            stats = pack_grads_(out, [reduced], [0], scale=self._inverse)
            self._found += stats[1:] > 0
        else:
            if out is not reduced:
                out.copy_(reduced)
            unscale_and_check([out], self._found, self._inverse)
        return out

    def take_flag(self) -> Tensor:
        """Return whether this rank found an inf or a NaN (not 0.0) in what it unscaled, [1]."""
        flag, self._found = self._found, torch.zeros_like(self._found)
        return flag

    def note_backward(self, has_overflowed: bool) -> None:
        """Take note of what all ranks found in a backward."""
        self._is_pending = True
        self.has_overflowed |= has_overflowed

    def note_step(self) -> None:
        """Take note of an optimizer step: move the scale by what its backward passes found."""
        if not self._is_pending:
            return
        self._is_pending = False
        if self.has_overflowed:
            self.has_overflowed = False
            self.num_skipped += 1
            self._overflowed()
        elif self.rule.growth_interval:
            self._num_good += 1
            if self._num_good >= self.rule.growth_interval:
                self._num_good, self._patience = 0, self.rule.hysteresis
                self.scale = min(self.scale * self.rule.growth, torch.finfo(torch.float32).max)

    def _overflowed(self) -> None:
        self._num_good = 0
        if not self.rule.growth_interval:
            return
        self._patience -= 1
        if self._patience <= 0:
            self._patience = 1
            self.scale = max(self.scale * self.rule.backoff, self.rule.minimum)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on alike."""
        return {
            "scale": self.scale,
            "num_skipped": self.num_skipped,
            "num_good": self._num_good,
            "patience": self._patience,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that `state_dict` returned."""
        self.scale, self.num_skipped = float(state["scale"]), int(state["num_skipped"])
        self._num_good, self._patience = int(state["num_good"]), int(state["patience"])
        self.has_overflowed = self._is_pending = False

    def __repr__(self) -> str:
        return f"LossScaler(scale={self.scale:g}, num_skipped={self.num_skipped})"
