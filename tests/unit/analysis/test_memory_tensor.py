"""Predicted and measured peaks of layers, and of sequences, that are cut over ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from pool import Pool

import zerofx
from benchmarks.turns import peak_bytes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr


class Trainee:
    """A Llama whose logits are larger than all else."""

    def __init__(self, parallel: dict[str, Any] | None, length: int = 64, **plan: Any) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
                num_key_value_heads=4, vocab_size=1024, use_cache=False,
            )
        )  # fmt: skip
        self.model: Any = zerofx.compile(model, {"kernels": "aten", "parallel": parallel, **plan})
        self.length = length
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 1024, (4, self.length), generator=draw)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0.0


def weigh(parallel: dict[str, Any] | None) -> tuple[int, int]:
    trainee, measured = peak_bytes(lambda: Trainee(parallel))
    (program,) = trainee.model.programs
    return measured, program.memory(basis="aten").peak_bytes


@pytest.mark.parametrize("sequence", [False, True])
def test_peaks_are_known_with_what_collectives_of_values_hold(pool: Pool, sequence: bool) -> None:
    pytest.importorskip("transformers")
    for measured, predicted in pool.run(2, weigh, {"tensor": 2, "sequence": sequence}):
        assert measured > 2**22
        assert measured == pytest.approx(predicted, rel=0.02)


def weigh_long(parallel: dict[str, Any] | None) -> tuple[int, int, int]:
    """Return the peak, the predicted one, and what is held between steps."""
    trainee, measured = peak_bytes(lambda: Trainee(parallel, 256, outputs="loss"))
    (program,) = trainee.model.programs
    memory = program.memory(basis="aten").memory
    return measured, memory.peak_bytes, sum(memory.lasting().values())


def test_peaks_of_cut_sequences_are_known_and_activations_are_halved(pool: Pool) -> None:
    pytest.importorskip("transformers")
    whole = pool.run(2, weigh_long, None)  # states are sharded over both ranks here, too
    found = pool.run(2, weigh_long, {"context": 2})
    for (measured, predicted, lasts), (most, _, _) in zip(found, whole, strict=True):
        assert measured == pytest.approx(predicted, rel=0.02)
        assert measured - lasts < 0.56 * (most - lasts)
