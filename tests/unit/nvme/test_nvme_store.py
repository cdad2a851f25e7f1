"""Stores: named places in one file, proved by checksums, and files that are not what they say."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvme_cases import SIZES, Disk, change, filled, random_bytes

from zerofx import nvme
from zerofx.errors import NvmeError
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.checksum import BLOCK_BYTES, checksums


@pytest.mark.parametrize("checksums", [True, False])
def test_everything_comes_back(checksums: bool, tmp_path: Path, store_engine: Any) -> None:
    store, data = filled(tmp_path, store_engine, checksums=checksums)
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
            assert store_engine.counts.buffered_bytes == 0  # ends too: extents own their pages
    assert not list(tmp_path.iterdir())


def test_what_was_kept_can_be_opened(kept: Any, store_engine: Any) -> None:
    path, data, _ = kept
    with nvme.NvmeStore.open(path, engine=store_engine) as store:
        for name, x in data.items():
            assert torch.equal(store.read(name, torch.empty_like(x)).wait(), x)
        with pytest.raises(NvmeError, match=r"open for reading only\. a cannot be written"):
            store.write("a", data["a"])
    assert path.exists()


def test_what_was_flushed_can_be_opened_after_a_death(tmp_path: Path, store_engine: Any) -> None:
    """As after a kill, the lock is gone and the file is there: blocks prove themselves."""
    store, data = filled(tmp_path, store_engine)
    store.flush()
    store.write("b", torch.zeros(SIZES["b"], dtype=torch.uint8)).wait()  # after the flush
    copy = tmp_path / "copy"
    copy.write_bytes(Path(store.path).read_bytes())
    store.close()
    with nvme.NvmeStore.open(copy, engine=store_engine) as store:
        assert torch.equal(store.read("c", torch.empty_like(data["c"])).wait(), data["c"])
        with pytest.raises(NvmeError, match="has the checksum"):
            store.read("b", torch.empty_like(data["b"])).wait()


def test_extents_keep_their_order(tmp_path: Path, store_engine: Any, disk: Disk) -> None:
    store, _ = filled(tmp_path, store_engine)
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
    nbytes=st.one_of(
        st.integers(0, 100),
        st.integers(PAGE - 9, 4 * PAGE),
        st.integers(BLOCK_BYTES - 9, BLOCK_BYTES + PAGE + 9),
        st.just(2 * BLOCK_BYTES),
    ),
    skew=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_the_checksum_is_its_formula(nbytes: int, skew: int, seed: int) -> None:
    memory = np.random.default_rng(seed).integers(0, 256, nbytes + skew, dtype=np.uint8)
    view = memory[skew:]
    blocks = [view[at : at + BLOCK_BYTES].tobytes() for at in range(0, nbytes, BLOCK_BYTES)]
    before = checksums(view)
    assert before.tolist() == [plain_checksum(block) for block in blocks]
    if nbytes:
        at = seed * nbytes // 10
        view[at] ^= 1 << seed % 8
        changed = before != checksums(view)
        assert np.flatnonzero(changed).tolist() == [at // BLOCK_BYTES]


def test_zeros_have_a_checksum() -> None:
    assert checksums(np.zeros(10, dtype=np.uint8)).tolist() == [1]


def test_pages_in_the_wrong_place_are_seen() -> None:
    pages = np.random.default_rng(0).integers(0, 256, (4, PAGE), dtype=np.uint8)
    swapped = pages[[0, 2, 1, 3]]
    assert checksums(pages.reshape(-1)) != checksums(swapped.reshape(-1))


@pytest.mark.parametrize("name", ["a", "c"])
def test_a_flipped_byte(name: str, tmp_path: Path, store_engine: Any) -> None:
    store, data = filled(tmp_path, store_engine)
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


def test_without_checksums_a_flipped_byte_goes_unseen(tmp_path: Path, store_engine: Any) -> None:
    store, data = filled(tmp_path, store_engine, checksums=False)
    with store:
        store.wait()
        change(Path(store.path), store._layout.extents["a"].offset)
        assert not torch.equal(store.read("a", torch.empty_like(data["a"])).wait(), data["a"])


def test_what_was_never_written_cannot_be_read(tmp_path: Path, store_engine: Any) -> None:
    with (
        nvme.NvmeStore.create(tmp_path, {"w": 8}, label="x", engine=store_engine) as store,
        pytest.raises(NvmeError, match=r"8 bytes of w .* it was never written"),
    ):
        store.read("w", torch.empty(1, dtype=torch.int64)).wait()


def test_an_extent_whose_write_failed_cannot_be_read(
    tmp_path: Path,
    store_engine: Any,
    disk: Disk,
) -> None:
    """Its other blocks may be new or old: half an update must not pass for a value."""
    store, data = filled(tmp_path, store_engine)
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
def test_names_and_sizes_are_checked(tmp_path: Path, store_engine: Any) -> None:
    sizes = {"blocks.0.w": 16}
    with nvme.NvmeStore.create(tmp_path, sizes, label="x", engine=store_engine) as store:
        with pytest.raises(NvmeError, match=r"no extent 'blocks.1.w'. The nearest is blocks.0.w"):
            store.read("blocks.1.w", torch.empty(4))
        with pytest.raises(NvmeError, match=r"blocks.0.w has 16 bytes but .*\[5\] has 20 bytes"):
            store.write("blocks.0.w", torch.empty(5))
    for bad in ({"w": -1}, {"w": 1.5}, {3: 1}):
        with pytest.raises(NvmeError, match=r"x: extent .*. Give names as strings"):
            nvme.NvmeStore.create(tmp_path, bad, label="x", engine=store_engine)
    assert not list(tmp_path.iterdir())
