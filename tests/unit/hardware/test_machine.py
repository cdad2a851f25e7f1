"""Sizes and algorithms of hardware, and the names and forms that `machine=` takes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

import zerofx
from zerofx.errors import PlanError
from zerofx.hardware import Hardware, hardware_for, load_hardware

CPU, CUDA = load_hardware("cpu-box"), load_hardware("dgx-h100")
OLD = {  # what Machine.to_dict() wrote before there was one class
    "name": "mine", "device_type": "cpu", "backend": "gloo", "persist_below_bytes": 0,
    "bucket_bytes": 4194304, "direct_exchange_max_world": 8, "direct_gather_min_bytes": 0,
    "direct_reduce_min_bytes": 0, "offload_min_bytes": 65536, "prefetch": 3,
    "dense_flops_per_s": 69e9, "memory_bytes_per_s": 22e9, "host_link_bytes_per_s": 22e9,
}  # fmt: skip


def test_each_device_type_has_its_preset() -> None:
    assert hardware_for("cpu") is CPU
    assert hardware_for(torch.device("cuda", 3)) is CUDA
    with pytest.raises(PlanError, match="no machine preset for device type 'meta'"):
        hardware_for("meta")


def test_a_machine_is_given_by_value_name_or_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: cpu-gloo\nname: mine\nbucket_bytes: 8MiB\n")
    mine = dataclasses.replace(CPU, name="mine", bucket_bytes=8 * 2**20)
    assert hardware_for("cpu", "cuda-nccl") is CUDA  # a laptop plans for GPUs
    assert hardware_for("cpu", mine) is mine
    assert hardware_for("cpu", path) == hardware_for("cpu", str(path)) == mine


@pytest.mark.parametrize("machine", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_machine_comes_back_from_its_file(machine: Hardware, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine.to_dict()))
    assert zerofx.Machine.load(path) == machine
    assert hash(zerofx.Machine.load(path)) == hash(machine)


def test_the_names_and_forms_of_before_are_taken(tmp_path: Path) -> None:
    assert zerofx.Machine is zerofx.Hardware
    assert load_hardware("cpu-gloo") is CPU and load_hardware("cuda-nccl") is CUDA
    path = tmp_path / "old.json"
    path.write_text(json.dumps(OLD))
    program = zerofx.capture(torch.nn.Linear(4, 4), (torch.zeros(2, 4),))
    rewritten = [zerofx.rewrite(program, **{name: "dgx-h100"}) for name in ("machine", "hardware")]
    assert all(each.hardware is CUDA for each in rewritten)
    with pytest.raises(zerofx.errors.ArgumentError, match="two names of one parameter"):
        zerofx.rewrite(program, machine="dgx-h100", hardware="dgx-h100")
    made, loaded = zerofx.Machine(**OLD), hardware_for("cuda", path)
    assert dataclasses.replace(loaded, sources=made.sources) == made
    assert loaded.sources["memory_bytes_per_s"] == "given in old.json"
    assert made.dense_flops_per_s["fp32"] == made.dense_flops_per_s["bf16"] == 69e9
    # Figures that no machine had are those of the default hardware for the type of device.
    assert made.launch_us == CPU.launch_us and made.sources["launch_us"] == "as cpu-box"
    assert made.bucket_bytes == 4 * 2**20 and made.prefetch == 3 and not made.curves


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: cpu-glo", "unknown machine 'cpu-glo'. Did you mean 'cpu-gloo'?"),
        ("nam: x", "unknown machine field 'nam'. Did you mean 'name'?"),
        ("name: x", "leaves out device_type, backend"),
        ("base: cpu-gloo\nbackend: mpi", "Hardware.backend = 'mpi': allowed are 'gloo', 'nccl'"),
        ("base: cpu-gloo\nprefetch: -1", "Hardware.prefetch = -1"),
        ("base: cpu-gloo\nlink_latency_us: 5", "unknown machine field 'link_latency_us'"),
    ],
)
def test_bad_machine_files_say_what_and_the_way_out(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(content)
    with pytest.raises(PlanError) as error:
        hardware_for("cpu", path)
    assert message in str(error.value)


def test_direct_exchange_is_for_small_gloo_worlds_only() -> None:
    def at(machine: Hardware, backend: str, nbytes: int, world_size: int) -> set[str]:
        collectives = ("gather", "reduce")
        return {machine.algorithm(c, backend, nbytes, world_size) for c in collectives}

    assert at(CPU, "gloo", 2**20, 2) == at(CPU, "gloo", 1, 8) == {"direct"}
    assert at(CPU, "gloo", 2**20, 9) == at(CPU, "gloo", 2**20, 1) == {"native"}
    for backend in ("nccl", "single", "simulated"):
        assert at(CPU, backend, 2**20, 2) == {"native"}
    assert at(CUDA, "nccl", 2**20, 2) == at(CUDA, "gloo", 2**20, 2) == {"native"}
    large = dataclasses.replace(CPU, direct_gather_min_bytes=2**16)
    assert large.algorithm("gather", "gloo", 2**16 - 1, 2) == "native"
    assert large.algorithm("gather", "gloo", 2**16, 2) == "direct"
    assert large.algorithm("reduce", "gloo", 2**16 - 1, 2) == "direct"


def test_every_field_has_a_reader() -> None:
    """A field that nothing reads promises the writer of a machine file what does not happen."""
    package = Path(zerofx.__file__).parent
    texts = [path.read_text() for path in package.rglob("*.py")]
    for field in dataclasses.fields(Hardware):
        assert any(re.search(rf"\.{field.name}\b", text) for text in texts), field.name
