"""Plan(ignored_params=...): parameters that stay the user's, as fully_shard's ignored_params do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import PlanError, ShardError
from zerofx.ir.meta import info

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.subtrahend = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.deep(x)) - self.subtrahend


class Model(nn.Module):
    """Ignored: all of one module, a parameter of the root, a tied one, and a recurrent layer."""

    def __init__(self, decides: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decides = decides
        self.inner, self.addend = Inner(), nn.Parameter(torch.randn(8, 8))
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.cell(self.embed(ids))[0]
        if self.decides and x.sum().item() > 1e9:
            x = x * 2
        x = self.inner(x) + self.addend * self.scale
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IGNORED = ("inner.deep", "addend", "cell", "head.weight")


def ids(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(9 * step + rank))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore


def gradients(plain: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    return dict(
        zip(trained, torch.autograd.grad(plain(batch), list(trained.values())), strict=True)
    )


def compare(held: dict[str, Any], plain: nn.Module) -> None:
    for name, param in plain.named_parameters():
        assert (held[name].grad is None) == (param.grad is None), name
        if param.grad is not None:
            found = whole(held[name].grad)
            torch.testing.assert_close(found, param.grad, atol=1e-6, rtol=1e-4, msg=name)


def train(decides: bool, *plans: dict[str, Any]) -> None:
    for fields in plans:
        train_under(decides, fields)


def train_under(decides: bool, fields: dict[str, Any]) -> None:
    """Train beside plain PyTorch; ignored gradients are this rank's, and averaged by a hook."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain, made = Model(decides), Model(decides)
    before = {n: p for n, p in made.named_parameters() if n.startswith(("addend", "inner.deep"))}
    model: Any = zerofx.compile(made, {**ATEN, "ignored_params": IGNORED, **fields})
    held = dict(model.named_parameters())
    assert list(held) == [name for name, _ in plain.named_parameters()]
    assert all(held[name] is param for name, param in before.items())
    left = {n for n, p in held.items() if type(p) is nn.Parameter}
    assert left == {n for n in held if n.startswith(("addend", "inner.deep", "cell", "embed"))}
    assert set(model.zerofx.layout.owned) == held.keys() - left
    local: dict[str, Tensor] = {}

    def average(param: nn.Parameter) -> None:
        local[next(n for n in left if held[n] is param)] = param.grad.clone()  # type: ignore
        if world > 1:
            dist.all_reduce(param.grad)
        param.grad.div_(world)  # type: ignore[union-attr]

    for name in left:
        held[name].register_post_accumulate_grad_hook(average)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    for step in range(3):
        for m in (model, plain):
            m.inner.deep.requires_grad_(step != 1)
        own = gradients(plain, ids(step, rank)) if step == 0 else {}
        for each in range(world):
            (plain(ids(step, each)) / world).backward()
        model(ids(step, rank)).backward()
        for name in own.keys() & left:
            torch.testing.assert_close(local[name], own[name], atol=1e-6, rtol=1e-4, msg=name)
        compare(held, plain)
        for m in (model, plain):
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, wanted = model.state_dict(), plain.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-4, msg=name)
    with zerofx.whole(model), torch.no_grad():
        assert model.addend is held["addend"]
        torch.testing.assert_close(model.inner(state["addend"]), plain.inner(state["addend"]))
    kinds = {str(i.entry) for i in model.zerofx.islands}
    assert kinds == ({""} if decides else set())


PLANS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 0},
    {"offload": {"parameters": "cpu", "optimizer": "cpu"}},
    {"kernels": "inductor"},
    {"activations": "recompute"},
]


@pytest.mark.parametrize("decides", [False, True], ids=["captured", "island"])
def test_in_one_process(decides: bool) -> None:
    train(decides, {})


@pytest.mark.slow
@pytest.mark.parametrize("decides", [False, True], ids=["captured", "island"])
def test_on_two_ranks(pool: Pool, decides: bool) -> None:
    pool.run(2, train, decides, {})


@pytest.mark.slow
@pytest.mark.parametrize("decides", [False, True], ids=["captured", "island"])
def test_under_other_plans(pool: Pool, decides: bool) -> None:
    pool.run(2, train, decides, *PLANS, timeout_s=300)


def test_it_is_saved_and_loaded_with_the_model(tmp_path: Path) -> None:
    plan = zerofx.Plan(**ATEN, ignored_params=IGNORED)
    one, other = (zerofx.compile(Model(), plan) for _ in range(2))
    with torch.no_grad():
        for param in one.parameters():
            param.add_(1)
    zerofx.save(tmp_path / "save", one)
    zerofx.load(tmp_path / "save", other)
    zerofx.export(tmp_path / "full", one)
    third = zerofx.compile(Model(), plan)
    zerofx.load_weights(third, tmp_path / "full")
    copied = copy.deepcopy(one)
    for model in (other, third, copied):
        assert torch.equal(model(ids(0, 0)), one(ids(0, 0)))
        assert model.addend is not one.addend
    mine = torch.optim.SGD([p for n, p in one.named_parameters() if n != "addend"], lr=0.1)
    with pytest.raises(Exception, match="another one for other parameters"):
        zerofx.save(tmp_path / "save", one, mine)


def test_a_replaced_parameter_is_used(tmp_path: Path) -> None:
    model: Any = zerofx.compile(Model(), zerofx.Plan(**ATEN, ignored_params="addend"))
    plain = Model()
    model(ids(0, 0)).backward()
    for m in (model, plain):
        m.addend = nn.Parameter(torch.ones(8, 8))
    torch.testing.assert_close(model(ids(0, 0)), plain(ids(0, 0)))
    model.addend.requires_grad_(False)
    torch.testing.assert_close(model(ids(0, 0)), plain(ids(0, 0)))
    assert "ignored_params.addend" in model.programs[0].dump("full")


def test_all_of_a_model_may_be_ignored() -> None:
    plain = nn.Linear(4, 4)
    model: Any = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**ATEN, ignored_params="*"))
    for m in (model, plain):
        m(torch.ones(2, 4)).sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert list(model.state_dict()) == ["weight", "bias"]


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'nothing' covers no parameter of Model\. Its"):
        zerofx.compile(Model(), zerofx.Plan(ignored_params=["nothing"]))
    with pytest.raises(PlanError, match=r"name patterns. For a set .* in the_set\]"):
        zerofx.Plan(ignored_params={nn.Parameter(torch.ones(2))})  # type: ignore[arg-type]
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ShardError, match=r"addend is on meta, and Plan\.ignored_params leaves"):
        zerofx.compile(model, zerofx.Plan(ignored_params=["addend"]))


def test_it_is_computed_with_in_the_format_of_its_module() -> None:
    precision = {"compute": "bf16", "modules": {"inner": "fp32"}}
    plain, fields = Model(), {**ATEN, "ignored_params": IGNORED}
    model: Any = zerofx.compile(Model(), {**fields, "precision": precision})
    for m in (model, plain):
        m(ids(0, 0)).backward()
    params = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert param.dtype is param.grad.dtype is torch.float32
        error = (whole(param.grad) - params[name].grad).norm() / params[name].grad.norm()
        assert float(error) < 0.05, name  # as far as bf16 goes
    formats = {n.name: n.meta["val"].dtype for n in nodes(model, "inner.deep.0")}
    assert torch.float32 in formats.values() and torch.bfloat16 not in formats.values()


def nodes(model: Any, module: str) -> list[Any]:
    """Return the matrix products of one module's forward."""
    graph = model.programs[0].graph("forward")
    return [n for n in graph.nodes if "mm" in str(n.target) and info(n).module == module]
