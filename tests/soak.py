"""The soak: a job of two ranks that trains for hours while its ranks are killed, stopped and ended.

    python tests/soak.py FOLDER --minutes 120      # again with the same folder: goes on

The job is made of segments, each with one fault at a random moment: SIGKILL of a rank, SIGSTOP of
one for a few seconds, SIGTERM as of a cluster that reclaims its machines, or none. After each, both
ranks start again and resume from the newest snapshot, of which one is saved every `EVERY` steps, in
the background. The soak is right if

- every survivor names the killed rank, and every step that runs twice has the same loss to the bit;
- all losses are those of a job that is never disturbed;
- in each segment, memory, descriptors and threads of the ranks stay flat once it is warm, and so do
  the bytes of the run's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "support")]

from pool import Died, Pool  # noqa: E402  (found by the lines above)

import zerofx  # noqa: E402
import zerofx.api  # noqa: E402  (not at the first call: a rank lost before it is missed later)
from zerofx.errors import ZerofxError  # noqa: E402
from zerofx.tools.demo.gpt import GPT, GPTConfig  # noqa: E402

EVERY, SAMPLED = 50, 25  # steps: between two saves, and between two samples
WARM = 200  # steps of a segment, after which memory must stay flat
GROWTH_MIB, GROWTH_COUNT = 24.0, 2  # how much a segment may grow after that
FAULTS = "kill", "kill", "stop", "end", "none"
Samples = list[dict[str, float]]
PAUSE_S = 0.05  # after each step, so that hours are not millions of steps to run undisturbed too
PLAN = {"stage": 3, "kernels": "inductor", "bucket_bytes": 0}


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=32, seq=32)
    model = zerofx.compile(GPT(config), PLAN)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int, rank: int) -> Tensor:
    draws = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(0, 256, (2, 32), generator=draws)


def step_of(run: tuple[Any, Any], step: int, rank: int) -> float:
    model, optimizer = run
    ids = batch(step, rank)
    loss = model(ids, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def sample(folder: Path) -> dict[str, float]:
    """Return what this process and the run's folder hold."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    sizes = []
    for path in files:
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # an old snapshot, just removed
            continue
    return {
        "rss_mib": int(resident) / 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "disk_mib": sum(sizes) / 2**20,
    }


def strike(fault: str, delay_s: float) -> None:
    """Send this process the signal of a fault after a delay, from another process."""
    number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}[fault]
    wake = f"sleep {delay_s}; kill -{int(number)} {os.getpid()}"
    if fault == "stop":
        wake += f"; sleep 3; kill -{int(signal.SIGCONT)} {os.getpid()}"
    os.posix_spawn("/bin/sh", ["sh", "-c", wake], os.environ)


@dataclass(frozen=True)
class Segment:
    """A part of the soak: its number of steps, and its fault.

    at: the step, counted from the start of the segment, in which the fault strikes `victim`, after
        `delay_s`; 0 is before the model is compiled.
    """

    steps: int
    fault: str
    victim: int
    at: int
    delay_s: float

    @classmethod
    def drawn(cls, rng: random.Random, steps: int) -> Segment:
        fault, victim = rng.choice(FAULTS), rng.randrange(2)
        is_early = fault in ("kill", "stop") and rng.random() < 0.2
        at = 0 if is_early else rng.randrange(1, steps)
        return cls(steps, fault, victim, at, rng.uniform(0.05, 1.0 if is_early else 0.2))


def run_segment(folder_name: str, segment: Segment) -> tuple[str, int, Samples, str]:
    """Train until the last step or the fault; return how it ended, the step and the samples."""
    folder, rank = Path(folder_name), int(os.environ["RANK"])
    samples: Samples = []
    step, is_victim = 0, rank == segment.victim and segment.fault != "none"
    if is_victim and not segment.at:
        strike(segment.fault, segment.delay_s)
    try:
        run = trained()
        preemption = zerofx.Preemption(run[0])
        extra = zerofx.resume(folder / "run", *run)
        step = first = extra["step"] if extra else 0
        with open(folder / f"losses-{rank}.jsonl", "a", buffering=1) as losses:
            while True:
                step += 1
                if is_victim and step == first + segment.at:
                    strike(segment.fault, segment.delay_s)
                losses.write(json.dumps([step, step_of(run, step, rank)]) + "\n")
                time.sleep(PAUSE_S)
                is_over = preemption.is_requested() or step == first + segment.steps
                if step % SAMPLED == 0:
                    samples.append({"step": step - first} | sample(folder))
                if is_over or step % EVERY == 0:
                    zerofx.save(folder / "run", *run, {"step": step}, step=step, keep=2,
                                background=not is_over)  # fmt: skip
                if is_over:
                    return "ended", step, samples, ""
    except ZerofxError as error:
        return "error", step, samples, f"{type(error).__name__}: {error}"


def undisturbed(steps: int) -> list[float]:
    rank = int(os.environ["RANK"])
    run = trained()
    return [step_of(run, step, rank) for step in range(1, steps + 1)]


def growth(samples: Samples) -> dict[str, float]:
    """Return how much each quantity grew between the first and the last third of warm samples."""
    warm = [each for each in samples if each["step"] >= WARM]
    third = len(warm) // 3
    if not third:
        return {}
    return {
        name: min(each[name] for each in warm[-third:]) - min(each[name] for each in warm[:third])
        for name in ("rss_mib", "descriptors", "threads", "disk_mib")
    }


def losses_of(folder: Path, rank: int) -> tuple[dict[int, float], list[int]]:
    """Return the loss of each step, and the steps that ran twice with different ones."""
    found: dict[int, float] = {}
    differing = []
    for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines():
        try:
            step, loss = json.loads(line)
        except ValueError:  # the rank was killed while it wrote
            continue
        if found.setdefault(step, loss) != loss:
            differing.append(step)
    return found, differing


def check(answers: list[Any], fault: str, victim: int) -> list[str]:
    """Return what was wrong with a segment."""
    wrong = []
    for rank, answer in enumerate(answers):
        if isinstance(answer, Died):
            if (fault, rank) != ("kill", victim):
                wrong.append(f"rank {rank} died with {answer.exitcode} under {fault!r}")
            continue
        how, step, samples, text = answer
        is_expected = how == ("error" if fault == "kill" else "ended")
        if not is_expected and not (fault == "kill" and how == "ended"):
            wrong.append(f"rank {rank} {how} at step {step} under {fault!r}: {text}")
        if how == "error" and f"rank {victim}" not in text:
            wrong.append(f"rank {rank} does not name rank {victim}: {text}")
        grown = growth(samples)
        limits = {"rss_mib": GROWTH_MIB, "descriptors": GROWTH_COUNT, "threads": GROWTH_COUNT}
        limits["disk_mib"] = 1.0
        wrong += [
            f"rank {rank}: {name} grew by {grown[name]:.1f} within a segment"
            for name, most in limits.items()
            if grown.get(name, 0.0) > most
        ]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=120.0, help="in all, of this folder")
    parser.add_argument("--steps", type=int, default=2000, help="of a segment")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    notes = given.folder / "segments.jsonl"
    rows = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    pool = Pool()
    try:
        while sum(row["seconds"] for row in rows) < 60 * given.minutes:
            each = Segment.drawn(random.Random(len(rows)), given.steps)
            fault, victim = each.fault, each.victim
            began = time.monotonic()
            answers = pool.run(
                2, run_segment, str(given.folder), each, may_die=True, timeout_s=1200.0
            )  # fmt: skip
            pool.renew()
            steps = [0 if isinstance(a, Died) else a[1] for a in answers]
            row = {
                "fault": fault, "seconds": time.monotonic() - began, "step": max(steps),
                "wrong": check(answers, fault, victim),
                "samples": [[] if isinstance(a, Died) else a[2] for a in answers],
            }  # fmt: skip
            rows.append(row)
            with open(notes, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{len(rows)}: {fault} of rank {victim}, step {row['step']}, "
                  f"{row['seconds']:.0f} s {'; '.join(row['wrong'])}", flush=True)  # fmt: skip
        wrong = [text for row in rows for text in row["wrong"]]
        found = [losses_of(given.folder, rank) for rank in (0, 1)]
        steps = max(max(losses) for losses, _ in found)
        wanted = pool.run(2, undisturbed, steps, timeout_s=7200.0)
        for rank, ((losses, differing), plain) in enumerate(zip(found, wanted, strict=True)):
            wrong += [f"rank {rank}: step {step} had two losses" for step in differing[:5]]
            other = [s for s, loss in losses.items() if plain[s - 1] != loss]
            wrong += [f"rank {rank}: the loss of step {step} differs" for step in other[:5]]
    finally:
        pool.close()
    for text in wrong:
        print(text)
    counts = Counter(row["fault"] for row in rows)
    print(f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes, {len(rows)} segments "
          f"({', '.join(f'{n} {fault}' for fault, n in sorted(counts.items()))}), {steps} steps, "
          f"{len(wrong)} faults")  # fmt: skip
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
