"""Extents as tensors over the file itself: the same bytes as requests move, and no locks kept."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from nvme_cases import random_bytes

from zerofx import nvme
from zerofx.errors import NvmeError
from zerofx.nvme.store import Mapped

SIZES = {"a": 100, "empty": 0, "b": 300_000}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with nvme.NvmeStore.create(tmp_path, SIZES, label="rank0") as store:
        yield store


def test_both_ways_see_the_same_bytes(store: Any) -> None:
    mapped = {name: Mapped(store, name) for name in SIZES}
    assert {name: m.memory.numel() for name, m in mapped.items()} == SIZES
    for seed in range(3):
        x = random_bytes(SIZES["b"], seed)
        store.write("b", x).wait()
        assert torch.equal(mapped["b"].memory, x)  # also where its pages were in memory before
        mapped["b"].memory.add_(1)
        mapped["b"].settle()
        assert torch.equal(store.read("b", torch.empty_like(x)).wait(), x + 1)
    assert not mapped["a"].memory.any()
    assert mapped["a"].memory.untyped_storage().nbytes() == 100


def test_what_is_written_through_one_is_noticed_there_alone(store: Any) -> None:
    a, b = Mapped(store, "a"), Mapped(store, "b")
    assert a.is_settled and b.is_settled and not a.is_written
    a.memory.view(torch.float32).fill_(1.0)
    assert not a.is_settled and b.is_settled
    with pytest.raises(NvmeError, match=r"of a at offset .* never written"):
        store.read("a", torch.empty(25)).wait()
    a.settle()
    assert a.is_settled and a.is_written
    assert torch.equal(store.read("a", torch.empty(25)).wait(), torch.ones(25))


def test_one_descriptor_for_all(tmp_path: Path) -> None:
    sizes = {f"bucket {i}": 5000 for i in range(50)}
    with nvme.NvmeStore.create(tmp_path, sizes, label="x") as store:
        Mapped(store, "bucket 0")
        before = len(os.listdir("/proc/self/fd"))
        mapped = [Mapped(store, name) for name in sizes]
        assert len(os.listdir("/proc/self/fd")) == before and len(mapped) == 50


def test_a_mapping_keeps_no_lock(tmp_path: Path) -> None:
    """A parameter that outlives its store must not make the file look alive."""
    store = nvme.NvmeStore.create(tmp_path, SIZES, label="x")
    mapped = Mapped(store, "a")
    mapped.memory.fill_(3)
    mapped.settle()
    store.close(delete=False)
    assert bool((mapped.memory == 3).all())
    with nvme.NvmeStore.open(store.path) as again:  # it takes the lock
        assert bool((again.read("a", torch.empty(100, dtype=torch.uint8)).wait() == 3).all())


def test_a_device_that_does_not_take_it(store: Any) -> None:
    class Failing:
        def flush(self, *_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

    mapped = Mapped(store, "a")
    mapped._map = Failing()  # type: ignore[assignment]
    with pytest.raises(NvmeError, match=r"cannot write a to .*rank0.*\(EIO\)"):
        mapped.settle()


def test_rest_keeps_what_was_written(store: Any) -> None:
    mapped = Mapped(store, "b")
    mapped.memory.fill_(9)
    mapped.rest()
    assert bool((mapped.memory == 9).all())
    assert mapped._pages[1] >= mmap.PAGESIZE
