"""load_weights: safetensors into shards on any tier, each rank what it owns, tensor by tensor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from far_cases import far, made, tiers, train, unequal
from models import CASES
from pool import Pool
from safetensors.torch import save_file, save_model
from torch import nn

import zerofx
from zerofx.errors import ShardError, SnapshotError


def plain(seed: int = 3) -> nn.Module:
    return CASES["gpt"].make(seed)


def loaded(folder: str, source: str, plan: dict[str, Any]) -> list[str]:
    """Return what differs, after two steps, from the model whose weights lie at `source`."""
    model, optimizer = made("gpt", "adamw", plan)
    train(model, optimizer, "gpt", 0, 1)  # there are copies that would be stale
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=0.01)
    keys = zerofx.load_weights(model, source)
    assert keys == ([], [])
    found = unequal(dict(model.state_dict()), dict(plain().state_dict()))
    reference = zerofx.compile(plain(), {"kernels": "aten", "bucket_bytes": 2000, "stage": 0})
    steps = zerofx.optim.AdamW(reference.parameters(), lr=0.01)
    ends = [train(*pair, "gpt", 1, 3) for pair in ((model, optimizer), (reference, steps))]
    return found + [str(pair) for pair in zip(*ends, strict=True) if abs(pair[0] - pair[1]) > 1e-5]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    save_model(plain(), str(folder / "model.safetensors"))
    return folder


def test_one_rank(tmp_path: Path, weights: Path) -> None:
    for place in (tiers(str(tmp_path)), tiers("", "cpu", "cpu")):
        assert not loaded(str(tmp_path), str(weights), place)


def two_ranks(folder: str, source: str) -> list[str]:
    tiled = {"stage": 3, "tiling": {"blocks.*.mlp.up": 2}}
    cells = [{"stage": 1}, {**tiled, **tiers(folder)}]
    return [f"{plan}: {d}" for plan in cells if (d := loaded(folder, source, plan))]


def test_two_ranks(pool: Pool, tmp_path: Path, weights: Path) -> None:
    source = str(weights / "model.safetensors")
    for found in pool.run(2, two_ranks, str(tmp_path), source):
        assert not found


def test_what_export_wrote(tmp_path: Path) -> None:
    """In several files, with an index; found by the directory, and by the index."""
    model, optimizer = far(tmp_path)
    train(model, optimizer, "gpt", 0, 1)
    zerofx.export(tmp_path / "out", model, max_file_bytes=9000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    for source in (tmp_path / "out", tmp_path / "out" / "model.safetensors.index.json"):
        other, _ = far(tmp_path)
        zerofx.load_weights(other, source)
        assert not unequal(dict(other.state_dict()), dict(model.state_dict()))


def test_other_formats_and_buffers(tmp_path: Path) -> None:
    """Values are cast to the model's formats; running statistics come too."""
    torch.manual_seed(0)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(300, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))

    source = net()
    source[1].running_mean.normal_()
    state = {k: v.to(torch.bfloat16) if v.is_floating_point() else v
             for k, v in source.state_dict().items()}  # fmt: skip
    save_file(state, tmp_path / "half.safetensors")
    model = zerofx.compile(net(), {"kernels": "aten", **tiers(str(tmp_path))})
    zerofx.load_weights(model, tmp_path / "half.safetensors")
    expected = {k: v.to(model.state_dict()[k].dtype) for k, v in state.items()}
    assert not unequal(dict(model.state_dict()), expected)


def test_names_that_differ(tmp_path: Path, weights: Path) -> None:
    model, _ = far(tmp_path)
    before = dict(model.state_dict())
    state = dict(plain().state_dict())
    state.pop("head.weight")  # tied to embed.weight
    changed = {**state, "extra": torch.ones(1)}
    changed.pop("norm.weight")
    save_file(changed, tmp_path / "other.safetensors")
    with pytest.raises(SnapshotError, match=r"norm.weight is only in the model; extra is only in"):
        zerofx.load_weights(model, tmp_path / "other.safetensors")
    save_file({**state, "norm.weight": torch.ones(3)}, tmp_path / "shape.safetensors")
    with pytest.raises(SnapshotError, match=r"norm.weight is float32 \[3\] in shape.safetensors"):
        zerofx.load_weights(model, tmp_path / "shape.safetensors", strict=False)
    assert not unequal(dict(model.state_dict()), before)
    keys = zerofx.load_weights(model, tmp_path / "other.safetensors", strict=False)
    assert keys.missing_keys == ["norm.weight"] and keys.unexpected_keys == ["extra"]
    expected = {**plain().state_dict(), "norm.weight": before["norm.weight"]}
    assert not unequal(dict(model.state_dict()), expected)


def test_files_that_are_not_whole(tmp_path: Path, weights: Path) -> None:
    model, _ = far(tmp_path)
    file = weights / "model.safetensors"
    content = file.read_bytes()

    def refused(text: str, source: Path = file) -> None:
        with pytest.raises(SnapshotError, match=text) as caught:
            zerofx.load_weights(model, source)
        assert str(source.parent) in str(caught.value)

    os.truncate(file, len(content) - 100)
    refused(f"is cut short: .* the file at {len(content) - 100}")
    os.truncate(file, 5)
    refused("no safetensors file, or is cut short: 5 bytes")
    file.write_bytes(b"\x10" + b"\0" * 7 + b"no header at all" * 4)
    refused("no safetensors file, or is damaged: it is truncated or not JSON")
    header = json.dumps({"w": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    refused("w.dtype is 'F31', but should be one of 'F64'")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    refused(r"w of torch.float32 \[2\] has 4 bytes")
    refused("No such file", weights / "absent.safetensors")
    file.unlink()
    refused(r"no \*.safetensors file is there", weights)
    index = weights / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "absent.safetensors"}}))
    refused("absent.safetensors: No such file", weights)


def test_a_plain_module(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"plain GPT. Use safetensors.torch.load_model"):
        zerofx.load_weights(plain(), tmp_path)


# -- by compile, from meta ------------------------------------------------------------------------
class Bare(nn.Module):
    """Nothing here can initialise itself: weights are all it can begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("shift", torch.empty(4))
        self.table = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x) * self.scale + self.shift).square().mean()


def begun_with(folder: str, source: str, plan: dict[str, Any]) -> list[str]:
    """Return what of a model that was made on meta differs from the weights it was given."""
    with torch.device("meta"):
        bare = Bare()
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "reset_parameters", lambda self: calls.append(self))
        model = zerofx.compile(bare, plan, weights=source)
    model(torch.ones(2, 6)).backward()
    expected = torch.load(f"{folder}/state.pt", weights_only=True)
    return unequal(dict(model.state_dict()), expected) + [f"{m} was initialised" for m in calls]


def test_compile_from_meta(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = Bare()
    with torch.no_grad():
        for value in source.state_dict().values():
            value.normal_()
    torch.save(source.state_dict(), tmp_path / "state.pt")
    state = {k: v for k, v in source.state_dict().items() if k != "table.weight"}  # by its other
    save_file(state, tmp_path / "bare.safetensors")
    place = str(tmp_path), str(tmp_path / "bare.safetensors")
    for plan in ({"kernels": "aten"}, {"kernels": "aten", **tiers(str(tmp_path))}):
        assert not begun_with(*place, plan)
    for found in pool.run(2, begun_with, *place, plan):
        assert not found
    save_file({"scale": torch.ones(4)}, tmp_path / "little.safetensors")
    with torch.device("meta"):
        bare = Bare()
    with pytest.raises(ShardError, match="shift is on meta, and its module the model"):
        zerofx.compile(bare, {"kernels": "aten"}, weights=tmp_path / "little.safetensors")
