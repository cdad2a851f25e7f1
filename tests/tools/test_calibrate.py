"""Calibration: probes that run, transfers on real ranks, and hardware made of what was found."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from zerofx.analysis.time.kernels import PASSES, WINDOWS
from zerofx.comm.world import World
from zerofx.errors import DoctorError, PlanError
from zerofx.hardware import load_hardware, write_hardware
from zerofx.hardware.curve import KINDS, read_curves
from zerofx.tools.calibrate import compute, launch, transfers
from zerofx.tools.calibrate import probe as probe_module
from zerofx.tools.calibrate.convolutions import convolutions
from zerofx.tools.calibrate.crowd import Crowd, pace_step
from zerofx.tools.calibrate.describe import describe
from zerofx.tools.calibrate.disk import FILE_BYTES, Disk
from zerofx.tools.calibrate.probe import LEAST_S, TURNS, Probe, in_turn
from zerofx.tools.calibrate.transfers import Algorithms, Beside, Between, sum_bytes
from zerofx.tools.calibrate.view import CalibrationView
from zerofx.tools.cli import main

MADE_FIELDS = ("launch", "stream")


def test_a_probe_takes_as_many_calls_as_the_clock_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def work() -> None:
        now[0] += 2e-4

    monkeypatch.setattr(probe_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    probe = Probe("launch", 1, 10, lambda: work)
    probe.prepare()
    assert probe.calls is not None and LEAST_S < probe.calls * 2.1e-4 < 3 * LEAST_S
    for _ in range(3):
        probe.measure()
    assert len(probe.found_s) == 3 and probe.seconds == pytest.approx(2e-4)


def test_every_probe_of_compute_runs_and_has_its_kind() -> None:
    probes = [
        *compute.matmuls(),
        *convolutions(),
        *compute.attentions(),
        *compute.aten(),
        *compute.others(),
        Probe("pace", 1, 1, pace_step),
    ]
    for curve in {p.curve for p in probes}:  # the smallest of each
        probe = min((p for p in probes if p.curve == curve), key=lambda p: p.x)
        probe.make()()
    read_curves("curves", {p.curve: [[1, 1]] for p in probes if p.curve not in MADE_FIELDS})
    linear = next(p for p in probes if p.curve == "matmul.fp32")
    results = linear.make()()
    y, *_ = results  # type: ignore[misc]
    # Three products of the same number of operations: 2 a multiply-add.
    assert linear.amount == 3 * 2 * y.numel() * compute.WIDTHS[0]


def test_convolutions_multiply_what_they_are_said_to() -> None:
    """Each pass alone, at the fewest rows; curves have points of growing rows."""
    probes = [p for p in convolutions() if ".fp32." in p.curve]
    points: dict[str, list[Probe]] = {}
    for probe in probes:
        points.setdefault(probe.curve, []).append(probe)
    assert {tuple(name.split(".")[2:4]) for name in points} == set(product(PASSES, WINDOWS))
    for name, found in points.items():
        assert [p.x for p in found] == sorted({p.x for p in found})
        if name.endswith(".32"):
            work = found[0].make()
            with FlopCounterMode(display=False) as counted:
                work()
            assert counted.get_total_flops() == found[0].amount


def test_compiled_work_is_laid_out_as_probes_say() -> None:
    """Every kind reads and writes what its probes are weighed by, op by op as compiled."""
    size = 128 << 10
    a, b = compute.operands(size)
    for kind, function in compute.COMPILED.items():
        found = function(a, b)
        made = found[0] if isinstance(found, tuple) else found
        assert isinstance(made, torch.Tensor)
        if kind in compute.PASSED:
            reads = compute.PASSED[kind] - 1
            assert reads * size + made.nbytes == pytest.approx(
                compute.PASSED[kind] * size, rel=0.05
            )
        elif kind == "pool":
            assert made.numel() * compute.WINDOW**2 == compute.ELEMENTS[kind] * a.numel()


def test_chained_work_reads_what_it_wrote_and_keeps_it() -> None:
    """An op of a step reads what the ones before wrote, into memory that no cache holds."""
    probes = [p for p in compute.aten() if p.curve.startswith("memory.pointwise")]
    assert compute.CHAINED == ("pointwise", "reduction")
    seen: list[tuple[Tensor, Tensor]] = []

    def function(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a, b))
        return a - b

    a, b = compute.operands(1 << 10)
    work = compute._chain(function, a, b, "pointwise")
    for _ in range(3 * TURNS):
        work()
    assert all(new[1] is old[0] for old, new in itertools.pairwise(seen))
    assert len({t.data_ptr() for t, _ in seen[-TURNS:]}) == TURNS
    assert all(t.isfinite().all() for t, _ in seen)
    assert [p.x for p in probes] == [3 * size for size in compute.TENSOR_BYTES]


def test_turns_are_taken_by_tensors_of_their_own() -> None:
    made: list[list[int]] = []

    def make() -> Any:
        made.append([])
        mine = made[-1]
        return lambda: mine.append(len(made))

    work = in_turn(make)
    for _ in range(2 * TURNS):
        work()
    assert [len(calls) for calls in made] == [2] * TURNS


def test_the_disk_is_written_before_it_is_read(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.measure()
    disk.close()
    assert all(p.seconds > 0 and p.amount == FILE_BYTES for p in disk.probes)
    assert not list(tmp_path.iterdir())


def run_transfers() -> dict[str, float]:
    torch.set_num_threads(1)
    algorithms = Algorithms()
    world = World.connect("cpu", algorithm=algorithms)
    probes = [p for p in transfers.transfers(world, algorithms) if p.x <= 64 << 10]
    for probe in probes:
        probe.prepare()
        probe.measure()
    algorithms.now = "direct"
    launched = transfers.launches(world, 4 << 10)["reduce_scatter"]
    beside = Beside("reduce_scatter", launched, 4 << 10, 1e-4, world.size)
    between = Between("reduce_scatter", launched, 4 << 10, world.size)
    crowd = Crowd(world)
    for each in (beside, between, crowd):
        each.measure()
    found = {f"{p.curve} {p.x}": p.seconds for p in probes}
    found |= {f"{name} {x:.0f}": value for name, x, value in crowd.points()}
    return found | {beside.curve: beside.lost_s, between.curve: between.lost_s}


def test_transfers_of_every_kind_are_timed_on_ranks(pool: Any) -> None:
    found = pool.run(2, run_transfers)[0]
    kinds = {name.split(" ")[0] for name in found}
    assert kinds == {
        "all_gather.direct.2", "all_gather.native.2", "reduce_scatter.direct.2",
        "reduce_scatter.native.2", "all_reduce.direct.2", "all_to_all.direct.2",
        "broadcast.direct.2",
        "broadcast.native.2", "beside.reduce_scatter.2", "between.reduce_scatter.2", "crowd",
    }  # fmt: skip
    assert all(seconds > 0 for name, seconds in found.items() if "be" not in name)
    assert found["crowd 1"] == 1.0 and 0.2 < found["crowd 2"] < 20


def test_sums_are_those_that_the_runtime_makes() -> None:
    assert sum_bytes("reduce_scatter.direct.4", 1024, 4) == 256
    assert sum_bytes("all_reduce.direct.2", 1024, 2) == 1024
    assert sum_bytes("beside.all_reduce.4", 1024, 4) == 256
    assert sum_bytes("all_gather.direct.2", 1024, 2) == 0


def _report(ranks: int) -> dict[str, list[list[Any]]]:
    """Return a report of round figures: 100 GFLOPS, 10 GB/s, 1 GB/s to disk, all by hand."""
    slower = 1.25 if ranks > 1 else 1.0
    rates = [
        ["matmul.fp32", 1e6, 3e6, 1e-4], ["matmul.fp32", 1e9, 3e9, 0.03 * slower],
        ["attention.fp32", 1e8, 3.5e8, 7e-3], ["memory.pointwise.aten", 3e5, 3e5, 1.5e-5],
        ["heavy.aten", 1e4, 1e4, 1e-5], ["stream", 1, 2e8, 0.02 * slower],
        ["launch", 1, 1, 2e-6], ["host_copy", 1e6, 1e6, 1e-4 * slower],
        ["host_update", 1e6, 1e6, 1e-3 * slower],
    ]  # fmt: skip
    if ranks == 1:
        rates += [["nvme_read", 1e6, 1e9, 1.0], ["nvme_write", 1e6, 1e9, 2.0]]
        return {"rates": rates, "times": [["call.forward.1", 4, 100.0], ["pace", 1, 6e4]]}
    times = [
        ["crowd", 1, 1.0],
        ["crowd", 2, slower],
        ["all_gather.direct.2", 4e3, 50.0],
        ["all_gather.direct.2", 16e6, 4e3],
    ]
    return {"rates": rates, "times": times}


def test_what_was_found_becomes_hardware(tmp_path: Path) -> None:
    found = describe({1: _report(1), 2: _report(2)}, tmp_path)
    assert found.dense_flops_per_s == {"fp32": pytest.approx(100e9)}
    assert found.memory_bytes_per_s == pytest.approx(10e9)
    assert found.host_memory_bytes_per_s == pytest.approx(16e9)  # two at 8 each
    assert found.node_link_bytes_per_s == pytest.approx(2e9)  # half of 16 MB in 4 ms
    assert (found.node_latency_us, found.launch_us) == (50.0, pytest.approx(2.0))
    assert found.host_update_elements_per_s == pytest.approx(1.6e9)
    at = {name: curve.points[0][1] for name, curve in found.curves.items()}
    assert at["matmul.fp32"] == pytest.approx(0.3) and at["attention.fp32"] == pytest.approx(0.5)
    assert at["memory.pointwise.aten"] == pytest.approx(2.0)  # in a cache
    assert at["heavy.aten"] == pytest.approx(1000)  # elements a us
    assert at["host_update"] == pytest.approx(1 / 1.6) and at["host_copy.2"] == pytest.approx(0.8)
    assert found.curves["crowd"].points == ((1, 1), (2, pytest.approx(1.25)))
    assert found.curves["pace"].points == ((1, 6e4), (2, pytest.approx(7.5e4)))
    assert {name.split(".")[0] for name in at} <= set(KINDS)
    assert set(found.figures()) == set(found.sources)
    assert "products in fp32" in str(CalibrationView(found))

    write_hardware(found, tmp_path / "mine.yaml")
    assert load_hardware(tmp_path / "mine.yaml") == found
    assert found.dense_flops_per_s["fp32"] == pytest.approx(100e9)
    # One rank alone sends nothing: what comes closest to a link is a copy.
    assert describe({1: _report(1)}, tmp_path).node_link_bytes_per_s == pytest.approx(10e9)


def test_numbers_that_yaml_would_take_for_text_come_back(tmp_path: Path) -> None:
    mine = dataclasses.replace(
        load_hardware("cpu-box"), memory_bytes_per_s=1e16, launch_us=2e-7, network_bytes_per_s=3.0
    )
    write_hardware(mine, tmp_path / "mine.yaml")
    assert load_hardware(tmp_path / "mine.yaml") == mine
    with pytest.raises(PlanError, match="cannot be written: No such file or directory"):
        write_hardware(mine, tmp_path / "gone" / "mine.yaml")


def test_bad_calls_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(DoctorError, match=rf"{cores + 1} ranks need .* There (is|are) {cores}"):
        launch.calibrate(cores + 1)
    for argv, message in (
        (
            ["doctor", "--out", "x.yaml"],
            "--out and --folder for --calibrate alone. Add --calibrate.",
        ),
        (["doctor", "--calibrate", "--out", "x.txt"], "Give a name that ends in .yaml or .yml"),
        (["doctor", "--calibrate", "--folder", str(tmp_path / "gone")], "is no folder"),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        assert message in capsys.readouterr().err


def test_ranks_are_followed_while_they_measure() -> None:
    said: list[str] = []
    script = "import sys; print('round 1 of 2'); print('else'); print('no', file=sys.stderr)"
    ended = launch.follow([sys.executable, "-c", f"{script}; sys.exit(3)"], said.append)
    assert ended == (3, "  no") and said == ["round 1 of 2"]


@pytest.mark.slow
def test_this_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "ROUNDS", 1)
    world = min(2, len(os.sched_getaffinity(0)))
    path = tmp_path / "mine.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--calibrate", "--world", str(world), "--out", str(path)])
    assert not ended.value.code
    mine = load_hardware(path)
    assert mine.devices_per_node == world and "matmul.bf16" in mine.curves
    shown = capsys.readouterr()
    assert f"written to {path}" in shown.out
    assert "measuring one rank alone: round 1 of 1, " in shown.err
