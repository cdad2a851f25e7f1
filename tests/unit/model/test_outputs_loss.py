"""Plan(outputs="loss"): the loss alone is handed out, and trains as ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor

import zerofx
from zerofx.analysis.memory.memory import memory


def run_step(outputs: str) -> tuple[Tensor, bool, list[Tensor]]:
    """Return the loss, whether there are logits, and the weights after two steps."""
    plan = {"stage": 3, "kernels": "aten", "outputs": outputs}
    model = zerofx.compile(CASES["hf-gpt2"].make(), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = None
    for step in range(2):
        args, kwargs = CASES["hf-gpt2"].batch(step)
        result = model(*args, **kwargs)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert result is not None
    has_logits = result.logits is not None
    return result.loss.detach(), has_logits, list(model.state_dict().values())


def test_the_loss_alone_trains_alike(pool: Any) -> None:
    pytest.importorskip("transformers")
    whole, alone = (pool.run(2, run_step, outputs)[0] for outputs in ("all", "loss"))
    assert whole[1] and not alone[1]
    assert torch.equal(whole[0], alone[0])
    assert all(torch.equal(a, b) for a, b in zip(whole[2], alone[2], strict=True))


def test_the_logits_are_not_held_for_the_caller() -> None:
    pytest.importorskip("transformers")
    model, (args, kwargs) = CASES["hf-gpt2"].make(), CASES["hf-gpt2"].batch(0)
    peaks = []
    for outputs in ("all", "loss"):
        program = zerofx.capture(model, args, kwargs, outputs=outputs)
        peaks.append(memory(zerofx.rewrite(program, zerofx.Plan(outputs=outputs), 2)).peak_bytes)
    assert peaks[1] < peaks[0]
