"""Tensors to disk and back: any size, any offset, any memory; split, merged, in order."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nvme_cases import Disk, random_bytes, without_direct

from zerofx import nvme
from zerofx.nvme.aligned import PAGE
from zerofx.nvme.handle import RangeIndex

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def engine() -> Any:
    with nvme.IOEngine(num_threads=3, piece_bytes=256 * KIB) as engine:
        yield engine


def in_memory(nbytes: int, misaligned: int) -> torch.Tensor:
    """Return bytes that begin so far behind a page."""
    return nvme.aligned_empty(nbytes + misaligned, dtype=torch.uint8)[misaligned:]


writes = st.lists(
    st.tuples(
        st.integers(0, 600 * KIB),  # offset
        st.one_of(st.integers(0, 9 * KIB), st.integers(0, 700 * KIB)),  # bytes
        st.sampled_from([0, 1, 64, 512, PAGE - 1]),  # how misaligned in memory
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@settings(max_examples=40)
@given(writes=writes, aligned=st.booleans())
def test_a_file_holds_what_was_written_last(
    writes: list[tuple[int, int, int]], aligned: bool, direct: bool, tmp_path_factory: Any
) -> None:
    """Writes that overlap in any way, none waited for, then reads of the same stretches."""
    path = tmp_path_factory.mktemp("moves") / "file"
    if aligned:
        writes = [(offset // PAGE * PAGE, n, skew // 512 * 512) for offset, n, skew in writes]
    expected = torch.zeros(max(offset + n for offset, n, _ in writes), dtype=torch.uint8)
    with (
        nvme.IOEngine(num_threads=3, piece_bytes=256 * KIB) as engine,
        nvme.File(path, "w", engine=engine, direct=direct) as file,
    ):
        file.reserve(max(1, expected.numel()))
        reads = []
        for number, (offset, n, skew) in enumerate(writes):
            data = in_memory(n, skew)
            data[:] = random_bytes(n, number)
            expected[offset : offset + n] = data
            file.submit_write(data, offset)
            reads.append((file.submit_read(in_memory(n, skew), offset), expected.clone()))
        for (offset, n, _), (request, then) in zip(writes, reads, strict=True):
            assert torch.equal(request.wait(), then[offset : offset + n])
        whole = file.read(torch.empty_like(expected))
        assert torch.equal(whole, expected)
        file.flush()
    assert path.read_bytes()[: expected.numel()] == expected.numpy().tobytes()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path, engine: Any) -> None:
    x = random_bytes(24 * 100).remainder(2).view(3, -1)
    x = x.view(dtype)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        file.write(x, 40)
        y = file.read(torch.empty_like(x), 40)
    assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)) and y.dtype == dtype


def test_scalars_parameters_and_inference_tensors(tmp_path: Path, engine: Any) -> None:
    with nvme.File(tmp_path / "file", "w", engine=engine) as file, torch.inference_mode():
        file.write(torch.nn.Parameter(torch.tensor(3.5)), 0)
        assert file.read(torch.empty(())).item() == 3.5


def test_a_file_system_that_refuses_direct_transfers(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_direct(monkeypatch)
    x = random_bytes(MIB + 77)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        assert not file.is_direct
        file.write(x, 5)
        assert torch.equal(file.read(torch.empty_like(x), 5), x)
    assert engine.counts.buffered_bytes == 2 * x.numel()


def test_a_file_system_that_refuses_them_only_when_asked(
    tmp_path: Path,
    engine: Any,
    disk: Disk,
) -> None:
    """Some open a file with O_DIRECT and then take no transfer: what is lost is only the try."""
    refused: list[int] = []

    def fault(name: str, real: Any, fd: int, buffers: Any, offset: int) -> None:
        if fd == file._handle.direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")

    x = random_bytes(MIB)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        disk.faults.append(fault)
        file.write(x)
        assert not file.is_direct and refused
        assert torch.equal(file.read(torch.empty_like(x)), x)


def test_aligned_memory_moves_without_a_copy(tmp_path: Path, engine: Any) -> None:
    x = nvme.aligned_empty(600, 1024)  # 2.3 MiB, whole pages
    x.normal_()
    y = nvme.aligned_empty(600, 1024)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        if not file.is_direct:
            pytest.skip(f"{tmp_path} is on a file system without O_DIRECT")
        file.write(x)
        file.read(y)
    assert torch.equal(x, y)
    counts = engine.counts
    assert counts.bounced_bytes == counts.buffered_bytes == 0
    assert counts.read_bytes == counts.written_bytes == x.nbytes


def test_large_requests_are_split(tmp_path: Path, engine: Any, disk: Disk) -> None:
    x = in_memory(MIB + 100, 0)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        file.write(x, 0)
    assert engine.counts.num_pieces == 5
    pieces = sorted((offset, nbytes) for _, _, nbytes, offset in disk.calls)
    assert pieces == [(i * 256 * KIB, 256 * KIB) for i in range(4)] + [(MIB, 100)]


def test_small_neighbours_are_merged(tmp_path: Path, disk: Disk) -> None:
    """While the only thread is busy, 100 small requests queue up; they leave in one call."""
    with nvme.IOEngine(1, 256 * KIB) as engine, nvme.File(tmp_path / "f", "w", engine=engine) as f:
        f.reserve(2 * MIB)
        disk.gate.clear()
        first = f.submit_write(in_memory(PAGE, 0), MIB)
        assert disk.entered.acquire(timeout=30)
        data = [random_bytes(1000, i) for i in range(100)]
        small = [f.submit_write(x, i * 1000) for i, x in enumerate(data)]
        far = f.submit_write(random_bytes(1000, 7), 500 * KIB)
        disk.gate.set()
        for request in [first, *small, far]:
            request.wait()
        calls = [call for call in disk.calls if call[3] < 100_000]
        # 100,000 bytes: 24 whole pages, and the ragged end through the page cache
        if f.is_direct:
            assert [(nbytes, offset) for _, _, nbytes, offset in calls] == [
                (24 * PAGE, 0), (100_000 - 24 * PAGE, 24 * PAGE),
            ]  # fmt: skip
        else:
            assert len(calls) == 1
        assert engine.counts.num_pieces == 102
        back = f.read(torch.empty(100_000, dtype=torch.uint8))
    assert torch.equal(back, torch.cat(data))


def test_merging_stops_at_the_size_of_a_piece(tmp_path: Path, disk: Disk) -> None:
    with nvme.IOEngine(1, 256 * KIB) as engine, nvme.File(tmp_path / "f", "w", engine=engine) as f:
        f.reserve(4 * MIB)
        disk.gate.clear()
        requests = [f.submit_write(in_memory(PAGE, 0), 3 * MIB)]
        assert disk.entered.acquire(timeout=30)
        requests += [f.submit_write(in_memory(64 * KIB, 0), i * 64 * KIB) for i in range(6)]
        disk.gate.set()
        for request in requests:
            request.wait()
    sizes = [nbytes for _, _, nbytes, offset in disk.calls if offset < MIB]
    assert sizes == [256 * KIB, 128 * KIB]


def test_a_read_follows_the_write_before_it(tmp_path: Path, engine: Any, disk: Disk) -> None:
    path = tmp_path / "file"
    old, new = random_bytes(MIB, 1), random_bytes(MIB, 2)
    with nvme.File(path, "w", engine=engine) as file:
        file.write(old)
        disk.gate.clear()
        before = file.submit_read(torch.empty_like(old))
        write = file.submit_write(new)
        after = file.submit_read(torch.empty_like(old))
        elsewhere = file.submit_write(new, 2 * MIB)
        disk.gate.set()
        assert torch.equal(after.wait(), new) and write.is_done and before.is_done
        assert torch.equal(before.wait(), old)
        elsewhere.wait()
    order = [(name, offset) for name, _, _, offset in disk.calls if offset < MIB]
    kinds = [name for name, _ in order]
    assert kinds == ["pwritev"] * 4 + ["preadv"] * 4 + ["pwritev"] * 4 + ["preadv"] * 4


def test_reads_of_the_same_bytes_run_in_parallel(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, met, real = threading.Barrier(2), threading.Event(), os.preadv

    def meeting(fd: int, buffers: Any, offset: int) -> int:
        is_ours = os.path.samestat(os.fstat(fd), os.stat(tmp_path / "file"))
        if is_ours and not met.is_set():  # not what others still read, nor what is left of a read
            both.wait(30)
            met.set()
        return real(fd, buffers, offset)

    x = random_bytes(PAGE)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        file.write(x)
        monkeypatch.setattr(os, "preadv", meeting)
        requests = [file.submit_read(torch.empty_like(x)) for _ in range(2)]
        assert all(torch.equal(request.wait(), x) for request in requests)


def test_reads_and_writes_take_turns(tmp_path: Path, disk: Disk) -> None:
    """A read that is submitted behind many writes does not wait for all of them."""
    with nvme.IOEngine(1, 256 * KIB) as engine, nvme.File(tmp_path / "f", "w", engine=engine) as f:
        f.reserve(8 * MIB)
        disk.gate.clear()
        writes = [f.submit_write(in_memory(256 * KIB, 0), 2 * i * 256 * KIB) for i in range(8)]
        read = f.submit_read(in_memory(PAGE, 0), 7 * MIB)
        disk.gate.set()
        for request in [*writes, read]:
            request.wait()
    assert [name for name, *_ in disk.calls].index("preadv") <= 2


@given(
    entries=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=30),
    asked=st.tuples(st.integers(0, 200), st.integers(1, 60)),
    removed=st.sets(st.integers(0, 29)),
)
def test_overlaps_are_found(
    entries: list[tuple[int, int]], asked: tuple[int, int], removed: set[int]
) -> None:
    index, (begin, length) = RangeIndex(), asked
    requests: list[Any] = [object() for _ in entries]
    for request, (start, n) in zip(requests, entries, strict=True):
        index.add(start, start + n, request)
    kept = [i for i in range(len(entries)) if i not in removed]
    for i in set(range(len(entries))) - set(kept):
        index.remove(requests[i])
    expected = [
        requests[i]
        for i in kept
        if entries[i][0] < begin + length and begin < entries[i][0] + entries[i][1]
    ]
    assert index.overlapping(begin, begin + length) == expected
    assert len(index) == len(kept)
