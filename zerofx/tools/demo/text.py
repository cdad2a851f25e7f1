"""Real text without a download: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from zerofx.errors import ZerofxError

VALID_EVERY = 16  # the first file and every 16th after it is held out
# tests and installed packages, and modules that are tables rather than code
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SKIPPED |= {"encodings", "pydoc_data"}


@dataclass(frozen=True)
class Text:
    """Two flat uint8 tensors; no file lies in both."""

    train: Tensor
    valid: Tensor


def source_files(root: Path) -> list[Path]:
    """List the .py files under `root` in a fixed order, without tests and installed packages."""
    found = (p for p in root.rglob("*.py") if SKIPPED.isdisjoint(p.relative_to(root).parts))
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def load_text(limit_bytes: int = 4_000_000, root: Path | None = None) -> Text:
    """Read sources until `limit_bytes` are read, whole files only; the same on every rank.

    Raises:
        ZerofxError: no sources lie under `root` (a Python installed without them).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    train, valid, total = bytearray(), bytearray(), 0
    for number, path in enumerate(source_files(root)):
        if total >= limit_bytes:
            break
        data = path.read_bytes()
        (valid if number % VALID_EVERY == 0 else train).extend(data)
        total += len(data)
    if not train or not valid:
        raise ZerofxError(
            f"demo text: {root} has {total} bytes of .py files, too few for a train and a valid "
            "part. Use a Python that ships its standard library as sources."
        )
    return Text(
        torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8)
    )


@lru_cache(maxsize=4)
def _order(num_windows: int, seed: int, epoch: int) -> list[int]:
    """Shuffle the windows of an epoch; a list, so that it counts as no tensor memory."""
    return random.Random(f"{seed}/{epoch}").sample(range(num_windows), num_windows)


@dataclass(frozen=True)
class Batches:
    """Batches of one rank, a pure function of (seed, step): a resume needs only the step number.

    The text is cut into windows of `seq` bytes, shuffled again each epoch. Step s takes the next
    batch * world_size windows and rank r the r-th share of them, so ranks never see the same
    window within an epoch and the union over ranks depends on batch * world_size only.
    """

    tokens: Tensor
    batch: int
    seq: int
    rank: int = 0
    world_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise ZerofxError(
                f"demo text: {self.num_windows} windows of {self.seq} bytes do not fill one batch "
                f"of {self.batch} on each of {self.world_size} ranks. Read more text."
            )

    @property
    def num_windows(self) -> int:
        return (self.tokens.numel() - 1) // self.seq  # the last byte is only ever a target

    @property
    def steps_per_epoch(self) -> int:
        return self.num_windows // (self.batch * self.world_size)

    def windows(self, step: int) -> Tensor:
        """Return the window numbers of this rank at `step` (int64 [batch])."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first = (within * self.world_size + self.rank) * self.batch
        return torch.tensor(_order(self.num_windows, self.seed, epoch)[first : first + self.batch])

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of `step`, the targets one byte ahead.

        Shapes: both int64 [batch, seq].
        """
        place = self.windows(step)[:, None] * self.seq + torch.arange(self.seq + 1)
        taken = self.tokens[place].long()
        return taken[:, :-1].contiguous(), taken[:, 1:].contiguous()

    def run(self, first: int, last: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (step, x, y) for steps first .. last - 1."""
        for step in range(first, last):
            yield step, *self.at(step)
