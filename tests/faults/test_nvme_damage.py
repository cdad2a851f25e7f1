"""Stores that are not what they say: foreign, of another version, damaged, cut short."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import change

from zerofx import nvme
from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.checksum import BLOCK_BYTES


def refused(path: Path, text: str) -> None:
    with pytest.raises(NvmeError, match=text) as caught:
        nvme.NvmeStore.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"ZFX", b"not a store of anything at all"])
def test_foreign_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file", "offset 0 are .*: not a store of zerofx")


def test_other_versions(kept: Any) -> None:
    path, _, _ = kept
    change(path, 8, struct.pack("<I", 0))
    refused(path, "format version 0 at offset 8, of an older zerofx. This one reads version 1")
    change(path, 8, struct.pack("<I", 2))
    refused(path, "format version 2 at offset 8, of a newer zerofx")


@pytest.mark.parametrize("at", [12, 16, 20, 23, 24, 60, 150])
def test_a_flipped_byte_in_the_header(at: int, kept: Any) -> None:
    """In the layout's checksum, in its length (three bytes of it), in the layout."""
    path, _, _ = kept
    change(path, at)
    refused(path, r"the header .* at offset 24\) does not match its checksum|truncated")


def test_a_flipped_byte_in_the_state(kept: Any) -> None:
    path, _, layout = kept
    change(path, layout.state_at + 13)
    refused(path, f"the state at offset {layout.state_at} does not match its checksum")


def test_a_flipped_byte_in_the_checksums(kept: Any) -> None:
    path, _, layout = kept
    change(path, layout.sums_at + 8)
    refused(path, f"the checksums at offset {layout.sums_at} are not those of the last flush")


def test_a_flipped_byte_in_a_block(kept: Any, store_engine: Any) -> None:
    path, data, layout = kept
    change(path, layout.extents["b"].offset + BLOCK_BYTES + 3)
    with nvme.NvmeStore.open(path, engine=store_engine) as store:
        store.read("a", torch.empty_like(data["a"])).wait()
        at = layout.extents["b"].offset + BLOCK_BYTES
        with pytest.raises(NvmeError, match=f"of b at .*the block at offset {at} .* damaged"):
            store.read("b", torch.empty_like(data["b"])).wait()


@pytest.mark.parametrize("keep", [3, 10, 100, "data", "middle"])
def test_files_cut_short(keep: int | str, kept: Any) -> None:
    path, _, layout = kept
    middle = layout.extents["c"].offset + 5
    at = {"data": layout.data_at, "middle": middle}.get(str(keep), keep)
    os.truncate(path, int(at))
    if keep == 3:
        refused(path, "not a store of zerofx")
        return
    first = {
        "data": ". a is the first incomplete extent",
        "middle": ". c is the first incomplete extent",
    }
    refused(path, f"truncated at offset {at}: .* were written. .*{first.get(str(keep), '')}")


def test_never_flushed(tmp_path: Path, store_engine: Any) -> None:
    with nvme.NvmeStore.create(tmp_path, {"w": 8}, label="x", engine=store_engine) as store:
        refused(Path(store.path), f"in use by process {os.getpid()} on .*. Wait for it to end")
        copy = tmp_path / "copy"
        copy.write_bytes(Path(store.path).read_bytes())
    refused(copy, f"never flushed by process {os.getpid()}")


def test_a_header_of_many_pages(tmp_path: Path, store_engine: Any) -> None:
    sizes = {f"blocks.{i}.mlp.weight": 8 for i in range(2000)}
    store = nvme.NvmeStore.create(tmp_path, sizes, label="x", engine=store_engine)
    for i, name in enumerate(sizes):
        store.write(name, torch.tensor([i]))
    store.close(delete=False)
    with nvme.NvmeStore.open(store.path, engine=store_engine) as store:
        reads = [store.read(name, torch.empty(1, dtype=torch.int64)) for name in sizes]
        assert [int(read.wait()) for read in reads] == list(range(2000))
    raw = Path(store.path).read_bytes()
    length = struct.unpack_from("<Q", raw, 16)[0]
    assert (
        length > PAGE and zlib.crc32(raw[24 : 24 + length]) == struct.unpack_from("<I", raw, 12)[0]
    )
