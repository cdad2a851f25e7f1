"""8-bit states: what codes keep, and training with them at any world size and after resume."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from optim_cases import mixed_batch, mixed_groups, mixed_model
from pool import Pool
from shard_cases import deliver, gradients, on_ranks, small_model, whole
from snapshot_cases import assert_same, everything
from torch import Tensor, nn

import zerofx
from zerofx.comm.world import World
from zerofx.errors import OptimizerError
from zerofx.optim.codes import BLOCK, Codes, code_book
from zerofx.runtime.store.shards import ShardStore
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.demo.text import Batches, load_text

CPU = torch.device("cpu")


def coded(values: Tensor, is_signed: bool, start: int = 0) -> tuple[Codes, Tensor]:
    codes = Codes.zeros([(start, values.numel())], is_signed, CPU)
    codes.write(0, values)
    return codes, codes.read(0)


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize(("numel", "start"), [(1, 0), (255, 1), (256, 256), (1000, 300), (0, 0)])
def test_errors_are_what_the_map_promises(is_signed: bool, numel: int, start: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator) ** 4
    if not is_signed:
        values = values.square()
    _, found = coded(values, is_signed, start)
    assert found.shape == values.shape
    for begin in range(-(start % BLOCK), numel, BLOCK):
        block = slice(max(begin, 0), begin + BLOCK)
        x, y = values[block], found[block]
        largest = x.abs().max()
        root = (x.abs() / largest) ** 0.25
        # half a step in the fourth root, and its fourth power's slope
        half = (0.5 if is_signed else 0.51) / (127 if is_signed else 256)
        low = (root - half).clamp(min=0.0) ** 4
        high = ((root + half) ** 4).clamp(min=0.0 if is_signed else 256.0**-4)
        assert ((y.abs() / largest) >= low * (1 - 1e-5)).all()
        assert ((y.abs() / largest) <= high * (1 + 1e-5)).all()
        assert torch.equal(y.sign()[y != 0], x.sign()[y != 0]) or not is_signed
        assert y.abs().max() == largest


@pytest.mark.parametrize("is_signed", [False, True])
def test_coding_again_changes_nothing(is_signed: bool) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    first, found = coded(values if is_signed else values.square(), is_signed)
    second, again = coded(found, is_signed)
    assert torch.equal(first.codes, second.codes) and torch.equal(found, again)


def test_zeros_stay_zeros_and_small_second_moments_do_not_become_zero() -> None:
    _, zeros = coded(torch.zeros(300), False)
    assert not zeros.any()
    _, found = coded(torch.tensor([1.0, 1e-20]), False)
    assert found[1] > 0
    _, signed = coded(torch.tensor([1.0, 0.0, -1.0]), True)
    assert signed.tolist() == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("is_signed", [False, True])
def test_the_code_book_is_the_same_map(is_signed: bool) -> None:
    book = code_book(is_signed, CPU)
    assert (book.diff() >= 0).all() and book[-1] == 1.0
    codes = Codes.zeros([(0, 256)], is_signed, CPU)
    codes.codes.copy_(torch.arange(256))
    codes.absmax.fill_(1.0)
    first = 1 if is_signed else 0  # signed code 0 is never written
    torch.testing.assert_close(codes.read(0)[first:], book[first:], rtol=1e-6, atol=0.0)


def test_states_take_a_quarter_and_read_as_torchs() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        plain = small_model()
        exact = torch.optim.AdamW(plain.parameters(), lr=0.01)
        optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.01, state_bits=8)
        for step in range(5):
            deliver(store, gradients(model, step))
            for key, grad in gradients(plain, step).items():
                plain.get_parameter(key).grad = grad
            exact.step()
            optimizer.step()
            optimizer.zero_grad()
        right, found = exact.state_dict(), optimizer.state_dict()
        assert found["param_groups"] == right["param_groups"]
        for number, values in right["state"].items():
            for key, value in found["state"][number].items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                gap = (whole - values[key]).abs().max() / values[key].abs().max()
                assert gap <= 0.03, (key, gap)

    for size in (1, 2):
        on_ranks(size, body)


STEPS = 200
WINDOWS = 8  # a step, divided among the ranks


def train(first: int, last: int, folder: str, bits: int) -> tuple[float, float]:
    """Train the byte GPT; return the loss of the last 20 steps and the states' bytes an element."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batches = Batches(load_text(200_000).train, WINDOWS // size, 32, rank, size)
    torch.manual_seed(0)
    config = GPTConfig(layers=1, width=64, heads=2, seq=32)
    model = zerofx.compile(GPT(config), {"kernels": "aten", "stage": 3})
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=3e-3, state_bits=bits)
    if first:
        zerofx.load(folder, model, optimizer)
    losses = []
    for _, x, y in batches.run(first, last):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if last < STEPS:
        zerofx.save(folder, model, optimizer)
    owned = sum(shard.numel() for shard in model._engine.store.shards)
    return sum(losses[-20:]) / 20, optimizer.state_bytes / owned


def judge(exact: float, results: list[tuple[float, float]]) -> None:
    loss = sum(found for found, _ in results) / len(results)  # each rank's own windows
    assert abs(loss / exact - 1) <= 0.01, (loss, exact)
    for _, state_bytes in results:
        assert state_bytes <= 2.0 * 1.1, state_bytes


def test_the_byte_gpt_trains_to_the_same_loss(pool: Pool, tmp_path: Path) -> None:
    """On two ranks, and from half way on by one process that loads what they have saved."""
    folder = str(tmp_path / "save")
    ((exact, exact_bytes),) = pool.run(1, train, 0, STEPS, folder, 32)
    assert exact < 3.0 and exact_bytes == pytest.approx(8.0)
    pool.run(2, train, 0, STEPS // 2, folder, 8)
    judge(exact, pool.run(1, train, STEPS // 2, STEPS, folder, 8))


@pytest.mark.slow
def test_the_byte_gpt_at_every_world_size(pool: Pool, tmp_path: Path) -> None:
    folder = str(tmp_path / "save")
    ((exact, _),) = pool.run(1, train, 0, STEPS, folder, 32)
    for world in (1, 2, 4):
        judge(exact, pool.run(world, train, 0, STEPS, folder, 8, timeout_s=300))
    pool.run(4, train, 0, STEPS // 2, folder, 8, timeout_s=300)
    judge(exact, pool.run(2, train, STEPS // 2, STEPS, folder, 8, timeout_s=300))


def resume_exactly(folder: str) -> None:
    """Codes come back as they were: what one process goes on with, the other does too."""
    found = []
    for again in (False, True):
        model = zerofx.compile(mixed_model(), {"kernels": "aten", "stage": 3})
        optimizer = zerofx.optim.AdamW(mixed_groups(model), lr=0.01, state_bits=8)
        if again:
            zerofx.load(folder, model, optimizer)
        for step in range(3 if again else 0, 6):
            if step == 3 and not again:
                zerofx.save(folder, model, optimizer)
            model(*mixed_batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(everything(model, optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("world", [1, 2])
def test_resume_is_bit_for_bit(pool: Pool, tmp_path: Path, world: int) -> None:
    pool.run(world, resume_exactly, str(tmp_path / "save"))


def test_states_of_32_bits_load_into_8_and_back() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        exact = torch.optim.AdamW(model.parameters(), lr=0.01)
        deliver(store, gradients(model, 0))
        exact.step()
        optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.01, state_bits=8)
        optimizer.load_state_dict(exact.state_dict())
        back = torch.optim.AdamW(model.parameters())
        back.load_state_dict(optimizer.state_dict())
        for param, values in exact.state.items():
            assert int(back.state[param]["step"]) == 1
            for found in (back.state[param], optimizer.state[param]):
                gap = whole(found["exp_avg"]) - whole(values["exp_avg"])
                assert gap.abs().max() <= 0.03 * whole(values["exp_avg"]).abs().max()

    for size in (1, 2):
        on_ranks(size, body)


def test_a_state_that_is_assigned_is_coded() -> None:
    model = small_model()
    optimizer = zerofx.optim.AdamW(model.parameters(), state_bits=8)
    model(torch.ones(2, 13)).sum().backward()
    optimizer.step()
    weight = model[0].weight
    optimizer.state[weight]["exp_avg"] = torch.full_like(weight, 2.0)
    weight.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full_like(weight, 2.0))
    other = copy.deepcopy(optimizer)
    assert other.state_bits == 8
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])


def test_bad_state_bits() -> None:
    with pytest.raises(OptimizerError, match="state_bits is 16"):
        zerofx.optim.Adam(small_model().parameters(), state_bits=16)
    with pytest.raises(OptimizerError, match=r"\[33, 13\] is torch.bfloat16, but state_bits=8"):
        zerofx.optim.Adam(small_model().bfloat16().parameters(), state_bits=8)
    with pytest.raises(OptimizerError, match="amsgrad or state_bits"):
        zerofx.optim.Adam(small_model().parameters(), state_bits=8, amsgrad=True)
