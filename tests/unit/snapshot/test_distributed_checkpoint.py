"""torch.distributed.checkpoint and its state dicts: zerofx and FSDP2 read each other's folders."""

from __future__ import annotations

import copy
import random
from math import prod
from pathlib import Path
from typing import Any

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import OPTIMIZERS, go_on, make, state, step, train, write
from pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import zerofx
from zerofx.errors import OptimizerError, ShardError
from zerofx.runtime.tensors.checkpoint import boxes_of
from zerofx.runtime.tensors.tensor import ShardedTensor
from zerofx.tools.demo.measure import PeakMemory

TORCHS = ["adamw", "sgd"]
FLATS = ["flat adamw", "flat sgd"]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


# -- boxes ----------------------------------------------------------------------------------------
def test_flat_ranges_are_few_boxes_in_memory_order() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
        numel = prod(shape)
        cuts = sorted(draw.randint(0, numel) for _ in range(2))
        ranges = [(0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], numel)]
        flat = torch.arange(numel)
        for start, stop in ranges:
            boxes = boxes_of(shape, [(start, stop)])
            assert len(boxes) <= max(2 * len(shape) - 1, 1)
            position = 0
            for box in boxes:
                where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
                part = flat.view(shape)[where].reshape(-1)
                assert box.start == position and box.numel == part.numel() > 0
                assert part.tolist() == list(range(start + position, start + position + box.numel))
                position += box.numel
            assert position == stop - start


def test_a_tensor_without_elements_is_one_empty_box() -> None:
    (box,) = boxes_of((3, 0), [(0, 0)])
    assert (box.offsets, box.sizes, box.numel) == ((0, 0), (3, 0), 0)


# -- folders --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("saved", "loaded", "style"),
    [
        ((2, "fsdp2", TORCHS), (2, "zerofx 3", TORCHS), "torch"),
        ((2, "zerofx 3", ["flat adamw", "sgd"]), (2, "fsdp2", TORCHS), "torch"),
        slow((1, "zerofx 3", TORCHS), (3, "zerofx 3", FLATS), "own"),
        slow((2, "fsdp2", TORCHS), (3, "zerofx 1", FLATS), "torch"),
        slow((3, "zerofx 2", FLATS), (2, "zerofx 0", TORCHS), "torch"),
        slow((2, "zerofx 3", FLATS), (1, "zerofx 3", FLATS), "own"),
    ],
)
def test_training_goes_on_from_a_folder(
    pool: Pool, tmp_path: Path, saved: Any, loaded: Any, style: str
) -> None:
    expected = [train("plain", name) for name in TORCHS]
    size, kind, optimizers = saved
    pool.run(size, write, str(tmp_path), kind, optimizers, style)
    size, kind, optimizers = loaded
    for found in pool.run(size, go_on, str(tmp_path), kind, optimizers, style):
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs)


def chunks_in(folder: str) -> dict[str, tuple[list[int], int]]:
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (list(entry.size), len(entry.chunks))
        for name, entry in metadata.items()
        if hasattr(entry, "chunks")
    }


def test_a_folder_holds_the_models_own_shapes(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, write, str(tmp_path), "zerofx 3", ["adamw"], "own")
    found = chunks_in(f"{tmp_path}/0")
    model = dcp_cases.Net()
    for name, value in model.state_dict().items():
        size, count = found[f"model.{name}"]
        assert size == list(value.shape) and count <= 2 * max(2 * value.ndim - 1, 1), name
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert found[f"optim.state.{name}.exp_avg"][0] == list(param.shape)


# -- full state dicts -----------------------------------------------------------------------------
def handed_out(optimizer: str, stage: int) -> list[dict[str, Tensor]]:
    """Give whole states out from every rank, and from rank 0; return what a third step makes."""
    kind = f"zerofx {stage}"
    live = make(kind, optimizer)
    step(*live, 0)
    step(*live, 1)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, states = get_state_dict(*live, options=offloaded)
    is_first = dist.get_rank() == 0
    assert all(type(v) is Tensor for v in model_state.values()) if is_first else True
    assert is_first or not any(isinstance(v, Tensor) for v in model_state.values())
    everywhere = get_state_dict(*live, options=StateDictOptions(full_state_dict=True))
    found = []
    for from_rank_0 in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        given = everywhere if not from_rank_0 else (model_state, states) if is_first else ({}, {})
        given = copy.deepcopy(given)  # torch loads step counts as they are
        other = make(kind, optimizer, scale=0.5)
        set_model_state_dict(other[0], dict(given[0]), options=options)
        set_optimizer_state_dict(*other, given[1], options=options)
        step(*other, 2)
        found.append(state(other[0]))
    return found


@pytest.mark.parametrize(
    ("optimizer", "stage"), [("adamw", 3), slow("sgd", 1), slow("flat adamw", 3), slow("adamw", 0)]
)
def test_full_state_dicts_are_handed_out(pool: Pool, optimizer: str, stage: int) -> None:
    expected = train("plain", optimizer)
    for found in pool.run(2, handed_out, optimizer, stage):
        for mine in found:
            close(mine, expected)


def broadcast_peak() -> tuple[int, int, int]:
    """Return (bytes of the model, of its largest parameter, the peak of taking it from rank 0)."""
    plain = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    with torch.no_grad():
        for number, param in enumerate(plain.parameters()):
            param.fill_(number)
    full = dict(plain.state_dict()) if dist.get_rank() == 0 else {}
    sizes = [p.nbytes for p in plain.parameters()]
    with PeakMemory(torch.device("cpu")) as memory:
        model = zerofx.compile(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), {})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with memory.step():
            held = sum(p.to_local().nbytes for p in model.parameters())
            set_model_state_dict(model, full, options=options)
    for number, param in enumerate(model.parameters()):
        assert bool((param.to_local() == number).all())
    return sum(sizes), max(sizes), memory.steps[0].high_bytes - held


def test_no_rank_holds_the_whole_model_that_rank_0_hands_out(pool: Pool) -> None:
    _, (total, largest, taken) = pool.run(2, broadcast_peak)
    assert taken <= 4 * largest < total / 2  # the tensor as sent, its rows twice, and the gathered


def mismatched() -> str:
    model, _ = make("zerofx 3", "sgd")
    full = {}
    if dist.get_rank() == 0:
        full = dict(dcp_cases.Net().state_dict())
        full["up.weight"] = torch.zeros(40, 9)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(ShardError) as caught:
        set_model_state_dict(model, full, options=options)
    return str(caught.value)


def test_another_shape_from_rank_0_raises_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(2, mismatched):
        assert "up.weight has global shape [33, 9]" in text


# -- options and forms ----------------------------------------------------------------------------
def optional(folder: str) -> list[dict[str, Tensor]]:
    """Save and load with each option that changes what a state dict looks like."""
    found = []
    for number, options in enumerate(
        [
            StateDictOptions(flatten_optimizer_state_dict=True),
            StateDictOptions(cpu_offload=True),
            StateDictOptions(ignore_frozen_params=True, strict=False),
        ]
    ):
        live = make("zerofx 3", "flat adamw")
        step(*live, 0)
        step(*live, 1)
        held = dict(zip(("model", "optim"), get_state_dict(*live, options=options), strict=True))
        assert ("frozen.weight" in held["model"]) == (not options.ignore_frozen_params)
        dcp.save(held, checkpoint_id=f"{folder}/{number}")
        model, optimizer = make("zerofx 3", "flat adamw")
        held = dict(
            zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True)
        )
        dcp.load(held, checkpoint_id=f"{folder}/{number}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optim"],
            options=options,
        )
        step(model, optimizer, 2)
        found.append(state(model))
    return found


def test_options_of_state_dicts(pool: Pool, tmp_path: Path) -> None:
    expected = train("plain", "adamw")
    for found in pool.run(2, optional, str(tmp_path)):
        for mine in found:
            close(mine, expected)


class Odd(nn.Module):
    """Parameters without dimensions or elements, and state of the module's own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.fc = nn.Linear(5, 3)
        self.note = "fresh"

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.scale).pow(2).mean() + self.empty.sum()

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


PLANS: dict[str, tuple[dict[str, Any], Any]] = {
    "16 bits": ({"precision": "bf16"}, lambda p: torch.optim.NAdam(p, lr=0.1)),
    "host": ({"offload": {"optimizer": "cpu", "parameters": "cpu"}}, OPTIMIZERS["flat adamw"]),
    "in backward": ({"update": "in-backward"}, OPTIMIZERS["flat sgd"]),
    "8 bits": ({}, lambda p: zerofx.optim.AdamW(p, lr=0.1, state_bits=8)),
}


def odd(folder: str) -> None:
    """Save model and optimizer as they are, and go on from there; each plan by itself."""

    def made(name: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        plan, optimizer = PLANS[name]
        model = zerofx.compile(Odd(), {"kernels": "aten", **plan})
        return model, optimizer(model.parameters())

    def turn(model: Any, optimizer: Any, number: int) -> None:
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for name in PLANS:
        model, optimizer = made(name)
        turn(model, optimizer, 0)
        model.note = "trained"
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=f"{folder}/{name}")
        turn(model, optimizer, 1)
        expected = dict(model.state_dict())
        model, optimizer = made(name)
        states = get_optimizer_state_dict(model, optimizer)  # makes them
        assert all(value.shape == () for value in states["state"]["scale"].values())
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=f"{folder}/{name}")
        assert model.note == "trained"
        turn(model, optimizer, 1)
        for key, value in model.state_dict().items():
            assert not isinstance(value, Tensor) or torch.equal(value, expected[key]), (name, key)


def test_odd_parameters_under_several_plans(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, odd, str(tmp_path))


def set_by_hand() -> None:
    plan = {"update": "in-backward", "kernels": "aten"}
    model = zerofx.compile(dcp_cases.Net(), plan)
    optimizer = zerofx.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    weight = model.up.weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(OptimizerError, match=r"grad was set by hand"):
        optimizer.step()


def test_gradients_by_hand_are_still_refused_in_backward(pool: Pool) -> None:
    pool.run(2, set_by_hand)


def saved_meanwhile(folder: str) -> dict[str, Tensor]:
    live = make("zerofx 3", "flat adamw")
    step(*live, 0)
    step(*live, 1)
    held = dict(zip(("model", "optim"), get_state_dict(*live), strict=True))
    saving = dcp.async_save(held, checkpoint_id=f"{folder}/0")
    step(*live, 7)  # changes what is saved, after it was copied
    saving.result()
    return go_on(folder, "zerofx 3", ["flat adamw"])[0]


@pytest.mark.slow
def test_async_save(pool: Pool, tmp_path: Path) -> None:
    expected = train("plain", "adamw")
    for found in pool.run(2, saved_meanwhile, str(tmp_path)):
        close(found, expected)


# -- other tensors --------------------------------------------------------------------------------
def from_fsdp2() -> dict[str, Tensor]:
    """Hand an FSDP2 model's own sharded tensors over, without a folder."""
    source = make("fsdp2", "adamw")
    step(*source, 0)
    model, optimizer = make("zerofx 3", "adamw", scale=0.5)
    model_state, states = get_state_dict(*source)
    assert isinstance(model_state["up.weight"], DTensor)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=states)
    for each in optimizer.state.values():
        assert isinstance(each["exp_avg"], ShardedTensor)
    step(model, optimizer, 1)
    return state(model)


def test_dtensors_of_another_cut_are_taken_in(pool: Pool) -> None:
    expected = train("plain", "adamw", 0, 2)
    for found in pool.run(2, from_fsdp2):
        close(found, expected)


def whole_states(folder: str, has_stepped: bool) -> dict[str, Tensor]:
    """Load a plain optimizer's whole states, take a step, save, and go on at another place."""
    plain = make("plain", "adamw")
    step(*plain, 0)
    model, optimizer = make("zerofx 3", "adamw", scale=0.5)
    if has_stepped:
        step(model, optimizer, 7)
    model.load_state_dict(plain[0].state_dict())
    optimizer.load_state_dict(plain[1].state_dict())
    step(model, optimizer, 1)
    assert all(isinstance(s["exp_avg"], ShardedTensor) for s in optimizer.state.values())
    zerofx.save(folder, model, optimizer)
    model, optimizer = make("zerofx 3", "adamw", scale=0.5)
    zerofx.load(folder, model, optimizer)
    step(model, optimizer, 2)
    return state(model)


@pytest.mark.parametrize("has_stepped", [slow(False), True])
def test_whole_states_are_cut_when_loaded(pool: Pool, tmp_path: Path, has_stepped: bool) -> None:
    expected = train("plain", "adamw")
    for found in pool.run(2, whole_states, str(tmp_path / "snapshot"), has_stepped):
        close(found, expected)


# -- what of torch this stands on -----------------------------------------------------------------
class Asked(nn.Linear):
    """Notes whether `state_dict` knows its caller."""

    by_checkpoint = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        from zerofx.compat.callers import is_called_by_checkpoint

        self.by_checkpoint = is_called_by_checkpoint()
        return super().state_dict(*args, **kwargs)


def test_torch_calls_state_dict_from_its_checkpoint_package() -> None:
    model = Asked(2, 2)
    model.state_dict()
    assert not model.by_checkpoint
    get_model_state_dict(model)
    assert model.by_checkpoint
