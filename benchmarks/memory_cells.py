"""Cells of the memory matrix: models, plans, and the prediction and measurement of one cell."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.measured import train
from zerofx.analysis.memory.memory import peak_bytes
from zerofx.ir.program import Loop, Program
from zerofx.passes.decide import budget_for
from zerofx.tools.demo.gpt import GPT, GPTConfig

SEQ, WIDTH, LAYERS, VOCAB = 64, 192, 4, 2048
FEW, MANY = 2, 8  # samples: weights outweigh activations, or the other way round
SIDE, LABELS = 64, 1024
COUNTED = 12  # occurrences of a pair: higher counts are treated alike
SHARE = 0.4  # fraction of the way from the need of recomputing to that of keeping


@dataclass(frozen=True)
class Model:
    """One model: its constructor, the arguments of a call, and its tiled weights by name."""

    build: Callable[[int], nn.Module]  # takes the number of layers
    batch: Callable[[int, int], dict[str, Tensor]]  # (number, samples)
    tiling: dict[str, int]

    def forward(self, model: nn.Module, number: int, samples: int) -> Tensor:
        """Return the loss of a batch; other results are dropped at once, as in most loops."""
        found = model(**self.batch(number, samples))
        return found if isinstance(found, Tensor) else found.loss


def _drawn(number: int, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(number))


def _text(number: int, samples: int) -> dict[str, Tensor]:
    tokens = _drawn(number, 256, samples, SEQ + 1)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def _ids(number: int, samples: int) -> dict[str, Tensor]:
    tokens = _drawn(number, VOCAB, samples, SEQ)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _pixels(number: int, samples: int) -> dict[str, Tensor]:
    given = torch.Generator().manual_seed(number)
    pixels = torch.randn(samples, 3, SIDE, SIDE, generator=given)
    return {"pixel_values": pixels, "labels": _drawn(number, LABELS, samples)}


def _hf(kind: str, head: str, depth: str, **fields: Any) -> Callable[[int], nn.Module]:
    """Return a constructor of a transformers model from a small configuration.

    depth: the field that takes the number of layers; for a ResNet, half of it in each of 3 stages.
    """

    def build(layers: int) -> nn.Module:
        import transformers

        value = [max(layers // 2, 1)] * 3 if depth == "depths" else layers
        config = getattr(transformers, f"{kind}Config")(**fields, **{depth: value})
        return getattr(transformers, kind + head)(config)

    return build


_SIZES = {
    "depth": "num_hidden_layers", "hidden_size": WIDTH, "num_attention_heads": 4,
    "intermediate_size": 4 * WIDTH,
}  # fmt: skip
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt": Model(
        lambda layers: GPT(GPTConfig(layers=layers, width=WIDTH, heads=4, seq=SEQ)),
        _text,
        {"blocks.*.mlp": 4},
    ),
    "gpt2": Model(
        _hf("GPT2", "LMHeadModel", "n_layer", n_embd=WIDTH, n_head=4, n_positions=SEQ,
            vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, use_cache=False, attn_pdrop=0.0,
            embd_pdrop=0.0, resid_pdrop=0.0),
        _ids,
        {"transformer.h.*.mlp": 4},
    ),
    "llama": Model(
        _hf("Llama", "ForCausalLM", vocab_size=VOCAB, use_cache=False, num_key_value_heads=2,
            max_position_embeddings=SEQ, **_SIZES),
        _ids,
        {"lm_head": 8, "model.layers.*.mlp": 4},
    ),
    "bert": Model(
        _hf("Bert", "ForMaskedLM", vocab_size=VOCAB, max_position_embeddings=SEQ, **_STILL,
            **_SIZES),
        _ids,
        {"bert.encoder.layer.*.intermediate": 4, "bert.encoder.layer.*.output": 4},
    ),
    "vit": Model(
        _hf("ViT", "ForImageClassification", image_size=SIDE, patch_size=8, num_labels=LABELS,
            **_SIZES),
        _pixels,
        {"classifier": 4, "vit.layers.*.mlp": 4},
    ),
    "resnet": Model(
        _hf("ResNet", "ForImageClassification", "depths", embedding_size=32,
            hidden_sizes=[64, 128, 256], layer_type="basic", num_labels=LABELS),
        _pixels,
        {"classifier": 4},
    ),
}  # fmt: skip
CHOICES: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "stage": (0, 1, 2, 3),
    "world": (1, 2),
    "activations": ("keep", "recompute", "half", "auto", "offload"),
    "tiling": ("off", "pattern", "auto"),
    "kernels": ("aten", "inductor"),
    "offload": ("none", "states", "all", "states-nvme", "all-nvme"),
}


@dataclass(frozen=True)
class Cell:
    """One combination. `tiling` needs parameters that are gathered: stage 3 and two ranks."""

    model: str
    stage: int
    world: int
    activations: str
    tiling: str
    kernels: str
    offload: str = "none"
    layers: int = LAYERS
    accumulation: int = 1
    no_sync: bool = False

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in CHOICES)

    @property
    def samples(self) -> int:
        """Samples per batch: tiling="auto" only cuts what is large next to activations."""
        return FEW if self.tiling == "auto" else MANY

    def pairs(self) -> list[tuple[tuple[str, Any], ...]]:
        """Return every pair of a choice with another."""
        return list(itertools.combinations([(name, getattr(self, name)) for name in CHOICES], 2))


def all_cells() -> Iterator[Cell]:
    """Yield every combination that is meaningful, in a fixed order."""
    for chosen in itertools.product(*CHOICES.values()):
        cell = Cell(*chosen)
        is_tiled = cell.tiling == "off" or (cell.stage, cell.world) == (3, 2)
        if is_tiled and cell.stage >= _LEAST_STAGE.get(cell.offload, 1):
            yield cell


def cover(count: int) -> list[Cell]:
    """Return `count` cells in which every pair of choices occurs.

    They are chosen greedily, for an even count of pairs: each next cell is the one whose pairs have
    occurred least.

    Raises:
        ValueError: `count` cells leave out a pair.
    """
    left = list(all_cells())
    times = dict.fromkeys((p for cell in left for p in cell.pairs()), 0)
    found: list[Cell] = []
    while len(found) < count:
        best = max(
            left, key=lambda cell: sum(10 ** max(COUNTED - times[p], 0) for p in cell.pairs())
        )
        left.remove(best)
        found.append(best)
        for pair in best.pairs():
            times[pair] += 1
    missing = [p for p, n in times.items() if n == 0]
    if missing:
        raise ValueError(f"{count} cells leave out {len(missing)} pairs, {missing[0]} first")
    return sorted(found, key=lambda cell: tuple(map(str, asdict(cell).values())))


_LEAST_STAGE = {"none": 0, "all": 3, "all-nvme": 3}


# -- a cell's plan ------------------------------------------------------------------------------
_TIERS: dict[str, dict[str, str]] = {
    "none": {},
    "states": {"optimizer": "cpu"},
    "all": {"optimizer": "cpu", "parameters": "cpu"},
    "states-nvme": {"optimizer": "nvme"},
    "all-nvme": {"optimizer": "nvme", "parameters": "nvme"},
}
_ACTIVATIONS = {"half": 0.5, "offload": {"*": "offload"}}


def plan_of(cell: Cell) -> dict[str, Any]:
    """Return a cell's plan; its budget, if needed, is below the need of keeping everything."""
    plan: dict[str, Any] = {
        "stage": cell.stage,
        "kernels": cell.kernels,
        "activations": _ACTIVATIONS.get(cell.activations, cell.activations),
        "tiling": MODELS[cell.model].tiling if cell.tiling == "pattern" else cell.tiling,
        "bucket_bytes": "256KiB",
        "offload": dict(_TIERS[cell.offload]),
    }
    if "nvme" in cell.offload:
        plan["offload"]["path"] = str(Path(tempfile.gettempdir()) / "zerofx-memory-matrix")
    if cell.activations == "auto":
        plan["memory_budget"] = _between(cell, SHARE)
    elif cell.tiling == "auto":  # nothing else is to be decided by it
        plan["memory_budget"] = _between(cell, 1.0)
    return plan


def _between(cell: Cell, share: float) -> int:
    """Return a budget at this fraction between recomputing and keeping, both untiled."""
    program = captured(cell.model, cell.layers, cell.samples)
    least, most = (
        peak_bytes(zerofx.rewrite(program, {"stage": cell.stage, "activations": a}, cell.world))
        for a in ("recompute", "keep")
    )
    return budget_for(int(least + share * (most - least)))


@functools.cache
def captured(model: str, layers: int, samples: int, outputs: str = "all") -> Program:
    """Return the captured training call of a model."""
    batch = MODELS[model].batch(0, samples)
    return zerofx.capture(MODELS[model].build(layers), (), batch, outputs=outputs)


def run(cell: Cell) -> dict[str, Any]:
    """Train a cell on this rank; return the predicted and measured bytes."""
    model = MODELS[cell.model]
    loop = Loop(cell.accumulation, cell.no_sync)
    trained = train(
        lambda: model.build(cell.layers),
        lambda module, number: model.forward(module, number, cell.samples),
        plan_of(cell),
        loop=loop,
    )
    (program,) = trained.model.programs
    found = program.memory(basis="compiled", **asdict(loop))
    return {
        "low_bytes": trained.peak.low_bytes,
        "high_bytes": trained.peak.high_bytes,
        "predicted_bytes": found.peak_bytes,
        "host_bytes": trained.host_bytes,
        "predicted_host_bytes": found.memory.host_bytes,
        "num_tiles": sum(b.tile is not None for b in program.layout.buckets),
        "budget_bytes": program.plan.memory_budget,
    }
