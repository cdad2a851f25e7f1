"""The board: what a row holds, what is cut, and who may write it."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from zerofx.comm import board
from zerofx.comm.agreement import Agreement
from zerofx.comm.board import FAILED, LEFT, PRESENT, ROW_BYTES, Entry, MemoryBoard
from zerofx.comm.differences import IF_RANK_0, describe_difference, is_difference
from zerofx.errors import DesyncError

LONG = "; ".join(f"blocks.{i}.weight=f32[1024, 1024]" for i in range(500))


def two_rows() -> tuple[MemoryBoard, MemoryBoard]:
    memory = bytearray(2 * ROW_BYTES)
    boards = MemoryBoard(memory, 0, 2), MemoryBoard(memory, 1, 2)
    for each in boards:
        each.attach()
    return boards


def test_the_last_two_calls_can_be_read() -> None:
    mine, theirs = two_rows()
    for call in (1, 2, 3):
        mine.post(call, f"forward {call}", "stage=3")
    assert theirs.call(0) == 3 and theirs.entry(0, 1) is None and theirs.entry(1, 1) is None
    entries = [theirs.entry(0, call) for call in (2, 3)]
    assert [(e.call, e.what, e.digest) for e in entries if e] == [
        (2, "forward 2", "stage=3"),
        (3, "forward 3", "stage=3"),
    ]


def test_texts_that_do_not_fit_are_cut_but_still_compared() -> None:
    mine, theirs = two_rows()
    mine.post(1, "forward" * 500, LONG)
    agreement = Agreement(theirs, [0, 1], timeout_s=1.0)
    with pytest.raises(DesyncError, match="rank 1 is about to run forwardforward"):
        agreement.agree("forward" * 500, LONG + " and its tail")
    assert theirs.state(0) == PRESENT and theirs.entry(0, 1) is not None


def test_the_first_reason_stays() -> None:
    mine, theirs = two_rows()
    mine.leave("out of memory " * 300, FAILED)
    mine.leave("its process ended", LEFT)
    assert theirs.state(0) == FAILED
    assert theirs.reason(0).startswith("out of memory") and len(theirs.reason(0)) < 2000


def test_a_forked_child_does_not_leave_for_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = two_rows()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    mine.leave("a loader's worker ended")
    assert theirs.state(0) == PRESENT


def test_a_dead_process_is_seen_even_unreaped() -> None:
    mine, theirs = two_rows()
    assert theirs.is_alive(0)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        mine.attach()
    assert theirs.is_alive(0)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and left a zombie
    assert not theirs.is_alive(0)
    child.communicate()
    assert not theirs.is_alive(0)


def test_a_process_reaped_while_it_is_looked_at_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    @contextlib.contextmanager
    def reap_after_opening(path: str, mode: str) -> Iterator[Any]:
        with open(path, mode) as file:
            child.kill()
            child.communicate()
            yield file

    monkeypatch.setattr(board, "open", reap_after_opening, raising=False)
    assert board.process_started(child.pid) == 0


def test_a_rank_is_no_dead_one_where_the_system_cannot_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, theirs = two_rows()

    def no_descriptor_left(path: str, mode: str) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(board, "open", no_descriptor_left, raising=False)
    assert theirs.is_alive(0)


def test_the_last_two_calls_may_be_broken_off() -> None:
    mine, theirs = two_rows()
    assert theirs.broke_off(0, 0) is None
    for call in (1, 2, 3):
        mine.post(call, f"forward {call}", "")
        if call != 2:
            mine.break_off(call, f"ValueError({call})")
    assert [theirs.broke_off(0, call) for call in (2, 3)] == [None, "ValueError(3)"]
    mine.break_off(3, "out of memory" * 100)
    mine.set_busy("compiling GPT" * 100)
    assert len(theirs.broke_off(0, 3) or "") < 512 and len(theirs.busy(0)) < 512
    assert theirs.entry(0, 3) is not None and theirs.reason(0) == ""


def test_differences_name_the_items_that_differ() -> None:
    most = Entry(4, "forward of program 3fa2", "stage=3; torch=2.13.0; params=12")
    odd = Entry(4, "forward of program 3fa2", "stage=3; torch=2.11.0; params=12")
    other = Entry(4, "save", "")
    assert describe_difference({most: list(range(9)), odd: [9], other: [10, 11]}, 4) == (
        "rank 9 is about to run forward of program 3fa2 (call 4) with torch=2.11.0, "
        "ranks 10, 11 are about to run save (call 4) "
        "while ranks 0, 1, 2, 3, 4, 5, 6, ... (9 in all) run forward of program 3fa2 with "
        "torch=2.13.0. Every rank must run save at the same point of the loop, also if only one "
        "rank uses the result. The usual cause is code under `if rank == 0:`: let all ranks run "
        "it, and rank 0 alone print and write files."
    )


@pytest.mark.parametrize(
    "alone", ["inference of GPT", "forward of GPT", "backward of GPT", "save", "clip_grad_norm_"]
)
def test_what_one_rank_does_alone_has_its_usual_cause(alone: str) -> None:
    calls = ["forward of GPT", "backward of GPT", "inference of GPT", "save", "state_dict"]
    for others in sorted({*calls} - {alone}):
        told = describe_difference({Entry(4, alone, ""): [0], Entry(4, others, ""): [1, 2]}, 4)
        assert is_difference(told)
        assert told.endswith(IF_RANK_0) == (alone != others)
    two_models = {
        Entry(1, "zerofx.compile of A", ""): [0],
        Entry(1, "zerofx.compile of B", ""): [1],
    }
    assert IF_RANK_0 not in describe_difference(two_models, 1)
