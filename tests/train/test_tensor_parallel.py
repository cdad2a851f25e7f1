"""Layers cut over ranks: unmodified models of transformers train as one plain process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from tensor_models import MODELS, batch, relative_error, sent_in_a_step
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zerofx
from zerofx.errors import CaptureError, ShardError
from zerofx.plan.plan import Plan

STEPS = 5


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def samples(name: str, step: int, rank: int) -> dict[str, Tensor]:
    """Return what the ranks that share the layers have as number `rank` of the data ranks."""
    given = batch(name, seed=100 * step + rank)
    return given


def train(name: str, optimizer: str, plan: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train on this rank; return the losses and norms, and the whole parameters."""
    model = zerofx.compile(make(name), {"kernels": "aten", **plan})
    own = model.zerofx
    stepper = _optimizer(optimizer, model)
    found: list[float] = []
    for step in range(STEPS):
        loss = model(**samples(name, step, own.data_rank)).loss
        loss.backward()
        found.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        stepper.step()
        stepper.zero_grad()
    return found, dict(zerofx.full_state_dict(model, rank0_only=False))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def plain(name: str, optimizer: str, data: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train one plain process on the samples of all data ranks."""
    model = make(name)
    stepper = _optimizer(optimizer, model)
    found = []
    for step in range(STEPS):
        for rank in range(data):
            (model(**samples(name, step, rank)).loss / data).backward()
        found.append(float(clip_grad_norm_(model.parameters(), 0.5)))
        stepper.step()
        stepper.zero_grad()
    return found, model.state_dict()


def compare(found: Any, expected: Any, tolerance: float) -> None:
    norms, state = found
    assert norms == pytest.approx(expected[0], rel=1e-5)
    assert state.keys() == expected[1].keys()
    assert relative_error(state, expected[1]) <= (1e-6 if tolerance < 1e-5 else 1e-5)
    for key, theirs in expected[1].items():
        torch.testing.assert_close(state[key], theirs, rtol=0, atol=tolerance, msg=key)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


EXPERTS = {"tensor": 2, "experts": True}
NAMED = {"blocks.*.up": "experts", "blocks.*.down": "experts"}


@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("llama", 2, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}}),
        ("gpt2", 2, {"stage": 1, "parallel": {"tensor": 2}}),
        slow("llama", 4, {"stage": 0, "parallel": {"tensor": 4, "sequence": True}}),
        slow("grouped", 4, {"stage": 3, "parallel": {"tensor": 4}}),
        slow("gpt2", 4, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}}),
        slow("bert", 4, {"stage": 2, "parallel": {"tensor": 2}}),
        slow("t5", 4, {"stage": 3, "parallel": {"tensor": 2}}),
        slow("mixtral", 2, {"stage": 3, "parallel": {"tensor": 2}}),
        slow("mixtral", 2, {"stage": 3, "parallel": {"tensor": 2}, "kernels": "inductor"}),
        slow("mixtral", 2, {"stage": 1, "parallel": {"tensor": 2, "sequence": True}}),
        slow("qwen3-moe", 4, {"stage": 3, "parallel": {"tensor": 2}}),
        ("mixture", 2, {"stage": 3, "parallel": {"tensor": 2, "placements": NAMED}}),
        slow("mixture", 4, {"stage": 2, "parallel": {"tensor": 4, "placements": NAMED}}),
        slow("mixtral", 2, {"stage": 3, "parallel": EXPERTS}),
        slow("mixtral", 2, {"stage": 3, "parallel": EXPERTS, "kernels": "inductor"}),
        slow("mixtral", 2, {"stage": 1, "parallel": {**EXPERTS, "sequence": True}}),
        slow("mixtral", 4, {"stage": 3, "parallel": EXPERTS, "activations": "recompute"}),
        slow("mixtral", 4, {"stage": 0, "parallel": {**EXPERTS, "tensor": 4}}),
        slow("qwen3-moe", 2, {"stage": 2, "parallel": EXPERTS}),
        slow("qwen3-moe", 4, {"stage": 3, "parallel": EXPERTS}),
        slow("vit", 4, {"stage": 1, "parallel": {"tensor": 2, "sequence": True}}),
        slow("llama", 2, {"stage": 3, "parallel": {"tensor": 2}, "activations": "recompute"}),
        slow("llama", 4, {"stage": 3, "parallel": {"tensor": 2}}),
        slow("own", 4, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}}),
        slow("odd", 2, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}}),
        slow("many heads", 8, {"stage": 1, "parallel": {"tensor": 8}}),
    ],
)
def test_models_train_alike(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    for optimizer, tolerance in (("sgd", 2e-6), ("adamw", 1e-5)):
        data = ranks // plan["parallel"]["tensor"]
        expected = plain(name, optimizer, data)
        for found in pool.run(ranks, train, name, optimizer, plan, timeout_s=400):
            compare(found, expected, tolerance)


def counted(plan: dict[str, Any], name: str = "llama") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the calls and bytes that this rank sent in a step, and those of its program."""
    model = zerofx.compile(make(name), {"kernels": "aten", "outputs": "loss", **plan})
    return sent_in_a_step(model, name)


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"stage": 3, "parallel": {"tensor": 2}}),
        slow(2, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}}),
        slow(4, {"stage": 3, "parallel": {"tensor": 2, "sequence": True}}),
        slow(2, {"stage": 3, "parallel": {"context": 2}}),
    ],
)
def test_ranks_send_what_is_predicted(pool: Pool, ranks: int, plan: dict[str, Any]) -> None:
    for found, predicted in pool.run(ranks, counted, plan):
        assert found == predicted


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_ranks_with_whole_experts_send_what_is_predicted(pool: Pool, ranks: int) -> None:
    plan = {"stage": 3, "parallel": {"tensor": 2, "placements": NAMED}}
    for found, predicted in pool.run(ranks, counted, plan, "mixture"):
        assert found == predicted


def losses_of_labels() -> list[Any]:
    """Return losses and the norms of gradients with labels that are left out, and of a sum."""
    model = zerofx.compile(
        make("llama"), {"kernels": "aten", "parallel": {"tensor": 2}, "outputs": "loss"}
    )
    return [given(model, **more) for more in OF_LABELS] + [past_the_classes(model)]


OF_LABELS: list[dict[str, Any]] = [{}, {"num_items_in_batch": torch.tensor(7)}]


def labelled() -> dict[str, Tensor]:
    made = batch("llama", seed=3)
    return {**made, "labels": made["labels"].index_fill(1, torch.tensor([0, 1, 4]), -100)}


def given(model: nn.Module, **more: Any) -> tuple[float, float]:
    loss = model(**labelled(), **more).loss
    loss.backward()
    norm = float(clip_grad_norm_(model.parameters(), 1e9))
    model.zero_grad()
    return float(loss.detach()), norm


def past_the_classes(model: nn.Module) -> str:
    wrong = labelled()
    wrong["labels"][0, 3] = 64
    with pytest.raises((RuntimeError, IndexError), match="out of bounds") as told:
        model(**wrong)
    return str(told.value)


class Weighed(nn.Module):
    """A loss with weights of classes, smoothed labels, or both, which needs all logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make("llama")

    def forward(self, ids: Tensor, labels: Tensor, smoothing: float, weight: Tensor | None) -> Any:
        logits = self.inner(ids).logits[:, :-1].flatten(0, 1)
        target = labels[:, 1:].flatten()
        return F.cross_entropy(logits, target, weight, label_smoothing=smoothing)


def weighed(model: nn.Module) -> list[Any]:
    """Return losses and gradients for each kind of loss."""
    made = labelled()
    weights, found = torch.linspace(0.5, 2, 64), list[Any]()
    for smoothing, weight in ((0.1, None), (0.0, weights), (0.2, weights)):
        loss = model(made["input_ids"], made["labels"], smoothing, weight)
        loss.backward()
        norm = float(clip_grad_norm_(model.parameters(), 1e9))
        model.zero_grad()
        found.append((float(loss.detach()), norm))
    return found


def weighed_on_ranks() -> list[Any]:
    plan = {"kernels": "aten", "parallel": {"tensor": 2}, "outputs": "loss"}
    return weighed(zerofx.compile(Weighed(), plan))


@pytest.mark.slow
def test_weights_of_classes_and_smoothed_labels(pool: Pool) -> None:
    expected = weighed(Weighed())
    for found in pool.run(2, weighed_on_ranks):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_loss_over_cut_classes_is_that_of_all(pool: Pool) -> None:
    model = make("llama")
    expected = [given(model, **more) for more in OF_LABELS]
    for *found, told in pool.run(2, losses_of_labels):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        assert "64" in told and "loss_utils.py" in told


def states(folder: str) -> list[Any]:
    """Give a whole state out, and take it in again."""
    model = zerofx.compile(make("llama"), Plan(parallel={"tensor": 2}, kernels="aten"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch("llama")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state = model.state_dict()
    moments = zerofx.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    other = zerofx.compile(make("llama"), Plan(parallel={"tensor": 2}, kernels="aten"))
    other.load_state_dict(state)
    again = other.state_dict()
    zerofx.export(folder, model)
    third = zerofx.compile(make("llama"), Plan(parallel={"tensor": 2}, kernels="aten"))
    zerofx.load_weights(third, folder)
    from_files = third.state_dict()
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    numel = sum(p.to_local().numel() for p in model.parameters())
    return [state, again, from_files, moments, shapes, numel]


def test_states_go_out_and_in_whole(pool: Pool, tmp_path: Path) -> None:
    expected = make("llama")
    stepper = torch.optim.AdamW(expected.parameters(), lr=1e-3)
    expected(**batch("llama")).loss.backward()
    stepper.step()
    found = pool.run(2, states, str(tmp_path / "model"))
    for state, again, from_files, moments, shapes, numel in found:
        assert shapes == {n: tuple(p.shape) for n, p in expected.named_parameters()}
        assert numel < 0.6 * sum(p.numel() for p in expected.parameters())
        for key, theirs in expected.state_dict().items():
            torch.testing.assert_close(state[key], theirs, rtol=0, atol=1e-4, msg=key)
            assert torch.equal(state[key], again[key]), key
            assert torch.equal(state[key], from_files[key]), key
        first = next(iter(stepper.state.values()))["exp_avg"]
        name = next(n for n, p in expected.named_parameters())
        held = moments["state"][name] if name in moments["state"] else moments["state"][0]
        torch.testing.assert_close(held["exp_avg"], first, rtol=1e-4, atol=1e-7)


def other_samples() -> str:
    model = zerofx.compile(make("llama"), Plan(parallel={"tensor": 2}, kernels="aten"))
    with pytest.raises(ShardError) as caught:
        model(**batch("llama", seed=model.zerofx.world.rank))
    return str(caught.value)


def test_a_wrong_sampler_is_named(pool: Pool) -> None:
    for text in pool.run(2, other_samples):
        assert "input input_ids differs between the 2 ranks that share each layer" in text
        assert "num_replicas=model.zerofx.data_world" in text


class Remembers(nn.Module):
    """A layer that keeps a result, which a program would not do, and a model that does so too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Remembered() for _ in range(2))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.kept = x * self.scale
        return self.kept.square().mean()


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x)
        return self.kept


def remembering(axis: str) -> str:
    model = zerofx.compile(Remembers(), {"kernels": "aten", "parallel": {axis: 2}})
    with pytest.raises(CaptureError) as caught:
        model(torch.ones(2, 4, 8))
    return str(caught.value)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_what_would_run_eagerly_is_refused(pool: Pool, axis: str) -> None:
    """Whole parameters are gathered for the model itself before one of its layers is refused."""
    for text in pool.run(2, remembering, axis):
        assert "Remembers.layers.0 cannot be captured (forward changes the attribute" in text
        assert f"cannot be cut over Plan.parallel.{axis} = 2 ranks" in text


def dropped() -> list[Tensor]:
    model = MODELS["dropout"]()
    model = zerofx.compile(model, Plan(parallel={"tensor": 2}, kernels="aten", stage=1))
    torch.manual_seed(model.zerofx.world.rank)  # whatever the user's generators say
    model(**batch("gpt2")).loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    loss = model(**batch("gpt2")).loss.detach()
    return [loss, *grads]


def test_ranks_draw_alike(pool: Pool) -> None:
    first, second = pool.run(2, dropped)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gradients_in_bf16(plan: dict[str, Any]) -> dict[str, Tensor]:
    """Return whole gradients of one step that computes in bf16 and reduces in fp32."""
    precision = {"compute": "bf16", "reduce": "fp32"}
    model = zerofx.compile(make("llama"), {"kernels": "aten", "precision": precision, **plan})
    model(**batch("llama")).loss.backward()
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def whole(grad: Any) -> Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"context": 2},
        {"context": 2, "attention": "ring"},
        {"pipeline": 2, "micro_batches": 2},
    ],
    ids=str,
)
def test_bf16_is_as_near_to_fp64_as_in_one_process(pool: Pool, parallel: dict[str, Any]) -> None:
    """At most 1.5 times as far, over all gradients: cutting layers adds roundings of its own."""
    exact = make("llama").double()
    exact(**batch("llama")).loss.backward()
    expected = {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}
    (alone,) = pool.run(1, gradients_in_bf16, {})
    found = pool.run(2, gradients_in_bf16, {"parallel": parallel, "stage": 1})
    together = {n: grad for each in found for n, grad in each.items()}
    assert together.keys() == expected.keys()
    error, least = relative_error(together, expected), relative_error(alone, expected)
    assert 1e-4 < error <= 1.5 * least, (error, least)
