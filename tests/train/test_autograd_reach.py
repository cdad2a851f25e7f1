"""Which gradients a backward touches: by the outputs that a loss uses, and by what it asks for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as schedules
from pool import Pool
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

import zerofx
import zerofx.optim
from zerofx.errors import GradientError, ShardError


class Heads(nn.Module):
    """Two heads, one of them over a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.left(h), self.right(y).square()


class Root(Heads):
    """The second head's gradient is infinite: times the zeros of an unused output, NaN."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = super().forward(x, y)
        return left, (right * 0).sqrt()


def make(kind: type[nn.Module] = Heads) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def compiled(kind: type[nn.Module] = Heads, **plan: Any) -> Any:
    return zerofx.compile(make(kind), {"kernels": "aten"} | plan)


def inputs_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(2, 3, 4, generator=generator)
    return x.requires_grad_(), y.requires_grad_()


def loss_of(outputs: Sequence[Tensor], used: Sequence[int]) -> Tensor:
    return sum((outputs[i].square().mean() for i in used), torch.zeros(()))


USED = [[0, 1], [0], [1], [0]]


@pytest.mark.parametrize(
    ("optimizer", "plan"),
    [
        (torch.optim.AdamW, {}),
        (zerofx.optim.AdamW, {}),
        (zerofx.optim.AdamW, {"update": "in-backward"}),
    ],
    ids=["torch", "own", "in-backward"],
)
def test_what_a_loss_does_not_reach_is_left_alone(optimizer: Any, plan: Any) -> None:
    found = []
    for model, kind in ((make(), torch.optim.AdamW), (compiled(**plan), optimizer)):
        opt, nones = kind(model.parameters(), lr=0.1, weight_decay=0.1), []
        for step, used in enumerate(USED):
            x, y = inputs_of(0, step)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            loss_of(model(x, y), used).backward()
            nones.append([x.grad is None, y.grad is None])
            if not plan:
                nones.append([p.grad is None for p in model.parameters()])
            opt.step()
            opt.zero_grad()
            same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
            side = {1: "right", 0: "left"}
            unused = [side[i] for i in (0, 1) if i not in used]
            assert same == {n for n in before if any(n.startswith(u) for u in unused)} | (
                {"body.weight", "body.bias"} if used == [1] else set()
            )
        counts = [int(opt.state[p]["step"]) for p in model.parameters()]
        found.append((dict(model.named_parameters()), nones, counts))
    (plain, plain_nones, plain_counts), (ours, nones, counts) = found
    assert counts == plain_counts
    assert plan or nones == plain_nones
    for name, param in plain.items():
        torch.testing.assert_close(ours[name], param, rtol=0, atol=2e-6, msg=name)


def test_nothing_of_an_unused_output_reaches_its_parameters_not_even_nan() -> None:
    model = compiled(Root)
    x, y = inputs_of(0, 0)
    model.right.weight.grad = torch.ones_like(model.right.weight)
    model(x, y)[0].sum().backward()
    assert torch.equal(model.right.weight.grad, torch.ones(2, 4))
    assert model.right.bias.grad is None and y.grad is None
    assert all(p.grad.isfinite().all() for p in (*model.body.parameters(), x))


def whole(grad: Any) -> Tensor | None:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def train(stage: int) -> list[dict[str, Tensor | None]]:
    rank, found = dist.get_rank(), []
    model = compiled(stage=stage, persist_below=0)
    for step, used in enumerate(([0], [[0], [0, 1]][rank], [[0], [1]][rank])):
        loss_of(model(*inputs_of(rank, step)), used).backward()
        grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        found.append({n: None if g is None else g.clone() for n, g in grads.items()})
        if step == 1:
            model.zero_grad()
    return found


def trained_plainly() -> list[dict[str, Tensor | None]]:
    total: dict[str, Tensor] = {}
    found = []
    for step, used in enumerate((([0], [0]), ([0], [0, 1]), ([0], [1]))):
        for rank in range(2):
            model = make()
            loss_of(model(*inputs_of(rank, step)), used[rank]).backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    total[name] = total.get(name, torch.zeros(())) + param.grad / 2
        found.append({n: total.get(n) for n, _ in model.named_parameters()})
        if step == 1:
            total.clear()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_whose_losses_use_different_outputs_share_the_mean(pool: Pool, stage: int) -> None:
    for found in pool.run(2, train, stage):
        for ours, plain in zip(found, trained_plainly(), strict=True):
            assert [n for n in ours if ours[n] is None] == [n for n in plain if plain[n] is None]
            for name, grad in plain.items():
                if grad is not None:
                    torch.testing.assert_close(ours[name], grad, msg=name)


def asked(model: nn.Module, rank: int) -> list[Any]:
    """Ask for gradients in each way; return what came, and what became of p.grad."""
    params = dict(model.named_parameters())
    some = [params["left.weight"], params["body.bias"]]
    loss_of(model(*inputs_of(rank, 0)), [0, 1]).backward()
    found = [whole(p.grad).clone() for p in params.values()]
    returned = torch.autograd.grad(loss_of(model(*inputs_of(rank, 1)), [0, 1]), some)
    found += [whole(g).clone() for g in returned]
    found += [whole(p.grad).clone() for p in params.values()]
    x, y = inputs_of(rank, 2)
    loss_of(model(x, y), [0, 1]).backward(inputs=[*some, y])
    assert x.grad is None and y.grad is not None
    found += [whole(p.grad).clone() for p in params.values()]
    found += [whole(g) for g in returned]  # the user's own by now
    # one program runs twice, another once
    calls = [inputs_of(rank, 4), inputs_of(rank, 5), [t[:1] for t in inputs_of(rank, 6)]]
    loss = sum(loss_of(model(*inputs), [0, 1]) for inputs in calls)
    found += [whole(g).clone() for g in torch.autograd.grad(loss, some)]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(*inputs_of(rank, 3))[1].sum(), some[0])
    return found


def asked_on_a_rank(stage: int) -> list[Any]:
    return asked(compiled(stage=stage, persist_below=0), dist.get_rank())


def test_gradients_of_some_parameters_are_those_of_eager_pytorch() -> None:
    for ours, plain in zip(asked(compiled(), 0), asked(make(), 0), strict=True):
        torch.testing.assert_close(ours, plain)


def test_gradients_of_some_parameters_on_two_ranks(pool: Pool) -> None:
    left, right = (asked(make(), rank) for rank in range(2))
    for found in pool.run(2, asked_on_a_rank, 3):
        for ours, one, other in zip(found, left, right, strict=True):
            torch.testing.assert_close(ours, (one + other) / 2)


def test_gradients_that_are_gone_by_then_are_refused() -> None:
    model = compiled(update="in-backward")
    opt = zerofx.optim.AdamW(model.parameters())
    loss = loss_of(model(*inputs_of(0, 0)), [0, 1])
    with pytest.raises(GradientError, match=r"left\.weight.*in-backward.*Call loss\.backward\(\)"):
        torch.autograd.grad(loss, [model.left.weight])
    del opt


SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
NO_EDGES = torch.__version__.startswith("2.11")
WHOLE = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")


def pipelined(names: Sequence[str]) -> list[list[tuple[Tensor, Tensor]]]:
    rank, found = dist.get_rank(), []
    torch.manual_seed(0)
    x, target = torch.randn(2, 4, 6)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
    for name in names:
        schedule = getattr(schedules, name)
        is_single = issubclass(schedule, schedules.PipelineScheduleSingle)
        is_v = name in SPLIT[1:]
        mine = [rank] if is_single else [rank, 3 - rank if is_v else rank + 2]
        last = mine[-1] == (1 if is_single else 3)
        grads = []
        for is_compiled in (False, True):
            models = [copy.deepcopy(parts[i]) for i in mine]
            if is_compiled:
                alone = DeviceMesh("cpu", [rank])
                plan = {"kernels": "aten", "differentiate": "all"}
                models = [zerofx.compile(m, plan, mesh=alone) for m in models]
            num = 2 if is_single else 4
            stages: Any = [
                PipelineStage(m, i, num, torch.device("cpu"))
                for m, i in zip(models, mine, strict=True)
            ]
            run = schedule(
                stages[0] if is_single else stages, n_microbatches=4, loss_fn=nn.MSELoss()
            )
            run.step(*((x,) if rank == 0 else ()), **({"target": target} if last else {}))
            grads.append([p.grad for m in models for p in m.parameters()])
        found.append(list(zip(*grads, strict=True)))
    return found


def check_pipelined(pool: Pool, names: Sequence[str]) -> None:
    for rank in pool.run(2, pipelined, names):
        for pairs in rank:
            for plain, ours in pairs:
                torch.testing.assert_close(ours, plain)


@pytest.mark.skipif(NO_EDGES, reason="torch 2.11 raises for any autograd.Function there")
def test_pipeline_schedules_that_split_backward_keep_the_gradients(pool: Pool) -> None:
    check_pipelined(pool, SPLIT[:1])


@pytest.mark.slow
def test_other_pipeline_schedules(pool: Pool) -> None:
    check_pipelined(pool, WHOLE if NO_EDGES else (*SPLIT[1:], *WHOLE))


def test_a_gradient_of_the_users_own_stays_p_grad() -> None:
    found = []
    for model in (make(), compiled()):
        own = torch.ones_like(model.body.weight)
        model.body.weight.grad = own
        for step in range(2):
            loss_of(model(*inputs_of(0, step)), [0, 1]).backward()
        assert model.body.weight.grad is own
        found.append(own)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_would_never_run_is_refused_before_the_model_is_changed(method: str) -> None:
    model = make()
    getattr(model.body.weight, method)(print)
    with pytest.raises(ShardError, match=r"body\.weight has a gradient hook.*never run"):
        zerofx.compile(model)


class Logged(Heads):
    """Returns, beside the loss, a value to look at."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        left, right = super().forward(x, y)
        return left.sum() + right.sum(), left.detach()


def test_a_detached_output_requires_no_grad() -> None:
    for model in (make(Logged), compiled(Logged)):
        loss, seen = model(*inputs_of(0, 0))
        assert loss.requires_grad and not seen.requires_grad
        (loss + seen.sum()).backward()
        assert model.body.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_is_refused() -> None:
    model = compiled()
    x, y = inputs_of(0, 0)
    with forward_ad.dual_level():
        model(x, y)
        with pytest.raises(GradientError, match="dual tensor"):
            model(forward_ad.make_dual(x.detach(), torch.ones(3, 4)), y)
