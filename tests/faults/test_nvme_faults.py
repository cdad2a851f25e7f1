"""What disks do wrong: told at wait(), with file, offset, bytes and whose they are."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import Disk, random_bytes

from zerofx import nvme
from zerofx.errors import NvmeError, ZerofxError
from zerofx.nvme.aligned import PAGE

MIB, KIB = 1 << 20, 1 << 10


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (errno.ENOSPC, "Free space on that file system"),
        (errno.EDQUOT, "Raise the disk quota"),
        (errno.EIO, "The device reports a fault"),
        (errno.EROFS, "Remount the file system writable"),
        (errno.ESTALE, "See the kernel's log"),
    ],
    ids=lambda value: errno.errorcode.get(value) if isinstance(value, int) else "",
)
def test_a_write_that_fails(
    code: int,
    way_out: str,
    file: Any,
    disk: Disk,
) -> None:
    disk.fails("pwritev", code, lambda offset: offset == 512 * KIB)
    request = file.submit_write(random_bytes(MIB), 0, "blocks.3.mlp.fc1.weight")
    with pytest.raises(NvmeError) as caught:
        request.wait()
    text = str(caught.value)
    assert text.startswith(
        f"write of {file.path}, 256.0 KiB (262144 bytes) of blocks.3.mlp.fc1.weight at offset "
        f"524288: {os.strerror(code)} ({errno.errorcode[code]}). {way_out}"
    )
    assert isinstance(caught.value, ZerofxError) and isinstance(caught.value.__cause__, OSError)
    with pytest.raises(NvmeError):  # to whoever else waits, too
        request.wait()
    disk.faults.clear()  # and the engine goes on
    x = random_bytes(MIB)
    file.write(x)
    assert torch.equal(file.read(torch.empty_like(x)), x)


def test_a_read_that_fails(file: Any, disk: Disk) -> None:
    disk.fails("preadv", errno.EIO)
    with pytest.raises(NvmeError, match=r"read of .*file, 10 bytes of w at offset 7: .*\(EIO\)"):
        file.read(torch.empty(10, dtype=torch.uint8), 7, "w")


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 1000, 100_001], ids=str)
@pytest.mark.parametrize("skew", [0, 1])
def test_short_moves_are_continued(most: int, skew: int, file: Any, disk: Disk) -> None:
    x = random_bytes(300_000)
    disk.moves_at_most(most)
    file.write(x, skew)
    assert torch.equal(file.read(torch.empty_like(x), skew), x)
    disk.faults.clear()
    assert torch.equal(file.read(torch.empty_like(x), skew), x)
    assert len(disk.calls) >= 2 * 300_000 // most


def test_a_write_without_progress_is_an_error(file: Any, disk: Disk) -> None:
    disk.faults.append(lambda name, *_: 0 if name == "pwritev" else None)
    with pytest.raises(NvmeError, match="the file system accepts no bytes at offset 0"):
        file.write(random_bytes(PAGE))


@pytest.mark.parametrize("nbytes", [10, 2 * PAGE, 2 * PAGE + 5])
@pytest.mark.parametrize("direct", [True, False])
def test_a_read_behind_the_end(nbytes: int, direct: bool, tmp_path: Path, engine: Any) -> None:
    with nvme.File(tmp_path / "file", "w", engine=engine, direct=direct) as file:
        file.write(random_bytes(nbytes - 1), 100)
        with pytest.raises(NvmeError, match=f"the file ends at offset {nbytes + 99}. "):
            file.read(torch.empty(nbytes, dtype=torch.uint8), 100)


def test_a_device_that_is_really_full(tmp_path: Path, engine: Any) -> None:
    """A limit on the size of files stands in for it: the kernel itself refuses, half way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (640 * KIB, hard))
        try:
            with pytest.raises(NvmeError, match=r"of w at offset \d+: .*\(EFBIG\). .*ulimit -f"):
                file.write(random_bytes(MIB), label="w")
            with pytest.raises(NvmeError, match=r"cannot reserve .*\(EFBIG\)"):
                file.reserve(MIB)
            with pytest.raises(NvmeError, match=r"cannot reserve 1.0 MiB .* for opt in .*EFBIG"):
                nvme.NvmeStore.create(tmp_path, {"w": MIB - 3 * PAGE}, label="opt", engine=engine)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_merged_requests_only_those_fail_that_must(tmp_path: Path, disk: Disk) -> None:
    """One call for all fails; each is then tried by itself."""
    with nvme.IOEngine(1, 256 * KIB) as engine, nvme.File(tmp_path / "f", "w", engine=engine) as f:
        f.reserve(MIB)

        def bad_page(name: str, real: Any, fd: int, buffers: Any, offset: int) -> None:
            nbytes = sum(len(memoryview(b)) for b in buffers)
            if name == "pwritev" and offset <= 3 * PAGE < offset + nbytes:
                raise OSError(errno.EIO, "Input/output error")

        disk.faults.append(bad_page)
        disk.gate.clear()
        first = f.submit_write(nvme.aligned_empty(PAGE, dtype=torch.uint8), 512 * KIB)
        assert disk.entered.acquire(timeout=30)
        small = [
            f.submit_write(nvme.aligned_empty(PAGE, dtype=torch.uint8), i * PAGE, f"w{i}")
            for i in range(8)
        ]
        disk.gate.set()
        first.wait()
        for i, request in enumerate(small):
            if i == 3:
                with pytest.raises(NvmeError, match=f"of w3 at offset {3 * PAGE}: .*EIO"):
                    request.wait()
            else:
                request.wait()


def test_a_read_behind_a_failed_write_fails(file: Any, disk: Disk) -> None:
    x = random_bytes(MIB)
    file.write(x)
    disk.fails("pwritev", errno.EIO)
    disk.gate.clear()
    write = file.submit_write(random_bytes(MIB, 1), 0, "w")
    read = file.submit_read(torch.empty_like(x), 0, "w")
    again = file.submit_write(x, 0, "w")
    last = file.submit_read(torch.empty_like(x), 0, "w")
    disk.gate.set()
    with pytest.raises(NvmeError, match=r"^write of .*EIO"):
        write.wait()
    with pytest.raises(NvmeError, match=r"^read of .*: the write before it failed: write of .*EIO"):
        read.wait()
    for request in (again, last):
        with pytest.raises(NvmeError, match="EIO"):
            request.wait()
    disk.faults.clear()
    file.write(x)  # what is whole again can be read again
    assert torch.equal(file.read(torch.empty_like(x)), x)


def test_faults_that_nobody_waits_for_come_up(tmp_path: Path, engine: Any, disk: Disk) -> None:
    disk.fails("pwritev", errno.EIO, lambda offset: offset < MIB)
    with nvme.File(tmp_path / "file", "w", engine=engine) as file:
        seen = file.submit_write(random_bytes(10), 0, "a")
        for i, label in enumerate("bc"):
            file.submit_write(random_bytes(10), 100 + i * PAGE, label)
        with pytest.raises(NvmeError, match="of a at"):
            seen.wait()
        with pytest.raises(NvmeError, match=r"of [bc] at .*\(and 1 more requests failed\)"):
            file.flush()
        file.flush()  # told once
        file.submit_write(random_bytes(10), 0, "d")
        with pytest.raises(NvmeError, match="of d at"):
            file.close()
        file.close()
    with pytest.raises(KeyError), nvme.File(tmp_path / "file", "r+", engine=engine) as file:
        file.submit_write(random_bytes(10), 0, "e")
        raise KeyError  # comes through


def test_a_flush_that_fails(file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(NvmeError, match=r"cannot flush .*file: .*\(EIO\)"):
        file.flush()


def test_errors_that_are_no_fault_of_the_disk(file: Any, disk: Disk) -> None:
    """Whatever a thread meets reaches who waits; the thread goes on."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug of ours")

    disk.faults.append(broken)
    with pytest.raises(NvmeError, match="of w at offset 0: ZeroDivisionError: a bug of ours"):
        file.read(torch.empty(10), label="w")
    disk.faults.clear()
    file.read(torch.empty(10))


REFUSED = {
    "list": ([1.0], "list is not a tensor"),
    "sparse": (torch.eye(3).to_sparse(), "Only dense tensors in host memory"),
    "meta": (torch.empty(3, device="meta"), r"float32\[3\] is meta. Only dense tensors in host"),
    "strided": (torch.ones(4, 4).t(), r"float32\[4, 4\] with strides \(1, 4\) is not contiguous"),
    "conjugate": (torch.ones(2, dtype=torch.complex64).conj(), "not contiguous"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_cannot_move(name: str, file: Any) -> None:
    tensor, text = REFUSED[name]
    with pytest.raises(NvmeError, match=text):
        file.submit_write(tensor)
    with pytest.raises(NvmeError, match=text):
        file.submit_read(tensor)


def test_paths_and_options_that_cannot_be(tmp_path: Path, engine: Any) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    with pytest.raises(NvmeError, match=r"cannot open .*absent: No such file .*\(ENOENT\)"):
        nvme.File(tmp_path / "absent")
    with pytest.raises(NvmeError, match=r"cannot open .*\(ENOTDIR\)"):
        nvme.File(tmp_path / "file" / "below", "w")
    with pytest.raises(NvmeError, match=r"cannot open .*\(EISDIR\). Give the path of a file"):
        nvme.File(tmp_path, "w")
    with pytest.raises(NvmeError, match=r"mode = 'a'\. Allowed are 'r', 'r\+', 'w'"):
        nvme.File(tmp_path / "file", "a")
    with nvme.File(tmp_path / "file", engine=engine) as file:
        with pytest.raises(NvmeError, match="open for reading"):
            file.submit_write(torch.ones(1))
        with pytest.raises(NvmeError, match="offset -1 is negative"):
            file.submit_read(torch.ones(1), -1)
        assert file.nbytes == 10
    with pytest.raises(NvmeError, match="the file is closed"):
        file.submit_read(torch.ones(1))
    for options in ({"num_threads": 0}, {"piece_bytes": 1000}):
        with pytest.raises(NvmeError, match=next(iter(options))):
            nvme.IOEngine(**options)


def test_waiting_has_an_end(file: Any, disk: Disk) -> None:
    disk.gate.clear()
    request = file.submit_write(torch.ones(10), 0, "w")
    with pytest.raises(TimeoutError, match=r"write of .* of w at offset 0: still in flight"):
        request.wait(0.01)
    assert not request.is_done
    disk.gate.set()
    assert torch.equal(request.wait(30), torch.ones(10))
