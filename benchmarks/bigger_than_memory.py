"""A GPT whose states are several times the memory of the process that trains it.

    python -m benchmarks.bigger_than_memory --folder /nvme/scratch
    python -m benchmarks.bigger_than_memory --folder /nvme/scratch --layers 32 --times 2

Parameters, gradients and Adam's states in fp32 take 16 bytes per parameter. A child process may
have 1 / `--times` of that as resident memory for everything: interpreter, torch, buffers, the
program itself, and pages of mapped files. It is killed if it has more, and the peak that the kernel
reports must be below the limit too. (RLIMIT_DATA would count addresses without memory.) The model
starts on meta and is never whole. There are three runs with one seed. The first has everything on
NVMe, under the limit. The second is on the device without a limit; its losses must have the same
bits. The third is on the device under the limit, and must be killed, otherwise the limit would
prove nothing.

The peak resident memory is compared with the prediction that was made before the first parameter
existed: the memory that the process held after planning on paper, plus the device and host memory
reported by `Program.memory()`. The rest of the limit for the host is the plan's `host_budget`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.bigger_job import on_meta, status_bytes
from benchmarks.report import Column, finish, need_memory
from zerofx.tools.demo.gpt import GPTConfig

STATE_BYTES = 16  # per parameter: itself, its gradient, two states of Adam, in fp32
TOLERANCE = 0.10  # relative to the prediction
LOOK_S = 0.01  # interval at which a process with a limit is checked
# Makes glibc give back freed memory; by default it keeps some hundred MiB that no schedule sees.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "2"}


def run(job: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run one training in a process of its own, which is killed if it exceeds its limit."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bigger_job", json.dumps(job)],
            env={**os.environ, **MALLOC, **ONE_THREAD},
            stdout=out,
            stderr=err,
        ) as child,
    ):
        while child.poll() is None:
            if job["limit"] is not None and status_bytes("VmRSS", child.pid) > job["limit"]:
                child.kill()
            time.sleep(LOOK_S)
        texts = [file.seek(0) or file.read() for file in (out, err)]
        return subprocess.CompletedProcess(child.args, child.returncode, *texts)


def trained(job: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a training, which must succeed."""
    done = run(job)
    if done.returncode:
        raise SystemExit(f"the training ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def is_killed(job: dict[str, Any]) -> bool:
    """Return whether a training with too little memory is killed for it."""
    done = run(job)
    if done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"the training ended with code {done.returncode}:\n{done.stderr[-4000:]}")
    return done.returncode == -signal.SIGKILL


def measure(config: dict[str, int], batch: int, steps: int, times: float, folder: str) -> Any:
    """Return the row of one model."""
    num_params = on_meta(GPTConfig(**config)).num_parameters()
    states = num_params * STATE_BYTES
    limit = int(states / times)
    need_memory(states + limit)
    job: dict[str, Any] = {"model": config, "batch": batch, "steps": steps, "folder": None}
    return row(
        f"{config['layers']}x{config['width']}",
        states,
        limit,
        far=trained({**job, "folder": folder, "limit": limit}),
        near=trained({**job, "limit": None}),
        is_too_much=is_killed({**job, "limit": limit}),
    )


def row(
    name: str,
    states: int,
    limit: int,
    far: dict[str, Any],
    near: dict[str, Any],
    is_too_much: bool,
) -> dict[str, Any]:
    """Return the row for these runs, and whether all targets are met."""
    predicted = far["before_bytes"] + far["device_bytes"] + far["host_bytes"]
    error, is_same = far["peak_bytes"] / predicted - 1, far["losses"] == near["losses"]
    fits = far["peak_bytes"] <= limit
    return {
        "model": name,
        "states_mib": states / 2**20,
        "limit_mib": limit / 2**20,
        "times": states / far["peak_bytes"],
        "peak_mib": far["peak_bytes"] / 2**20,
        "predicted_mib": predicted / 2**20,
        "error": error,
        "without_mib": near["peak_bytes"] / 2**20,
        "same": is_same,
        "is_too_much": is_too_much,
        "met": is_same and fits and is_too_much and abs(error) <= TOLERANCE,
        "far": far,
        "near": near,
    }


COLUMNS = [
    Column("model", "model"),
    Column("states_mib", "states MiB", "{:.0f}"),
    Column("limit_mib", "limit MiB", "{:.0f}"),
    Column("times", "states / peak", "{:.2f}"),
    Column("peak_mib", "peak MiB", "{:.0f}"),
    Column("predicted_mib", "predicted MiB", "{:.0f}"),
    Column("error", "error", "{:+.1%}"),
    Column("without_mib", "peak without offload MiB", "{:.0f}"),
    Column("same", "losses bit for bit"),
    Column("is_too_much", "killed without offload"),
    Column("met", "met"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", required=True, help="a folder on the disk to use")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--times", type=float, default=4.0, help="size of the states divided by the limit"
    )
    options = parser.parse_args()
    folder = vars(options).pop("folder")
    torch.set_num_threads(1)
    sizes = {key: getattr(options, key) for key in ("layers", "width", "heads", "seq")}
    found = measure(sizes, options.batch, options.steps, options.times, folder)
    finish("bigger_than_memory", COLUMNS, [found], options)


if __name__ == "__main__":
    main()
