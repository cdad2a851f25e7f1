"""Layers cut over ranks, and the sequences that go through each part cut over others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tensor_models import batch, relative_error
from test_context_parallel import RING, masked
from test_tensor_parallel import compare, counted, make, plain, slow, train
from test_tensor_plans import HOST, IGNORED, check, run
from test_tensor_state import check_same, loaded, saved

import zerofx
from zerofx.errors import PlanError, ShardError
from zerofx.plan.plan import Plan

BOTH = {"tensor": 2, "context": 2}
SEQUENCE = BOTH | {"sequence": True}


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("llama", 4, {"stage": 3}),
        slow("gpt2", 4, {"stage": 3}),
        slow("gpt2", 4, {"stage": 1, "parallel": SEQUENCE}),
        slow("llama", 4, {"stage": 3, "parallel": SEQUENCE}),
        slow("llama", 4, {"stage": 2, "activations": "recompute"}),
        slow("gpt2", 4, {"stage": 1, "kernels": "inductor"}),
        slow("bert", 4, {"stage": 0}),
        slow("t5", 4, {"stage": 3}),
        slow("mixtral", 4, {"stage": 3}),
        slow("mixtral", 4, {"stage": 3, "parallel": BOTH | {"experts": True}}),
        slow("grouped", 4, {"stage": 3, "parallel": BOTH | RING}),
        slow("gpt2", 4, {"stage": 2, "parallel": BOTH | RING}),
        slow("llama", 8, {"stage": 3}),
        slow("gpt2", 8, {"stage": 2, "parallel": SEQUENCE, "shard_axis_size": 2}),
        slow("llama", 8, {"stage": 3, "parallel": BOTH | {"context": 4}}),
        slow("many heads", 8, {"stage": 1, "parallel": BOTH | {"tensor": 4}}),
        slow("gpt2", 8, {"stage": 3, "parallel": BOTH | {"pipeline": 2}}),
        slow("llama", 8, {"stage": 1, "parallel": SEQUENCE | {"pipeline": 2}}),
        slow("llama", 8, {"stage": 3, "parallel": BOTH | RING | {"pipeline": 2}}),
    ],
)
def test_models_train_alike(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    plan = {"parallel": BOTH, **plan}
    data = ranks // Plan(**plan).parallel.num_shared
    for optimizer, tolerance in (("sgd", 2e-6), ("adamw", 1e-5)):
        expected = plain(name, optimizer, data)
        for found in pool.run(ranks, train, name, optimizer, plan, timeout_s=300):
            compare(found, expected, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"), [("llama", BOTH), ("gpt2", BOTH | RING), ("bert", SEQUENCE)]
)
def test_padded_texts(pool: Pool, name: str, parallel: dict[str, Any]) -> None:
    losses, state = masked(name, None)
    found = pool.run(8, masked, name, {"parallel": parallel, "stage": 3}, timeout_s=300)
    mean = torch.tensor([each for each, _ in found]).double().mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses).double(), rtol=2e-6, atol=0)
    for _, held in found:
        assert relative_error(held, state) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [BOTH, SEQUENCE, BOTH | RING])
def test_ranks_send_what_is_predicted(pool: Pool, parallel: dict[str, Any]) -> None:
    for found, predicted in pool.run(4, counted, {"stage": 3, "parallel": parallel}):
        assert found == predicted


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        {"update": "in-backward", "offload": HOST | {"activations": "cpu"}},
        IGNORED,
        {"memory_budget": "600KiB", "activations": "auto", "parallel": SEQUENCE},
        {"stage": 1, "optimizer": "Lamb"},
    ],
)
def test_plans_train_alike(pool: Pool, plan: dict[str, Any]) -> None:
    plan = {"parallel": BOTH} | plan
    kind = plan.pop("optimizer", "AdamW")
    ignored = plan.get("ignored_params", [])
    expected = run(None, kind, ignored, 1)
    for found in pool.run(4, run, plan, kind, ignored, timeout_s=400):
        check(found, expected)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        slow((4, {"stage": 3, "parallel": BOTH}), (1, {"stage": 3})),
        slow((4, {"stage": 1, "parallel": SEQUENCE}), (4, {"stage": 3, "parallel": BOTH | RING})),
        slow((2, {"stage": 2, "parallel": {"tensor": 2}}), (4, {"stage": 3, "parallel": BOTH})),
        slow((2, {"stage": 3, "parallel": {"context": 2}}), (8, {"stage": 1, "parallel": BOTH})),
    ],
)
def test_any_layout_loads_any_other(pool: Pool, tmp_path: Path, first: Any, second: Any) -> None:
    path = str(tmp_path / "snapshot")
    expected = pool.run(first[0], saved, path, "blocks", "adamw", first[1])[0]
    for found in pool.run(second[0], loaded, path, "blocks", "adamw", second[1]):
        check_same(found, expected)


def other_samples(differs_over: int) -> list[Any]:
    """Give ranks the samples of others: of each pair of neighbours, or of each two pairs."""
    model = zerofx.compile(make("blocks"), Plan(parallel=BOTH, kernels="aten"))
    own = model.zerofx
    rank = own.world.rank
    with pytest.raises(ShardError) as caught:
        model(**batch("blocks", seed=rank // differs_over % 2))
    return [str(caught.value), own.data_rank, own.data_world]


@pytest.mark.parametrize(
    ("differs_over", "said"),
    [
        (1, "the 2 ranks that share each layer (Plan.parallel.tensor)"),
        slow(2, "the 2 ranks that share each sequence (Plan.parallel.context)"),
    ],
)
def test_a_wrong_sampler_is_named(pool: Pool, differs_over: int, said: str) -> None:
    found = pool.run(4, other_samples, differs_over)
    assert all(said in text for text, _, _ in found)
    assert {(rank, world) for _, rank, world in found} == {(0, 1)}


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (SEQUENCE | RING, "attention = 'ring' does not support sequence = True yet"),
        (BOTH | {"placements": "model"}, "'model' contradicts context = 2"),
        ({"context": 2, "placements": {"*": "whole"}}, "Set tensor, or drop it"),
    ],
)
def test_plans_that_are_refused(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Plan(parallel=parallel)


def test_axes_of_both() -> None:
    plan = Plan(parallel=BOTH | {"placements": {"head": "whole"}})
    assert plan.axis_sizes(8) == (4, 1)
    assert plan.parallel.value_axes == {"tensor": 2, "context": 2}
    assert plan == Plan.from_dict(plan.to_dict())
    with pytest.raises(PlanError, match="world of 6"):
        plan.axis_sizes(6)
