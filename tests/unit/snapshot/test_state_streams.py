"""Full states one value at a time: lazy state dicts, iter_state_dict, saves and loads by parts."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from far_cases import everything, far, made, rank_here, train, unequal
from models import CASES
from pool import Pool
from torch import Tensor, nn

import zerofx
from zerofx.errors import DesyncError, ShardError
from zerofx.model.full_state import LazyState

MIB = 1 << 20


def lazy_and_plain(folder: str, plan: dict[str, Any]) -> list[str]:
    """Return what of the ways to read a lazy state differs from an ordinary one."""
    model, optimizer = far(folder, "mixed", **plan)
    train(model, optimizer, "mixed", 0, 2)
    near, steps = made("mixed", "adamw", {k: v for k, v in plan.items() if k != "update"})
    train(near, steps, "mixed", 0, 2)
    expected = near.state_dict()
    state = model.state_dict()
    assert type(expected) is OrderedDict and type(state) is LazyState
    assert list(state) == list(expected) and len(state) == len(expected)
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    kept = torch.load(stream, weights_only=True)
    assert type(kept) is OrderedDict
    ways: dict[str, Any] = {
        "items": {k: v.clone() for k, v in state.items()},
        "getitem": {k: state[k] for k in state},
        "get": {k: state.get(k) for k in state},
        "values": dict(zip(state, state.values(), strict=True)),
        "dict": dict(state),
        "unpacked": {**state},
        "copy": copy.copy(state),
        "deepcopy": copy.deepcopy(state),
        "saved": kept,
        "full": zerofx.full_state_dict(model, rank0_only=False),
        "iterated": dict(zerofx.iter_state_dict(model)),
        "iterated near": dict(zerofx.iter_state_dict(near)),
        "popped": {k: state.pop(k) for k in list(state)},
    }
    assert not state and state.get("absent", 3) == 3 and state.pop("absent", 4) == 4
    on_rank_0 = dict(zerofx.full_state_dict(model))
    in_turn = dict(zerofx.iter_state_dict(model, rank0_only=True))
    if rank_here() == 0:
        ways |= {"rank 0's": on_rank_0, "rank 0's, in turn": in_turn}
    else:
        assert not on_rank_0 and not in_turn
    return [f"{way}: {unequal(found, expected)}" for way, found in ways.items()
            if unequal(dict(found), dict(expected))]  # fmt: skip


@pytest.mark.parametrize("plan", [{}, {"update": "in-backward"}], ids=["step", "in backward"])
def test_every_way_to_read_it(tmp_path: Path, plan: dict[str, Any]) -> None:
    assert not lazy_and_plain(str(tmp_path), plan)


def test_every_way_to_read_it_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, lazy_and_plain, str(tmp_path), {}):
        assert not found


def test_into_a_plain_module(tmp_path: Path) -> None:
    model, optimizer = far(tmp_path)
    train(model, optimizer, "gpt", 0, 1)
    plain = CASES["gpt"].make(7)
    plain.load_state_dict(model.state_dict())
    assert not unequal(dict(plain.state_dict()), dict(model.state_dict()))
    other = CASES["gpt"].make(8)
    with torch.no_grad():
        found = dict(other.named_parameters())
        for name, value in zerofx.iter_state_dict(model):
            if name in found:
                found[name].copy_(value)
    assert not unequal(dict(other.state_dict()), dict(model.state_dict()))


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    """A dict that would show later values under an older name says so instead."""
    model, optimizer = far(tmp_path)
    train(model, optimizer, "gpt", 0, 1)
    state = model.state_dict()
    kept = dict(state)
    train(model, optimizer, "gpt", 1, 2)
    name = next(iter(state))
    for read in (lambda: state[name], lambda: dict(state), lambda: torch.save(state, "/dev/null")):
        with pytest.raises(ShardError, match="the parameters have changed since this state_dict"):
            read()
    assert not torch.equal(kept[name], model.state_dict()[name])
    state[name] = kept[name]  # what was put there is there
    assert state[name] is kept[name]


def reads_alone(folder: str) -> str:
    """Rank 1 reads a value that rank 0 does not; return what this rank is told."""
    model, _ = far(folder)
    state = model.state_dict()
    with pytest.raises(DesyncError) as caught:
        if rank_here() == 1:
            state["blocks.1.mlp.up.weight"]
        else:
            model.state_dict()["blocks.0.mlp.up.weight"]
    return str(caught.value)


def test_ranks_that_read_other_values_are_named(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, reads_alone, str(tmp_path)):
        assert "rank 1 is about to run reading blocks.1.mlp.up.weight of a state_dict" in told
        assert "rank 0 runs reading blocks.0.mlp.up.weight of a state_dict" in told


# -- by parts -------------------------------------------------------------------------------------
class Wide(nn.Module):
    """64 MiB of parameters in layers of 4 MiB."""

    def __init__(self, layers: int = 16, width: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean()


def resident(key: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Growth:
    """How far resident memory, with the pages of files that are mapped, rises within a block."""

    def __enter__(self) -> Growth:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        self._before = resident()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = resident("VmHWM") - self._before


def grown(folder: str) -> dict[str, int]:
    """Return by how much each of the ways to save and load raises the peak of this process."""
    torch.manual_seed(0)
    place = {"parameters": "nvme", "optimizer": "nvme", "path": folder}
    plan = zerofx.Plan(kernels="aten", bucket_bytes=4 * MIB, offload=place)
    with torch.device("meta"):
        plain = [Wide(), Wide()]
    model, other = (zerofx.compile(each, plan, device="cpu") for each in plain)
    steps, again = (zerofx.optim.AdamW(m.parameters()) for m in (model, other))
    model(torch.ones(1, 1024)).backward()
    steps.step()
    steps.zero_grad()
    ways = {name: Growth() for name in ("save", "load", "iterate", "read", "load_weights")}
    with ways["save"]:
        zerofx.save(f"{folder}/save", model, steps)
    with ways["load"]:
        zerofx.load(f"{folder}/save", other, again)
    expected = everything(model, steps)
    assert not unequal(everything(other, again), expected)
    with ways["iterate"]:
        total = sum(float(value.double().sum()) for _, value in zerofx.iter_state_dict(model))
    with ways["read"]:
        again_total = sum(float(value.double().sum()) for value in model.state_dict().values())
    assert total == again_total
    zerofx.export(f"{folder}/weights.safetensors", model)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    with ways["load_weights"]:
        zerofx.load_weights(other, f"{folder}/weights.safetensors")
    assert not unequal(everything(other, again), expected)
    return {name: growth.nbytes for name, growth in ways.items()}


def test_saves_and_loads_hold_a_part_at_a_time(tmp_path: Path) -> None:
    """Of 192 MiB of parameters and states: four layers' worth of each, not all."""
    for name, nbytes in grown(str(tmp_path)).items():
        assert nbytes < 40 * MIB, (name, nbytes)
