"""The model sizes that the claims are made at, and the data they train on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zerofx.demo.gpt import GPTConfig
from zerofx.demo.text import Batches, load_text

TEXT_BYTES = 1_000_000
NUM_BATCHES = 16  # made before the clock starts, then taken in turn


@dataclass(frozen=True)
class Size:
    """One row of a benchmark: the model, the batch of one rank, and the steps of one round."""

    model: GPTConfig
    batch: int
    steps: int

    @property
    def num_params(self) -> int:
        """Parameter elements: blocks 12 w^2 + 13 w each, embeddings, the last norm."""
        c = self.model
        return c.layers * (12 * c.width**2 + 13 * c.width) + (c.vocab + c.seq + 2) * c.width


SIZES = {
    "4x32": Size(GPTConfig(layers=4, width=32, heads=2, seq=16), batch=1, steps=60),
    "4x128": Size(GPTConfig(layers=4, width=128, heads=4, seq=128), batch=4, steps=12),
    "8x384": Size(GPTConfig(layers=8, width=384, heads=6, seq=256), batch=2, steps=2),
    "4x1024": Size(GPTConfig(layers=4, width=1024, heads=16, seq=128), batch=2, steps=2),
}


def make_batches(size: Size, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's batches, the same for every system."""
    text = load_text(TEXT_BYTES)
    batches = Batches(text.train, size.batch, size.model.seq, rank, ranks)
    return [batches.at(step) for step in range(NUM_BATCHES)]
