"""Activations on NVMe: what goes wrong is told by file, offset and name, and the model goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import Disk
from offload_cases import batch_loss, compiled, gradients
from pool import Pool
from spill_cases import spilling

import zerofx
from zerofx.errors import DesyncError, NvmeError
from zerofx.nvme import folder as nvme_folder


def test_a_folder_that_is_missing_is_told_by_compile() -> None:
    with pytest.raises(NvmeError, match=r"neither it nor /no/such exists"):
        spilling({}, "/no/such/folder")


def test_too_little_space_is_told_before_step_0(tmp_path: Path, monkeypatch: Any) -> None:
    model = spilling({}, tmp_path)
    monkeypatch.setattr(nvme_folder, "free_bytes", lambda folder: 8192)
    with pytest.raises(NvmeError) as caught:
        batch_loss(model, "gpt", 0)
    text = str(caught.value)
    assert "activations of GPT on rank 0 needs" in text and "8.0 KiB (8192 bytes) are free" in text
    assert model._engine.host.moved["d2h"].calls == 0
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    batch_loss(model, "gpt", 0).backward()


def one_rank_is_full(folder: str) -> str:
    """Return what a rank is told where rank 1 alone has no space."""
    model = spilling({"stage": 3}, folder)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(nvme_folder, "free_bytes", lambda folder: 8192)
        try:
            batch_loss(model, "gpt", 0)
        except (NvmeError, DesyncError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_hear_of_one_that_has_too_little(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, one_rank_is_full, str(tmp_path))
    assert second.startswith("NvmeError") and "8.0 KiB (8192 bytes) are free" in second
    assert first.startswith("DesyncError") and "rank 1" in first and "on rank 1 needs" in first


def test_damage_names_file_offset_and_activation(tmp_path: Path) -> None:
    model = spilling({"stage": 3}, tmp_path)
    loss = batch_loss(model, "gpt", 0)
    (path,) = tmp_path.iterdir()
    (store,) = model._engine.values._files
    name, extent = next((n, e) for n, e in store._layout.extents.items() if "blocks.1" in n)
    with open(path, "r+b") as file:
        file.seek(extent.offset + 3)
        byte = file.read(1)
        file.seek(extent.offset + 3)
        file.write(bytes([byte[0] ^ 1]))
    whose = name.rsplit(" ", 1)[0]
    with pytest.raises(
        NvmeError, match=rf"read of {path}, .* of {whose} at offset {extent.offset}"
    ):
        loss.backward()
    assert model._engine.host.num_lent == 0
    batch_loss(model, "gpt", 1).backward()  # and the model goes on


def test_a_write_that_fails_names_the_activation(tmp_path: Path, disk: Disk) -> None:
    model = spilling({"stage": 3}, tmp_path)
    batch_loss(model, "gpt", 0).backward()
    expected = gradients(model)
    disk.fails("pwritev", errno.EIO)
    with pytest.raises(NvmeError, match=r"write of .* of [\w.]+ at offset \d+: .*\(EIO\)"):
        batch_loss(model, "gpt", 1)
    disk.faults.clear()
    model.zero_grad()
    batch_loss(model, "gpt", 0).backward()
    engine = model._engine
    assert all(map(torch.equal, gradients(model), expected))
    assert engine.host.num_lent == engine.values.num_lent == 0


def test_an_adopted_program_needs_a_folder(tmp_path: Path) -> None:
    model = spilling({"stage": 3}, tmp_path)
    batch_loss(model, "gpt", 0)
    loaded = zerofx.load_program(model.programs[0].emit(tmp_path / "program"))
    other = compiled("gpt", {"stage": 3})
    other.adopt(loaded)
    with pytest.raises(NvmeError, match="compiled without a folder there"):
        batch_loss(other, "gpt", 0)
