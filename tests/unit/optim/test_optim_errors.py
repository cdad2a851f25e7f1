"""zerofx.optim: groups by name, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shard_cases import on_ranks, small_model
from torch import nn

import zerofx
from zerofx.comm.world import World
from zerofx.errors import OptimizerError, ShardError, ZerofxError
from zerofx.runtime.store.shards import ShardStore


def named(*groups: dict[str, Any]) -> list[list[str]]:
    model = small_model()
    optimizer = zerofx.optim.AdamW(
        [{"params": model.named_parameters(), **group} for group in groups]
    )
    return [group["param_names"] for group in optimizer.param_groups]


def test_named_parameters_are_taken_as_torch_takes_them() -> None:
    model = small_model()
    mine = zerofx.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    assert mine.state_dict() == theirs.state_dict()
    assert mine.param_groups[0]["param_names"][0] == "0.weight"


def test_groups_by_name() -> None:
    decay, rest = named({"names": "*.bias", "weight_decay": 0.0}, {"names": "*"})
    assert decay == ["0.bias", "1.bias"] and rest == ["0.weight", "1.weight", "2.weight"]
    module, others = named({"names": ["1", "2.*"]}, {})  # the rest needs no names
    assert module == ["1.weight", "1.bias", "2.weight"] and others == ["0.weight", "0.bias"]


def test_groups_by_name_of_shards() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        groups = [{"params": model.named_parameters(), "names": n} for n in ("*.bias", "*")]
        optimizer = zerofx.optim.Lamb(groups)
        assert [len(g["params"]) for g in optimizer.param_groups] == [2, 3]

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"names": "norm.*"}], r"group 0: 'norm.\*' names none of the 5 parameters. The nearest"),
        ([{"names": ["*.bias", "0.wieght"]}], "'0.wieght' names none .* nearest are 0.weight"),
        ([{"names": "*"}, {"names": "0.*"}], "group 1: all parameters .* in earlier groups"),
    ],
)
def test_a_group_that_names_nothing(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(OptimizerError, match=message):
        named(*groups)


def test_a_group_by_name_needs_names() -> None:
    with pytest.raises(OptimizerError, match=r"group 0 .*named_parameters"):
        zerofx.optim.AdamW([{"params": small_model().parameters(), "names": "*"}])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Lion", "Lamb"])
def test_half_parameters_without_a_master_copy(kind: str) -> None:
    with pytest.raises(OptimizerError, match=r"\[33, 13\] is float16 .*Plan\(precision"):
        getattr(zerofx.optim, kind)(small_model().half().parameters())
    make = getattr(zerofx.optim, kind)
    make(small_model().bfloat16().parameters())

    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        with pytest.raises(OptimizerError, match=r"^0.weight is float16 .*Plan\(precision"):
            make(model.parameters())

    on_ranks(2, body, small_model().half())


def test_sgd_takes_half_parameters() -> None:
    model = small_model().half()
    optimizer = zerofx.optim.SGD(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = model[0].bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model[0].bias.detach(), before - 0.5)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"max_grad_norm": 0.0}, "max_grad_norm is 0.0, but must be positive"),
    ("SGD", {"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
    ("AdamW", {"differentiable": True}, "differentiable=True .*torch.optim.AdamW"),
    ("AdamW", {"lr": -1.0}, "Invalid learning rate: -1.0"),
    ("Lion", {"lr": -1.0}, "Invalid learning rate: -1.0"),
    ("Lion", {"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    ("Lamb", {"eps": -1.0}, "Invalid epsilon value: -1.0"),
    ("Lamb", {"eps": 0.0}, "eps is 0.0"),
    ("Lamb", {"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff is 2.0 and max_coeff is 1.0"),
]


@pytest.mark.parametrize(("kind", "options", "message"), BAD)
def test_bad_options(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(zerofx.optim, kind)(small_model().parameters(), **options)


def test_parameters_that_cannot_be_flat_or_real() -> None:
    strided = nn.Parameter(torch.zeros(4, 6).t())
    strided.grad = torch.ones_like(strided)
    with pytest.raises(OptimizerError, match=r"shape \[6, 4\] has strides \[1, 6\]"):
        zerofx.optim.AdamW([strided]).step()
    with pytest.raises(OptimizerError, match="complex64"):
        zerofx.optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


def test_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(OptimizerError, match=r"\[5, 3\]: its gradient is torch.sparse_coo"):
        zerofx.optim.AdamW(table.parameters()).step()


def test_errors_are_zerofx_errors() -> None:
    assert issubclass(OptimizerError, ZerofxError) and issubclass(OptimizerError, ValueError)


class Eighth(nn.Module):
    """A parameter in a format that nothing adds."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        weight = torch.randn(8, 8).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=is_trained)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.float() + self.bias).sum()


def test_a_format_that_cannot_be_summed() -> None:
    with pytest.raises(
        ShardError, match=r"^weight is torch.float8_e4m3fn, whose gradients no backend can sum"
    ):
        zerofx.compile(Eighth(True), {"kernels": "aten"})
    frozen = zerofx.compile(Eighth(False), {"kernels": "aten"})
    frozen(torch.ones(2, 8)).backward()
    frozen.weight.requires_grad_(True)
    with pytest.raises(
        ShardError, match=r"^weight is torch.float8_e4m3fn, whose gradients no backend can sum"
    ):
        frozen(torch.ones(2, 8))


class OwnAdamW(torch.optim.AdamW):
    """One that a user derives."""


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, torch.optim.AdamW), (3, torch.optim.Adam), (3, OwnAdamW)]
)
def test_torchs_adam_without_master_weights(stage: int, kind: Any) -> None:
    plan = {
        "kernels": "aten",
        "stage": stage,
        "precision": {"compute": "fp16", "master": "fp16", "loss_scale": 8.0},
    }
    model = zerofx.compile(nn.Linear(4, 4), plan)
    adam = kind(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model(torch.ones(2, 4)).float().sum().backward()
    with pytest.raises(ShardError, match=r"^weight is float16 without a float32 master copy"):
        adam.step()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
