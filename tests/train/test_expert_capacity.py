"""Experts with slots: tokens go to the ranks of their experts, and what is trained is that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from tensor_models import MODELS, Mixture, batch, relative_error, sent_in_a_step
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zerofx
from zerofx.ir.verify import verify

STEPS = 4
NAMED = {"blocks.*.up": "experts", "blocks.*.down": "experts"}
BASE = {"kernels": "aten", "numerics": "fast", "outputs": "loss"}


def given(tensor: int, capacity: float, sequence: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "tensor": tensor, "experts": True, "capacity": capacity, "sequence": sequence, **more
    }  # fmt: skip


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# -- the reference: a plain process that gives tokens beyond the capacity no weight ----------------
def kept(
    chosen: Tensor, shape: tuple[int, int], ranks: int, most: int, by_sequence: bool
) -> Tensor:
    """Return 1 for each choice of a token [tokens, k] that an expert has room for, and else 0."""
    samples, length = shape
    found = torch.ones(chosen.shape)
    for rank in range(ranks):
        counts: dict[int, int] = {}
        for token in range(len(chosen)):
            at = token % length if by_sequence else token
            if at // ((length if by_sequence else samples * length) // ranks) != rank:
                continue
            for choice, expert in enumerate(chosen[token].tolist()):
                counts[expert] = counts.get(expert, 0) + 1
                if counts[expert] > most:
                    found[token, choice] = 0
    return found


class Limited(Mixture.Block):
    """A block of the mixture without products of groups, in which an expert has limited room."""

    limit: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        weights = weights * self.limit(chosen[:, None])[:, 0]
        rows = torch.einsum("ti,tio->to", tokens.bfloat16(), self.up.bfloat16()[chosen])
        rows = nn.functional.gelu(rows)
        rows = torch.einsum("ti,tio->to", rows, self.down.bfloat16()[chosen]).float()
        return x + (rows * weights[:, None]).view(x.shape)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def limited(name: str, parallel: dict[str, Any]) -> tuple[nn.Module, list[int]]:
    """Return a plain model that drops tokens, and a list of how many it has dropped."""
    model, dropped = make(name), []
    samples, length = batch(name)["input_ids"].shape
    per, experts, ranks = (1 if name == "mixture" else 2), 4, parallel["tensor"]
    share = samples * length // ranks
    most = min(-(-parallel["capacity"] * share * per // experts), share)

    def limit(chosen: Tensor) -> Tensor:
        found = kept(chosen, (samples, length), ranks, int(most), parallel["sequence"])
        dropped.append(int((found == 0).sum()))
        return found

    def before(module: nn.Module, args: Any) -> Any:
        x, chosen, weights = args
        return x, chosen, weights * limit(chosen)

    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(before)
        if isinstance(module, Mixture.Block):
            module.__class__ = Limited
            module.limit = limit  # type: ignore[assignment]
    return model, dropped


def plain(name: str, data: int, parallel: dict[str, Any]) -> tuple[Any, dict[str, Tensor], int]:
    model, dropped = limited(name, parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        for rank in range(data):
            (model(**batch(name, seed=100 * step + rank)).loss / data).backward()
        found.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found, model.state_dict(), sum(dropped)


def train(name: str, plan: dict[str, Any]) -> tuple[Any, dict[str, Tensor], int]:
    model = zerofx.compile(make(name), {**BASE, **plan})
    own = model.zerofx
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, dropped = [], 0
    for step in range(STEPS):
        loss = model(**batch(name, seed=100 * step + own.data_rank)).loss
        dropped += sum(layer.dropped for layer in own.dropped_tokens.values())
        loss.backward()
        found.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for program in model.programs:
        verify(program)
    return found, dict(zerofx.full_state_dict(model, rank0_only=False)), dropped


RECOMPUTED = {"activations": "recompute"}


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("mixtral", 2, {"stage": 3, "parallel": given(2, 2.0)}),
        ("mixtral", 2, {"stage": 1, "parallel": given(2, 0.75)}),
        slow("mixtral", 4, {"stage": 3, "parallel": given(2, 0.75)}),
        slow("mixtral", 4, {"stage": 0, "parallel": given(4, 2.0)}),
        slow("mixtral", 2, {"stage": 2, "parallel": given(2, 0.75, sequence=False)}),
        slow("mixtral", 2, {"stage": 3, "parallel": given(2, 1.0), **RECOMPUTED}),
        slow("mixtral", 2, {"stage": 3, "parallel": given(2, 0.75), "kernels": "inductor"}),
        slow("mixtral", 4, {"stage": 1, "parallel": given(2, 2.0, pipeline=2, micro_batches=2)}),
        slow("qwen3-moe", 4, {"stage": 3, "parallel": given(2, 1.0)}),
        slow("mixture", 2, {"stage": 3, "parallel": given(2, 4.0, placements=NAMED)}),
        slow("mixture", 2, {"stage": 1, "parallel": given(2, 0.75, placements=NAMED)}),
    ],
)
def test_models_train_as_a_plain_process(
    pool: Pool, name: str, ranks: int, plan: dict[str, Any]
) -> None:
    """Equal without drops, and with them equal to a process that gives these tokens no weight."""
    parallel = plan["parallel"]
    data = ranks // parallel["tensor"] // parallel.get("pipeline", 1)
    norms, state, dropped = plain(name, data, parallel)
    is_enough = parallel["capacity"] >= (4 if name == "mixture" else 2)
    assert is_enough == (dropped == 0)
    rough = name == "mixture"  # its products are in bf16, and sums round differently
    found = pool.run(ranks, train, name, plan, timeout_s=400)
    for got, theirs, _ in found:
        assert got == pytest.approx(norms, rel=2e-2 if rough else 1e-5)
        assert relative_error(theirs, state) <= (1e-3 if rough else 1e-6)
    if parallel.get("pipeline", 1) == 1:
        assert sum(n for _, _, n in found) == dropped


def counted(plan: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the calls and bytes that this rank sent in a step, and those of its program."""
    return sent_in_a_step(zerofx.compile(make(name), {**BASE, **plan}), name)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mixtral", {"stage": 3, "parallel": given(2, 1.0)}),
        slow("mixture", {"stage": 1, "parallel": given(2, 1.0, placements=NAMED)}),
        slow("mixtral", {"stage": 3, "parallel": given(2, 1.0), **RECOMPUTED}),
    ],
)
def test_ranks_send_what_is_predicted(pool: Pool, name: str, plan: dict[str, Any]) -> None:
    """Two all-to-alls forward and two backward in each of two layers; recomputing repeats two."""
    calls = 12 if plan.get("activations") == "recompute" else 8
    rows = {"mixtral": 16, "mixture": 8}[name]
    width = {"mixtral": 32 * 4, "mixture": 16 * 2}[name]  # bytes; the mixture sends bf16
    for found, predicted in pool.run(2, counted, plan, name):
        assert found == predicted
        assert found["all_to_all"] == (calls, calls * rows // 2 * width)
