"""Sequences cut over ranks: unmodified models of transformers train as one plain process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from tensor_models import Result, batch, padded, relative_error
from test_tensor_parallel import compare, make, plain, slow, train
from test_tensor_plans import HOST, IGNORED, check, run
from test_tensor_state import check_same, loaded, saved
from torch import Tensor, nn

import zerofx
from zerofx.errors import PlanError, ShardError
from zerofx.plan.plan import Plan

CONTEXT = {"context": 2, "attention": "heads"}
RING = {"context": 2, "attention": "ring"}


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("gpt2", 2, {"stage": 3}),
        slow("llama", 2, {"stage": 3}),
        slow("llama", 2, {"stage": 2, "activations": "recompute"}),
        slow("gpt2", 2, {"stage": 1, "kernels": "inductor"}),
        slow("bert", 2, {"stage": 2}),
        slow("t5", 2, {"stage": 3}),
        slow("vit", 2, {"stage": 2}),
        slow("mixtral", 2, {"stage": 3}),
        slow("bert", 4, {"stage": 1}),
        slow("gpt2", 4, {"stage": 2, "shard_axis_size": 2}),
        slow("llama", 4, {"stage": 3, "parallel": {"context": 4}}),
        slow("grouped", 2, {"stage": 3, "parallel": RING}),
        slow("llama", 2, {"stage": 2, "parallel": RING, "activations": "recompute"}),
        slow("gpt2", 2, {"stage": 1, "parallel": RING, "kernels": "inductor"}),
        slow("bert", 2, {"stage": 2, "parallel": RING}),
        slow("t5", 2, {"stage": 3, "parallel": RING}),
        slow("vit", 2, {"stage": 2, "parallel": RING}),
        slow("llama", 4, {"stage": 3, "parallel": RING | {"context": 4}}),
        slow("gpt2", 4, {"stage": 2, "parallel": RING, "shard_axis_size": 2}),
    ],
)
def test_models_train_alike(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    plan = {"parallel": CONTEXT, **plan}
    for optimizer, tolerance in (("sgd", 2e-6), ("adamw", 1e-5)):
        expected = plain(name, optimizer, ranks // plan["parallel"]["context"])
        for found in pool.run(ranks, train, name, optimizer, plan):
            compare(found, expected, tolerance)


# -- a model of this file -------------------------------------------------------------------------
class Odd(nn.Module):
    """Attention from bare products, learned positions, and a loss over shifted labels.

    is_fused: attention is torch's. is_shared: all heads have the first one's keys and values.
    """

    def __init__(self, heads: int = 4, is_fused: bool = False, is_shared: bool = False) -> None:
        super().__init__()
        self.heads, self.is_fused, self.is_shared = heads, is_fused, is_shared
        self.words, self.places = nn.Embedding(40, 24), nn.Parameter(torch.randn(1, 32, 24) * 0.02)
        self.mix, self.back = nn.Linear(24, 72), nn.Linear(24, 24, bias=False)
        self.norm = nn.RMSNorm(24)
        self.out = nn.Linear(24, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Result:
        count, length = input_ids.shape
        x = self.words(input_ids) + self.places[:, :length]
        q, k, v = (
            each.view(count, length, self.heads, -1).transpose(1, 2)
            for each in self.mix(self.norm(x)).chunk(3, -1)
        )
        if self.is_shared:
            k, v = (each[:, :1].expand(-1, self.heads, -1, -1) for each in (k, v))
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
        x = x + self.back(mixed.transpose(1, 2).reshape(count, length, -1))
        logits = self.out(x)
        return Result(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1))


def texts(step: int, length: int) -> dict[str, Tensor]:
    """Return two texts, of which some labels do not count: more of them in the first half."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (2, length), generator=draw)
    labels = ids.roll(-1, 1)
    labels[:, : length // 4] = -1
    labels[:, -1] = -1
    return {"input_ids": ids, "labels": labels}


def odd(
    plan: dict[str, Any] | None, heads: int, length: int, *kinds: bool
) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model: Any = Odd(heads, *kinds)
    if plan is not None:
        model = zerofx.compile(model, {"kernels": "aten", **plan})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(**texts(step, length)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(float(model(**texts(9, length)).loss))
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("heads", "length"),
    [
        (4, 8),
        slow(3, 8),  # heads that do not divide
        slow(4, 7),  # nor does the sequence
    ],
)
def test_a_model_of_bare_products(pool: Pool, heads: int, length: int) -> None:
    same(pool, 2, {"parallel": CONTEXT, "stage": 2}, heads, length)


@pytest.mark.parametrize(
    ("parallel", "is_fused"),
    [
        (CONTEXT, True),
        slow(CONTEXT, False),
        slow(RING, True),
        slow({"tensor": 2, "sequence": True}, True),
    ],
)
def test_heads_that_share_keys_and_values(
    pool: Pool, parallel: dict[str, Any], is_fused: bool
) -> None:
    """Expanded heads have no memory of their own; their parts do."""
    same(pool, 2, {"parallel": parallel, "stage": 2}, 4, 8, is_fused, True)


def same(pool: Pool, ranks: int, plan: dict[str, Any], *more: Any) -> None:
    """Check the losses of an `Odd` on several ranks, and its parameters, against one process."""
    expected = odd(None, *more)
    for found in pool.run(ranks, odd, plan, *more):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        for key, value in expected[1].items():
            torch.testing.assert_close(found[1][key], value, rtol=0, atol=2e-6, msg=key)


@pytest.mark.parametrize(
    ("heads", "ranks", "context"),
    [(3, 2, 2), slow(1, 4, 4), slow(3, 4, 2)],  # no number of heads need divide
)
def test_a_ring_with_any_number_of_heads(pool: Pool, heads: int, ranks: int, context: int) -> None:
    """Some labels do not count, more of them in the first half; evaluation, too."""
    same(pool, ranks, {"parallel": RING | {"context": context}, "stage": 3}, heads, 16, True)


# -- masks of padding -----------------------------------------------------------------------------
def masked(name: str, plan: dict[str, Any] | None) -> tuple[list[float], Any]:
    """Train on padded texts, of this data rank or of all; return losses and the parameters."""
    model: Any = make(name)
    ranks = range(2)
    if plan is not None:
        model = zerofx.compile(model, {"kernels": "aten", "outputs": "loss", **plan})
        ranks = range(model.zerofx.data_rank, model.zerofx.data_rank + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        losses.append(0.0)
        for rank in ranks:
            loss = model(**padded(name, 10 * step + rank)).loss / len(ranks)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    if plan is None:
        return losses, model.state_dict()
    return losses, dict(zerofx.full_state_dict(model, rank0_only=False))


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("llama", 4, {"stage": 3}),
        slow("gpt2", 4, {"stage": 1}),
        slow("bert", 4, {"stage": 2}),
        slow("grouped", 8, {"stage": 3, "parallel": RING | {"context": 4}}),
        slow("llama", 4, {"stage": 2, "activations": "recompute"}),
        slow("llama", 4, {"stage": 1, "kernels": "inductor"}),
        slow("llama", 8, {"stage": 3, "parallel": RING | {"pipeline": 2}}),
    ],
)
def test_padded_texts_go_around_a_ring(
    pool: Pool, name: str, ranks: int, plan: dict[str, Any]
) -> None:
    losses, state = masked(name, None)
    found = pool.run(ranks, masked, name, {"parallel": RING} | plan, timeout_s=300)
    mean = torch.tensor([each for each, _ in found]).double().mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses).double(), rtol=2e-6, atol=0)
    for _, held in found:
        assert relative_error(held, state) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 6])  # 6 positions are no four chunks
def test_bare_products_in_the_order_of_a_ring(pool: Pool, length: int) -> None:
    same(pool, 2, {"parallel": RING, "stage": 2}, 4, length)


# -- other fields of the plan ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        slow(2, {"update": "in-backward", "offload": HOST | {"activations": "cpu"}}),
        slow(2, IGNORED),
        slow(2, {"offload": {"optimizer": "nvme", "parameters": "nvme"}}),
        slow(2, {"memory_budget": "600KiB", "activations": "auto"}),
        slow(4, {"update": "in-backward", "optimizer": "Lamb"}),
        slow(4, {"stage": 1, "optimizer": "Lamb"}),
        slow(2, {"parallel": RING, "update": "in-backward", "offload": HOST}),
        slow(2, {"parallel": RING, "memory_budget": "600KiB", "activations": "auto"}),
    ],
)
def test_plans_train_alike(pool: Pool, tmp_path: Path, ranks: int, plan: dict[str, Any]) -> None:
    plan = {"parallel": CONTEXT} | plan
    kind = plan.pop("optimizer", "AdamW")
    if "nvme" in plan.get("offload", {}).values():
        plan = plan | {"offload": plan["offload"] | {"path": str(tmp_path)}}
    ignored = plan.get("ignored_params", [])
    expected = run(None, kind, ignored, ranks // 2)
    for found in pool.run(ranks, run, plan, kind, ignored, timeout_s=400):
        check(found, expected)


def halves(plan: dict[str, Any], is_padded: bool = False) -> list[float]:
    given = padded if is_padded else batch
    model = zerofx.compile(make("llama"), {"kernels": "aten", "precision": "bf16", **plan})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        loss = model(**given("llama", seed=step)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "is_padded"), [(CONTEXT, False), (RING, False), (RING, True)])
def test_in_bf16(pool: Pool, parallel: dict[str, Any], is_padded: bool) -> None:
    (alone,) = pool.run(1, halves, {}, is_padded)
    for found in pool.run(2, halves, {"parallel": parallel, "stage": 3}, is_padded):
        assert found == pytest.approx(alone, abs=5e-3)


# -- states and samples ---------------------------------------------------------------------------
SEQUENCES = {"stage": 3, "parallel": CONTEXT}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        slow((2, SEQUENCES), (1, {"stage": 3})),
        slow((2, {"stage": 3, "parallel": RING}), (2, SEQUENCES)),
        slow((2, {"stage": 3, "parallel": {"tensor": 2}}), (4, {**SEQUENCES, "stage": 1})),
    ],
)
def test_any_layout_loads_any_other(pool: Pool, tmp_path: Path, first: Any, second: Any) -> None:
    path = str(tmp_path / "snapshot")
    expected = pool.run(first[0], saved, path, "blocks", "adamw", first[1])[0]
    for found in pool.run(second[0], loaded, path, "blocks", "adamw", second[1]):
        check_same(found, expected)


def other_samples() -> list[Any]:
    model = zerofx.compile(make("blocks"), Plan(parallel=CONTEXT, kernels="aten"))
    own = model.zerofx
    with pytest.raises(ShardError) as caught:
        model(**batch("blocks", seed=own.world.rank))
    return [str(caught.value), own.data_rank, own.data_world]


def test_a_wrong_sampler_is_named(pool: Pool) -> None:
    found = pool.run(4, other_samples)
    for text, _, world in found:
        assert (
            "differs between the 2 ranks that share each sequence (Plan.parallel.context)" in text
        )
        assert world == 2
    assert [rank for _, rank, _ in found] == [0, 0, 1, 1]


# -- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"parallel": {"context": 2, "pipeline": 2}, "numerics": "fast"},
            "context = 2 does not support numerics = 'fast'",
        ),
        (
            {"parallel": {"context": 2, "pipeline": 2}, "update": "in-backward"},
            "pipeline = 2 does not support update",
        ),
        ({"parallel": {"context": 2, "attention": "rings"}}, "attention"),
        ({"parallel": {"attention": "ring"}}, "attention = 'ring' contradicts context = 1"),
        ({"parallel": {"context": 2, "sequence": True}}, "Set tensor, or drop sequence"),
        (
            {"parallel": {"context": 2, "placements": {"*": "whole"}}},
            "tensor axis. Set tensor, or drop it",
        ),
        ({"parallel": {"context": 2}, "numerics": "fast"}, "does not support numerics = 'fast'"),
    ],
)
def test_plans_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan(**fields)


def test_a_world_that_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"parallel.context = 4 does not divide the world of 6"):
        Plan(parallel={"context": 4}).axis_sizes(6)
    assert Plan(parallel={"context": 2}).axis_sizes(8) == (8, 1)
    assert Plan(parallel={"context": 2}, stage=0).axis_sizes(8) == (1, 8)
