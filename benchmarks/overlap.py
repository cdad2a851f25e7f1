"""Overlap of an optimizer on the host with the compute: one process, updates in backward.

    python -m benchmarks.overlap                      # 4x1024, batches 1 to 8, 8 rounds
    python -m benchmarks.overlap --states nvme --folder /nvme/scratch
    python -m benchmarks.overlap --batches 4 --hardware mine.yaml    # predicted and recorded too

In the measured step, gradients are copied to the host, and parameters are updated there bucket by
bucket during backward. It is compared with its three lanes, each measured alone: forward and
backward of the same model without offload; the update of all host shards; and copies of as many
bytes in as many pieces as in a step. With full overlap, a step takes as long as its longest lane.
`in turn` is the sum of the lanes, without any overlap. Everything runs once in every round, in
turn, on one thread of compute and one of updates; ratios are taken within a round.

With states on NVMe there is a fourth lane: reading and writing as many bytes in as many pieces, all
of them in flight as soon as there is a buffer, with as many buffers as the step has.

With --hardware (the output of `zerofx doctor --calibrate --out mine.yaml`), the step is predicted
lane by lane, and recorded: its compute, its length, and the time that the compute waited.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

import zerofx
from benchmarks import sizes
from benchmarks.report import Column, finish, need_memory
from benchmarks.sizes import make_batches
from benchmarks.systems import SEED, flat_adamw
from zerofx import nvme
from zerofx.analysis.time.steps import Lane
from zerofx.policy.staging import at_once_in_step
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, NVME_WRITE
from zerofx.tools.demo.gpt import GPT, GPTConfig

TARGETS = {"cpu": 1.15, "nvme": 1.25}  # relative to the longest lane, by the tier of the states
NUM_MODELS, BYTES_PER_PARAM = 3, 24
WARMUP_STEPS, RECORDED_STEPS = 2, 6
LANES = {
    "cpu": ("compute", "update", "transfer"),
    "nvme": ("compute", "update", "transfer", "disk"),
}


class Training:
    """One model under one plan, whose forward and backward are timed apart from its step."""

    def __init__(self, config: GPTConfig, x: Tensor, y: Tensor, **plan: Any) -> None:
        torch.manual_seed(SEED)
        plan = {"stage": 3, "kernels": "inductor", **plan}
        self.model = zerofx.compile(GPT(config), plan, device="cpu")
        self._optimizer = flat_adamw(self.model)
        self._batch = x, y
        for _ in range(WARMUP_STEPS):
            self.run()
            self.step()

    def run(self) -> None:
        """Run forward and backward."""
        self.model(*self._batch).backward()

    def step(self) -> None:
        """Update, unless backward has done it."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def drop(self) -> None:
        """Drop the gradients without an update."""
        self._optimizer.zero_grad()


def _two_places(nbytes: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)


def copies(model: zerofx.CompiledModule) -> Callable[[], None]:
    """Return a function with the same copies between device and host as a step of `model`."""
    moved = model.programs[0].memory().traffic.moved
    pieces: list[tuple[Tensor, Tensor]] = []
    for lane in (D2H, H2D):
        sent = moved[lane]
        nbytes = sent.sent_bytes // sent.calls
        pieces += [_two_places(nbytes) for _ in range(sent.calls)]

    def copy() -> None:
        for out, source in pieces:
            out.copy_(source)

    copy()  # so that its pages exist
    return copy


def disk(model: zerofx.CompiledModule, store: nvme.NvmeStore) -> Callable[[], None]:
    """Return a function with the same reads and writes as a step of `model`, in its own store.

    Each read and write has its own extent; `extents` lists them.
    """
    pieces = [(lane, *piece) for lane, piece in extents(model)]
    largest = max(nbytes for _, _, nbytes in pieces)
    buffers = [
        nvme.aligned_empty(largest, dtype=torch.uint8) for _ in range(2 * at_once_in_step() * 3)
    ]

    def move() -> None:
        under_way: list[nvme.Request] = []
        for number, (lane, name, nbytes) in enumerate(pieces):
            if len(under_way) >= len(buffers):
                under_way.pop(0).wait()
            buffer = buffers[number % len(buffers)][:nbytes]
            submit = store.read if lane == NVME_READ else store.write
            under_way.append(submit(name, buffer))
        for request in under_way:
            request.wait()

    for _, name, nbytes in pieces:  # nothing can be read before it is written
        store.write(name, buffers[0][:nbytes]).wait()
    return move


def extents(model: zerofx.CompiledModule) -> list[tuple[str, tuple[str, int]]]:
    """Return (lane, (name, bytes)) of a step's reads and writes, in order."""
    moved = model.programs[0].memory().traffic.moved
    each = [
        [(lane, (f"{lane}{i}", moved[lane].sent_bytes // moved[lane].calls))
         for i in range(moved[lane].calls)]
        for lane in (NVME_READ, NVME_WRITE)
    ]  # fmt: skip
    return [piece for pair in zip(*each, strict=True) for piece in pair]


def seconds(function: Callable[[], None]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(
    name: str, batch: int, rounds: int, states: str, folder: str, hardware: str | None
) -> dict[str, Any]:
    """Return the line for one size and batch."""
    config = sizes.SIZES[name].model
    x, y = make_batches(name, batch, rank=0, ranks=1).at(0)
    plain = Training(config, x, y)
    after = Training(config, x, y, offload={"optimizer": "cpu"})
    offload = {"optimizer": states} | ({"path": folder} if states == "nvme" else {})
    within = Training(config, x, y, offload=offload, update="in-backward")
    with ExitStack() as stack:
        alone = {"transfer": copies(within.model)}
        if states == "nvme":
            sizes_of = dict(piece for _, piece in extents(within.model))
            store = nvme.NvmeStore.create(folder, sizes_of, label="overlap")
            alone["disk"] = disk(within.model, stack.enter_context(store))
        found: dict[str, list[float]] = {key: [] for key in (*LANES[states], "after", "step")}

        def compute() -> None:
            found["compute"].append(seconds(plain.run))
            plain.drop()

        def in_turn() -> None:
            run, update = seconds(after.run), seconds(after.step)
            found["update"].append(update)
            found["after"].append(run + update)

        def lanes() -> None:
            for lane, move in alone.items():
                found[lane].append(seconds(move))

        def overlapped() -> None:
            found["step"].append(seconds(within.run) + seconds(within.step))

        parts = [compute, in_turn, lanes, overlapped]
        for number in range(rounds):
            first = number % len(parts)
            for part in parts[first:] + parts[:first]:
                part()
    more = {} if hardware is None else foreseen(within, hardware)
    return line(name, batch, states, found) | more


def foreseen(training: Training, hardware: str) -> dict[str, Any]:
    """Return a step as predicted, lane by lane, and as recorded, in milliseconds."""
    with zerofx.record(training.model) as recording:
        for _ in range(RECORDED_STEPS):
            training.run()
            training.step()
    (program,) = training.model.programs
    (measured,) = recording.of(program)
    found = zerofx.predict(program, hardware=hardware).forecast.timeline
    lanes = {lane.value: us / 1e3 for lane, us in found.busy_us.items() if us}
    compute = sum(s.us for s in measured.spans if s.lane is Lane.COMPUTE and s.kind != "wait")
    return {
        "predicted_ms": found.step_us / 1e3, "recorded_ms": measured.step_us / 1e3,
        "predicted_compute_ms": lanes[Lane.COMPUTE.value], "recorded_compute_ms": compute / 1e3,
        "predicted_lanes_ms": lanes, "recorded_waits_ms": measured.exposed_us / 1e3,
    }  # fmt: skip


def line(name: str, batch: int, states: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians over rounds of each lane and of the ratios within a round."""
    lanes, target = LANES[states], TARGETS[states]
    each = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    longest = [max(one[lane] for lane in lanes) for one in each]
    in_turn = [sum(one[lane] for lane in lanes) for one in each]
    ratios = [one["step"] / most for one, most in zip(each, longest, strict=True)]
    ratio = statistics.median(ratios)
    milliseconds = {f"{key}_ms": statistics.median(v) * 1e3 for key, v in found.items()}
    turns = [total / most for total, most in zip(in_turn, longest, strict=True)]
    return {
        "size": name, "batch": batch, "states": states, "ratio": ratio, "target": target,
        "met": ratio <= target, "low": min(ratios), "high": max(ratios),
        "in_turn": statistics.median(turns), "disk_ms": None, **milliseconds, "rounds": found,
    }  # fmt: skip


COLUMNS = [
    Column("size", "size"),
    Column("batch", "batch"),
    Column("states", "states"),
    Column("ratio", "step / longest lane", "{:.2f}"),
    Column("target", "target", "{:.2f}"),
    Column("met", "met"),
    Column("low", "lowest", "{:.2f}"),
    Column("high", "highest", "{:.2f}"),
    Column("in_turn", "in turn", "{:.2f}"),
    *(Column(f"{lane}_ms", f"{lane} ms", "{:.1f}") for lane in LANES["nvme"]),
    Column("after_ms", "step, update after, ms", "{:.1f}"),
    Column("step_ms", "step, update within, ms", "{:.1f}"),
]
FORESEEN = [
    Column("predicted_ms", "predicted ms", "{:.0f}"),
    Column("recorded_ms", "recorded ms", "{:.0f}"),
    Column("predicted_compute_ms", "compute predicted ms", "{:.0f}"),
    Column("recorded_compute_ms", "compute recorded ms", "{:.0f}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="4x1024", choices=list(sizes.SIZES))
    parser.add_argument("--batches", default="1,2,4,8", help="sequences per step")
    parser.add_argument(
        "--states", default="cpu", choices=list(TARGETS), help="the tier of the states"
    )
    parser.add_argument("--folder", help="a folder on the disk to use, for --states nvme")
    parser.add_argument("--rounds", type=int, default=8, help="a claim needs 8 or more")
    parser.add_argument(
        "--hardware", help="a hardware file: also predict the step on it, and record it"
    )
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        parser.error("this machine has one core, so an update cannot run next to the compute")
    if options.states == "nvme" and options.folder is None:
        parser.error("--states nvme needs a --folder on the disk to use")
    torch.set_num_threads(1)
    need_memory(sizes.SIZES[options.size].num_params * BYTES_PER_PARAM * NUM_MODELS)
    batches = [int(batch) for batch in options.batches.split(",")]
    folder = vars(options).pop("folder")
    hardware = vars(options).pop("hardware")
    lines = [
        measure(options.size, b, options.rounds, options.states, folder, hardware) for b in batches
    ]
    finish("overlap", COLUMNS + (FORESEEN if hardware else []), lines, options)


if __name__ == "__main__":
    main()
