"""Training that does not depend on the number of ranks, its whole state, and loads refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor
from training import loss_of

import zerofx
from zerofx.errors import SnapshotError

MICRO_BATCHES = 6  # a step, divided among 1, 2 or 3 ranks
OPTIMIZERS: dict[str, Any] = {
    # eps above the noise of attention key biases, whose true gradient is zero
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def compiled(name: str, plan: dict[str, Any], optimizer: str = "adamw", seed: int = 0) -> Any:
    """Return (model, optimizer) on this rank; another `seed`, other values."""
    model = zerofx.compile(CASES[name].make(seed), {"kernels": "aten", **plan})
    return model, OPTIMIZERS[optimizer](model.parameters())


def train(model: Any, optimizer: Any, name: str, first: int, last: int) -> list[float]:
    """Train from step `first` to `last` on the same data at any world size; return losses."""
    engine = getattr(model, "_engine", None)
    rank, size = (engine.world.rank, engine.world.size) if engine else (0, 1)
    count = MICRO_BATCHES // size
    losses = []
    for step in range(first, last):
        for micro in range(count):
            args, kwargs = CASES[name].batch(100 * step + micro * size + rank)
            loss = loss_of(model(*args, **kwargs))
            (loss / count).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(value: Any) -> Any:
    """Return a plain full copy of what an optimizer or a model holds."""
    if not isinstance(value, Tensor):
        return value
    full = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).detach().clone().cpu()


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return all state by name, whole: a collective call."""
    found = {f"model.{k}": whole(v) for k, v in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            found[f"optimizer.{name}.{key}"] = whole(value)
    for number, group in enumerate(optimizer.param_groups):
        found.update({f"{number}.{k}": v for k, v in group.items() if k != "params"})
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert equality, bit for bit."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, value in expected.items():
        same = torch.equal(found[key], value) if isinstance(value, Tensor) else found[key] == value
        assert same, key


# -- for refusals ---------------------------------------------------------------------------------
def other_run() -> tuple[Any, Any]:
    """Return a model and an optimizer with a state of their own."""
    model, optimizer = compiled("gpt", {"stage": 3}, seed=7)
    train(model, optimizer, "gpt", 5, 6)
    return model, optimizer


def refused(folder: Path, live: tuple[Any, Any], *texts: str) -> None:
    """Assert that loading raises with these texts and changes nothing."""
    model, optimizer = live
    before, generator = everything(model, optimizer), torch.get_rng_state()
    with pytest.raises(SnapshotError) as caught:
        zerofx.load(folder, model, optimizer)
    for text in texts:
        assert text in str(caught.value)
    assert_same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def tree(tmp_path: Path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
