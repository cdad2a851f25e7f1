"""Stores: named places in one file, proved by checksums, and files that are not what they say."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvme_cases import Disk, disk, random_bytes  # noqa: F401  (a fixture)

from zerofx import nvme
from zerofx.errors import NvmeError
from zerofx.runtime.nvme.aligned import PAGE
from zerofx.runtime.nvme.checksum import checksum
from zerofx.runtime.nvme.header import BLOCK_BYTES

SIZES = {"a": 10, "empty": 0, "b": 2 * BLOCK_BYTES, "c": 5 * BLOCK_BYTES + 123}


@pytest.fixture
def engine() -> Any:
    with nvme.IOEngine(num_threads=3, piece_bytes=2 * BLOCK_BYTES) as engine:
        yield engine


def filled(folder: Path, engine: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    store = nvme.NvmeStore.create(folder, SIZES, label="rank0-opt", engine=engine, **options)
    data = {name: random_bytes(n, i) for i, (name, n) in enumerate(SIZES.items())}
    for name, x in data.items():
        store.write(name, x)
    return store, data


@pytest.fixture
def kept(tmp_path: Path, engine: Any) -> Any:
    """A store that was closed to be read back: its path, its data, and where things lie."""
    store, data = filled(tmp_path, engine)
    layout = store._layout
    store.close(delete=False)
    return Path(store.path), data, layout


def change(path: Path, offset: int, new: bytes | None = None) -> None:
    """Flip a bit of the byte at `offset`, or replace bytes."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(new or bytes([old[0] ^ 1]))


@pytest.mark.parametrize("checksums", [True, False])
def test_everything_comes_back(checksums: bool, tmp_path: Path, engine: Any) -> None:
    store, data = filled(tmp_path, engine, checksums=checksums)
    with store:
        assert store.extents == SIZES and os.path.getsize(store.path) == store.nbytes
        reads = {name: store.read(name, torch.empty_like(x)) for name, x in data.items()}
        for name, x in data.items():
            assert torch.equal(reads[name].wait(), x)
        new = torch.arange(2 * BLOCK_BYTES // 8).view(2, -1)
        store.write("b", new)
        assert torch.equal(store.read("b", torch.empty_like(new)).wait(), new)
        assert torch.equal(store.read("a", torch.empty_like(data["a"])).wait(), data["a"])
        if store.is_direct:
            assert engine.counts.buffered_bytes == 0  # ends too: extents own their pages
    assert not list(tmp_path.iterdir())


def test_what_was_kept_can_be_opened(kept: Any, engine: Any) -> None:
    path, data, _ = kept
    with nvme.NvmeStore.open(path, engine=engine) as store:
        for name, x in data.items():
            assert torch.equal(store.read(name, torch.empty_like(x)).wait(), x)
        with pytest.raises(NvmeError, match="open for reading; a cannot be written"):
            store.write("a", data["a"])
    assert path.exists()


def test_what_was_flushed_can_be_opened_after_a_death(tmp_path: Path, engine: Any) -> None:
    """As after a kill, the lock is gone and the file is there: blocks prove themselves."""
    store, data = filled(tmp_path, engine)
    store.flush()
    store.write("b", torch.zeros(SIZES["b"], dtype=torch.uint8)).wait()  # after the flush
    copy = tmp_path / "copy"
    copy.write_bytes(Path(store.path).read_bytes())
    store.close()
    with nvme.NvmeStore.open(copy, engine=engine) as store:
        assert torch.equal(store.read("c", torch.empty_like(data["c"])).wait(), data["c"])
        with pytest.raises(NvmeError, match="has the checksum"):
            store.read("b", torch.empty_like(data["b"])).wait()


def test_extents_keep_their_order(tmp_path: Path, engine: Any, disk: Disk) -> None:  # noqa: F811
    store, _ = filled(tmp_path, engine)
    with store:
        store.wait()
        disk.gate.clear()
        new = random_bytes(SIZES["c"], 99)
        store.write("c", new)
        reads = [store.read("c", torch.empty_like(new)) for _ in range(3)]
        store.write("c", torch.zeros_like(new))
        disk.gate.set()
        for read in reads:
            assert torch.equal(read.wait(), new)
        assert not store.read("c", new).wait().any()


# -- checksums ------------------------------------------------------------------------------
def plain_checksum(data: bytes) -> int:
    """The formula as the docstring has it, word by word."""
    total = 0
    for page in range(-(-len(data) // PAGE)):
        content = data[page * PAGE : (page + 1) * PAGE].ljust(PAGE, b"\0")
        total += (2 * page + 1) * sum(struct.unpack(f"<{PAGE // 8}Q", content))
    return total % 2**64 or 1


@settings(max_examples=30)
@given(
    nbytes=st.one_of(st.integers(0, 100), st.integers(PAGE - 9, 4 * PAGE)),
    skew=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_the_checksum_is_its_formula(nbytes: int, skew: int, seed: int) -> None:
    memory = np.random.default_rng(seed).integers(0, 256, nbytes + skew, dtype=np.uint8)
    block = memory[skew:]
    assert checksum(block) == plain_checksum(block.tobytes())
    if nbytes:
        before = checksum(block)
        block[seed * nbytes // 10] ^= 1 << seed % 8
        assert checksum(block) != before


def test_pages_in_the_wrong_place_are_seen() -> None:
    pages = np.random.default_rng(0).integers(0, 256, (4, PAGE), dtype=np.uint8)
    swapped = pages[[0, 2, 1, 3]]
    assert checksum(pages.reshape(-1)) != checksum(swapped.reshape(-1))


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_flipped_byte(name: str, tmp_path: Path, engine: Any) -> None:
    store, data = filled(tmp_path, engine)
    with store:
        store.wait()
        extent = store._layout.extents[name]
        at = extent.offset + extent.nbytes - 1
        change(Path(store.path), at)
        block = extent.offset + (extent.num_blocks - 1) * BLOCK_BYTES
        with pytest.raises(NvmeError) as caught:
            store.read(name, torch.empty_like(data[name])).wait()
        text = str(caught.value)
        assert text.startswith(f"read of {store.path}, ") and f" of {name} at offset " in text
        assert f"the block at offset {block} " in text and "the device or the file" in text
        store.write(name, data[name])  # whole again
        store.read(name, torch.empty_like(data[name])).wait()


def test_without_checksums_a_flipped_byte_goes_unseen(tmp_path: Path, engine: Any) -> None:
    store, data = filled(tmp_path, engine, checksums=False)
    with store:
        store.wait()
        change(Path(store.path), store._layout.extents["a"].offset)
        assert not torch.equal(store.read("a", torch.empty_like(data["a"])).wait(), data["a"])


def test_what_was_never_written_cannot_be_read(tmp_path: Path, engine: Any) -> None:
    with (
        nvme.NvmeStore.create(tmp_path, {"w": 8}, label="x", engine=engine) as store,
        pytest.raises(NvmeError, match=r"8 bytes of w .* it was never written"),
    ):
        store.read("w", torch.empty(1, dtype=torch.int64)).wait()


def test_an_extent_whose_write_failed_cannot_be_read(
    tmp_path: Path,
    engine: Any,
    disk: Disk,  # noqa: F811
) -> None:
    """Its other blocks may be new or old: half an update must not pass for a value."""
    store, data = filled(tmp_path, engine)
    with store:
        store.wait()
        at = store._layout.extents["c"].offset + 2 * BLOCK_BYTES
        disk.fails("pwritev", errno.ENOSPC, lambda offset: offset == at)
        with pytest.raises(NvmeError, match=rf"of c at offset {at}: .*ENOSPC"):
            store.write("c", random_bytes(SIZES["c"], 5)).wait()
        with pytest.raises(NvmeError, match="or its last write failed"):
            store.read("c", torch.empty_like(data["c"])).wait()
        assert torch.equal(store.read("b", torch.empty_like(data["b"])).wait(), data["b"])


# -- names, sizes ---------------------------------------------------------------------------
def test_names_and_sizes_are_checked(tmp_path: Path, engine: Any) -> None:
    sizes = {"blocks.0.w": 16}
    with nvme.NvmeStore.create(tmp_path, sizes, label="x", engine=engine) as store:
        with pytest.raises(NvmeError, match=r"no extent 'blocks.1.w'; the nearest is blocks.0.w"):
            store.read("blocks.1.w", torch.empty(4))
        with pytest.raises(NvmeError, match=r"blocks.0.w has 16 bytes but .*\[5\] has 20 bytes"):
            store.write("blocks.0.w", torch.empty(5))
    for bad in ({"w": -1}, {"w": 1.5}, {3: 1}):
        with pytest.raises(NvmeError, match=r"x: extent .*; give names as strings"):
            nvme.NvmeStore.create(tmp_path, bad, label="x", engine=engine)
    assert not list(tmp_path.iterdir())


# -- files that are not what they say -------------------------------------------------------
def refused(path: Path, text: str) -> None:
    with pytest.raises(NvmeError, match=text) as caught:
        nvme.NvmeStore.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"ZFX", b"not a store of anything at all"])
def test_foreign_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file", "offset 0 are .*: no store of zerofx")


def test_other_versions(kept: Any) -> None:
    path, _, _ = kept
    change(path, 8, struct.pack("<I", 0))
    refused(path, "format version 0 at offset 8, of an older zerofx; this one reads version 1")
    change(path, 8, struct.pack("<I", 2))
    refused(path, "format version 2 at offset 8, of a newer zerofx")


@pytest.mark.parametrize("at", [12, 16, 20, 23, 24, 60, 150])
def test_a_flipped_byte_in_the_header(at: int, kept: Any) -> None:
    """In the layout's checksum, in its length (three bytes of it), in the layout."""
    path, _, _ = kept
    change(path, at)
    refused(path, r"the header .* at offset 24\) does not have its checksum|cut short")


def test_a_flipped_byte_in_the_state(kept: Any) -> None:
    path, _, layout = kept
    change(path, layout.state_at + 13)
    refused(path, f"the state at offset {layout.state_at} does not have its checksum")


def test_a_flipped_byte_in_the_checksums(kept: Any) -> None:
    path, _, layout = kept
    change(path, layout.sums_at + 8)
    refused(path, f"the checksums at offset {layout.sums_at} are not those of the last flush")


def test_a_flipped_byte_in_a_block(kept: Any, engine: Any) -> None:
    path, data, layout = kept
    change(path, layout.extents["b"].offset + BLOCK_BYTES + 3)
    with nvme.NvmeStore.open(path, engine=engine) as store:
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
        refused(path, "no store of zerofx")
        return
    first = {"data": "; a is the first extent", "middle": "; c is the first extent"}
    refused(path, f"cut short at offset {at}: .* were written; .*{first.get(str(keep), '')}")


def test_never_flushed(tmp_path: Path, engine: Any) -> None:
    with nvme.NvmeStore.create(tmp_path, {"w": 8}, label="x", engine=engine) as store:
        refused(Path(store.path), f"in use by process {os.getpid()} on .*; wait for it to end")
        copy = tmp_path / "copy"
        copy.write_bytes(Path(store.path).read_bytes())
    refused(copy, f"never flushed by process {os.getpid()}")


def test_a_header_of_many_pages(tmp_path: Path, engine: Any) -> None:
    sizes = {f"blocks.{i}.mlp.weight": 8 for i in range(2000)}
    store = nvme.NvmeStore.create(tmp_path, sizes, label="x", engine=engine)
    for i, name in enumerate(sizes):
        store.write(name, torch.tensor([i]))
    store.close(delete=False)
    with nvme.NvmeStore.open(store.path, engine=engine) as store:
        reads = [store.read(name, torch.empty(1, dtype=torch.int64)) for name in sizes]
        assert [int(read.wait()) for read in reads] == list(range(2000))
    raw = Path(store.path).read_bytes()
    length = struct.unpack_from("<Q", raw, 16)[0]
    assert (
        length > PAGE and zlib.crc32(raw[24 : 24 + length]) == struct.unpack_from("<I", raw, 12)[0]
    )
