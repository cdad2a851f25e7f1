"""What changes in a compiled model's tree: honoured, or refused by name; never run past."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from shard_cases import whole, wholes
from torch import Tensor, nn

import zerofx
from zerofx.errors import ShardError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.seq = nn.Sequential(nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.seq(x).sum()


def compiled(stage: int = 3) -> Any:
    torch.manual_seed(0)
    model = zerofx.compile(Net(), {"stage": stage, "kernels": "aten"})
    model(torch.ones(2, 5)).backward()
    return model


# -- submodules -----------------------------------------------------------------------------------
def _replace(model: Any) -> None:
    model.first = nn.Linear(5, 4)


def _replace_item(model: Any) -> None:
    model.seq[1] = nn.Linear(4, 2)


def _delete_item(model: Any) -> None:
    del model.layers[2]


def _swap(model: Any) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def _empty(model: Any) -> None:
    model.seq = None


def _append(model: Any) -> None:
    model.seq.append(nn.Sigmoid())


def _add_weights(model: Any) -> None:
    model.head = nn.Linear(2, 2)


CHANGES = {
    _replace: r"first: another module, a Linear, was put in its place",
    _replace_item: r"seq.1: another module, a Linear",
    _delete_item: r"layers.2: the Linear there was removed",
    _swap: r"layers.0: another module",
    _empty: r"seq: the Sequential there was removed",
    _append: r"seq.2: a Sigmoid was added",
    _add_weights: r"head: a Linear was added",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_tree_is_refused(change: Callable[[Any], None]) -> None:
    model = compiled()
    change(model)
    for _ in range(2):
        with pytest.raises(ShardError, match=CHANGES[change] + r".*before zerofx\.compile"):
            model(torch.ones(2, 5))
    twin = copy.deepcopy(compiled())  # watches modules of its own
    change(twin)
    with pytest.raises(ShardError, match=CHANGES[change]):
        twin(torch.ones(2, 5))


def test_a_child_that_no_call_runs_may_come_and_stay() -> None:
    model = compiled()
    x = torch.ones(2, 5)
    expected = model(x)
    model.criterion = nn.MSELoss()
    assert torch.equal(model(x), expected)
    del model.criterion
    with pytest.raises(ShardError, match="criterion: the MSELoss there was removed"):
        model(x)


# -- parameters -----------------------------------------------------------------------------------
def call_with_other_values() -> tuple[list[str], bool, bool]:
    model = compiled(2)
    before = wholes(model)
    x = torch.ones(2, 5)
    expected = model(x)
    messages = []
    for kind in (torch.Tensor.clone, nn.Parameter):
        values = {name: kind(torch.zeros(v.shape)) for name, v in before.items()}
        with pytest.raises(ShardError) as caught:
            torch.func.functional_call(model, values, (x,))
        messages.append(str(caught.value))
    kept = all(torch.equal(v, before[name]) for name, v in wholes(model).items())
    return messages, kept, torch.equal(model(x), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_functional_call_is_refused_and_leaves_the_weights(pool: Pool, world: int) -> None:
    for messages, kept, again in pool.run(world, call_with_other_values):
        for message, kind in zip(messages, ("Tensor", "Parameter"), strict=True):
            assert message.startswith(f"first.weight: a {kind} was put in the parameter's place")
            assert "functional_call" in message and "load_state_dict" in message
        assert kept and again


def test_functional_call_with_its_own_parameters_and_other_buffers() -> None:
    model = compiled()
    x = torch.ones(2, 5)
    own = dict(model.named_parameters())
    assert torch.equal(torch.func.functional_call(model, own, (x,)), model(x))


def test_assignment_is_a_load_however_often() -> None:
    model = compiled()
    ours = model.first.weight
    for value in (1.0, 2.0):
        model.first.weight = nn.Parameter(torch.full((4, 5), value))
        model(torch.ones(2, 5))
        assert model.first.weight is ours and bool((whole(ours) == value).all())
    del model.first.weight
    with pytest.raises(ShardError, match=r"first.weight: the module now holds None"):
        model(torch.ones(2, 5))
    model.first.weight = nn.Parameter(torch.full((4, 5), 3.0))
    model(torch.ones(2, 5))
    assert model.first.weight is ours and bool((whole(ours) == 3).all())


def swap_in_averages(model: Any) -> list[Tensor]:
    """Evaluate with other values in place, as loops do that average weights: `p.data` is kept."""
    x, seen = torch.ones(2, 5), []
    with torch.no_grad():
        seen.append(model(x).clone())
        average = [p.data * 0.5 for p in model.parameters()]
        kept = [p.data for p in model.parameters()]
        for p, value in zip(model.parameters(), average, strict=True):
            p.data = value
        seen.append(model(x).clone())
        for p, value in zip(model.parameters(), kept, strict=True):
            p.data = value
        seen.append(model(x).clone())
    return seen


def plain_and_compiled() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    return swap_in_averages(Net()), swap_in_averages(compiled())


@pytest.mark.parametrize("world", [1, 2])
def test_data_that_was_read_keeps_its_values(pool: Pool, world: int) -> None:
    for plain, ours in pool.run(world, plain_and_compiled):
        torch.testing.assert_close(ours, plain)
        assert not torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[2])


def test_data_swapped_between_parameters_and_models() -> None:
    found = []
    for make in (Net, compiled):
        one, two = make(), make()
        for i, p in enumerate([*one.parameters(), *two.parameters()]):
            nn.init.normal_(p, generator=torch.Generator().manual_seed(i))
        a, b, c = one.layers[0].weight, one.layers[1].weight, two.layers[0].weight
        a.data, b.data = b.data, a.data
        a.data, c.data = c.data, a.data
        a.data = a.data.t()
        b.data *= 2
        found.append([p.detach().clone() for p in (a, b, c)] + [one(torch.ones(2, 5)).detach()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def _tie(model: Any) -> None:
    model.layers[1].weight = model.layers[0].weight


def _tie_data(model: Any) -> None:
    model.layers[1].weight.data = model.layers[0].weight.data


@pytest.mark.parametrize("tie", [_tie, _tie_data])
def test_ties_made_after_compile_are_refused(tie: Callable[[Any], None]) -> None:
    model = compiled()
    tie(model)
    with pytest.raises(ShardError, match=r"layers.1.weight: .*which would tie the two"):
        model(torch.ones(2, 5))
    model.layers[1].weight = nn.Parameter(torch.ones(4, 4))
    model(torch.ones(2, 5)).backward()


def test_ties_undone_after_compile_are_refused() -> None:
    net = Net()
    net.layers[1].weight = net.layers[0].weight
    model = zerofx.compile(net, {"kernels": "aten"})
    ours, x = model.layers[0].weight, torch.ones(2, 5)
    model.load_state_dict(model.state_dict(), assign=True)  # equal values: the tie stays
    model(x)
    assert model.layers[0].weight is model.layers[1].weight is ours
    model.layers[1].weight = nn.Parameter(ours.detach().clone())
    with pytest.raises(ShardError, match=r"held in 2 places, and one of them .*would untie"):
        model(x)
