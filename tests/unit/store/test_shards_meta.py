"""Initialisation from meta: module by module, one seed on all ranks, clear errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from shard_cases import build, layout_of, wholes
from torch import Tensor, nn

from zerofx.comm.world import World
from zerofx.errors import ShardError
from zerofx.runtime.store.shards import ShardStore


class Net(nn.Module):
    """Attention, recurrence, normalisation, a tied head and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.rnn = nn.GRU(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)


def by_hand(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Initialise a materialised copy as documented: children first, each module's reset."""
    torch.manual_seed(seed)
    order: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        order.append(module)

    visit(model)
    done: set[int] = set()
    for module in order:
        mine = [id(p) for p in module._parameters.values() if p is not None]
        fresh = [i for i in mine if i not in done]
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if fresh and reset is not None:
            reset()
        done.update(mine)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def built_from_meta(seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    model = on_meta(Net)
    world = World.connect()
    state = torch.get_rng_state()
    build(model, world, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)  # the user's generator is left alone
    assert model.head.weight is model.embed.weight
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    return wholes(model), model.norm.running_var, model.norm.num_batches_tracked


def test_equals_a_materialised_initialisation_on_any_world(pool: Pool) -> None:
    expected = by_hand(Net(), 7)
    for got, variance, batches in [built_from_meta(7), *pool.run(2, built_from_meta, 7)]:
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
        assert torch.equal(variance, torch.ones(8)) and int(batches) == 0


def rank_0_has_values() -> tuple[dict[str, Tensor], Tensor]:
    world = World.connect()
    torch.manual_seed(3)
    model = Net() if world.rank == 0 else on_meta(Net)
    build(model, world)
    return wholes(model), model.norm.running_var


def test_only_rank_0_needs_values(pool: Pool) -> None:
    torch.manual_seed(3)
    expected = {n: p.detach() for n, p in Net().named_parameters()}
    for got, variance in pool.run(2, rank_0_has_values):
        assert all(torch.equal(got[n], v) for n, v in expected.items())
        assert torch.equal(variance, torch.ones(8))


def test_the_default_seed_is_torchs() -> None:
    torch.manual_seed(11)
    model = on_meta(Net)
    build(model, World.single())
    expected = by_hand(Net(), 11)
    assert all(torch.equal(v, expected[n]) for n, v in wholes(model).items())


class Hooked(nn.Module):
    """A GPT-like model: one `_init_weights(module)` at the root, for all modules below."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.gain = Gain()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.constant_(module.weight, 0.25)
        if isinstance(module, Gain):
            module.value.data.fill_(2.0)
        if module is self:  # scaled again once all are there, as GPT-2 does
            for name, p in self.named_parameters():
                if name == "blocks.1.weight":
                    nn.init.normal_(p, 5.0, 0.0)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(3))


def hooked() -> dict[str, Tensor]:
    model = on_meta(Hooked)
    build(model, World.connect())
    return wholes(model)


def test_an_enclosing_init_weights_has_the_last_word(pool: Pool) -> None:
    for got in [hooked(), *pool.run(2, hooked)]:
        assert bool((got["embed.weight"] == 0.25).all())
        assert bool((got["blocks.1.weight"] == 5).all())
        assert bool((got["gain.value"] == 2).all())
        assert bool((got["blocks.0.bias"].abs() < 0.36).all())  # nn.Linear's own reset


class Forgets(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("table", torch.empty(4))
        self.what = what

    def reset_parameters(self) -> None:
        if self.what == "crash":
            raise ValueError("no data file")
        nn.init.ones_(self.weight if self.what != "weight" else self.table)
        if self.what == "half":
            self.weight[2:] = torch.nan
        if self.what != "table" and self.what != "weight":
            nn.init.ones_(self.table)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("weight", "inner.weight is on meta, and neither Forgets.reset_parameters"),
        ("half", "inner.weight is on meta, and neither Forgets.reset_parameters"),
        ("table", "inner.table is on meta, and neither Forgets.reset_parameters"),
        ("crash", r"initialising inner \(Forgets\) from meta failed: no data file"),
    ],
)
def test_what_a_reset_leaves_out_is_named(what: str, text: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": Forgets(what)})
    with pytest.raises(ShardError, match=text):
        build(model, World.single())


def test_a_module_without_any_reset_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Gain())
    with pytest.raises(ShardError, match=r"1.value .* module 1 \(Gain\) has no reset_parameters"):
        build(model, World.single())


def test_buffers_on_meta_of_a_materialised_model_are_filled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    model[1].to("meta")
    model[1].weight = nn.Parameter(torch.full((2,), 3.0))
    model[1].bias = nn.Parameter(torch.zeros(2))
    build(model, World.single())
    assert torch.equal(model[1].running_var, torch.ones(2))
    assert torch.equal(model[1].weight.detach(), torch.full((2,), 3.0))


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64},
    "LlamaForCausalLM": {**TINY, "vocab_size": 64, "intermediate_size": 64},
    "BertForMaskedLM": {**TINY, "vocab_size": 64, "intermediate_size": 64},
    "ViTForImageClassification": {**TINY, "intermediate_size": 64, "image_size": 32},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_models_from_meta(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    model: Any = on_meta(lambda: cls(cls.config_class(**CONFIGS[name])))
    world = World.single()
    store = ShardStore.build(model, layout_of(model, world), world, seed=0)
    torch.manual_seed(0)
    reference = cls(cls.config_class(**CONFIGS[name]))
    for key, p in model.named_parameters():
        other = reference.get_parameter(key).detach()
        assert bool(p.isfinite().all()), key
        if p.numel() > 500:  # drawn from the same distribution
            assert abs(p.detach().std() - other.std()) < 0.1 * other.std() + 1e-8, key
        elif not bool(other.any()) or bool((other == 1).all()):
            assert torch.equal(p.detach(), other), key
    for key, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    assert list(store.params) == [n for n, _ in model.named_parameters()]
