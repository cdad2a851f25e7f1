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


class Mixed:
    """A Mixtral whose experts are larger than all else; all tokens go to the first two of eight."""

    def __init__(self, parallel: dict[str, Any] | None, is_even: bool) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(0)
        model = MixtralForCausalLM(
            MixtralConfig(
                hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=4, vocab_size=64, num_local_experts=8, num_experts_per_tok=2,
                use_cache=False,
            )
        )  # fmt: skip
        if not is_even:
            for layer in model.model.layers:
                torch.nn.init.zeros_(layer.mlp.gate.weight).requires_grad_(False)
        plan = {"kernels": "aten", "parallel": parallel, "outputs": "loss"}
        if "capacity" in (parallel or {}):
            plan["numerics"] = "fast"
        self.model: Any = zerofx.compile(model, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 64, (4, 64), generator=draw)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0.0


def weigh_experts(parallel: dict[str, Any] | None, is_even: bool) -> tuple[int, int, int]:
    """Return the peak, the predicted one, and the elements of the experts' weights."""
    trainee, measured = peak_bytes(lambda: Mixed(parallel, is_even))
    (program,) = trainee.model.programs
    held = {n: p for n, p in trainee.model.named_parameters() if "experts" in n}
    numel = sum(p.to_local().numel() for p in held.values())
    return measured, program.memory(basis="aten").peak_bytes, numel


@pytest.mark.slow
def test_peaks_of_whole_experts_are_known_whatever_their_loads(pool: Pool) -> None:
    """The first rank has all tokens of an uneven load; it holds no more than with an even one."""
    pytest.importorskip("transformers")
    experts = 2 * 8 * 3 * 64 * 256
    for is_even in (True, False):
        for measured, predicted, numel in pool.run(
            2, weigh_experts, {"tensor": 2, "experts": True}, is_even
        ):
            assert numel == experts // 2
            assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_peaks_of_experts_with_slots_are_known_whatever_their_loads(pool: Pool) -> None:
    """Of uneven loads most rows get no slot; memory is the same."""
    pytest.importorskip("transformers")
    parallel = {"tensor": 2, "experts": True, "capacity": 1.25, "sequence": True}
    for is_even in (True, False):
        for measured, predicted, _ in pool.run(2, weigh_experts, parallel, is_even):
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


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"sequence": True}, marks=pytest.mark.slow),
        pytest.param({"attention": "ring"}, marks=pytest.mark.slow),
    ],
)
def test_peaks_of_layers_and_sequences_are_known(pool: Pool, more: dict[str, Any]) -> None:
    """What collectives over both axes hold is counted."""
    pytest.importorskip("transformers")
    whole = pool.run(4, weigh_long, None)
    found = pool.run(4, weigh_long, {"tensor": 2, "context": 2} | more)
    for (measured, predicted, lasts), (most, _, others) in zip(found, whole, strict=True):
        assert measured == pytest.approx(predicted, rel=0.02)
        assert measured - lasts < 0.36 * (most - others)


class Attends(torch.nn.Module):
    """Layers whose attention, not whose logits, has the peak."""

    def __init__(self, heads: int, kept: int, is_padded: bool) -> None:
        super().__init__()
        self.heads, self.kept, self.is_padded = heads, kept, is_padded
        self.words = torch.nn.Embedding(32, 32 * heads)
        self.mix = torch.nn.Linear(32 * heads, 32 * (heads + 2 * kept), bias=False)
        self.back = torch.nn.Linear(32 * heads, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.words(ids)).unflatten(-1, (-1, 32)).transpose(1, 2)
        q, k, v = x.split([self.heads, self.kept, self.kept], 1)
        k, v = (
            x[:, :, None].expand(-1, -1, self.heads // self.kept, -1, -1).flatten(1, 2)
            for x in (k, v)
        )
        if self.is_padded:
            at = torch.arange(ids.shape[1])
            seen = (at <= at[:, None]) & (ids > 0)[:, None, None]
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)
        else:
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(mixed.transpose(1, 2).flatten(2)).square().mean()


class Attending:
    def __init__(
        self, heads: int, kept: int, parallel: dict[str, Any], precision: str, is_padded: bool
    ) -> None:
        plan = {"kernels": "aten", "stage": 3, "parallel": parallel, "precision": precision}
        self.model: Any = zerofx.compile(Attends(heads, kept, is_padded), plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, foreach=False)

    def step(self, number: int) -> float:
        draw = torch.Generator().manual_seed(number)
        self.model(torch.randint(0, 32, (2, 1024), generator=draw)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return 0.0


def weigh_ring(ranks: int, kept: int, precision: str, is_padded: bool) -> tuple[int, int, str]:
    """Return the peak, the predicted one, and the operator that is predicted to have it."""
    ring = {"context": ranks, "attention": "ring"}
    trainee, measured = peak_bytes(lambda: Attending(4, kept, ring, precision, is_padded))
    (program,) = trainee.model.programs
    memory = program.memory(basis="aten")
    at = memory.memory.life.nodes[memory.memory.peak_time][1]
    return measured, memory.peak_bytes, str(at.target)


@pytest.mark.parametrize(
    ("ranks", "kept", "precision", "is_padded"),
    [
        (2, 4, "fp32", False),
        pytest.param(2, 1, "fp32", False, marks=pytest.mark.slow),
        pytest.param(4, 4, "fp32", False, marks=pytest.mark.slow),
        pytest.param(2, 2, "bf16", False, marks=pytest.mark.slow),
        pytest.param(2, 4, "fp32", True, marks=pytest.mark.slow),
        pytest.param(4, 4, "fp32", True, marks=pytest.mark.slow),
        pytest.param(2, 2, "bf16", True, marks=pytest.mark.slow),
    ],
)
def test_peaks_of_a_ring_are_known(
    pool: Pool, ranks: int, kept: int, precision: str, is_padded: bool
) -> None:
    """The peak is inside of the backward of attention, and is that of the rank that has most.

    Of two ranks, one attends with all queries to half of the keys, the other the other way round.
    """
    found = pool.run(ranks, weigh_ring, ranks, kept, precision, is_padded)
    (predicted,) = {each[1] for each in found}
    assert all("ring_attention_backward" in shown for _, _, shown in found)
    most = max(measured for measured, _, _ in found)
    assert most == pytest.approx(predicted, rel=0.05)
