"""Hardware: presets that are complete and sourced, files that build on them, curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zerofx.errors import PlanError
from zerofx.hardware import Curve, hardware_for, hardware_names, load_hardware

GIB = 2**30


@pytest.mark.parametrize("name", hardware_names())
def test_every_preset_loads_and_every_figure_has_a_source(name: str) -> None:
    found = load_hardware(name)
    assert found.name == name and hash(found) == hash(load_hardware(name))
    assert set(found.figures()) == set(found.sources)
    assert all(len(source) > 3 for source in found.sources.values())
    # A device moves less through its links than through its memory, a node at least as much as one.
    assert found.memory_bytes_per_s >= found.node_link_bytes_per_s >= 0
    assert found.node_host_link_bytes_per_s >= found.host_link_bytes_per_s
    assert found.host_memory_bytes >= found.device_memory_bytes


@pytest.mark.parametrize("name", hardware_names())
def test_a_preset_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load_hardware(name).to_dict()))
    assert load_hardware(path) == load_hardware(name)


def test_the_presets_are_those_that_are_promised() -> None:
    assert hardware_names() == [
        "cpu-box", "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "dgx2-v100-32gb", "gb200",
        "h200", "mi300x",
    ]  # fmt: skip


def test_figures_of_the_dgx_2_are_the_papers() -> None:
    """The bandwidths that ZeRO-Infinity's section 6 names, and its 70 of 125 TFLOPS."""
    v100 = load_hardware("dgx2-v100-32gb")
    assert (v100.devices_per_node, v100.device_memory_bytes) == (16, 32 * GIB)
    assert (v100.host_link_bytes_per_s, v100.node_host_link_bytes_per_s) == (12e9, 64e9)
    assert (v100.nvme_read_bytes_per_s, v100.host_memory_bytes) == (28e9, 1.5e12)
    curve = v100.curve("matmul.fp16")
    assert curve is not None
    assert v100.dense_flops_per_s["fp16"] * curve.at(1e12) == pytest.approx(70e12)


def test_what_passes_plan_with() -> None:
    h100 = load_hardware("dgx-h100")
    assert (h100.bucket_bytes, h100.prefetch, h100.backend) == (64 * 2**20, 2, "nccl")
    assert h100.dense_flops_per_s["bf16"] == 989e12 > h100.dense_flops_per_s["fp32"]
    assert load_hardware("cpu-box").direct_exchange_max_world == 8
    assert hardware_for("cpu", h100) is h100
    with pytest.raises(PlanError, match=r"rate for matrix products in bf16[.] It has fp16, fp32"):
        load_hardware("dgx2-v100-32gb").check_format("bf16")


def test_a_file_builds_on_a_preset_or_on_another_file(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(
        "base: dgx-h100\nname: ours\nnetwork_bytes_per_s: 50 GB/s\n"
        "curves: {memory.pointwise.aten: [[1.0e+6, 0.5], [1.0e+8, 0.9]]}\n"
    )
    (tmp_path / "slow.yaml").write_text("base: ours.yaml\nname: slow\nlaunch_us: 9\n")
    ours, slow = load_hardware(tmp_path / "ours.yaml"), load_hardware(str(tmp_path / "slow.yaml"))
    assert ours.network_bytes_per_s == slow.network_bytes_per_s == 50e9
    assert ours.dense_flops_per_s == load_hardware("dgx-h100").dense_flops_per_s
    assert {"matmul.bf16", "memory.pointwise.aten"} < set(slow.curves)
    assert slow.sources["network_bytes_per_s"] == "given in ours.yaml"
    assert slow.sources["memory.pointwise.aten"] == "given in ours.yaml"
    assert slow.sources["launch_us"] == "given in slow.yaml"
    assert slow.sources["memory_bytes_per_s"].startswith("NVIDIA H100 data sheet")
    assert set(slow.figures()) == set(slow.sources)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: dgx-h10", "unknown hardware 'dgx-h10'. Did you mean 'dgx-h100'? Give cpu-box"),
        ("base: 3", "base = 3: allowed is the name of a preset or a file"),
        ("base: mine.yaml", "is its own base"),
        ("base: gone.yaml", "gone.yaml: No such file or directory"),
        ("nam: x", "unknown hardware field 'nam'. Did you mean 'name'?"),
        ("name: x", "leaves out device, device_type, backend"),
        ("base: h200\nbackend: mpi", "Hardware.backend = 'mpi': allowed are 'gloo', 'nccl'"),
        ("base: h200\nlaunch_us: -1", "Hardware.launch_us = -1: allowed are numbers from 0"),
        ("base: h200\nnetwork_bytes_per_s: 3 GiB/s", "network_bytes_per_s = '3 GiB/s'"),
        ("base: h200\ndevices_per_node: 0", "devices_per_node = 0: allowed are whole numbers"),
        ("base: h200\ndense_flops_per_s: {fp61: 1}", "unknown format 'fp61'. Did you mean 'fp16'?"),
        ("base: h200\ndense_flops_per_s: [3]", "Hardware.dense_flops_per_s = [3]: allowed is a m"),
        ("base: h200\ncurves: {matmull: [[1, 1]]}", "unknown curve 'matmull'. Did you mean 'mat"),
        ("base: h200\ncurves: {matmul.bf16: [[2, 1], [1, 1]]}", "It follows x = 2"),
        ("base: h200\ncurves: {matmul.bf16: [[1, 0]]}", "curves['matmul.bf16'] = [1, 0]: allowed"),
        ("base: h200\ncurves: {matmul.bf16: []}", "curves['matmul.bf16'] = []: allowed is a list"),
        ("base: h200\nsources: {launchus: x}", "unknown field 'launchus'. Did you mean 'laun"),
        ("base: h200\nsources: 5", "Hardware.sources = 5: allowed is a mapping"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_by_field(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(PlanError) as error:
        load_hardware(path)
    assert message in str(error.value)
    assert "mine.yaml" in str(error.value) or "gone.yaml" in str(error.value)


def test_unknown_names_are_told_the_nearest_and_all() -> None:
    with pytest.raises(PlanError) as error:
        load_hardware("dgx-a100")
    assert "Did you mean 'dgx-a100-" in str(error.value)
    assert all(name in str(error.value) for name in hardware_names())
    with pytest.raises(PlanError, match=r"unknown hardware 'zzz'[.] Give cpu-box, .*mi300x, or"):
        load_hardware("zzz")


def test_curves_follow_a_power_law_between_points_and_hold_their_ends() -> None:
    curve = Curve(((1e3, 0.1), (1e5, 0.4), (1e6, 0.5)))
    assert curve.at(1) == 0.1 and curve.at(1e9) == 0.5 and curve.at(1e5) == 0.4
    assert curve.at(1e4) == pytest.approx(0.2)
    assert curve.time_at(4e6) == pytest.approx(2.0) and curve.time_at(10) == 0.1
