"""Pipelines with the plan's other fields: equal to one plain process that accumulates."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matrix_optimizers import Shampoo
from measure import ATEN, BATCH, SEQ, TOLERANCE, measure
from measure import MODELS as MEASURED
from pool import Pool
from tensor_models import MODELS, relative_error
from torch import Tensor, nn

import zerofx
from zerofx.analysis.memory.memory import peak_bytes
from zerofx.errors import BudgetError, CaptureError, PlanError, ShardError
from zerofx.optim import whole_matrices
from zerofx.passes.decide import budget_for
from zerofx.plan.plan import Plan
from zerofx.plan.sizes import format_bytes

STEPS, NUM = 5, 4
ONE_BY_ONE = {"pipeline": 2, "micro_batches": NUM}
INTERLEAVED = {**ONE_BY_ONE, "schedule": "interleaved", "interleave": 2}
ZERO_BUBBLE = {**ONE_BY_ONE, "schedule": "zero-bubble"}
GPIPE = {**ONE_BY_ONE, "schedule": "gpipe"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def optimizer_of(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        atol = 2e-6 if kind == "sgd" else 1e-5
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


# -- Loss scaling ----------------------------------------------------------------------------------
class Layer(nn.Module):
    """A layer whose `shift` has a gradient that is `factor` times as large as others."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.shift, self.factor = nn.Linear(8, 8), nn.Parameter(torch.zeros(8)), factor

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.shift * self.factor).tanh()


class Steep(nn.Module):
    """Overflows in fp16 in the gradient of one layer alone."""

    def __init__(self, where: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(2.0**8 if i == where else 1.0) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Outside(Steep):
    """Leaves the loss to its caller."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def vectors(step: int, rank: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + rank))


FP16 = {"compute": "fp16", "reduce": "fp32"}
SCALED = {**FP16, "loss_scale": "dynamic"}
Scaled = tuple[dict[str, Tensor], list[float], int]


def scaled(where: int, kind: str, initial: float, plan: dict[str, Any]) -> Scaled:
    """Train in fp16; return the parameters, the scale after each step, and the steps skipped."""
    precision = {**FP16, "loss_scale": {"initial": initial, "growth_interval": 2, "hysteresis": 1}}
    model: Any = zerofx.compile(Steep(where), {"kernels": "aten", "precision": precision, **plan})
    optimizer, scales = optimizer_of(kind, model.parameters()), []
    for step in range(STEPS):
        loss = model(vectors(step, model.zerofx.data_rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scales.append(model.loss_scale.scale)
    state = zerofx.full_state_dict(model, rank0_only=False)
    return dict(state), scales, model.loss_scale.num_skipped


def half(where: int, kind: str, scale: float, data: int) -> Scaled:
    """Do the same in one plain process, one micro-batch after the other."""
    master = Steep(where)
    model = copy.deepcopy(master).half()
    optimizer, scales, good, skipped = optimizer_of(kind, master.parameters()), [], 0, 0
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in master.parameters()]
        for rank in range(data):
            for piece in vectors(step, rank).half().chunk(NUM):
                (model(piece) / NUM * scale).backward()
                for total, param in zip(sums, model.parameters(), strict=True):
                    assert param.grad is not None
                    total += param.grad.float() / (scale * data)
                    param.grad = None
        good += 1
        if all(bool(total.isfinite().all()) for total in sums):
            for param, total in zip(master.parameters(), sums, strict=True):
                param.grad = total
            optimizer.step()
            if good == 2:
                scale, good = scale * 2, 0
        else:
            scale, good, skipped = scale / 2, 0, skipped + 1
        scales.append(scale)
        with torch.no_grad():
            for mine, whole in zip(model.parameters(), master.parameters(), strict=True):
                mine.copy_(whole)
    return dict(master.state_dict()), scales, skipped


@pytest.mark.parametrize(
    ("ranks", "where", "plan"),
    [
        (2, 0, {"stage": 3, "parallel": ONE_BY_ONE}),
        slow(2, 3, {"stage": 1, "parallel": ONE_BY_ONE}),
        slow(2, 1, {"stage": 2, "parallel": INTERLEAVED}),
        slow(2, 2, {"stage": 3, "parallel": ZERO_BUBBLE}),
        slow(2, 0, {"stage": 0, "parallel": GPIPE}),
        slow(2, 3, {"stage": 3, "parallel": ONE_BY_ONE, "offload": {"optimizer": "cpu"}}),
        slow(4, 0, {"stage": 3, "parallel": ONE_BY_ONE}),
        slow(4, 3, {"stage": 1, "parallel": ONE_BY_ONE}),
        slow(4, 1, {"stage": 2, "parallel": {**ONE_BY_ONE, "accumulate": "sharded"}}),
    ],
    ids=str,
)
def test_an_overflow_in_one_stage_skips_the_step_on_all(
    pool: Pool, ranks: int, where: int, plan: dict[str, Any]
) -> None:
    for kind in ("sgd", "adamw"):
        expected, scales, skipped = half(where, kind, 2.0**17, ranks // 2)
        assert 0 < skipped < STEPS
        for state, found, num in pool.run(ranks, scaled, where, kind, 2.0**17, plan):
            assert (found, num) == (scales, skipped)
            assert_alike(state, expected, kind)


def scaled_by_torch(plan: dict[str, Any] | None) -> tuple[dict[str, Tensor], float, bool]:
    """Let GradScaler scale a loss that is computed outside; accumulate without a pipeline."""
    model: Any = Outside(1)
    external = {**FP16, "loss_scale": "external"}
    model = zerofx.compile(model, {"kernels": "aten", "precision": external, **(plan or {})})
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    before = copy.deepcopy(dict(zerofx.full_state_dict(model, rank0_only=False)))
    is_skipped = False
    for step in range(STEPS):
        for piece in vectors(step, 0).chunk(NUM if plan is None else 1):
            share = len(piece) / 8
            scaler.scale(model(piece).float().square().mean() * share).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = dict(zerofx.full_state_dict(model, rank0_only=False))
        is_skipped |= all(torch.equal(state[name], value) for name, value in before.items())
    return state, scaler.get_scale(), is_skipped


@pytest.mark.slow
def test_torchs_scaler_works_with_a_loss_outside(pool: Pool) -> None:
    expected = scaled_by_torch(None)
    for state, scale, is_skipped in pool.run(2, scaled_by_torch, {"parallel": GPIPE}):
        assert is_skipped and expected[2] and scale == expected[1] < 2.0**17
        assert_alike(state, expected[0], "adamw")


def scaled_too_late() -> str:
    plan = {"precision": {**FP16, "loss_scale": "external"}, "parallel": GPIPE}
    model = zerofx.compile(Steep(0), {"kernels": "aten", **plan})
    with pytest.raises(CaptureError) as caught:
        model(vectors(0, 0))
    return str(caught.value)


def test_a_scaler_that_comes_too_late_is_refused(pool: Pool) -> None:
    with pytest.raises(PlanError, match=r"schedule = '1f1b' .* 'external'"):
        Plan(parallel=ONE_BY_ONE, precision={**FP16, "loss_scale": "external"})
    for said in pool.run(2, scaled_too_late):
        assert "forward returns the loss, so that" in said and "or compute the loss" in said


# -- Ignored parameters ----------------------------------------------------------------------------
def text(step: int, rank: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(50 * step + rank))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def ignoring(name: str, kind: str, ignored: list[str], plan: dict[str, Any]) -> dict[str, Tensor]:
    """Train, ignored parameters too, whose gradients a hook averages over the data ranks."""
    fields = {"kernels": "aten", "ignored_params": ignored, **plan}
    model: Any = zerofx.compile(make(name), fields)
    left = {n: p for n, p in model.named_parameters() if type(p) is nn.Parameter}
    assert left and len(left) < len(list(model.named_parameters()))

    def average(param: nn.Parameter) -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad)  # ranks of one pipeline have the same
        param.grad.div_(dist.get_world_size())

    for param in left.values():
        param.register_post_accumulate_grad_hook(average)
    optimizer = optimizer_of(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**text(step, model.zerofx.data_rank)).loss.backward()
        optimizer.step()
    return {n: v.clone() for n, v in model.state_dict().items()}


def accumulating(name: str, kind: str, data: int) -> dict[str, Tensor]:
    model = make(name)
    optimizer = optimizer_of(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(data):
            whole = text(step, rank)
            for pieces in zip(*(value.chunk(NUM) for value in whole.values()), strict=True):
                given = dict(zip(whole, pieces, strict=True))
                (model(**given).loss / (data * NUM)).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "ranks", "ignored", "plan"),
    [
        ("gpt2", 2, ["transformer.wte", "transformer.h.0.mlp"], {"parallel": ONE_BY_ONE}),
        slow("blocks", 2, ["blocks.0.fc1"], {"stage": 1, "parallel": ZERO_BUBBLE}),
        slow("llama", 2, ["lm_head"], {"stage": 2, "parallel": GPIPE}),
        slow("gpt2", 2, ["transformer.wte"], {"stage": 3, "parallel": INTERLEAVED}),
        slow("gpt2", 4, ["transformer.wte", "transformer.ln_f"], {"parallel": ONE_BY_ONE}),
        slow("llama", 4, ["model.layers.1.mlp"], {"parallel": {**ONE_BY_ONE, "tensor": 2}}),
    ],
    ids=str,
)
def test_ignored_parameters_train_alike(
    pool: Pool, name: str, ranks: int, ignored: list[str], plan: dict[str, Any]
) -> None:
    """A table that two stages read is the sum of what both have."""
    data = ranks // 2 if "tensor" not in plan["parallel"] else 1
    for kind in ("sgd", "adamw"):
        expected = accumulating(name, kind, data)
        for found in pool.run(ranks, ignoring, name, kind, ignored, plan):
            assert_alike(found, expected, kind)


# -- Buffers ---------------------------------------------------------------------------------------
class Normed(nn.Module):
    """Layers with running statistics, and a buffer that a layer reads and then replaces."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
            self.register_buffer("seen", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.linear(x)) + self.seen
            if self.training:
                self.seen = 0.9 * self.seen + 0.1 * x.detach().abs().mean(0)
            return x.tanh()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


Statistics = tuple[dict[str, Tensor], Tensor]


def normed(kind: str, plan: dict[str, Any]) -> Statistics:
    """Return the state after training, and what an evaluation gives."""
    model: Any = zerofx.compile(Normed(), {"kernels": "aten", **plan})
    optimizer = optimizer_of(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(vectors(step, model.zerofx.data_rank).repeat(2, 1)).backward()
        optimizer.step()
    state = {n: v.clone() for n, v in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        return state, model(vectors(99, 0))


def normed_plain(kind: str, data: int) -> Statistics:
    """Accumulate over micro-batches; statistics follow data rank 0, as under DDP."""
    model = Normed()
    optimizer = optimizer_of(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        before = [value.clone() for value in model.buffers()]
        for rank in reversed(range(data)):
            for buffer, value in zip(list(buffers_of(model)), before, strict=True):
                buffer[0][buffer[1]] = value.clone()
            for piece in vectors(step, rank).repeat(2, 1).chunk(NUM):
                (model(piece) / (data * NUM)).backward()
        optimizer.step()
    state = {n: v.clone() for n, v in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        return state, model(vectors(99, 0))


def buffers_of(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    for module in model.modules():
        for key in module._buffers:
            yield module._buffers, key


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        (2, {"stage": 3, "parallel": ONE_BY_ONE}),
        slow(2, {"stage": 1, "parallel": INTERLEAVED}),
        slow(2, {"stage": 2, "parallel": ZERO_BUBBLE, "activations": "recompute"}),
        slow(2, {"stage": 0, "parallel": GPIPE}),
        slow(2, {"stage": 3, "parallel": ONE_BY_ONE, "kernels": "inductor"}),
        slow(4, {"stage": 3, "parallel": ONE_BY_ONE}),
        slow(4, {"stage": 2, "parallel": {**ONE_BY_ONE, "pipeline": 4}}),
    ],
    ids=str,
)
def test_running_statistics_are_those_of_accumulation(
    pool: Pool, ranks: int, plan: dict[str, Any]
) -> None:
    data = ranks // plan["parallel"]["pipeline"]
    for kind in ("sgd", "adamw"):
        expected, out = normed_plain(kind, data)
        for state, given in pool.run(ranks, normed, kind, plan):
            assert_alike(state, expected, kind)
            torch.testing.assert_close(given, out, rtol=1e-4, atol=2e-6)


@pytest.mark.slow
def test_statistics_may_stay_those_of_each_rank(pool: Pool) -> None:
    plan = {"stage": 1, "parallel": ONE_BY_ONE, "buffers": "local"}
    ranks = [state for state, _ in pool.run(4, normed, "sgd", plan)]
    for stage in ("blocks.0", "blocks.3"):
        found = [state[f"{stage}.norm.running_mean"] for state in ranks]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
        assert not torch.equal(found[0], found[1])


class Elsewhere(nn.Module):
    """Its last layer reads what its first one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        before = self.total.clone()
        x = self.layers[0](x)
        self.total += x.detach().mean(0)
        for layer in self.layers[1:]:
            x = layer(x)
        return (x + before).square().mean()


def reads_elsewhere() -> str:
    model = zerofx.compile(Elsewhere(), {"kernels": "aten", "parallel": ONE_BY_ONE})
    with pytest.raises(CaptureError) as caught:
        model(vectors(0, 0))
    return str(caught.value)


def test_a_buffer_of_another_stage_is_refused(pool: Pool) -> None:
    for said in pool.run(2, reads_elsewhere):
        assert "pipeline stage 0 writes to the buffer total, which stage 1 reads" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "plan"),
    [
        ("convs", 2, {"stage": 3, "parallel": {**ONE_BY_ONE, "cuts": ["convs.1"]}}),
        ("broad", 2, {"stage": 3, "parallel": ONE_BY_ONE, "precision": SCALED}),
    ],
    ids=str,
)
def test_peaks_are_known(pool: Pool, name: str, ranks: int, plan: dict[str, Any]) -> None:
    """With running statistics, and with a loss scale."""
    for found in pool.run(ranks, measure, name, {**ATEN, **plan}):
        assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.05)


# -- Memory budgets --------------------------------------------------------------------------------
def stage_peaks(model: nn.Module, given: Any, plan: dict[str, Any], ranks: int) -> list[int]:
    """Return the predicted peak of each stage; `given` are the arguments of a micro-batch."""
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    chosen = Plan(**plan)
    dtype = torch.float16 if chosen.precision.compute == "fp16" else None
    program = zerofx.capture(model, args, kwargs, outputs="loss", compute_dtype=dtype)
    stages = range(chosen.parallel.num_stages)
    return [peak_bytes(zerofx.rewrite(program, plan, ranks, position=p)) for p in stages]


def between(model: nn.Module, given: Any, plan: dict[str, Any], ranks: int, share: float) -> int:
    """Return a budget that all stages meet, a share of the way to the largest.

    Under a zero-bubble schedule, keeping everything takes the least.
    """
    least, most = sorted(
        max(stage_peaks(model, given, {**plan, "activations": how}, ranks))
        for how in ("recompute", "keep")
    )
    assert least < most
    return budget_for(int(least + share * (most - least)))


def within(kind: str, plan: dict[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the trained state, and what was decided on activations."""
    model: Any = zerofx.compile(make("llama"), {"kernels": "aten", **plan})
    optimizer = optimizer_of(kind, model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**text(step, model.zerofx.data_rank)).loss.backward()
        optimizer.step()
    decided = {each.choice for each in model.programs[0].decisions}
    return {n: v.clone() for n, v in model.state_dict().items()}, decided


@pytest.mark.parametrize(
    ("ranks", "plan"),
    [
        slow(2, {"stage": 3, "parallel": ONE_BY_ONE}),
        slow(2, {"stage": 1, "parallel": GPIPE}),
        slow(4, {"stage": 3, "parallel": ONE_BY_ONE}),
    ],
    ids=str,
)
def test_pipelines_train_alike_within_a_budget(
    pool: Pool, ranks: int, plan: dict[str, Any]
) -> None:
    given = {n: v[: len(v) // NUM] for n, v in text(0, 0).items()}
    whole = {"kernels": "aten", **plan}
    plan = {**plan, "memory_budget": between(make("llama"), given, whole, ranks, 0.3)}
    for kind in ("sgd", "adamw"):
        expected, choices = accumulating("llama", kind, ranks // 2), set()
        for found, decided in pool.run(ranks, within, kind, {**plan, "activations": "auto"}):
            assert_alike(found, expected, kind)
            choices |= decided
        assert choices & {"recompute", "gather again"}


@pytest.mark.parametrize(
    ("ranks", "share", "plan"),
    [
        (2, 0.4, {"stage": 3, "parallel": ONE_BY_ONE}),
        slow(2, 0.0, {"stage": 1, "parallel": GPIPE}),
        slow(2, 0.7, {"stage": 2, "parallel": ZERO_BUBBLE}),
        slow(4, 0.2, {"stage": 3, "parallel": {**ONE_BY_ONE, "pipeline": 4}}),
        slow(4, 0.5, {"stage": 2, "parallel": ONE_BY_ONE}),
        slow(2, 0.4, {"stage": 3, "parallel": ONE_BY_ONE, "precision": "fp16"}),
    ],
    ids=str,
)
def test_a_budget_is_kept_by_each_stage(
    pool: Pool, ranks: int, share: float, plan: dict[str, Any]
) -> None:
    name = "gpt, large batch"
    tokens = torch.zeros(4 * BATCH // NUM, SEQ, dtype=torch.long)
    plan = {**ATEN, **plan}
    budget = between(MEASURED[name](None), (tokens, tokens), plan, ranks, share)
    for found in pool.run(
        ranks, measure, name, {**plan, "activations": "auto", "memory_budget": budget}
    ):
        assert found.peak_bytes <= budget * (1 + TOLERANCE)
        assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.05)


def over(plan: dict[str, Any]) -> tuple[str, int, float]:
    """Return the error of a budget that is too small, and train without one afterwards."""
    model: Any = zerofx.compile(make("llama"), {"kernels": "aten", **plan})
    for _ in range(2):
        with pytest.raises(BudgetError) as caught:
            model(**text(0, 0))
    other = zerofx.compile(make("llama"), {"kernels": "aten", "parallel": ONE_BY_ONE})
    loss = other(**text(0, 0)).loss
    loss.backward()
    return str(caught.value), caught.value.least_bytes, float(loss.detach())


def test_a_budget_that_one_stage_does_not_meet_is_refused_on_all(pool: Pool) -> None:
    """A budget just below what the larger stage needs at least, which the other one meets."""
    plan = {"kernels": "aten", "stage": 3, "parallel": {**ONE_BY_ONE, "cuts": ["model.layers.1"]}}
    plan |= {"activations": "auto", "memory_budget": 1 << 10}
    _, least, _ = pool.run(2, over, plan)[0]
    plan["memory_budget"] = least - 1
    given = {n: v[: len(v) // NUM] for n, v in text(0, 0).items()}
    program = zerofx.capture(make("llama"), (), given, outputs="loss")
    refused = []
    for stage in range(2):
        try:
            zerofx.rewrite(program, plan, 2, position=stage)
        except BudgetError:
            refused.append(stage)
    assert len(refused) == 1
    found = pool.run(2, over, plan)
    assert found[0] == found[1]
    said, again, _ = found[0]
    assert said.startswith(f"memory_budget: pipeline stage {refused[0]} of LlamaForCausalLM needs ")
    assert again == least and f"({least} bytes)" in said
    assert f"the budget is {format_bytes(least - 1)}. " in said


# -- Optimizers of whole matrices ------------------------------------------------------------------
def matrix_optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Return one for the matrices, tied tables among them, and AdamW for the rest."""
    params = [*model.parameters()]
    matrices = [p for p in params if p.ndim == 2]
    made: dict[str, Any] = {
        "Muon": lambda: torch.optim.Muon(matrices, lr=2e-3),
        "Shampoo": lambda: whole_matrices(Shampoo(matrices, lr=1e-3)),
    }
    others = [p for p in params if p.ndim != 2]
    return [made[kind](), torch.optim.AdamW(others, lr=1e-3, eps=1e-4)]


def steps_of(model: Any, optimizers: list[Any], data: list[int], steps: range) -> None:
    num = 1 if hasattr(model, "zerofx") else NUM
    for step in steps:
        for rank in data:
            whole = text(step, rank)
            for pieces in zip(*(value.chunk(num) for value in whole.values()), strict=True):
                given = dict(zip(whole, pieces, strict=True))
                (model(**given).loss / (len(data) * num)).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def on_matrices(
    name: str, kind: str, plan: dict[str, Any], folder: str, resumes: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Train and save, or load and train on; return the parameters, and whose states are here."""
    model: Any = zerofx.compile(make(name), {"kernels": "aten", **plan})
    optimizers = matrix_optimizers(model, kind)
    if resumes:
        zerofx.load(folder, model, optimizers)
    steps_of(model, optimizers, [model.zerofx.data_rank], range(3, 5) if resumes else range(3))
    if not resumes:
        zerofx.save(folder, model, optimizers)
    held = {id(p) for p in optimizers[0].state}
    here = [n for n, p in model.named_parameters() if id(p) in held]
    return {n: v.clone() for n, v in model.state_dict().items()}, here


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "parallel"),
    [
        slow("gpt2", "Muon", 2, ONE_BY_ONE),
        slow("llama", "Shampoo", 2, INTERLEAVED),
        slow("gpt2", "Shampoo", 4, ONE_BY_ONE),
        slow("deep", "Muon", 4, {**ZERO_BUBBLE, "pipeline": 4}),
    ],
    ids=str,
)
def test_each_stage_steps_its_matrices(
    pool: Pool, tmp_path: Path, name: str, kind: str, ranks: int, parallel: dict[str, Any]
) -> None:
    """And saves their states, which other ranks, without a pipeline, go on with."""
    data = [*range(ranks // parallel["pipeline"])]
    folder, model = str(tmp_path / "run"), make(name)
    optimizers = matrix_optimizers(model, kind)
    steps_of(model, optimizers, data, range(3))
    expected = {n: v.clone() for n, v in model.state_dict().items()}
    plan = {"stage": 3, "parallel": parallel}
    trained = pool.run(ranks, on_matrices, name, kind, plan, folder, False)
    for state, _ in trained:
        assert relative_error(state, expected) <= 1e-5
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2}
    assert {n for _, here in trained for n in here} == matrices
    assert all(len(here) < len(matrices) for _, here in trained)
    steps_of(model, optimizers, data, range(3, 5))
    then = pool.run(len(data), on_matrices, name, kind, {"stage": 2}, folder, True)
    again = pool.run(ranks, on_matrices, name, kind, plan, folder, True)
    for state, _ in [*then, *again]:
        assert relative_error(state, model.state_dict()) <= 2e-5


def both_axes() -> str:
    parallel = {**ONE_BY_ONE, "tensor": 2}
    model: Any = zerofx.compile(make("llama"), {"kernels": "aten", "parallel": parallel})
    first, _ = matrix_optimizers(model, "Muon")
    model(**text(0, 0)).loss.backward()
    with pytest.raises(ShardError) as caught:
        first.step()
    return str(caught.value)


@pytest.mark.slow
def test_matrices_over_both_axes_are_refused(pool: Pool) -> None:
    for said in pool.run(4, both_axes):
        assert "Muon, which steps on whole matrices, does not support pipeline stages" in said
        assert "Plan.parallel.pipeline is 2, and tensor is 2" in said
