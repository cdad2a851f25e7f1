"""The store: rank 0's values in flat shards, gradients that users may hold, repaired bindings."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from shard_cases import build, deliver, gradients, layout_of, on_ranks, small_model, whole, wholes
from simulated import run_ranks
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.errors import ShardError
from zerofx.runtime.store.shards import ShardStore

# -- building ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "shard_size"), [(1, 1), (2, 2), (3, 3), (4, 2), (2, 1)])
def test_every_rank_gets_rank_0s_values(size: int, shard_size: int) -> None:
    expected = wholes(small_model())

    def rank(world: World) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        if world.rank:
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(world.rank)
        store = build(model, world)
        owned = sum(s.numel() for s in store.shards)
        padding = sum(b.numel - sum(p.numel for p in b.params) for b in store.layout.buckets)
        assert owned == (sum(t.numel() for t in expected.values()) + padding) // shard_size
        return wholes(model)

    base = small_model()
    for got in run_ranks(size, rank, shard_size):
        assert list(got) == list(expected)
        assert all(torch.equal(got[k], v) for k, v in expected.items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.rnn = nn.LSTM(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.rnn.weight_hh_l0.requires_grad_(False)


def test_tied_names_flat_rnn_weights_flags_attributes_and_buffers() -> None:
    def rank(world: World) -> None:
        model: Any = copy.deepcopy(base)
        model.scale.decay = False
        store = build(model, world)
        assert model.head.weight is model.embed.weight
        assert "head.weight" not in store.params and "embed.weight" in store.params
        assert [id(w) for w in model.rnn._flat_weights] == [id(p) for p in model.rnn.parameters()]
        assert not model.rnn.weight_hh_l0.requires_grad and model.rnn.weight_ih_l0.requires_grad
        assert model.scale.decay is False and model.scale.shape == torch.Size([])
        assert torch.equal(whole(model.scale), torch.tensor(2.0))
        assert whole(model.empty).shape == (0, 4)

    torch.manual_seed(0)
    base = Tied()
    for size in (1, 2):
        run_ranks(size, rank)


def test_buffers_start_from_rank_0() -> None:
    def rank(world: World) -> tuple[Tensor, Tensor]:
        model: Any = copy.deepcopy(base)
        if world.rank:
            model.norm.running_mean.fill_(world.rank)
            model.mask.zero_()
        build(model, world)
        return model.norm.running_mean, model.mask

    torch.manual_seed(0)
    base = Tied()
    for mean, mask in run_ranks(2, rank):
        assert torch.equal(mean, torch.zeros(6)) and bool(mask.all())


def test_old_parameters_are_freed_with_the_model_and_need_no_collector() -> None:
    import gc
    import weakref

    model = small_model()
    old = weakref.ref(model[0].weight)
    store = build(model, World.single())
    assert old() is None
    shard = weakref.ref(store.shards[0])
    gc.disable()
    try:
        del store, model
        assert shard() is None
    finally:
        gc.enable()


def test_what_cannot_be_laid_out_is_named() -> None:
    world = World.single()
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ShardError, match=r"0.weight is a lazy parameter.*Run the model once"):
        ShardStore.build(lazy, layout_of(small_model(), world), world)
    model = small_model()
    model[1].bias.grad = torch.ones(7)
    with pytest.raises(ShardError, match=r"1.bias already has a gradient.*zero_grad"):
        build(model, world)

    def twice(model: nn.Module, store: ShardStore, world: World) -> None:
        with pytest.raises(ShardError, match=r"0.weight belongs to a compiled model already"):
            ShardStore.build(model, store.layout, world)

    on_ranks(2, twice)
    on_ranks(1, twice)


class Joined(nn.Module):
    """Two tensors over the same memory, which no Parameter is shared for."""

    def __init__(self, kind: str, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False, device=device)
        self.head = nn.Linear(4, 4, bias=False, device=device)
        values = self.embed.weight.data
        if kind == "data":
            self.head.weight.data = values
        elif kind == "transposed":
            self.head.weight = nn.Parameter(values.t())
        elif kind == "part":
            self.head.weight = nn.Parameter(values.view(-1)[8:])
        elif kind == "buffer":
            self.register_buffer("seen", values[1:3])
        elif kind == "apart":  # neighbours in one storage, as an RNN's flat weights
            both = torch.zeros(2, 4, 4, device=device)
            self.embed.weight.data, self.head.weight.data = both[0], both[1]
            self.register_buffer("one", torch.zeros(4)[:3])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_two_tensors_share_is_refused_by_both_names(device: str) -> None:
    world = World.single()
    for kind in ("data", "transposed", "part"):
        with pytest.raises(ShardError, match=r"embed.weight and head.weight share .*Parameter"):
            model = Joined(kind, device)
            build(model, world)
        assert type(model.embed.weight) is nn.Parameter
    with pytest.raises(ShardError, match=r"embed.weight and seen share memory.*in forward"):
        build(Joined("buffer", device), world)
    build(Joined("apart", device), world)


# -- bindings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
class TestBindings:
    def test_assigned_parameters_are_copied_back(self, size: int) -> None:
        def body(model: Any, store: ShardStore, world: World) -> None:
            ours = model[0].weight
            address = store.local_view("0.weight").data_ptr()
            values = torch.randn(33, 13, generator=torch.Generator().manual_seed(9))
            before = store.writes
            model[0].weight = nn.Parameter(values, requires_grad=False)
            store.check_bindings()
            assert model[0].weight is ours and not ours.requires_grad
            assert store.writes > before
            assert torch.equal(whole(ours), values)
            assert store.local_view("0.weight").data_ptr() == address

        on_ranks(size, body)

    def test_load_state_dict_both_ways(self, size: int) -> None:
        donor = {k: v + 1 for k, v in wholes(small_model()).items()}

        def body(model: nn.Module, store: ShardStore, world: World) -> None:
            before = store.writes
            model.load_state_dict(donor)
            assert store.poll_writes() > before
            assert all(torch.equal(v, donor[k]) for k, v in wholes(model).items())
            params = list(model.parameters())
            model.load_state_dict({k: v * 2 for k, v in donor.items()}, assign=True)
            store.check_bindings()
            assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
            assert all(torch.equal(v, donor[k] * 2) for k, v in wholes(model).items())

        on_ranks(size, body)

    def test_replaced_storage_is_brought_back(self, size: int) -> None:
        def body(model: Any, store: ShardStore, world: World) -> None:
            carrier = model[0].weight.to_local() if size > 1 else model[0].weight
            values = torch.full_like(carrier.detach(), 5.0)
            with torch.no_grad():
                carrier.set_(values)
            store.check_bindings()
            assert bool((store.local_view("0.weight") == 5).all())
            assert bool((whole(model[0].weight) == 5).all())
            if size > 1:
                return
            with torch.no_grad():
                carrier.set_(torch.zeros(3))
            with pytest.raises(ShardError, match=r"0.weight: its storage was replaced by 3 elem"):
                store.check_bindings()

        on_ranks(size, body)

    def test_what_does_not_fit_is_named(self, size: int) -> None:
        def body(model: Any, store: ShardStore, world: World) -> None:
            ours = model[1].bias
            for wrong, text in [
                (nn.Parameter(torch.zeros(8)), r"shape \[8\] instead of \[7\]"),
                (nn.Parameter(torch.zeros(7).double()), "float64"),
                (None, "None"),
            ]:
                model[1].bias = wrong
                with pytest.raises(ShardError, match=f"1.bias: the module now holds .*{text}"):
                    store.check_bindings()
            model[1].bias = ours
            store.check_bindings()

        on_ranks(size, body)


def test_an_optimizer_step_over_replicated_parameters_is_a_write() -> None:
    def body(model: nn.Module, store: ShardStore, world: World) -> None:
        deliver(store, gradients(model, 0))
        before = store.writes
        torch.optim.AdamW(model.parameters(), fused=True).step()
        assert store.writes > before

    on_ranks(1, body)
    on_ranks(2, body, shard_size=1)


def test_a_copy_of_the_model_can_be_averaged_into() -> None:
    """What AveragedModel does: foreach over two models' parameters that are cut alike."""

    def rank(world: World) -> dict[str, Tensor]:
        models = [copy.deepcopy(base) for _ in range(2)]
        for model in models:
            build(model, world)
        average, current = (list(m.parameters()) for m in models)
        with torch.no_grad():
            torch._foreach_mul_(current, 3.0)
            torch._foreach_lerp_(average, current, 0.25)
        return wholes(models[0])

    base = small_model()
    expected = {k: torch.lerp(v, v * 3, 0.25) for k, v in wholes(base).items()}
    for got in run_ranks(2, rank):
        assert all(torch.equal(got[k], v) for k, v in expected.items())


@pytest.mark.parametrize("size", [1, 2])
def test_a_copy_is_independent(size: int) -> None:
    def rank(world: World) -> None:
        model: Any = copy.deepcopy(base)
        store = build(model, world)
        model.scale.decay = False
        blank = {
            id(p): nn.Parameter(torch.empty(p.shape, device="meta")) for p in store.params.values()
        }
        twin = copy.deepcopy(model, blank)
        their_store = ShardStore.copy_of(store, twin)
        before = wholes(model)
        with torch.no_grad():
            for p in twin.parameters():
                p.add_(1)
        assert their_store.poll_writes() > 0
        assert all(torch.equal(v, before[n]) for n, v in wholes(model).items())
        assert all(torch.equal(v, before[n] + 1) for n, v in wholes(twin).items())
        assert twin.head.weight is twin.embed.weight and twin.scale.decay is False
        assert [id(w) for w in twin.rnn._flat_weights] == [id(p) for p in twin.rnn.parameters()]
        assert not twin.rnn.weight_hh_l0.requires_grad and twin.rnn.weight_ih_l0.requires_grad
        their_store.check_bindings()
        deliver(their_store, gradients(twin, 0))
        assert model.scale.grad is None and twin.scale.grad is not None

    torch.manual_seed(0)
    base = Tied()
    run_ranks(size, rank)
