"""Loss scaling: keeps small fp16 gradients from underflowing, and skips steps that overflowed.

Backward starts from `scale` times the incoming gradient. Reduced gradients are unscaled in fp32 and
checked in the same pass, so `p.grad` is never scaled. If any rank finds an inf or a NaN, every rank
drops all gradients (`p.grad` is None) until the next optimizer step, which therefore changes no
parameter and no state. Then the scale is lowered.

    hysteresis: an overflow lowers the scale only after `hysteresis` overflows since its last rise
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
    """Rule by which the scale changes; a `growth_interval` of 0 keeps it fixed."""

    initial: float
    growth_interval: int
    growth: float
    backoff: float
    minimum: float
    hysteresis: int


class LossScaler:
    """The scale of one model's backward passes, and the number of skipped steps.

    scale: the factor of the next backward.
    num_skipped: optimizer steps without gradients.
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
        """Scale the gradients from which a backward starts."""
        self._inverse.fill_(1.0 / self.scale)
        return {leaf: tangent * self.scale for leaf, tangent in tangents.items()}

    def unscaled(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return gradients of inputs without the scale, as the user sees them."""
        return [g / self.scale for g in grads]

    def unscale(self, reduced: Tensor, out: Tensor) -> Tensor:
        """Return `out`, set to `reduced` divided by the scale, and record any inf or NaN in it.

        On a GPU, one kernel casts, divides and checks in a single pass over memory.

        Shapes: both flat. `out` is fp32 (fp16 would lose what the scale has saved), or `reduced`
        itself.
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
        """Return and reset this rank's overflow flag, [1]: nonzero if it found an inf or a NaN."""
        flag, self._found = self._found, torch.zeros_like(self._found)
        return flag

    def note_backward(self, has_overflowed: bool) -> None:
        """Record whether any rank found an overflow in a backward."""
        self._is_pending = True
        self.has_overflowed |= has_overflowed

    def note_step(self) -> None:
        """Record an optimizer step: adjust the scale by the result of its backward passes."""
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
        """Return the state that a resumed run needs to continue identically."""
        return {
            "scale": self.scale,
            "num_skipped": self.num_skipped,
            "num_good": self._num_good,
            "patience": self._patience,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.scale, self.num_skipped = float(state["scale"]), int(state["num_skipped"])
        self._num_good, self._patience = int(state["num_good"]), int(state["patience"])
        self.has_overflowed = self._is_pending = False

    def __repr__(self) -> str:
        return f"LossScaler(scale={self.scale:g}, num_skipped={self.num_skipped})"
