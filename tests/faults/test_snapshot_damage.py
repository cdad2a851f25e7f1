"""Damaged and forged saves: load refuses them by name, runs nothing, and leaves the state alone."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from snapshot_cases import Harm, compiled, other_run, refused, train

import zerofx
from zerofx.snapshot import files as snapshot_files

FILES = ["zerofx.json", "values.pt", ".metadata", "__0_0.distcp"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = compiled("gpt", {"stage": 3})
    train(model, optimizer, "gpt", 0, 1)
    folder = tmp_path_factory.mktemp("original") / "save"
    zerofx.save(folder, model, optimizer, extra={"step": 1})
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A save that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "save"))


@pytest.fixture(scope="module")
def live() -> tuple[Any, Any]:
    return other_run()


@pytest.mark.parametrize("name", FILES)
def test_truncated(folder: Path, live: Any, name: str) -> None:
    size = (folder / name).stat().st_size
    for length in (0, size // 2, size - 1):
        os.truncate(folder / name, length)
        refused(folder, live, str(folder / name), "truncated")


@pytest.mark.parametrize("name", FILES)
def test_one_byte_differs(folder: Path, live: Any, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    place = data.index(b"blocks.0") if name == "zerofx.json" else len(data) // 2
    data[place] ^= 1
    (folder / name).write_bytes(data)
    refused(folder, live, str(folder / name), "checksum")


@pytest.mark.parametrize("name", FILES)
def test_longer(folder: Path, live: Any, name: str) -> None:
    with open(folder / name, "ab") as file:
        file.write(b"more")
    refused(folder, live, str(folder / name), "damaged")


@pytest.mark.parametrize("name", FILES[1:])
def test_missing(folder: Path, live: Any, name: str) -> None:
    (folder / name).unlink()
    refused(folder, live, f"{folder / name}: missing")


def test_half_written(folder: Path, live: Any) -> None:
    (folder / "zerofx.json").unlink()
    refused(folder, live, f"{folder} was written by torch.distributed.checkpoint alone")
    (folder / ".metadata").unlink()
    refused(folder, live, f"{folder} is half-written")


def test_foreign(tmp_path: Path, live: Any) -> None:
    refused(tmp_path / "nowhere", live, f"{tmp_path / 'nowhere'}: no such directory")
    refused(tmp_path, live, f"{tmp_path} is not a snapshot")
    (tmp_path / "file").write_text("weights")
    refused(tmp_path / "file", live, "is a file. A snapshot is a directory")
    (tmp_path / "zerofx.json").write_text('{"format": "something"}')
    refused(tmp_path, live, "not the manifest of a zerofx snapshot")
    (tmp_path / "zerofx.json").write_text("[1]")
    refused(tmp_path, live, "not the manifest of a zerofx snapshot")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_saved_by_torch_alone(tmp_path: Path, live: Any) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    refused(tmp_path / "dcp", live, "the files are of another model (checkpoint of torch.distrib")


def rewrite(folder: Path, **facts: Any) -> None:
    """Write the manifest again, with right checksums, as a forger would."""
    opened = snapshot_files.OpenSnapshot(folder)
    manifest = opened.manifest
    opened.close()
    sums = {name: snapshot_files.checksum(folder / name) for name in manifest["files"]}
    snapshot_files.write_manifest(folder, {**manifest, "files": sums, **facts})


def test_another_format(folder: Path, live: Any) -> None:
    text = json.loads((folder / "zerofx.json").read_text())
    (folder / "zerofx.json").write_text(json.dumps({**text, "version": 9}))
    refused(folder, live, "format 9, but this zerofx reads format 1")


def test_nothing_in_a_save_is_run(folder: Path, live: Any, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    rewrite(folder)
    refused(folder, live, ".metadata: not the index of a snapshot: it asks for pathlib")
    torch.save({"extra": Harm(tmp_path / "harm")}, folder / "values.pt")
    rewrite(folder)
    refused(folder, live, "values.pt: Weights only load failed")
    assert not (tmp_path / "harm").exists()


def test_an_index_that_points_elsewhere(folder: Path, live: Any) -> None:
    reader = dcp.FileSystemReader(folder)
    index = reader.read_metadata()
    next(iter(index.storage_data.values())).relative_path = "../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    rewrite(folder)
    refused(folder, live, ".metadata", "../elsewhere, which has 0 bytes")
