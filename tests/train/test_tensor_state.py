"""States of layers that are cut over ranks: saved and loaded at any other layout, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import foreign_checkpoints
import pytest
import torch
import torch.distributed.checkpoint as dcp
from matrix_optimizers import Shampoo
from pool import Pool
from tensor_models import MODELS, batch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zerofx
from zerofx.layout.placements import Cut, Part
from zerofx.layout.tiles import cut, spread
from zerofx.runtime.tensors.checkpoint import boxes_of_part
from zerofx.tools.demo.measure import PeakMemory

State = dict[str, Tensor]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# -- what a rank has of a parameter ---------------------------------------------------------------
def test_ranges_and_boxes_of_parts_make_up_the_whole() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks, groups, ndim = draw.randint(2, 3), draw.choice([1, 1, 2, 3]), draw.randint(1, 4)
        dim = draw.randrange(ndim)
        shape = [draw.randint(1, 4) for _ in range(ndim)]
        shape[dim] *= groups * ranks
        whole = torch.arange(prod(shape)).view(shape)
        part = Part(tuple(shape), Cut(dim, groups), ranks)
        numel = prod(part.local)
        middle = draw.randint(0, numel)
        joined, boxed = torch.full_like(whole, -1), torch.full_like(whole, -1)
        for rank in range(ranks):
            mine = part.of(whole, rank).reshape(-1)
            assert torch.equal(part.within(whole, rank).reshape(-1), mine)
            for own in ([(0, middle)], [(middle, numel)]):
                flat = cut(mine, tuple(own))
                spread(joined.view(-1), tuple(part.ranges(rank, own)), flat)
                boxes = boxes_of_part(part, rank, own)
                assert len(boxes) <= max(2 * ndim - 1, 1) * groups
                for box in boxes:
                    at = zip(box.offsets, box.sizes, strict=True)
                    boxed[tuple(slice(a, a + n) for a, n in at)] = box.of(flat)
        assert torch.equal(joined, whole) and torch.equal(boxed, whole)


# -- zerofx.save and zerofx.load ------------------------------------------------------------------
def plain(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def compiled(name: str, plan: dict[str, Any], seed: int) -> nn.Module:
    return zerofx.compile(plain(name, seed), {"kernels": "aten", **plan})


def stepper(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "flat":
        return zerofx.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, dict[int, State]]:
    states = zerofx.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]
    return zerofx.full_state_dict(model, rank0_only=False), states


def train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    for step in range(2):
        model(**batch(name, seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: str, name: str, kind: str, plan: dict[str, Any]) -> Any:
    model = compiled(name, plan, 0)
    optimizer = stepper(kind, model)
    train(model, optimizer, name)
    zerofx.save(folder, model, optimizer, {"step": 2})
    return whole(model, optimizer)


def loaded(folder: str, name: str, kind: str, plan: dict[str, Any], again: str = "") -> Any:
    model = compiled(name, plan, 1)
    optimizer = stepper(kind, model)
    assert zerofx.load(folder, model, optimizer) == {"step": 2}
    if again:
        zerofx.save(again, model, optimizer, {"step": 2})
    return whole(model, optimizer)


def check_same(found: Any, expected: Any) -> None:
    for key, value in expected[0].items():
        assert torch.equal(found[0][key], value), key
    assert found[1].keys() == expected[1].keys()
    for number, states in expected[1].items():
        for key, value in states.items():
            assert torch.equal(found[1][number][key], value), (number, key)


TENSOR = {"stage": 3, "parallel": {"tensor": 2}}
EXPERTS = {"stage": 3, "parallel": {"tensor": 2, "experts": True}}
WHOLE = {"tensor": 4, "experts": True}
NAMED = {
    "stage": 3,
    "parallel": {"tensor": 2, "placements": {"*.up": "experts", "*.down": "experts"}},
}
PIPELINE = {"stage": 3, "parallel": {"pipeline": 2}}
CUBE = {"stage": 3, "parallel": {"pipeline": 2, "tensor": 2}}
TURNS = {"stage": 2, "parallel": {"pipeline": 2, "schedule": "interleaved", "interleave": 2}}
CONTEXT = {"stage": 3, "parallel": {"context": 2}}


@pytest.mark.parametrize(
    ("name", "kind", "first", "second"),
    [
        ("blocks", "adamw", (2, TENSOR), (1, {"stage": 3})),
        ("blocks", "flat", (2, {**TENSOR, "stage": 1}), (2, {"stage": 2})),
        slow("llama", "flat", (2, TENSOR), (2, {"stage": 2})),
        slow("gpt2", "sgd", (4, TENSOR), (1, {"stage": 0})),
        slow("llama", "adamw", (4, {**TENSOR, "stage": 2}), (2, {"stage": 3})),
        slow("gpt2", "flat", (4, TENSOR), (2, TENSOR)),
        slow("llama", "adamw", (4, {"stage": 1, "parallel": {"tensor": 4}}), (4, TENSOR)),
        slow("bert", "adamw", (4, {**TENSOR, "shard_axis_size": 1}), (3, {"stage": 3})),
        slow("t5", "flat", (4, TENSOR), (4, {"stage": 3})),
        ("blocks", "adamw", (2, PIPELINE), (2, TENSOR)),
        slow("llama", "flat", (4, CUBE), (1, {"stage": 3})),
        slow("gpt2", "adamw", (4, CUBE), (4, {**PIPELINE, "stage": 1})),
        slow("llama", "sgd", (4, {**PIPELINE, "stage": 2}), (2, TENSOR)),
        slow("gpt2", "flat", (4, TURNS), (4, {**TENSOR, "stage": 1})),
        slow("deep", "adamw", (2, TURNS), (4, {"stage": 3, "parallel": {"pipeline": 4}})),
        slow("t5", "flat", (4, {"stage": 3, "parallel": {"pipeline": 4}}), (3, {"stage": 3})),
        slow("llama", "flat", (2, CONTEXT), (4, CUBE)),
        slow("mixtral", "flat", (2, TENSOR), (1, {"stage": 0})),
        ("mixture", "adamw", (2, NAMED), (1, {"stage": 3})),
        slow("mixtral", "adamw", (4, EXPERTS), (2, TENSOR)),
        slow("mixtral", "flat", (2, TENSOR), (4, {"stage": 1, "parallel": WHOLE})),
        slow("qwen3-moe", "sgd", (4, {"stage": 2, "parallel": WHOLE}), (3, {"stage": 3})),
        slow("mixtral", "adamw", (2, PIPELINE), (2, TENSOR)),
    ],
)
def test_any_layout_loads_any_other(
    pool: Pool, tmp_path: Path, name: str, kind: str, first: Any, second: Any
) -> None:
    """Save at one layout, load and save at another, and load that at the first."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    expected, *others = pool.run(first[0], saved, one, name, kind, first[1])
    for other in others:
        check_same(other, expected)
    for found in pool.run(second[0], loaded, one, name, kind, second[1], two):
        check_same(found, expected)
    for found in pool.run(first[0], loaded, two, name, kind, first[1]):
        check_same(found, expected)


# -- weights alone --------------------------------------------------------------------------------
def given_out(folder: str, name: str, plan: dict[str, Any]) -> State:
    model = compiled(name, plan, 0)
    train(model, stepper("adamw", model), name)
    zerofx.export(folder, model)
    return zerofx.full_state_dict(model, rank0_only=False)


def taken_in(folder: str, name: str, plan: dict[str, Any]) -> State:
    model = compiled(name, plan, 1)
    zerofx.load_weights(model, folder)
    return zerofx.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    ("name", "first", "others"),
    [
        ("blocks", (2, PIPELINE), [(2, TENSOR)]),
        slow("llama", (4, CUBE), [(1, {"stage": 0}), (2, CONTEXT), (2, PIPELINE)]),
        slow("gpt2", (4, {"stage": 3, "parallel": {"tensor": 4}}), [(2, TENSOR), (4, CUBE)]),
        slow("gpt2", (2, TURNS), [(4, CUBE), (2, {"stage": 2})]),
        slow("llama", (2, CONTEXT), [(4, CUBE), (2, TENSOR)]),
        slow("mixtral", (2, PIPELINE), [(2, TENSOR), (1, {"stage": 0})]),
    ],
)
def test_exported_weights_go_to_any_layout(
    pool: Pool, tmp_path: Path, name: str, first: Any, others: list[Any]
) -> None:
    folder = str(tmp_path / "model")
    expected, *alike = pool.run(first[0], given_out, folder, name, first[1])
    found = [*alike]
    for ranks, plan in others:
        found += pool.run(ranks, taken_in, folder, name, plan)
    theirs = plain(name, 2)
    theirs.load_state_dict(expected)  # names and shapes are the model's own
    for state in found:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], value) for key, value in expected.items())


# -- torch's state dicts, and folders of torch.distributed.checkpoint -----------------------------
def by_torch(folder: str) -> list[tuple[Any, Any]]:
    """Return what was trained, and what came of it by each way of torch."""
    trained = compiled("blocks", TENSOR, 0)
    live = trained, stepper("adamw", trained)
    train(*live, "blocks")
    expected = copy.deepcopy(whole(*live))
    held = dict(zip(("model", "optim"), get_state_dict(*live), strict=True))
    dcp.save(held, checkpoint_id=folder)
    found = []
    for full in (False, True):
        model = compiled("blocks", TENSOR, 1)
        other = model, stepper("adamw", model)
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
        if full:
            given = get_state_dict(*live, options=StateDictOptions(full_state_dict=True))
            given = copy.deepcopy(given) if live[0].zerofx.world.rank == 0 else ({}, {})
        else:
            mine = dict(zip(("model", "optim"), get_state_dict(*other), strict=True))
            dcp.load(mine, checkpoint_id=folder)
            given = mine["model"], mine["optim"]
        set_model_state_dict(other[0], dict(given[0]), options=options)
        set_optimizer_state_dict(*other, given[1], options=options)
        found.append(whole(*other))
    model = compiled("blocks", {"stage": 2}, 1)
    flat = {"model": trained.sharded_state_dict(flat=True)}
    dcp.save(flat, checkpoint_id=f"{folder}/flat")
    dcp.load({"model": model.sharded_state_dict(flat=True)}, checkpoint_id=f"{folder}/flat")
    found.append((zerofx.full_state_dict(model, rank0_only=False), expected[1]))
    return [expected, *found]


def read_folder(folder: str, plan: dict[str, Any]) -> Any:
    """Load a folder of torch.distributed.checkpoint as a foreign checkpoint."""
    model = compiled("blocks", plan, 1)
    optimizer = stepper("adamw", model)
    zerofx.load(folder, model, optimizer)
    return whole(model, optimizer)


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_torch_saves_and_loads_parts(pool: Pool, tmp_path: Path, ranks: int) -> None:
    folder = str(tmp_path / "dcp")
    for expected, *found in pool.run(ranks, by_torch, folder):
        for each in found:
            check_same(each, expected)
    check_same(read_folder(folder, {"stage": 3}), expected)
    for plan in (TENSOR, {"stage": 3}):
        for each in pool.run(2, read_folder, folder, plan):
            check_same(each, expected)


# -- checkpoints of others, and memory ------------------------------------------------------------
def from_deepspeed(folder: str) -> tuple[State, State]:
    """Return the weights and moments of a checkpoint of DeepSpeed, read into parts and whole."""
    found = []
    for parallel in ({"tensor": 2, "placements": {"up": "colwise", "down": "rowwise"}}, "none"):
        model = zerofx.compile(
            foreign_checkpoints.build(), {"parallel": parallel, "kernels": "aten"}
        )
        optimizer = foreign_checkpoints.adamw(model)
        zerofx.load(folder, model, optimizer)
        found.append(whole(model, optimizer))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["zero3", slow("zero1"), slow("universal1")])
def test_checkpoints_of_deepspeed_are_read_into_parts(pool: Pool, name: str) -> None:
    folder = Path(__file__).parents[1] / "snapshots" / "deepspeed-0.19.5" / name
    for parts, wholes in pool.run(2, from_deepspeed, str(folder)):
        check_same(parts, wholes)


class Deep(nn.Module):
    """Layers of a size that can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def peaks(folder: str) -> dict[str, float]:
    """Return how far each way rises above what this rank keeps, in tensors of the model."""
    styles = {"layers.[0246]": "colwise", "layers.[1357]": "rowwise"}
    plan = {"parallel": {"tensor": 2, "placements": styles}, "kernels": "aten"}
    kept: dict[str, int] = {}

    def measure(name: str, way: Callable[[], Any]) -> None:
        before = held()
        with memory.step():
            torch.empty(1)  # what there is before
        with memory.step():
            way()
        kept[name] = held() - before

    with PeakMemory(torch.device("cpu")) as memory:
        model = zerofx.compile(Deep(), plan)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 512)).backward()
        optimizer.step()
        optimizer.zero_grad()
        other = zerofx.compile(Deep(), plan)
        again = torch.optim.AdamW(other.parameters())

        def held() -> int:
            states = again.state.values()
            return sum(s[k].to_local().nbytes for s in states for k in ("exp_avg", "exp_avg_sq"))

        measure("save", lambda: zerofx.save(f"{folder}/run", model, optimizer))
        measure("load", lambda: zerofx.load(f"{folder}/run", other, again))
        measure("load_weights", lambda: zerofx.load_weights(other, f"{folder}/run"))
    pairs = zip(kept.items(), memory.steps[::2], memory.steps[1::2], strict=True)
    largest = 512 * 512 * 4
    return {
        name: (after.high_bytes - before.high_bytes - nbytes) / largest
        for (name, nbytes), before, after in pairs
    }


def test_no_rank_holds_more_than_its_shards_and_a_tensor(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, peaks, str(tmp_path)):
        assert all(tensors <= 1.1 for tensors in found.values()), found


# -- optimizers that look at more than one element ------------------------------------------------
def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if p.ndim == 2 and "wte" not in n]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "clipped": lambda m: zerofx.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=0.1),
    "lamb": lambda m: zerofx.optim.Lamb(m.parameters(), lr=1e-2, eps=1e-4, max_grad_norm=0.1),
    "8 bits": lambda m: zerofx.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-4, state_bits=8),
    "muon": lambda m: torch.optim.Muon(matrices(m), lr=1e-2),
    "shampoo": lambda m: zerofx.optim.whole_matrices(Shampoo(matrices(m), lr=1e-3)),
}


def steps(kind: str, plan: dict[str, Any] | None, folder: str = "") -> tuple[State, list[float]]:
    """Train 4 steps, on one plain process without a plan; go on from a snapshot after 2."""
    model = compiled("blocks", plan, 0) if plan else plain("blocks", 0)
    optimizer = OPTIMIZERS[kind](model)
    norms = []
    for step in range(4):
        model(**batch("blocks", seed=step)).loss.backward()
        # torch's Muon computes in bfloat16, whose rounding would hide an error of the cut.
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
            optimizer.step()
        optimizer.zero_grad()
        if kind in ("clipped", "lamb"):
            norms.append(float(optimizer.grad_norm))
        if step == 1 and folder:
            zerofx.save(folder, model, optimizer)
            model = compiled("blocks", plan, 1)
            optimizer = OPTIMIZERS[kind](model)
            zerofx.load(folder, model, optimizer)
    return (zerofx.full_state_dict(model, False) if plan else model.state_dict()), norms


@pytest.mark.parametrize(
    ("ranks", "kinds", "plan"),
    [
        (2, ["clipped", "shampoo"], TENSOR),
        slow(2, ["lamb", "muon"], TENSOR),
        slow(4, ["clipped", "lamb", "muon", "shampoo"], TENSOR),
        slow(4, ["clipped", "lamb", "shampoo"], {**TENSOR, "stage": 1, "shard_axis_size": 1}),
        slow(4, ["clipped", "muon"], {"stage": 3, "parallel": {"tensor": 4, "sequence": True}}),
    ],
)
def test_norms_and_matrices_are_those_of_whole_parameters(
    pool: Pool, tmp_path: Path, ranks: int, kinds: list[str], plan: dict[str, Any]
) -> None:
    for kind in kinds:
        expected, norms = steps(kind, None)
        first, *others = pool.run(ranks, steps, kind, plan, str(tmp_path / kind), timeout_s=400)
        for state, found in (first, *others):
            assert found == first[1] and found == pytest.approx(norms, rel=1e-5)
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=0, atol=1e-5, msg=key)


@pytest.mark.slow
def test_states_in_8_bits_are_coded_by_part(pool: Pool, tmp_path: Path) -> None:
    expected, _ = steps("8 bits", None)
    through, _ = pool.run(2, steps, "8 bits", TENSOR, str(tmp_path / "run"))
    straight, _ = pool.run(2, steps, "8 bits", TENSOR)
    for key, value in expected.items():
        torch.testing.assert_close(through[0][key], value, rtol=0, atol=1e-3, msg=key)
        assert torch.equal(through[0][key], straight[0][key]), key
