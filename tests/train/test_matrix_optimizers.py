"""Optimizers for whole matrices in training: equal to one process, saved, resumed and exported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_optimizers import Shampoo, Soap
from models import CASES
from pool import Pool
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import loss_of

import zerofx
from zerofx.errors import ArgumentError, SnapshotError
from zerofx.optim import whole_matrices

ATEN = {"kernels": "aten"}


def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return the matrices of the blocks, or of all layers, and the other parameters."""
    named = list(model.named_parameters())
    inner = {n for n, p in named if p.ndim == 2 and "embed" not in n and "position" not in n}
    return [p for n, p in named if n in inner], [p for n, p in named if n not in inner]


def made(model: nn.Module, kind: str = "Muon") -> list[torch.optim.Optimizer]:
    matrices, others = split(model)
    first = {
        "Muon": lambda: torch.optim.Muon(matrices, lr=2e-3),
        "Adafactor": lambda: torch.optim.Adafactor(matrices, lr=0.01),
        "Shampoo": lambda: whole_matrices(Shampoo(matrices, lr=1e-3)),
        "Soap": lambda: whole_matrices(Soap(matrices, lr=1e-3)),
    }[kind]()
    return [first, torch.optim.AdamW(others, lr=1e-3, eps=1e-5)]


def train(
    model: Any, optimizers: list[Any], steps: range, size: int = 2, case: str = "gpt"
) -> None:
    """Train on the same micro-batches at any world size: a plain model takes all of them."""
    engine = getattr(model, "_zerofx", None)
    rank, ranks = (engine.engine.world.rank, engine.engine.world.size) if engine else (0, 1)
    for step in steps:
        for micro in range(rank, size, ranks):
            args, kwargs = CASES[case].batch(100 * step + micro)
            (loss_of(model(*args, **kwargs)) * ranks / size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in optimizers:
            each.step()
            each.zero_grad()


def plain_run(
    kind: str, steps: int, case: str = "gpt", dtype: torch.dtype = torch.float32
) -> nn.Module:
    model = CASES[case].make().to(dtype)
    train(model, made(model, kind), range(steps), case=case)
    return model


def difference(model: Any, expected: nn.Module) -> float:
    """Return the largest difference of any parameter, relative to its largest value."""
    full = model.state_dict()
    return max(
        float((full[n] - p).abs().max() / p.abs().max())
        for n, p in expected.state_dict().items()
        if p.is_floating_point()
    )


def run(
    plan: dict[str, Any], kind: str, before: bool, dtype: torch.dtype = torch.float32
) -> tuple[float, int]:
    plain = CASES["gpt"].make().to(dtype)
    if before:
        optimizers = made(plain, kind)
        model = zerofx.compile(plain, {**ATEN, **plan}, optimizer=optimizers)
    else:
        model = zerofx.compile(plain, {**ATEN, **plan})
        optimizers = made(model, kind)
    train(model, optimizers, range(4))
    states = optimizers[0].state.values()
    held = sum(t.numel() for s in states for t in s.values() if isinstance(t, Tensor))
    return difference(model, plain_run(kind, 4, dtype=dtype)), held


# Muon's iterations in bf16 amplify the order in which gradients are added: 1e-6 with AVX-512,
# 2.2e-6 with AVX2.
@pytest.mark.parametrize(
    "stage", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2)), 3]
)
def test_muon_on_a_gpt_equals_one_process(pool: Pool, stage: int) -> None:
    sizes = [p.numel() for p in split(CASES["gpt"].make())[0]]
    for error, held in pool.run(2, run, {"stage": stage}, "Muon", stage != 1):
        assert error <= 5e-6
        assert held <= (sum(sizes) if stage == 0 else sum(sizes) / 2 + max(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Shampoo", "Soap"])
@pytest.mark.parametrize("before", [False, True])
def test_the_others_equal_one_process_too(pool: Pool, kind: str, before: bool) -> None:
    assert all(error <= 1e-6 for error, _ in pool.run(2, run, {"stage": 3}, kind, before))


# In float32, AdamW makes 2e-6 with AVX2 of key biases, whose true gradient is zero.
@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_adafactor_equals_one_process_in_float64(pool: Pool, before: bool) -> None:
    given = {"stage": 3}, "Adafactor", before, torch.float64
    assert all(error <= 1e-12 for error, _ in pool.run(2, run, *given))


# As above, and two axes change the order once more.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"), [("Muon", {"stage": 3}), ("Shampoo", {"stage": 2, "shard_axis_size": 2})]
)
def test_four_ranks(pool: Pool, kind: str, plan: dict[str, Any]) -> None:
    sizes = [p.numel() for p in split(CASES["gpt"].make())[0]]
    shards = plan.get("shard_axis_size", 4)
    for error, held in pool.run(4, run_four, kind, plan):
        assert error <= 1e-5
        assert held <= sum(sizes) / shards + max(sizes)


def run_four(kind: str, plan: dict[str, Any]) -> tuple[float, int]:
    model = zerofx.compile(CASES["gpt"].make(), {**ATEN, **plan})
    optimizers = made(model, kind)
    train(model, optimizers, range(3), size=4)
    plain = CASES["gpt"].make()
    train(plain, made(plain, kind), range(3), size=4)
    return difference(model, plain), sum(p.numel() for p in optimizers[0].state)


# -- saved, resumed, exported ---------------------------------------------------------------------
def leave(folder: str, kind: str, case: str, stage: int) -> float:
    """Train two steps, leave them in three forms, and go on."""
    model = zerofx.compile(CASES[case].make(), {**ATEN, "stage": stage})
    optimizers = made(model, kind)
    train(model, optimizers, range(2), case=case)
    zerofx.save(f"{folder}/snapshot", model, optimizers)
    weights = zerofx.full_state_dict(model)
    states = [zerofx.full_optimizer_state_dict(model, each) for each in optimizers]
    if model.zerofx.world.rank == 0:
        torch.save({"model": weights, "optimizers": states}, f"{folder}/full.pt")
    else:
        assert states == [{}, {}] and not weights
    everywhere = zerofx.full_optimizer_state_dict(model, optimizers[0], rank0_only=False)
    assert len(everywhere["state"]) == len(split(model)[0])
    train(model, optimizers, range(2, 4), case=case)
    return difference(model, plain_run(kind, 4, case))


def resume(folder: str, kind: str, case: str, plan: dict[str, Any]) -> tuple[float, float]:
    """Go on from the snapshot, then from the full states."""
    model = zerofx.compile(CASES[case].make(1), {**ATEN, **plan})
    optimizers = made(model, kind)
    zerofx.load(f"{folder}/snapshot", model, optimizers)
    train(model, optimizers, range(2, 4), case=case)
    errors = [difference(model, plain_run(kind, 4, case))]
    full = torch.load(f"{folder}/full.pt", weights_only=True)
    model.load_state_dict(full["model"])
    is_first = model.zerofx.world.rank == 0
    optimizers = made(model, kind)
    for each, state in zip(optimizers, full["optimizers"], strict=True):
        zerofx.load_full_optimizer_state_dict(model, each, state if is_first else {})
    train(model, optimizers, range(2, 4), case=case)
    errors.append(difference(model, plain_run(kind, 4, case)))
    return errors[0], errors[1]


KINDS = [
    ("Soap", "gpt", 3),
    ("Muon", "gpt", 0),
    ("Muon", "chain", 3),
    ("Adafactor", "chain", 0),
    ("Shampoo", "chain", 1),
]
SLOW = [pytest.param(*each, marks=pytest.mark.slow) for each in KINDS]


@pytest.mark.parametrize(("kind", "case", "stage"), [("Soap", "chain", 3), *SLOW])
def test_states_go_on_at_another_world_size_and_in_plain_torch(
    pool: Pool, kind: str, case: str, stage: int, tmp_path: Path
) -> None:
    assert all(error <= 1e-6 for error in pool.run(2, leave, str(tmp_path), kind, case, stage))
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    plain = CASES[case].make(1)
    plain.load_state_dict(full["model"])
    optimizers = made(plain, kind)
    for each, state in zip(optimizers, full["optimizers"], strict=True):
        each.load_state_dict(state)
    train(plain, optimizers, range(2, 4), case=case)
    assert difference(plain, plain_run(kind, 4, case)) <= 1e-6
    for size, plan in ((1, {"stage": 3}), (2, {"stage": 1})):
        for errors in pool.run(size, resume, str(tmp_path), kind, case, plan):
            assert max(errors) <= 1e-6, (size, plan)


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = zerofx.compile(CASES["chain"].make(), ATEN)
    optimizers = made(model, "Soap")
    train(model, optimizers, range(1), case="chain")
    zerofx.save(tmp_path / "two", model, optimizers)
    zerofx.save(tmp_path / "one", model, optimizers[:1])
    unmarked = Soap(split(model)[0])
    with pytest.raises(SnapshotError, match=r"2 optimizers \(Soap, AdamW\), but 1 optimizer is"):
        zerofx.load(tmp_path / "two", model, optimizers[0])
    with pytest.raises(SnapshotError, match=r"Give zerofx.optim.whole_matrices\(Soap\(...\)\)"):
        zerofx.load(tmp_path / "one", model, unmarked)
    with pytest.raises(SnapshotError, match=r"Only states .* Give zerofx.optim.whole_matrices"):
        train(model, [unmarked], range(1), case="chain")
        unmarked.state[split(model)[0][0]]["GG"] = torch.zeros(3)
        zerofx.save(tmp_path / "odd", model, unmarked)
    state = zerofx.full_optimizer_state_dict(model, optimizers[0])
    with pytest.raises(SnapshotError, match=r"AdamW has groups of .* the state dict has groups of"):
        zerofx.load_full_optimizer_state_dict(model, optimizers[1], state)
    with pytest.raises(SnapshotError, match="is a dict without 'state' and 'param_groups'"):
        zerofx.load_full_optimizer_state_dict(model, optimizers[1], {})
    with pytest.raises(ArgumentError, match=r"of type list, .* once for each optimizer"):
        zerofx.full_optimizer_state_dict(model, optimizers)  # type: ignore[arg-type]


# -- averages of the weights, two optimizers in turn ----------------------------------------------
class Pair(nn.Module):
    """A generator and a discriminator in one model, a GAN's two losses by flag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: Tensor, real: Tensor, for_generator: bool) -> Tensor:
        made = self.generator(noise)
        if for_generator:
            return nn.functional.softplus(-self.discriminator(made)).mean()
        right = nn.functional.softplus(-self.discriminator(real)).mean()
        return right + nn.functional.softplus(self.discriminator(made.detach())).mean()


def follow_gan(model: Any, average: Any, rank: int, ranks: int) -> None:
    both = [model.generator, model.discriminator]
    optimizers = [
        whole_matrices(Soap(both[0].parameters(), lr=1e-2)),
        torch.optim.Adafactor(both[1].parameters(), lr=1e-2),
    ]
    for step in range(6):
        for micro in range(rank, 2, ranks):
            generator = torch.Generator().manual_seed(10 * step + micro)
            noise, real = (torch.randn(8, n, generator=generator) for n in (4, 6))
            (model(noise, real, step % 2 == 0) * ranks / 2).backward()
        optimizers[step % 2].step()
        model.zero_grad()
        average.update_parameters(model)


def run_gan(when: str) -> list[dict[str, Tensor]]:
    plain = Pair()
    expected, average = Pair(), AveragedModel(Pair(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    follow_gan(expected, average, 0, 1)
    ours: Any = None
    if when == "before":
        ours = AveragedModel(copy.deepcopy(plain), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    model = zerofx.compile(plain, {**ATEN, "stage": 3})
    if when == "after":
        ours = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    world = model.zerofx.world
    follow_gan(model, ours, world.rank, world.size)
    found = [expected.state_dict(), model.state_dict(), average.module.state_dict()]
    return [dict(state) for state in (*found, ours.module.state_dict())]


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_gan_and_an_average_made_before_or_after_compile(pool: Pool, when: str) -> None:
    for expected, got, average, ours in pool.run(2, run_gan, when):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours[name], average[name], rtol=1e-5, atol=1e-6)
