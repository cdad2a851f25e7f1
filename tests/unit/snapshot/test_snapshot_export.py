"""export: safetensors files that others read, written a bucket at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import CASES
from pool import Pool
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from snapshot_cases import compiled, train
from torch import Tensor, nn

import zerofx
from zerofx.errors import SnapshotError
from zerofx.snapshot import exporting as snapshot_export


def exported(target: str, options: dict[str, Any]) -> dict[str, Tensor]:
    model, optimizer = compiled("gpt", {"stage": 3})
    train(model, optimizer, "gpt", 0, 1)
    zerofx.export(target, model, **options)
    return dict(model.state_dict())


def assert_all(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that `found` is all of `expected`; the tied head is left out."""
    assert expected.keys() - found.keys() == {"head.weight"}
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_one_file(pool: Pool, tmp_path: Path, world: int) -> None:
    path = tmp_path / "weights.safetensors"
    expected = pool.run(world, exported, str(path), {})[0]
    assert_all(load_file(path), expected)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    plain = CASES["gpt"].make(9)
    load_model(plain, path)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, expected[name])
    assert os.listdir(tmp_path) == [path.name]


def test_several_files_and_back_to_one(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "keep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    expected = pool.run(2, exported, str(folder), {"max_file_bytes": 9000})[0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    found: dict[str, Tensor] = {}
    for name in files:
        tensors = load_file(folder / name)
        assert all(index["weight_map"][key] == name for key in tensors)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 9000
        found.update(tensors)
    assert_all(found, expected)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert oct(os.stat(folder / files[0]).st_mode) == oct(os.stat(folder / "config.json").st_mode)
    pool.run(2, exported, str(folder), {})  # the numbered files of before go
    assert sorted(os.listdir(folder)) == ["config.json", "keep", "model.safetensors"]
    assert_all(load_file(folder / "model.safetensors"), expected)


class Mixed(nn.Module):
    """Every dtype, odd sizes, nothing aligned by itself, shared buffers."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
        self.params = nn.ParameterList(
            nn.Parameter(torch.randn(3 + i).to(d)) for i, d in enumerate(reversed(kinds))
        )
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("same", self.flag)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("turn", torch.tensor([1 + 2j], dtype=torch.complex64))
        self.register_buffer("temporary", torch.ones(2), persistent=False)


def test_every_dtype(tmp_path: Path) -> None:
    plain = Mixed()
    expected = {k: v.clone() for k, v in plain.state_dict().items()}
    model = zerofx.compile(plain, {"kernels": "aten"})
    zerofx.export(tmp_path / "w.safetensors", model)
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == expected.keys() - {"same"}
    for name, value in found.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def test_never_whole_on_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, _ = compiled("gpt", {"stage": 3, "bucket_bytes": 0})
    most = max(b.full_bytes for b in model._engine.layout.buckets)
    sizes = []
    put = snapshot_export._put

    def watched(hidden: Path, plan: Any, name: str, tensor: Tensor) -> Any:
        sizes.append(tensor.untyped_storage().nbytes())
        return put(hidden, plan, name, tensor)

    monkeypatch.setattr(snapshot_export, "_put", watched)
    zerofx.export(tmp_path / "model", model)
    assert 0 < max(sizes) <= most < sum(sizes)


def refused_on_rank_0(target: str) -> tuple[str, dict[str, Tensor]]:
    model, _ = compiled("gpt", {"stage": 3})
    with pytest.MonkeyPatch.context() as patch:
        if model._engine.world.rank == 0:
            count = [0]
            real = os.open

            def refuse(*args: Any, **kwargs: Any) -> Any:
                is_ours = str(args[0]).endswith(".safetensors")
                count[0] += is_ours
                if is_ours and count[0] == 5:
                    raise OSError(28, "No space left on device")
                return real(*args, **kwargs)

            patch.setattr(os, "open", refuse)
        with pytest.raises(SnapshotError) as caught:
            zerofx.export(target, model)
    return str(caught.value), dict(model.state_dict())


def test_disk_full(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("before")
    first, second = pool.run(2, refused_on_rank_0, str(folder))
    assert first[0].endswith("No space left on device.") and "rank 0: No space" in second[0]
    assert (folder / "model.safetensors").read_text() == "before"
    assert os.listdir(tmp_path) == ["model"] and os.listdir(folder) == ["model.safetensors"]


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="this is a plain Linear"):
        zerofx.export(tmp_path / "model", nn.Linear(2, 2))  # type: ignore[arg-type]
    plain = nn.Linear(2, 2)
    plain.register_buffer("turn", torch.zeros(2, dtype=torch.complex128))
    model = zerofx.compile(plain, {"kernels": "aten"})
    with pytest.raises(SnapshotError, match=r"turn is torch\.complex128"):
        zerofx.export(tmp_path / "model", model)
    assert os.listdir(tmp_path) == []
