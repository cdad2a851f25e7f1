"""Computing in bf16 over fp32 master weights: against plain PyTorch, and on paper."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import loss_of, train_cell

import zerofx
from zerofx import ops
from zerofx.analysis.time.traffic import traffic
from zerofx.errors import CaptureError, PlanError
from zerofx.ir.program import BACKWARD, FORWARD, Planned

# world, case, plan, options: stages, batch norms, tied weights, accumulation and clipping
CELLS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (2, "gpt", {"stage": 3}, {"optimizer": "sgd"}),
    (2, "gpt", {"stage": 1}, {"optimizer": "adamw", "clip": 0.5}),
    (2, "gpt", {"stage": 0}, {"accumulation": 3}),
    (2, "convnet", {"stage": 2}, {"optimizer": "sgd"}),
]
MORE: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "gpt", {"stage": 3, "activations": "recompute"}, {"optimizer": "adamw"}),
    (2, "hf-llama", {"stage": 3, "persist_below": "1KiB"}, {"optimizer": "adamw"}),
    (2, "hf-gpt2", {"stage": 3, "bucket_bytes": 0}, {"accumulation": 2}),
    (4, "gpt", {"stage": 3}, {"optimizer": "sgd"}),
    (4, "gpt", {"stage": 3, "shard_axis_size": 2}, {"clip": 0.5}),
]


@pytest.mark.parametrize(
    ("world", "name", "plan", "options"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE)],
)
def test_bf16_trains_as_plain_bf16_over_fp32_weights(
    pool: Any, world: int, name: str, plan: dict[str, Any], options: dict[str, Any]
) -> None:
    plan = {"kernels": "aten", "precision": "bf16", **plan}
    for report in pool.run(world, train_cell, name, plan, options):
        assert report.loss <= 1e-6, report
        assert report.model <= 1e-5, report
        assert report.buffers <= 1e-6, report


def run_beside_fsdp2(stage: int, kernels: str) -> float:
    """Return the largest relative difference of 20 losses from FSDP2's in the same precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    peer = CASES["gpt"].make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in peer.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(peer, mesh=mesh, mp_policy=policy)
    plan = {"stage": stage, "kernels": kernels, "precision": "bf16"}
    mine = zerofx.compile(CASES["gpt"].make(), plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (mine, peer)]
    worst = 0.0
    for step in range(20):
        args, kwargs = CASES["gpt"].batch(10 * step + dist.get_rank())
        losses = [loss_of(m(*args, **kwargs)) for m in (mine, peer)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        a, b = (float(loss.detach()) for loss in losses)
        worst = max(worst, abs(a - b) / abs(b))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_follows_fsdp2(pool: Any, stage: int) -> None:
    assert pool.run(2, run_beside_fsdp2, stage, "aten") == [0.0, 0.0]
    assert max(pool.run(2, run_beside_fsdp2, stage, "inductor", timeout_s=300)) < 5e-3


def run_narrow(precision: dict[str, str]) -> tuple[list[str], list[float]]:
    model = zerofx.compile(
        CASES["gpt"].make(), {"stage": 2, "kernels": "aten", "precision": precision}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        args, kwargs = CASES["gpt"].batch(step)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    formats = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return sorted(formats), losses


def test_narrow_reductions_and_masters_train(pool: Any) -> None:
    """No fp32 sum, no fp32 weights: near the fp32 run, within what 8 bits of mantissa leave."""
    _, exact = pool.run(2, run_narrow, {"compute": "fp32"})[0]
    for precision, held in [
        ({"compute": "bf16", "reduce": "bf16"}, "float32"),
        ({"compute": "bf16", "reduce": "bf16", "master": "bf16"}, "bfloat16"),
        ({"compute": "fp32", "reduce": "bf16"}, "float32"),
    ]:
        formats, losses = pool.run(2, run_narrow, precision)[0]
        assert formats == [held]
        assert losses != exact
        assert losses == pytest.approx(exact, rel=2e-2)


# -- on paper -------------------------------------------------------------------------------------
def _programs(stage: int) -> tuple[Planned, Planned]:
    """Return the GPT at world 4 in fp32 and in bf16."""
    model, (args, kwargs) = CASES["gpt"].make(), CASES["gpt"].batch(0)
    whole = zerofx.capture(model, args, kwargs)
    half = zerofx.capture(model, args, kwargs, compute_dtype=torch.bfloat16)
    return (
        zerofx.rewrite(whole, zerofx.Plan(stage=stage), 4),
        zerofx.rewrite(half, zerofx.Plan(stage=stage, precision="bf16"), 4),
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_the_bytes_are_gathered_and_the_same_reduced(stage: int) -> None:
    whole, half = (traffic(p).kinds for p in _programs(stage))
    assert half["all_gather"].sent_numel >= whole["all_gather"].sent_numel
    ratio = half["all_gather"].sent_bytes / whole["all_gather"].sent_bytes
    assert 0.5 <= ratio < 0.55  # alignment of the narrow format pads a little more
    assert half["reduce_scatter"].sent_bytes / whole["reduce_scatter"].sent_bytes < 1.1


def test_dump_and_schedule_show_where_formats_change(tmp_path: pathlib.Path) -> None:
    _, program = _programs(3)
    text = program.dump()
    assert re.search(r"zfx.all_gather\(shard_0, .*dtype=bf16\) +# bf16\[", text)
    assert re.search(r"zfx.grad_buffer\(shard_0, .*\) +# f32\[", text)
    again = zerofx.load_program(program.emit(tmp_path / "emitted"))
    gathers = [n for n in again.graph(BACKWARD).nodes if n.target is ops.all_gather]
    assert gathers and all(n.kwargs["dtype"] is torch.bfloat16 for n in gathers)


def test_a_gather_in_the_wrong_format_is_refused() -> None:
    _, program = _programs(3)
    gather = next(n for n in program.graph(FORWARD).nodes if n.target is ops.all_gather)
    gather.kwargs = {}
    gather.meta["val"] = gather.meta["val"].float()
    with pytest.raises(zerofx.errors.ProgramError, match=r"is torch.float32; bucket 0 gathered is"):
        zerofx.ir.verify.verify(program)


def test_a_program_captured_in_another_format_is_refused() -> None:
    model, (args, kwargs) = CASES["gpt"].make(), CASES["gpt"].batch(0)
    program = zerofx.capture(model, args, kwargs)
    with pytest.raises(PlanError, match=r"capture it with .*compute_dtype=torch.bfloat16"):
        zerofx.rewrite(program, zerofx.Plan(precision="bf16"), 2)
    with pytest.raises(CaptureError, match=r"compute_dtype = torch.float64 is not supported"):
        zerofx.capture(model, args, kwargs, compute_dtype=torch.float64)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.fc(x).sum()


def test_a_write_to_a_cast_input_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes in place to input tensor 0.*float32 given"):
        zerofx.capture(Writes(), (torch.ones(2, 4),), compute_dtype=torch.bfloat16)
    program = zerofx.capture(
        Writes(), (torch.ones(2, 4, dtype=torch.bfloat16),), compute_dtype=torch.bfloat16
    )
    assert program.is_training


def test_inputs_get_gradients_in_their_own_format() -> None:
    model = zerofx.compile(nn.Linear(4, 1), zerofx.Plan(precision="bf16", kernels="aten"))
    x = torch.randn(3, 4, requires_grad=True)
    out = model(x)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32
    weight = model.weight.detach().to(torch.bfloat16).float()
    assert torch.equal(x.grad, weight.expand(3, 4))


class Shifted(nn.Module):
    """A buffer of the model's own widens what its units are given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5]))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x - self.mean))
        return x.float().sum()


def test_units_get_their_inputs_in_the_compute_format() -> None:
    model = zerofx.compile(Shifted(), zerofx.Plan(precision="bf16", kernels="aten"))
    plain = Shifted()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    half = x.bfloat16()
    for layer in plain.layers:
        wide = half - plain.mean  # fp32: buffers keep their format
        assert wide.dtype is torch.float32
        weight, bias = layer.weight.bfloat16(), layer.bias.bfloat16()
        half = torch.tanh(nn.functional.linear(wide.bfloat16(), weight, bias))
    assert torch.equal(model(x), half.float().sum())
