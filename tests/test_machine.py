"""Machines: presets that agree with their devices, files, and the algorithm table."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import zerofx
from zerofx.errors import PlanError
from zerofx.machine import CPU_GLOO, CUDA_NCCL, PRESETS, Machine, machine_for


def test_each_device_type_has_its_preset() -> None:
    assert machine_for("cpu") is CPU_GLOO
    assert machine_for(torch.device("cuda", 3)) is CUDA_NCCL
    with pytest.raises(PlanError, match="no machine preset for device type 'meta'"):
        machine_for("meta")


def test_a_machine_is_given_by_value_name_or_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: cpu-gloo\nname: mine\nbucket_bytes: 8MiB\n")
    mine = dataclasses.replace(CPU_GLOO, name="mine", bucket_bytes=8 * 2**20)
    assert machine_for("cpu", "cuda-nccl") is CUDA_NCCL  # a laptop plans for GPUs
    assert machine_for("cpu", mine) is mine
    assert machine_for("cpu", path) == machine_for("cpu", str(path)) == mine


@pytest.mark.parametrize("machine", PRESETS.values(), ids=PRESETS.keys())
def test_a_machine_comes_back_from_its_file(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine.to_dict()))
    assert Machine.load(path) == machine
    assert hash(Machine.load(path)) == hash(machine)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: cpu-glo", "unknown machine 'cpu-glo'; did you mean 'cpu-gloo'?"),
        ("nam: x", "unknown machine field 'nam'; did you mean 'name'?"),
        ("name: x", "leaves out device_type, backend"),
        ("base: cpu-gloo\nbackend: mpi", "Machine.backend = 'mpi': allowed are 'gloo', 'nccl'"),
        ("base: cpu-gloo\nprefetch: -1", "Machine.prefetch = -1"),
        ("base: cpu-gloo\nlink_latency_us: 5", "unknown machine field 'link_latency_us'"),
    ],
)
def test_bad_machine_files_say_what_and_the_way_out(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(content)
    with pytest.raises(PlanError) as error:
        machine_for("cpu", path)
    assert message in str(error.value)


def test_direct_exchange_is_for_small_gloo_worlds_only() -> None:
    def at(machine: Machine, backend: str, nbytes: int, world_size: int) -> set[str]:
        collectives = ("gather", "reduce")
        return {machine.algorithm(c, backend, nbytes, world_size) for c in collectives}

    assert at(CPU_GLOO, "gloo", 2**20, 2) == at(CPU_GLOO, "gloo", 1, 8) == {"direct"}
    assert at(CPU_GLOO, "gloo", 2**20, 9) == at(CPU_GLOO, "gloo", 2**20, 1) == {"native"}
    for backend in ("nccl", "single", "simulated"):
        assert at(CPU_GLOO, backend, 2**20, 2) == {"native"}
    assert at(CUDA_NCCL, "nccl", 2**20, 2) == at(CUDA_NCCL, "gloo", 2**20, 2) == {"native"}
    large = dataclasses.replace(CPU_GLOO, direct_gather_min_bytes=2**16)
    assert large.algorithm("gather", "gloo", 2**16 - 1, 2) == "native"
    assert large.algorithm("gather", "gloo", 2**16, 2) == "direct"
    assert large.algorithm("reduce", "gloo", 2**16 - 1, 2) == "direct"


def test_every_field_has_a_reader() -> None:
    """A field that nothing reads promises the writer of a machine file what does not happen."""
    package = Path(zerofx.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py")]
    for field in dataclasses.fields(Machine):
        assert any(re.search(rf"\.{field.name}\b", text) for text in texts), field.name
