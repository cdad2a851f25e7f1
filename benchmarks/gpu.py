"""zerofx on one CUDA device, each figure with its target.

    python -m benchmarks.gpu                      # under 10 minutes; 8 interleaved rounds
    python -m benchmarks.gpu --only adamw,small --elements 250000000
    python -m benchmarks.gpu --rehearse           # every line of it, tiny, on a CPU: no figures

adamw: one flat fp32 step, 28 bytes per element, as a fraction of a plain copy's bandwidth.
small: a launch-bound GPT, with CUDA graphs, compared with torch.compile without them.
loss-head: linear + cross-entropy in chunks (numerics="fast"), compared with all logits at once.
gpt: 1.3 B parameters in bf16 over fp32 weights, compared with torch.compile and FSDP2 on one rank.
For every zerofx training, also the predicted peak and the allocator's.

Each system has a process of its own, which sleeps while another runs its round. Ratios are medians
over rounds of the two values in a round. A failed row gives its reason, the others continue, and
the command exits with 1; a missed target is not a failure. Rows are printed and written as they are
completed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks.gpu_cases import CASES
from benchmarks.gpu_report import Results, Row
from benchmarks.gpu_rows import ADAMW, adamw_rows, training_rows
from benchmarks.gpu_runner import Budget

ROUNDS, REHEARSAL_ROUNDS = 8, 2
ELEMENTS, REHEARSAL_ELEMENTS = 1_000_000_000, 100_000


def read_options(args: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; require a GPU, unless this is a rehearsal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [ADAMW, *CASES]
    parser.add_argument("--only", default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}; a claim needs 8 or more")
    batch = "sequences, in gpt and loss-head; default 4; all systems of a case share the device"
    parser.add_argument("--batch", type=int, help=batch)
    parser.add_argument(
        "--elements", type=int, help=f"elements of the flat AdamW; default {ELEMENTS:,}"
    )
    parser.add_argument("--stage", type=int, default=3, help="stage of zerofx's plans; default 3")
    parser.add_argument(
        "--limit", type=float, default=540, help="time limit of the command in seconds"
    )
    parser.add_argument("--out", help="the JSON file; default: a new one in benchmarks/results")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    options = parser.parse_args(args)
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(known):
        parser.error(f"--only: unknown {', '.join(sorted(unknown))}; known {', '.join(known)}")
    options.rounds = options.rounds or (REHEARSAL_ROUNDS if options.rehearse else ROUNDS)
    default = REHEARSAL_ELEMENTS if options.rehearse else ELEMENTS
    options.elements = options.elements or default
    for name in ("rounds", "batch", "elements", "limit"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} is {value}, but must be positive")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error(
            f"this benchmark needs a CUDA device, but torch {torch.__version__} finds none. "
            "--rehearse runs the same code at tiny sizes on the CPU"
        )
    return options


def all_rows(options: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Yield each row as soon as it is known."""
    if ADAMW in options.only:
        yield from adamw_rows(options, budget)
    for name in CASES:
        if name in options.only:
            yield from training_rows(name, options, budget)


def main(args: list[str] | None = None) -> int:
    """Run the benchmark with the command line's options; return the exit code."""
    options = read_options(args)
    results = Results(options)
    for row in all_rows(options, Budget(options.limit)):
        results.add(row)
    results.finish()
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
