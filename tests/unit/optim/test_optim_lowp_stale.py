"""What makes a resident copy stale although an optimizer writes it: all other writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from lowp_cases import Loop, check_copies, counted, settled
from optim_cases import mixed_batch, ours, theirs
from torch import nn

from zerofx.kernels import adamw

Run = Callable[..., Any]


def write_loaded(loop: Loop) -> None:
    loop.model.load_state_dict({k: v * 1.5 for k, v in loop.model.state_dict().items()})


def write_in_place(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.get_parameter("first.weight").mul_(1.5)


def write_frozen(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.get_parameter("frozen.weight").mul_(1.5)


def write_data(loop: Loop) -> None:
    loop.model.get_parameter("last.weight").data.add_(0.5)


def write_assigned(loop: Loop) -> None:
    last = loop.model.get_submodule("last")
    last.weight = nn.Parameter(last.weight.detach() * 1.5)


def write_unseen_then_refresh(loop: Loop) -> None:
    loop.model.get_parameter("first.weight").detach().numpy()[:] += 0.5
    loop.model.refresh()


WRITES = [
    write_loaded, write_in_place, write_frozen, write_data, write_assigned,
    write_unseen_then_refresh,
]  # fmt: skip


def check_write(write: Callable[[Loop], None], is_before_step: bool) -> None:
    with counted() as found:
        loop = settled(found)
        if is_before_step:
            loop.forward().backward()
            write(loop)
            loop.optimizer.step()
        else:
            write(loop)
        assert loop.casts_now(found) > 0
        loop.step()  # whose forward has nothing to do
        has_alias = loop.engine.store.ledger.handouts > 0
        assert (loop.casts_now(found) > 0) == has_alias  # which is never trusted again


@pytest.mark.parametrize("is_before_step", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_other_writes_are_cast(
    interpreted: Run, write: Callable[[Loop], None], is_before_step: bool
) -> None:
    interpreted(check_write, write, is_before_step)


def check_alias() -> None:
    """Through an alias that is kept, writes are seen by nobody; each forward casts from then on."""
    with counted() as found:
        loop = settled(found)
        kept = loop.model.get_parameter("first.weight").data
        for _ in range(3):
            loop.forward().backward()
            loop.optimizer.step()
            kept.numpy()[:] *= 1.01
            assert loop.casts_now(found) > 0


def test_an_alias_is_never_trusted(interpreted: Run) -> None:
    interpreted(check_alias)


def check_two(name: str, is_written: bool) -> None:
    """Two optimizers over the parameters of one bucket."""
    with counted() as found:
        loop = Loop()
        params = list(loop.model.parameters())
        second = theirs("sgd", params[1::2]) if name == "torch" else ours(name, params[1::2])
        halves = ours("adamw", params[0::2]), second
        for step in range(4):
            before = len(found)
            loop.forward().backward()
            assert step == 0 or (len(found) == before) == is_written
            for optimizer in halves if step % 2 else reversed(halves):
                optimizer.step()
            loop.optimizer.zero_grad()
        loop.forward()


@pytest.mark.parametrize(
    ("name", "is_written"), [("lamb", True), ("lion", False), ("torch", False)]
)
def test_two_optimizers_over_a_bucket(interpreted: Run, name: str, is_written: bool) -> None:
    interpreted(check_two, name, is_written)


def check_failure() -> None:
    """A step that fails in the middle has written some; what it wrote is computed with."""
    with counted() as found:
        loop = settled(found)
        loop.forward().backward()
        calls, launch = [], adamw._launch

        def fail_third(*given: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("planted")
            launch(*given)

        with (
            mock.patch.object(adamw, "_launch", fail_third),
            pytest.raises(RuntimeError, match="planted"),
        ):
            loop.optimizer.step()
        assert loop.casts_now(found) > 0


def test_a_step_that_fails_in_the_middle(interpreted: Run) -> None:
    interpreted(check_failure)


def check_skipped() -> None:
    """Where a scaler found an infinity, nothing is written and nothing is cast."""
    with counted() as found:
        loop = settled(found)
        loop.forward().backward()
        loop.optimizer.found_inf = torch.ones(())
        loop.optimizer.step()
        del loop.optimizer.found_inf
        assert loop.casts_now(found) == 0


def test_a_skipped_step(interpreted: Run) -> None:
    interpreted(check_skipped)


def check_two_copies() -> None:
    """A deep copy's optimizer writes its own copies only."""
    with counted() as found:
        loop = settled(found)
        twin = copy.deepcopy(loop.model)
        own = ours("adamw", twin.parameters())
        for step in range(3):
            twin(*mixed_batch(step, 0)).backward()
            check_copies(twin._engine)
            own.step()
            own.zero_grad()
        loop.step()
        assert loop.casts_now(found) == 0


def test_copies_of_a_model(interpreted: Run) -> None:
    interpreted(check_two_copies)
