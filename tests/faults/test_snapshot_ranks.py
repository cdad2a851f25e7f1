"""Saves and loads on several ranks: what fails on one raises on all, and names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from snapshot_cases import assert_same, compiled, everything, train, tree

import zerofx
from zerofx.errors import DesyncError, SnapshotError


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
    assert second[0] == f"SnapshotError: {path}: damaged: its checksum differs."
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
