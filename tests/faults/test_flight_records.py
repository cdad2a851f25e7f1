"""Flight records: what a rank did last is there however it ends, and the postmortem names it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import Died, Pool
from typer.testing import CliRunner

from zerofx.comm import flight_recorder
from zerofx.comm.board import Entry
from zerofx.comm.differences import IF_RANK_0, STUCK, describe_difference
from zerofx.comm.flight_recorder import EVENT_BYTES, HEAD_BYTES, NUM_EVENTS, REASON_BYTES, recorder
from zerofx.comm.world import World
from zerofx.errors import DesyncError, DoctorError
from zerofx.tools.cli import app
from zerofx.tools.postmortem import _INSIDE, postmortem, read_record

LABEL = "all-gather of bucket 3 (blocks.0: w, b)"


def dies(folder: str, how: str) -> int:
    """Rank 1 comes to its end in the second call; return whether a record was kept meanwhile."""
    os.environ |= {"ZEROFX_FLIGHT_DIR": folder, "ZEROFX_TIMEOUT_S": "1"}
    world = World.connect("cpu")
    out = torch.empty(2 * 64)
    for number in range(2):
        world.agree(f"forward of program 3fa{number}", "")
        if world.rank == 1 and number == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(3)
                return 1
        try:
            world.all_gather(out, torch.zeros(64), LABEL).wait()
        except DesyncError:
            assert how != "ends well"
    return len(list(Path(folder).rglob("rank-*.jsonl")))


def test_a_killed_rank_leaves_its_record(pool: Pool, tmp_path: Path) -> None:
    _, dead = pool.run(2, dies, str(tmp_path), "killed", may_die=True)
    assert dead == Died(-signal.SIGKILL)
    found = postmortem(tmp_path)
    (world,) = found.worlds
    assert [r.rank for r in world.suspects] == [1] and not world.missing
    assert "rank 1 (process" in world.verdict and "ended without an error: killed" in world.verdict
    survivor, lost = world.records
    assert survivor.reached == (2, 2) and lost.reached == (2, 1)
    assert LABEL in survivor.reason and str(lost.process) in survivor.reason
    assert lost.state == "vanished" and [e.what for e in lost.events][-2:] == [
        LABEL,
        "forward of program 3fa1",
    ]


def test_a_rank_that_hangs_tells_where(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, dies, str(tmp_path), "hangs")
    (world,) = postmortem(tmp_path).worlds
    assert [r.rank for r in world.suspects] == [1]
    assert "did not come as far as the others" in world.verdict
    late = world.records[1]
    assert "another rank has given up" in late.reason
    assert any("test_flight_records.py" in line for line in late.stacks["MainThread"])


def test_ranks_that_end_well_leave_nothing(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, dies, str(tmp_path), "ends well")[0] in (1, 2)
    deadline = time.monotonic() + 5
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
    with pytest.raises(DoctorError, match="has no flight records"):
        postmortem(tmp_path)


SCRIPT = """
import sys, torch, zerofx
model = zerofx.compile(torch.nn.Linear(4, 4), zerofx.Plan(stage=3, kernels="aten"))
for number in range(3):
    if number == 2 and model.zerofx.world.rank == 1:
        raise ValueError("no more batches")
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_an_exception_of_the_users_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "ZEROFX_FLIGHT_DIR": str(tmp_path / "records")}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert "zerofx doctor --postmortem" in done.stderr
    shown = CliRunner().invoke(app, ["doctor", "--postmortem", str(tmp_path / "records")])
    assert shown.exit_code == 0
    assert "it ended with ValueError: no more batches. The others waited" in shown.output
    assert f"{script}:6 <module>" in shown.output
    as_json = CliRunner().invoke(
        app, ["doctor", "--postmortem", str(tmp_path / "records"), "--json"]
    )
    assert json.loads(as_json.output)["worlds"][0]["suspects"] == [1]


SAVES_ALONE = """
import torch, zerofx
model = zerofx.compile(torch.nn.Linear(4, 4), zerofx.Plan(stage=3, kernels="aten"))
for number in range(3):
    if number == 2 and model.zerofx.world.rank == 0:
        model.state_dict()
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_what_one_rank_did_alone_is_told_with_both_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES_ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "ZEROFX_FLIGHT_DIR": str(tmp_path / "records")}
    subprocess.run([*command, str(script)], env=environment, capture_output=True, timeout=120)
    (world,) = postmortem(tmp_path / "records").worlds
    assert world.verdict.startswith("rank 1 is about to run forward of Linear (call 6) while rank")
    assert "if rank == 0" in world.verdict and f"ank 1 was at {script}:7" in world.verdict


def raised(how: Callable[[], None]) -> DesyncError:
    """Raise a difference below a line of `how`."""
    try:
        how()
    except DesyncError as error:
        return error
    raise AssertionError


def differs() -> None:
    groups = {Entry(6, "state_dict", ""): [0], Entry(6, "forward of GPT", ""): [1]}
    raise DesyncError(describe_difference(groups, 6))


def saves() -> None:
    differs()


def trains() -> None:
    differs()


@pytest.mark.parametrize("is_killed", [False, True], ids=["both raise", "one is killed meanwhile"])
def test_ranks_that_differ_are_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    monkeypatch.setenv("ZEROFX_FLIGHT_DIR", str(tmp_path))
    for rank, how in enumerate((saves, trains)):
        record = recorder("20260101-000000-1", "1", rank, [0, 1])
        record.note(6, 0, "state_dict" if how is saves else "forward of GPT")
        if rank == 0 and is_killed:  # by a launcher
            assert record.path is not None
            data = record.path.read_bytes()
            own = f'"process": {os.getpid()}'.encode()
            gone = b'"process": 1'.ljust(len(own))
            record.path.write_bytes(data.replace(own, gone, 1))
            continue
        error = raised(how)
        record.end(f"it ended with DesyncError: {error}", False, error)
        record.close()
    (world,) = postmortem(tmp_path).worlds
    begins = "rank 1 is about to run forward of GPT (call 6) while rank 0 runs state_dict. Every"
    assert world.verdict.startswith(begins) and IF_RANK_0 in world.verdict
    assert f"{__file__}:{trains.__code__.co_firstlineno + 1} trains" in str(world)
    if is_killed:
        assert world.records[0].state == "vanished"
        return
    assert world.suspects == []
    for rank, how in enumerate((saves, trains)):
        line = f"{__file__}:{how.__code__.co_firstlineno + 1} {how.__name__}"
        assert f"ank {rank} was at {line}" in world.verdict


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [
        (f"every rank has launched it, but {STUCK}.", "Check the network."),
        ("it ended with DesyncError: the store does not answer", "the store does not answer."),
    ],
)
def test_what_all_ranks_gave_up_on_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, verdict: str
) -> None:
    monkeypatch.setenv("ZEROFX_FLIGHT_DIR", str(tmp_path))
    for rank in (0, 1):
        record = recorder("20260101-000000-1", "1", rank, [0, 1])
        record.note(6, 3, LABEL)
        record.end(reason, is_own=False)
        record.close()
    (world,) = postmortem(tmp_path).worlds
    assert world.verdict.endswith(verdict)


def test_lines_of_scripts_in_a_clone_are_shown() -> None:
    ours = "/root/zerofx/zerofx/api.py:3 run", "/x/site-packages/torch/nn/module.py:4 call"
    theirs = "/root/zerofx/examples/train.py:7 main", "/root/pytorch-fork/run.py:1 main"
    assert [line for line in (*ours, *theirs) if not _INSIDE.search(line)] == [*theirs]


# -- the file --------------------------------------------------------------------------------------


def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> flight_recorder.FlightRecorder:
    monkeypatch.setenv("ZEROFX_FLIGHT_DIR", str(folder))
    return recorder("20260101-000000-1", "1", 0, [0, 1])


def test_the_ring_keeps_the_last_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = made(tmp_path, monkeypatch)
    for number in range(NUM_EVENTS + 10):
        record.note(number, 0, f"forward {number} " + "\N{SNOWMAN}\n" * number)
    record.end("it ended with ValueError: \N{SNOWMAN}" + "x" * 9000, is_own=True)
    record.end("another", is_own=False)
    record.close()
    assert record.path is not None
    found = read_record(record.path)
    assert [e.event for e in found.events] == list(range(10, NUM_EVENTS + 10))
    assert found.events[-1].what.startswith(f"forward {NUM_EVENTS + 9} \N{SNOWMAN}")
    assert found.reason.startswith("it ended with ValueError: \N{SNOWMAN}xxx") and found.is_own
    assert all(json.loads(line) for line in record.path.read_text().splitlines())
    assert record.path.stat().st_size == HEAD_BYTES + REASON_BYTES + NUM_EVENTS * EVENT_BYTES
    assert record.path.stat().st_mode & 0o777 == 0o600


def test_damaged_records_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = made(tmp_path, monkeypatch)
    for number in range(5):
        record.note(number, number, LABEL)
    record.end("it ended", is_own=True)
    record.close()
    assert record.path is not None
    whole, rng, refused = record.path.read_bytes(), random.Random(0), 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.choice((rng.randrange(len(data)), rng.randrange(400), HEAD_BYTES + 20))
            data[at] = rng.randrange(256)
        record.path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            read_record(record.path)
        except DoctorError as error:
            refused += 1
            assert str(record.path) in str(error)
    assert refused > 100
    os.unlink(record.path)
    os.mkfifo(record.path)
    with pytest.raises(DoctorError, match="is no flight record"):
        postmortem(tmp_path)


def test_what_cannot_be_kept_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    record = made(tmp_path / "file", monkeypatch)
    record.note(1, 0, "forward")
    record.end("it ended", is_own=True)
    record.close()
    assert [r.getMessage() for r in caplog.records if "no flight record" in r.getMessage()]
    monkeypatch.setenv("ZEROFX_FLIGHT_DIR", "")
    assert recorder("20260101-000000-1", "1", 0, [0, 1]).path is None


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ZEROFX_FLIGHT_DIR", raising=False)
    monkeypatch.setattr(flight_recorder.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"zerofx-flight-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert recorder("20260101-000000-1", "1", 0, [0, 1]).path is None
    assert "is not a folder that only you can write to" in caplog.text
    folder.chmod(0o700)
    for number in range(30):
        (folder / f"2025-{number:02}").mkdir()
        (folder / f"2025-{number:02}" / "rank-0-1.jsonl").write_text("")
    record = recorder("20260101-000000-1", "1", 0, [0, 1])
    assert record.path is not None and record.path.exists()
    assert len(list(folder.iterdir())) == 21
    assert recorder("../escapes", "1", 0, [0, 1]).path is None
    record.close()
