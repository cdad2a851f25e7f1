"""The demo: train a byte-level GPT on the standard library's sources, sharded over ranks.

    zerofx demo                                      # 2 ranks, stage 3
    zerofx demo --resume zerofx-demo/snapshot        # continue from its snapshot

Started without ranks it starts them through torchrun; started by torchrun it is one of them. The
loop itself, `train_steps`, is an ordinary one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from zerofx.tools.demo.gpt import GPT, generate
from zerofx.tools.demo.measure import PeakMemory
from zerofx.tools.demo.options import Options, parse
from zerofx.tools.demo.report import Reporter, Result, write_files
from zerofx.tools.demo.text import Batches, load_text

SEED = 0
WARMUP_STEPS = 20
LOWEST_LR = 0.1  # of the highest, reached after --steps and kept
CLIP_NORM = 1.0
MEASURED_STEPS = 2  # after the first, which compiles and makes the optimizer's states
RESUMED_STEPS = 2  # the second of them depends on the optimizer's states too
VALID_BATCH = 64
PROMPT = b"def read_file(path):\n    "
SAMPLE_BYTES = 400


def main(argv: list[str] | None = None) -> int:
    """Run the demo, or start its ranks unless torchrun did; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    options = parse(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr
    if "RANK" in os.environ or options.ranks == 1:
        return train(options)
    threads = max(1, (os.cpu_count() or 1) // options.ranks)
    env = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = [f"--nproc-per-node={options.ranks}", "-m", "zerofx.tools.demo.train", *argv]
    return subprocess.run(torchrun + ranks, env=env, check=False).returncode


def train(options: Options) -> int:
    """Train on this rank, then save, show that the save resumes, and report on rank 0."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(world_size)
    text = load_text()
    batches = Batches(text.train, options.batch, options.seq, rank, world_size, SEED)
    with Reporter(rank, options.steps, options.batch * options.seq * world_size) as reporter:
        with PeakMemory(device) as memory:
            model, optimizer, first = build(options, device)
            reporter.built(options, world_size, device)
            last = first + options.steps
            steps = train_steps(model, optimizer, batches, first, last, options)
            began = time.perf_counter()
            losses = [next(steps)]
            reporter.compiled(time.perf_counter() - began)
            for _ in range(MEASURED_STEPS):
                with memory.step():
                    losses.append(next(steps))
            bases = bases_of(model)
        reporter.start(losses)
        for loss in steps:
            reporter.step(loss)
    full = zerofx.full_state_dict(model, rank0_only=True)
    resumes = save_and_resume(model, optimizer, batches, last, options)
    if rank == 0:
        valid_loss, sample = evaluate(full, options, text.valid)
        peak_bytes = max(peak.high_bytes for peak in memory.steps)
        result = Result(
            reporter.losses, reporter.tokens_per_s, peak_bytes, bases, valid_loss, resumes
        )
        program = next(p for p in model.programs if p.is_training)
        write_files(Path(options.out), program, sample)
        reporter.show(program, result, sample, options.out)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if resumes else 1


def pick_device(world_size: int) -> torch.device:
    """Return this rank's GPU if every rank of this host has one, else the CPU."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if torch.cuda.device_count() >= local_ranks:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def build(
    options: Options, device: torch.device
) -> tuple[zerofx.CompiledModule, torch.optim.Optimizer, int]:
    """Make the model and its optimizer; return them with the step to start at."""
    torch.manual_seed(SEED)
    model = zerofx.compile(GPT(options.model), options.plan, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    if not options.resume:
        return model, optimizer, 0
    extra = zerofx.load(options.resume, model, optimizer)
    return model, optimizer, extra["step"]


def lr_scale(step: int, steps: int) -> float:
    """Return the fraction of the highest learning rate: a short rise, then a straight fall."""
    return min((step + 1) / WARMUP_STEPS, max(LOWEST_LR, 1 - step / steps))


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    first: int,
    last: int,
    options: Options,
) -> Iterator[float]:
    """Train from step `first` to `last`, yielding this rank's loss after each."""
    device = next(model.parameters()).device
    for step, x, y in batches.run(first, last):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * lr_scale(step, options.steps)
        loss = model(x.to(device), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def save_and_resume(
    model: zerofx.CompiledModule,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    step: int,
    options: Options,
) -> bool:
    """Save, train on, load, train on again; return whether both gave the same losses, bit for bit.

    This is what `--resume` does in a new process, without compiling a second time. ATen and
    compiled kernels differ in the last bits: where a region changed its form between the two, both
    are trained once more.
    """
    folder = Path(options.out) / "snapshot"
    zerofx.save(folder, model, optimizer, extra={"step": step})
    end = step + RESUMED_STEPS
    while True:
        before = forms(model)
        went_on = list(train_steps(model, optimizer, batches, step, end, options))
        zerofx.load(folder, model, optimizer)
        again = list(train_steps(model, optimizer, batches, step, end, options))
        if forms(model) == before:
            return went_on == again
        zerofx.load(folder, model, optimizer)


def bases_of(model: zerofx.CompiledModule) -> set[str]:
    """Return the forms in which regions run, as bases of predicted memory: "aten", "compiled"."""
    running = model.zerofx.kernels
    on_aten = {"aten" for each in running if each.form == "aten" or each.on_aten or each.state}
    return on_aten | {"compiled" for each in running if each.form == "inductor"}


def forms(model: zerofx.CompiledModule) -> list[object]:
    """Return what the regions of each program run as; a value of its own while that alternates."""
    return [
        object() if each.form == "inductor" and each.state else (each.form, each.on_aten)
        for each in model.zerofx.kernels
    ]


def evaluate(full: dict[str, Tensor], options: Options, valid: Tensor) -> tuple[float, str]:
    """Load full weights into the plain model; return its loss on held-out files and a sample."""
    model = GPT(options.model).eval()
    model.load_state_dict(full)
    x, y = Batches(valid, VALID_BATCH, options.seq, seed=SEED).at(0)
    with torch.no_grad():
        loss = model(x, y).item()
    generator = torch.Generator().manual_seed(SEED)
    sample = generate(model, PROMPT, SAMPLE_BYTES, generator=generator)
    return loss, (PROMPT + sample).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
