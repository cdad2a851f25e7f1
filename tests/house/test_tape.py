"""The tape, which stands for CUDA graphs in tests: what it must not let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tape import Tape
from torch import Tensor


def test_the_tape_leaves_no_effect_but_by_its_replay() -> None:
    total, step = torch.zeros(2), torch.ones(2)
    made, replay = Tape().capture(lambda: total.add_(step) * 2)
    assert torch.equal(total, torch.zeros(2))
    assert made.isnan().all()
    step.fill_(3)
    replay()
    replay()
    assert torch.equal(total, torch.full((2,), 6.0))
    assert torch.equal(made, torch.full((2,), 12.0))


def test_the_tape_refuses_the_host() -> None:
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Tape().capture(lambda: torch.ones(2).sum().item())


def _hold_and_drop(change: Callable[[list[Tensor]], Any]) -> None:
    held = [torch.ones(400)]
    _, replay = Tape().capture(lambda: held[0] * 2)
    change(held)
    replay()


def test_the_tape_notices_memory_that_is_gone() -> None:
    with pytest.raises(AssertionError, match="memory that is gone"):
        _hold_and_drop(lambda held: held.clear())
    with pytest.raises(AssertionError, match="memory has moved"):
        _hold_and_drop(lambda held: held[0].untyped_storage().resize_(0))


def test_the_tape_spoils_what_a_shared_pool_may() -> None:
    tape, x = Tape(), torch.ones(4)
    first, again = tape.capture(lambda: x + 1)
    second, replay = tape.capture(lambda: x + 2)
    replay()
    again()
    assert torch.equal(first, torch.full((4,), 2.0))
    assert second.isnan().all()
