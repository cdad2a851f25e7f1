"""The weak scaling of Megatron-LM on A100s, 1.7 B to 1 T parameters, as published and predicted.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (arXiv 2104.04473): table 1, and section 5.1 for the formula of operations (recomputed
ones included), 2,048 tokens, a vocabulary of 51,200, fp16 and interleaved pipelines. The samples of
a micro-batch and the stages on each rank are not published: those here are ours.

Attention is written out, as it ran in 2021, so that its scores go through memory. With one kernel
for attention the 1.7 B of the first row would be a third faster. Products take the preset's rate,
which is the best that was measured later, on one shape, and dropout is left out: so predictions are
on the fast side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from zerofx.hardware import load_hardware
from zerofx.plan.plan import Plan
from zerofx.tools.demo.gpt import GPT, Attention, GPTConfig
from zerofx.tools.search.family import ModelFamily
from zerofx.tools.search.outcome import Outcome, outcome
from zerofx.tools.search.space import Choice
from zerofx.tools.targets import Target

SEQ, VOCAB = 2048, 51200


@dataclass(frozen=True)
class Row:
    """A row of table 1; `tflops` are those achieved per GPU."""

    billions: float
    heads: int
    width: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops: float

    @property
    def operations(self) -> float:
        """Operations of a step, recomputed ones included: the paper's formula."""
        squares = 96 * self.batch * SEQ * self.layers * self.width**2
        head = VOCAB / (16 * self.layers * self.width)
        return squares * (1 + SEQ / (6 * self.width) + head)

    @property
    def samples(self) -> int:
        """Samples of each group of ranks that share them."""
        return self.batch * self.tensor * self.pipeline // self.gpus


ROWS = [
    Row(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    Row(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    Row(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    Row(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    Row(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    Row(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Row(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    Row(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    Row(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    Row(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]
NAMED = {row.billions: row for row in ROWS}


class WrittenOut(Attention):
    """Causal self-attention as products, a mask and a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) * (width // self.heads) ** -0.5
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, time, width))


def target(row: Row, samples: int, written_out: bool = True) -> Target:
    sizes = {"layers": row.layers, "width": row.width, "heads": row.heads}
    with torch.device("meta"):
        model = GPT(GPTConfig(**sizes, seq=SEQ, vocab=VOCAB))
        ids = torch.zeros(samples, SEQ, dtype=torch.long)
    if written_out:
        for block in model.blocks:
            block.attn.__class__ = WrittenOut
    return Target("gpt", model, (ids, ids), {})


def priced(row: Row, samples: int, interleave: int = 1, written_out: bool = True) -> Outcome:
    """Return the figures of a row on DGX A100 nodes: its axes, and data parallel otherwise."""
    num = row.samples // samples
    parallel: dict[str, Any] = {}
    if row.tensor > 1:
        parallel |= {"tensor": row.tensor, "placements": {"embed": "rowwise"}}
    if row.pipeline > 1:
        parallel |= {"pipeline": row.pipeline, "micro_batches": num}
    if interleave > 1:
        parallel |= {"schedule": "interleaved", "interleave": interleave}
    plan = Plan.from_dict({
        "stage": 0, "precision": "fp16", "activations": "recompute", "kernels": "aten",
        "outputs": "loss", "parallel": parallel or "none",
    })  # fmt: skip
    family = ModelFamily(plan, target=target(row, samples, written_out))
    choice = Choice(plan, samples, num, no_sync=row.pipeline == 1)
    return outcome(choice, family, load_hardware("dgx-a100-80gb"), row.gpus)


def tflops(row: Row, found: Outcome) -> float:
    """Return operations per GPU and second, counted as the paper does."""
    return row.operations / row.gpus / found.step_us / 1e6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.billions} B")
def test_shapes_have_the_published_numbers_of_parameters(row: Row) -> None:
    model = target(row, 1).module
    numel = sum(p.numel() for p in model.parameters())
    assert numel / 1e9 == pytest.approx(row.billions, abs=0.06)
    assert row.gpus % (row.tensor * row.pipeline) == 0
    assert row.samples * (row.gpus // (row.tensor * row.pipeline)) == row.batch


# Samples of a micro-batch, stages on each rank, and what is predicted of what was published.
PREDICTED: list[tuple[float, int, int, float]] = [
    (1.7, 4, 1, 1.16),
    (3.6, 1, 1, 1.15),
    (7.5, 1, 1, 1.21),
    (18.4, 4, 1, 1.40),
    (39.1, 1, 2, 1.30),
    (76.1, 1, 3, 1.26),
    (145.6, 1, 2, 1.18),
    (310.1, 1, 2, 1.10),
    (529.6, 1, 1, 1.00),
    (1008.0, 1, 1, 1.01),
]


@pytest.mark.slow
@pytest.mark.parametrize(("billions", "samples", "interleave", "ratio"), PREDICTED)
def test_throughput_of_table_1(
    billions: float, samples: int, interleave: int, ratio: float
) -> None:
    """Each fits. Predictions are 0 to 40 % above, the least where products are the largest."""
    row = NAMED[billions]
    found = priced(row, samples, interleave)
    assert found.fits
    assert tflops(row, found) / row.tflops == pytest.approx(ratio, abs=0.02)


@pytest.mark.slow
def test_attention_through_memory_is_most_of_what_the_first_row_lacks() -> None:
    """One kernel for attention is 63 % above the published figure, attention written out 16 %.

    The range of the prediction, of 15 % each way, misses that figure by 1 %.
    """
    row = NAMED[1.7]
    fused, written = priced(row, 4, written_out=False), priced(row, 4)
    assert tflops(row, fused) / row.tflops == pytest.approx(1.63, abs=0.03)
    published_us = row.operations / row.gpus / row.tflops / 1e6
    assert published_us / written.figures["high_us"] == pytest.approx(1.01, abs=0.01)
