"""Small models of transformers, as their authors wrote them, for tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from odd_models import ODD, Result
from torch import Tensor, nn

from zerofx.analysis.time.traffic import traffic
from zerofx.tools.demo.gpt import GPT, GPTConfig


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {"num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, use_cache=False, **{**fields, **heads, **more}
        )
    )


def mixtral(experts: str = "grouped_mm", **more: Any) -> nn.Module:
    """Two layers of four experts, of which each token has two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, num_local_experts=4, num_experts_per_tok=2,
        use_cache=False, **more,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, head_dim=8, vocab_size=64, num_experts=4,
            num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0], use_cache=False,
        )
    )  # fmt: skip


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64,
            dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            image_size=16, patch_size=8, num_labels=4, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class Blocks(nn.Module):
    """A block with fused products, and a head; quick to capture."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(12)
            self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
            self.fc1, self.fc2 = nn.Linear(12, 20), nn.Linear(20, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            x = x + self.proj(q.tanh() * k + v)
            return x + self.fc2(self.fc1(x).relu())

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 12)
        self.blocks = nn.ModuleList([self.Block()])
        self.head = nn.Linear(12, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return Result(loss)


class Mixture(nn.Module):
    """Blocks of four experts, of which each token has one, by torch's own products, in bf16."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.router = nn.Linear(16, 4, bias=False)
            self.up = nn.Parameter(torch.randn(4, 16, 32) / 4)
            self.down = nn.Parameter(torch.randn(4, 32, 16) / 6)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.norm(x).flatten(0, 1)
            weights, chosen = self.router(tokens).softmax(-1).max(-1)
            order = chosen.argsort(stable=True)
            counts = chosen.unsqueeze(1) == torch.arange(4)
            ends = counts.sum(0).cumsum(0).to(torch.int32)
            up, down = self.up.bfloat16(), self.down.bfloat16()
            rows = nn.functional.grouped_mm(tokens[order].bfloat16(), up, offs=ends)
            rows = nn.functional.grouped_mm(nn.functional.gelu(rows), down, offs=ends)
            rows = rows.float() * weights[order].unsqueeze(1)
            return x + rows[order.argsort()].view(x.shape)

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.head = nn.Linear(16, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return Result(loss)


class Own(nn.Module):
    """zerofx's own GPT, which returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(layers=2, width=32, heads=4, seq=8, vocab=64))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return Result(self.gpt(input_ids, labels))


MODELS = {
    "blocks": Blocks,
    "llama": llama,
    "deep": lambda: llama(num_hidden_layers=4),
    "grouped": lambda: llama(num_key_value_heads=2),
    "odd": lambda: llama(vocab_size=67),
    "many heads": lambda: llama(num_attention_heads=8),
    "own": Own,
    "mixtral": mixtral,
    "batched": lambda: mixtral("batched_mm"),
    "qwen3-moe": qwen3_moe,
    "mixture": Mixture,
    "gpt2": gpt2,
    "dropout": lambda: gpt2(dropout=0.1),
    "bert": bert,
    "t5": t5,
    "vit": vit,
    **ODD,
}


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return how far a model's state is off as a whole, as a part of its length."""
    floats = [n for n, value in expected.items() if value.is_floating_point()]
    off = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in floats)
    length = sum(float(expected[n].double().square().sum()) for n in floats)
    return (off / length) ** 0.5


def batch(name: str, seed: int = 1) -> dict[str, Tensor]:
    """Return one batch for a model, the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pictures = torch.randn(2, 3, 16, 16, generator=generator)
        return {"pixel_values": pictures, "labels": torch.tensor([1, 3])}
    ids = torch.randint(0, 64, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def padded(name: str, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch whose first text is padded in front, and its last at the end.

    The queries at the front see no key at all under a causal mask.
    """
    found = batch(name, seed)
    kept = torch.ones_like(found["input_ids"])
    kept[0, :3] = 0
    kept[-1, -2:] = 0
    labels = found["labels"].masked_fill(kept == 0, -100)
    return found | {"attention_mask": kept, "labels": labels}


def sent_in_a_step(model: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the calls and bytes that this rank sent in a step by kind, and its program's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    counters = model.zerofx.world.counters
    before: dict[str, tuple[int, int]] = {}
    after: dict[str, tuple[int, int]] = {}
    for step in range(2):
        before = {kind: (c.calls, c.sent_bytes) for kind, c in counters.items()}
        model(**batch(name, seed=step)).loss.backward()
        after = {kind: (c.calls, c.sent_bytes) for kind, c in counters.items()}
        optimizer.step()
        optimizer.zero_grad()
    none = (0, 0)
    found = {k: tuple(a - b for a, b in zip(n, before.get(k, none), strict=True))
             for k, n in after.items()}  # fmt: skip
    predicted = traffic(model.programs[0], model.zerofx.world.rank).kinds
    return (
        {kind: n for kind, n in found.items() if n != none},
        {kind: (s.calls, s.sent_bytes) for kind, s in predicted.items() if s.calls},
    )
