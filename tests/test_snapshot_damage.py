"""What load refuses, by name, with the state untouched; and what save refuses before it writes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pool import Pool
from snapshot_cases import assert_same, compiled, everything, train
from torch import nn

import zerofx
from zerofx.errors import DesyncError, SnapshotError
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
def live() -> Iterator[tuple[Any, Any]]:
    """A model and an optimizer with a state of their own."""
    model, optimizer = compiled("gpt", {"stage": 3}, seed=7)
    train(model, optimizer, "gpt", 5, 6)
    yield model, optimizer


def refused(folder: Path, live: tuple[Any, Any], *texts: str) -> None:
    """Assert that loading raises with these texts and changes nothing."""
    model, optimizer = live
    before, generator = everything(model, optimizer), torch.get_rng_state()
    with pytest.raises(SnapshotError) as caught:
        zerofx.load(folder, model, optimizer)
    for text in texts:
        assert text in str(caught.value)
    assert_same(everything(model, optimizer), before)
    assert torch.equal(torch.get_rng_state(), generator)


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
    refused(tmp_path / "file", live, "is a file; a snapshot is a directory")
    (tmp_path / "zerofx.json").write_text('{"format": "something"}')
    refused(tmp_path, live, "not the manifest of a zerofx snapshot")
    (tmp_path / "zerofx.json").write_text("[1]")
    refused(tmp_path, live, "not the manifest of a zerofx snapshot")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_saved_by_torch_alone(tmp_path: Path, live: Any) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    refused(tmp_path / "dcp", live, "was written by torch.distributed.checkpoint alone")


def rewrite(folder: Path, **facts: Any) -> None:
    """Write the manifest anew, with right checksums, as a forger would."""
    manifest = snapshot_files.read_manifest(folder)
    sums = {name: snapshot_files.checksum(folder / name) for name in manifest["files"]}
    snapshot_files.write_manifest(folder, {**manifest, "files": sums, **facts})


def test_another_format(folder: Path, live: Any) -> None:
    text = json.loads((folder / "zerofx.json").read_text())
    (folder / "zerofx.json").write_text(json.dumps({**text, "version": 9}))
    refused(folder, live, "format 9, and this zerofx reads format 1")


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


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


def tree(tmp_path: Path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))


# -- other models ---------------------------------------------------------------------------------
def linear(make: Callable[[], nn.Module], kind: Any = torch.optim.SGD, groups: int = 1) -> Any:
    model = zerofx.compile(make(), {"kernels": "aten"})
    params = list(model.parameters())
    sets = [params] if groups == 1 else [params[:1], params[1:]]
    return model, kind([{"params": p} for p in sets], lr=0.1)


def with_buffer() -> nn.Module:
    model = nn.Linear(3, 4)
    model.register_buffer("mean", torch.zeros(4))
    return model


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        (lambda: nn.Linear(3, 5), ["weight is float32 [4, 3] in the save and float32 [5, 3]"]),
        (lambda: nn.Linear(3, 4).double(), ["bias is float32 [4] in the save and float64 [4]"]),
        (lambda: nn.Linear(3, 4, bias=False), ["bias is only in the save"]),
        (
            lambda: nn.Sequential(nn.Linear(3, 4)),
            ["0.bias is only in the model", "; weight is"],
        ),
        (with_buffer, ["buffers mean is only in the model"]),
    ],
)
def test_another_model(tmp_path: Path, other: Any, texts: list[str]) -> None:
    zerofx.save(tmp_path / "save", *linear(lambda: nn.Linear(3, 4)))
    refused(tmp_path / "save", linear(other), "the save is of another model", *texts)


def test_another_optimizer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Linear(3, 4)

    zerofx.save(tmp_path / "save", *linear(make))
    refused(
        tmp_path / "save", linear(make, torch.optim.AdamW), "has the state of SGD, but was given"
    )
    refused(tmp_path / "save", linear(make, groups=2), "SGD has 2 groups, the save 1")
    model, _ = linear(make)
    some = torch.optim.SGD([model.weight], lr=0.1)
    refused(tmp_path / "save", (model, some), "group 0 of SGD has other parameters", "bias")
    zerofx.save(tmp_path / "save", model)
    refused(tmp_path / "save", linear(make), "was saved without an optimizer")


# -- what save refuses ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"a": {"fine": 1, "scheduler": lambda step: step}}, "extra['a']['scheduler'] is a funct"),
        ({"list": [1, Harm(Path("x"))]}, "extra['list'][1] is a Harm"),
        ([1, 2], "extra is a list; give a dict"),
    ],
)
def test_extra_that_would_run_code(tmp_path: Path, live: Any, extra: Any, text: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        zerofx.save(tmp_path / "save", *live, extra=extra)
    assert text in str(caught.value)
    assert tree(tmp_path) == []


def test_a_directory_of_something_else(tmp_path: Path, live: Any) -> None:
    home = tmp_path / "home"
    home.mkdir()
    zerofx.save(home, *live)  # an empty one is fine
    (home / "zerofx.json").unlink()
    with pytest.raises(SnapshotError, match=r"holds other files and no zerofx\.json"):
        zerofx.save(home, *live)
    assert len(tree(home)) == 3
    with pytest.raises(SnapshotError, match="is a file; give a directory"):
        zerofx.save(home / "values.pt", *live)


def test_not_ours(tmp_path: Path, live: Any) -> None:
    with pytest.raises(SnapshotError, match="this is a plain Linear"):
        zerofx.save(tmp_path / "save", nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(SnapshotError, match="this is a plain Linear"):
        zerofx.load(tmp_path / "save", nn.Linear(2, 2))  # type: ignore[arg-type]
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2, 3))])
    with pytest.raises(SnapshotError, match=r"shape \[2, 3\] that is not the model's"):
        zerofx.save(tmp_path / "save", live[0], stranger)
    assert tree(tmp_path) == []


# -- on several ranks -----------------------------------------------------------------------------
def damaged_for_one(folder: str) -> list[str]:
    model, optimizer = compiled("gpt", {"stage": 3})
    train(model, optimizer, "gpt", 0, 1)
    zerofx.save(folder, model, optimizer)
    rank = model._engine.world.rank
    path = Path(folder) / "__1_0.distcp"  # its checksum is rank 1's to look at
    if rank == 0:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    model.state_dict()  # rank 1 waits for rank 0
    train(model, optimizer, "gpt", 1, 2)
    before = everything(model, optimizer)
    texts = []
    for action in (
        lambda: zerofx.load(folder, model, optimizer),
        lambda: zerofx.load(folder if rank else f"{folder}-elsewhere", model),
        lambda: zerofx.save(folder, model, None, extra={"f": print if rank == 0 else 0}),
    ):
        with pytest.raises((SnapshotError, DesyncError)) as caught:
            action()
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
        assert_same(everything(model, optimizer), before)
    train(model, optimizer, "gpt", 2, 3)
    return texts


def test_one_rank_fails_all_raise(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, damaged_for_one, str(tmp_path / "save"))
    path = tmp_path / "save" / "__1_0.distcp"
    assert f"rank 1: {path}: damaged: its checksum differs" in first[0]
    assert second[0] == f"SnapshotError: {path}: damaged: its checksum differs"
    for texts in (first, second):
        assert "DesyncError" in texts[1] and "directory=save-elsewhere" in texts[1]
    assert "extra['f'] is a builtin" in first[2]
    assert "rank 0: extra['f'] is a builtin" in second[2]


def alone(folder: str, call: str) -> str:
    model, optimizer = compiled("gpt", {"stage": 3})
    with pytest.raises(DesyncError) as caught:
        if model._engine.world.rank == 1:
            getattr(zerofx, call)(folder, model)
        else:
            train(model, optimizer, "gpt", 0, 1)
    train(model, optimizer, "gpt", 0, 1)  # nothing was launched: they go on together
    return str(caught.value)


@pytest.mark.parametrize("call", ["save", "load", "export"])
def test_a_rank_that_calls_alone_is_named(pool: Pool, tmp_path: Path, call: str) -> None:
    for text in pool.run(2, alone, str(tmp_path / "save"), call):
        assert f"rank 1 is about to run zerofx.{call}" in text and "forward of GPT" in text
    assert tree(tmp_path) == []
