"""Model sizes at which the claims are made, and the training data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from zerofx.tools.demo.gpt import GPTConfig
from zerofx.tools.demo.text import Batches, load_text

TEXT_BYTES = 1_000_000


@dataclass(frozen=True)
class Size:
    """One row of a benchmark: the model, the batch of one rank, and the steps of one round."""

    model: GPTConfig
    batch: int
    steps: int

    @property
    def num_params(self) -> int:
        """Number of parameter elements: blocks 12 w^2 + 13 w each, embeddings, the last norm."""
        c = self.model
        return c.layers * (12 * c.width**2 + 13 * c.width) + (c.vocab + c.seq + 2) * c.width


SIZES = {
    "4x32": Size(GPTConfig(layers=4, width=32, heads=2, seq=16), batch=1, steps=60),
    "4x128": Size(GPTConfig(layers=4, width=128, heads=4, seq=128), batch=4, steps=12),
    "8x384": Size(GPTConfig(layers=8, width=384, heads=6, seq=256), batch=1, steps=3),
    "4x1024": Size(GPTConfig(layers=4, width=1024, heads=16, seq=128), batch=1, steps=2),
}


def add_options(parser: argparse.ArgumentParser, sizes: str) -> None:
    """Add the options that choose sizes."""
    known = ", ".join(f"{name} (seq {s.model.seq}, batch {s.batch})" for name, s in SIZES.items())
    parser.add_argument("--sizes", default=sizes, help=f"layers x width, among {known}")
    parser.add_argument("--batch", type=int, help="sequences per rank, instead of the size's own")


def chosen(options: argparse.Namespace) -> dict[str, Size]:
    """Return the chosen sizes by name."""
    unknown = set(options.sizes.split(",")) - set(SIZES)
    if unknown:
        raise SystemExit(f"--sizes: unknown {', '.join(sorted(unknown))}; known {', '.join(SIZES)}")
    sizes = {name: SIZES[name] for name in options.sizes.split(",")}
    if options.batch is None:
        return sizes
    return {name: replace(size, batch=options.batch) for name, size in sizes.items()}


def make_batches(name: str, batch: int, rank: int, ranks: int) -> Batches:
    """Return this rank's batches, which are the same for every system."""
    return Batches(load_text(TEXT_BYTES).train, batch, SIZES[name].model.seq, rank, ranks)
