"""Computing in bf16 over fp32 master weights: against plain PyTorch, and on paper."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    with pytest.raises(PlanError, match=r"Capture it with .*compute_dtype=torch.bfloat16"):
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


# -- modules with a format of their own ------------------------------------------------------------


seen: dict[str, Any] = {}  # by name: the formats of a layer's input and weight


class Noted(nn.Linear):
    def __init__(self, wide: int, out: int, name: str) -> None:
        super().__init__(wide, out)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        seen[self.name] = x.dtype, self.weight.dtype
        return super().forward(x)


class Mixed(nn.Module):
    """A model as one with fp32 norms and head is written: nothing in it casts."""

    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        seen.clear()
        self.decides = decides
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "fc": Noted(16, 16, f"fc{i}")})
            for i in range(2)
        )
        self.head = Noted(16, 31, "head")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["fc"](block["norm"](x)).relu()
        if self.decides and x.sum().item() > 1e9:
            x = x * 2
        return self.head(x)


def by_hand(model: Mixed, ids: Tensor, own: tuple[torch.dtype, torch.dtype]) -> Tensor:
    """Compute the same with the casts written out: norms and head in fp32, the rest in bf16."""
    low, high = own

    def linear(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))

    x = F.embedding(ids, model.embed.weight.to(low))
    for block in model.blocks:
        norm = block["norm"]
        normed = F.layer_norm(x.to(high), (16,), norm.weight.to(high), norm.bias.to(high))
        x = x + linear(block["fc"], normed, low).relu()
    return linear(model.head, x, high)


def mixed_formats(decides: bool, *plans: dict[str, Any]) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    modules = {"blocks.*.norm": "fp32", "head": "fp32"}
    for fields in plans:
        plan = {"precision": {"compute": "bf16", "modules": modules}, "kernels": "aten", **fields}
        model: Any = zerofx.compile(Mixed(decides), plan)
        plain = Mixed(decides)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
        for step in range(3):
            batches = [torch.randint(0, 31, (2, 5)) for _ in range(world)]
            found = model(batches[rank])
            assert found.dtype is torch.float32
            found.square().mean().backward()
            for each, ids in enumerate(batches):
                wanted = by_hand(plain, ids, (torch.bfloat16, torch.float32))
                (wanted.square().mean() / world).backward()
                if each == rank:
                    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5, msg=str(step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            assert state[name].dtype is torch.float32
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-4, msg=name)
        formats = {n: b.compute_dtype for b in model.zerofx.layout.buckets for n in b.names}
        assert {n for n, f in formats.items() if f is torch.float32} == {
            n for n in formats if "norm" in n or "head" in n
        }


@pytest.mark.parametrize("decides", [False, True], ids=["captured", "island"])
def test_modules_compute_in_a_format_of_their_own(decides: bool) -> None:
    mixed_formats(decides, {})


@pytest.mark.slow
@pytest.mark.parametrize("decides", [False, True], ids=["captured", "island"])
def test_modules_compute_in_a_format_of_their_own_on_two_ranks(pool: Any, decides: bool) -> None:
    offload = {"offload": {"parameters": "cpu", "optimizer": "cpu"}}
    mixed_formats_of = ({}, {"stage": 0}, {"stage": 1}, offload, {"units": ["embed", "head"]})
    pool.run(2, mixed_formats, decides, *mixed_formats_of, timeout_s=300)


def test_one_module_computes_in_half_precision() -> None:
    precision = {"modules": {"blocks.1": "fp16"}, "loss_scale": "external"}
    model: Any = zerofx.compile(Mixed(), {"precision": precision, "kernels": "aten"})
    model(torch.zeros(1, 3, dtype=torch.long)).float().sum().backward()
    single, half = (torch.float32,) * 2, (torch.float16,) * 2
    assert seen == {"fc0": single, "fc1": half, "head": single}
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())


def test_formats_of_modules_that_contradict_are_refused() -> None:
    with pytest.raises(PlanError, match=r"loss_scale = None contradicts compute in 'fp16'"):
        zerofx.Plan(precision={"modules": {"head": "fp16"}})

    def compile_with(modules: dict[str, str], model: nn.Module) -> None:
        zerofx.compile(model, {"precision": {"compute": "bf16", "modules": modules}})

    with pytest.raises(PlanError, match=r"'heads' covers no parameter of Mixed\. Its parameters"):
        compile_with({"heads": "fp32"}, Mixed())
    tied = Mixed()
    tied.head.weight = tied.embed.weight
    with pytest.raises(PlanError, match=r"embed\.weight .* head\.weight .* one tied parameter"):
        compile_with({"head": "fp32"}, tied)
    plan = zerofx.Plan(precision={"compute": "bf16", "modules": {"head": "fp32"}})
    assert zerofx.Plan.from_yaml(plan.to_yaml()) == plan
    captured = zerofx.capture(
        Mixed(), (torch.zeros(1, 3, dtype=torch.long),), compute_dtype=torch.bfloat16
    )
    with pytest.raises(PlanError, match=r"head\.weight in torch\.float32.*module_dtypes"):
        zerofx.rewrite(captured, plan)
