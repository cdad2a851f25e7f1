"""What a step really holds and sends: torch's allocator and the world's own counters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.measured import train
from zerofx import ops
from zerofx.analysis.time.traffic import traffic
from zerofx.hardware import Hardware
from zerofx.ir.program import Loop
from zerofx.tools.demo.gpt import GPT, GPTConfig

BATCH, SEQ = 4, 64
TOLERANCE = 0.02  # what is promised is 0.05
ATEN = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 1024}
Call = Callable[[int], Tensor]  # runs a step's forward on the batch of that number


@dataclass(frozen=True)
class Measured:
    """One rank's steady state, and what its program predicts.

    sent: kind of collective -> (calls, bytes) in one step.
    padded_numel, regathered_numel: elements of all buckets, and of those that backward gathers.
    shard_bytes: what all gradients on this rank take, and all parameters.
    moved: lane between device and host -> (copies, bytes) in one step.
    host_bytes: on the host, on its way or living there, all of which the peaks leave out.
    """

    peak_bytes: int
    predicted_bytes: int
    predicted_loss_only_bytes: int
    sent: dict[str, tuple[int, int]]
    predicted_sent: dict[str, tuple[int, int]]
    padded_numel: int
    regathered_numel: int
    shard_bytes: int
    moved: dict[str, tuple[int, int]]
    predicted_moved: dict[str, tuple[int, int]]
    host_bytes: int
    predicted_host_bytes: int


# -- models large enough for tensors to outweigh what operators allocate inside ---------------
def _gpt(layers: int, width: int, batch: int = BATCH) -> Callable[[nn.Module | None], Any]:
    def made(model: nn.Module | None) -> nn.Module | Call:
        if model is None:
            return GPT(GPTConfig(layers=layers, width=width, heads=4, seq=SEQ))
        return lambda step: model(*_tokens(step, model, batch))

    return made


def _tokens(step: int, model: nn.Module, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 256, (batch, SEQ + 1), generator=torch.Generator().manual_seed(step))
    text = text.to(next(model.parameters()).device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Convs(nn.Module):
    """Convolutions with batch statistics, whose buffers every step updates."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 32, 64, 64]
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return self.head(x.mean((2, 3))).square().mean()


def _convs(model: nn.Module | None) -> nn.Module | Call:
    if model is None:
        return Convs()
    return lambda step: model(torch.randn(4, 3, 32, 32))


def _hf(model: nn.Module | None) -> nn.Module | Call:
    """GPT-2 of transformers, whose logits the caller drops at once."""
    if model is None:
        import transformers

        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=96, n_layer=3, n_head=4, n_positions=SEQ, vocab_size=512, bos_token_id=0,
                eos_token_id=0, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            )
        )  # fmt: skip

    def call(step: int) -> Tensor:
        tokens, _ = _tokens(step, model)
        return model(input_ids=tokens, labels=tokens).loss

    return call


class Wide(nn.Module):
    """Layers of 4 MiB each, so that their buckets are freed between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _wide(model: nn.Module | None) -> nn.Module | Call:
    if model is None:
        return Wide()
    return lambda step: model(torch.randn(64, 1024))


MODELS: dict[str, Callable[[nn.Module | None], Any]] = {
    "wide": _wide,
    # Blocks have gradients of more than is kept between steps, on two ranks too.
    "broad": _gpt(3, 256),
    # Activations are more than the gradients, also where parameters stay whole.
    "broad, twice the batch": _gpt(3, 256, 2 * BATCH),
    "broad, four blocks": _gpt(4, 256),  # one for each of four pipeline stages
    "gpt": _gpt(4, 96),
    # Gradients are several times the activations.
    "deep, one sample": _gpt(8, 256, 1),
    # Micro-batches save several times what blocks have of gradients.
    "gpt, large batch": _gpt(4, 96, 4 * BATCH),
    "convs": _convs,
    "hf-gpt2": _hf,
}


def measure(
    name: str,
    plan: dict[str, Any],
    on: str = "cpu",
    machine: Hardware | None = None,
    loop: Loop | None = None,
) -> Measured:
    """Train a model for some steps on this rank with AdamW, and measure one in the steady state."""
    how = loop or Loop()
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []
    trained = train(
        lambda: MODELS[name](None),
        lambda model, number: MODELS[name](model)(number),
        plan, on, machine, how,
        before_step=lambda model: seen.append((_counters(model), _moved(model))),
    )  # fmt: skip
    model = trained.model
    before, moved = seen[-1]
    after = _counters(model)
    program, *_ = programs = model.programs  # a rank of an interleaved pipeline has several
    own, loss_only = {"keeps_results": True, **asdict(how)}, asdict(how)
    expected = traffic(program, model._engine.world.rank)
    predicted = expected.kinds
    return Measured(
        peak_bytes=trained.peak.high_bytes,
        predicted_bytes=max(p.memory(basis="compiled", **own).peak_bytes for p in programs),
        predicted_loss_only_bytes=max(
            p.memory(basis="compiled", **loss_only).peak_bytes for p in programs
        ),
        sent={
            k: (after[k][0] - before[k][0], after[k][1] - before[k][1])
            for k in after
            if k in predicted or after[k] != before[k]
        },
        predicted_sent={k: (s.calls, s.sent_bytes) for k, s in predicted.items()},
        padded_numel=sum(b.numel for b in program.layout.buckets),
        regathered_numel=sum(
            n.args[2] for n in program.graph("backward").nodes if n.target is ops.all_gather
        ),
        shard_bytes=sum(s.nbytes for s in model._engine.store.shards),
        moved={k: (n - moved[k][0], b - moved[k][1]) for k, (n, b) in _moved(model).items()},
        predicted_moved={k: (s.calls, s.sent_bytes) for k, s in expected.moved.items()},
        host_bytes=trained.host_bytes,
        predicted_host_bytes=program.memory(basis="compiled").memory.host_bytes,
    )


def _counters(model: zerofx.CompiledModule) -> dict[str, tuple[int, int]]:
    counters = model._engine.world.counters
    return {kind: (t.calls, t.sent_bytes) for kind, t in counters.items()}


def _moved(model: zerofx.CompiledModule) -> dict[str, tuple[int, int]]:
    return {lane: (m.calls, m.nbytes) for lane, m in model._engine.host.moved.items()}
