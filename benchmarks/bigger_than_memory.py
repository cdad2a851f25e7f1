"""A GPT whose states are several times the memory of the process that trains it.

    python -m benchmarks.bigger_than_memory --folder /nvme/scratch
    python -m benchmarks.bigger_than_memory --folder /nvme/scratch --layers 32 --times 2

Parameters, gradients and Adam's states in fp32 are 16 bytes a parameter. A child process gets a
`--times`-th of that as its limit, for all that it has: interpreter, torch, buffers, the program
itself. The kernel enforces it (RLIMIT_DATA: every private writable page that is asked for), and the
peak of resident memory, which also counts pages of files and libraries, must stay under it too. The
model begins on meta and is never whole. Three runs of one seed: all on NVMe under the limit; on the
device without a limit, whose losses must be the same bits; on the device under the limit, which
must fail, or the limit would prove nothing.

The peak of resident memory is held against the prediction that was made before the first parameter
existed: what the process held after planning on paper, and what `Program.memory()` says of device
and host.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from functools import partial
from typing import Any

import torch

from benchmarks.bigger_job import on_meta
from benchmarks.report import Column, finish, need_memory
from zerofx.demo.gpt import GPTConfig

STATE_BYTES = 16  # a parameter's: itself, its gradient, two states of Adam, in fp32
TOLERANCE = 0.10  # of the prediction
# Told to give back what is freed; left alone, glibc keeps some hundred MiB that no schedule sees.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "2"}


def start(job: dict[str, Any], limit: int | None) -> subprocess.CompletedProcess[str]:
    """Run one training in a process that may have `limit` bytes, and wait for it."""

    def limited(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    return subprocess.run(
        [sys.executable, "-m", "benchmarks.bigger_job", json.dumps(job)],
        env={**os.environ, **MALLOC, **ONE_THREAD},
        preexec_fn=None if limit is None else partial(limited, limit),
        capture_output=True,
        text=True,
    )


def trained(job: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Return what a training found; it must end well."""
    done = start(job, limit)
    if done.returncode:
        raise SystemExit(f"the training ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def refusal(job: dict[str, Any], limit: int) -> str:
    """Return what ended a training that has too little memory."""
    done = start(job, limit)
    if not done.returncode:
        raise SystemExit(f"without offload the model trains in {limit} bytes too")
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"code {done.returncode}"


def measure(config: dict[str, int], batch: int, steps: int, times: float, folder: str) -> Any:
    """Return the row of one model."""
    job: dict[str, Any] = {"model": config, "batch": batch, "steps": steps, "folder": None}
    num_params = on_meta(GPTConfig(**config)).num_parameters()
    states = num_params * STATE_BYTES
    limit = int(states / times)
    need_memory(states + limit)
    return row(
        config,
        num_params,
        limit,
        far=trained({**job, "folder": folder}, limit),
        near=trained(job, None),
        refused=refusal(job, limit),
    )


def row(
    config: dict[str, int],
    num_params: int,
    limit: int,
    far: dict[str, Any],
    near: dict[str, Any],
    refused: str,
) -> dict[str, Any]:
    """Return what the runs amount to, and whether each target is met."""
    states = num_params * STATE_BYTES
    predicted = far["before_bytes"] + far["device_bytes"] + far["host_bytes"]
    error = far["peak_bytes"] / predicted - 1
    return {
        "model": f"{config['layers']}x{config['width']}",
        "num_params": num_params,
        "states_mib": states / 2**20,
        "limit_mib": limit / 2**20,
        "peak_mib": far["peak_bytes"] / 2**20,
        "predicted_mib": predicted / 2**20,
        "error": error,
        "times": states / max(limit, far["peak_bytes"]),
        "without_mib": near["peak_bytes"] / 2**20,
        "same": far["losses"] == near["losses"],
        "met": far["losses"] == near["losses"]
        and abs(error) <= TOLERANCE
        and far["peak_bytes"] <= limit,
        "without_offload": refused,
        "far": far,
        "near": near,
    }


COLUMNS = [
    Column("model", "model"),
    Column("states_mib", "states MiB", "{:.0f}"),
    Column("limit_mib", "limit MiB", "{:.0f}"),
    Column("times", "states / memory", "{:.2f}"),
    Column("peak_mib", "peak RSS MiB", "{:.0f}"),
    Column("predicted_mib", "predicted MiB", "{:.0f}"),
    Column("error", "error", "{:+.1%}"),
    Column("without_mib", "peak without offload MiB", "{:.0f}"),
    Column("same", "losses the same bits"),
    Column("met", "met"),
]


def main() -> None:
    """Measure what the command line chooses, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", required=True, help="on the disk to use")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--times", type=float, default=4.0, help="states over the limit")
    options = parser.parse_args()
    folder = vars(options).pop("folder")
    torch.set_num_threads(1)
    sizes = {key: getattr(options, key) for key in ("layers", "width", "heads", "seq")}
    found = measure(sizes, options.batch, options.steps, options.times, folder)
    finish("bigger_than_memory", COLUMNS, [found], options)


if __name__ == "__main__":
    main()
