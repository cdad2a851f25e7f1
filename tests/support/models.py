"""Small models that the tests share, each with a batch for every seed.

A case is a recipe, not a model: `CASES["gpt"].make()` gives a fresh module with the same weights
every time, and `.batch(rank)` one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from model_classes import (
    Adapter,
    BinaryNet,
    Branches,
    Chain,
    ConvNet,
    LSTMClassifier,
    Stage,
)
from torch import Tensor, nn

from zerofx.tools.demo.gpt import GPT, GPTConfig

Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One model of the tests, by name.

    build: returns the module; run under a fixed seed.
    draw: returns (args, kwargs) of one micro-batch from a seeded generator.
    is_random: forward draws from the generator (dropout), so ranks differ even on equal batches.
    is_foreign: needs transformers.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    is_random: bool = False
    is_foreign: bool = False

    def make(self, seed: int = 0) -> nn.Module:
        """Return the model in training mode, every parameter moved off its special start value.

        Biases of 0 and norms of 1 would hide a mistake that swaps them.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(torch.randn_like(param), alpha=0.02)
        return model.train()

    def batch(self, seed: int) -> Batch:
        """Return (args, kwargs) of one micro-batch."""
        return self.draw(torch.Generator().manual_seed(seed))


def _tokens(generator: torch.Generator, vocab: int, shape: tuple[int, ...] = (2, 8)) -> Tensor:
    return torch.randint(0, vocab, shape, generator=generator)


# -- the project's own ----------------------------------------------------------------------------
def _gpt(dropout: float = 0.0, layers: int = 2, width: int = 16) -> GPT:
    return GPT(GPTConfig(layers=layers, width=width, heads=2, seq=8, vocab=32, dropout=dropout))


def _draw_text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 32, (2, 9))
    return (tokens[:, :-1], tokens[:, 1:]), {}


def _draw_labelled(generator: torch.Generator) -> Batch:
    label = torch.randint(0, 4, (2,), generator=generator)
    return (_tokens(generator, 32, (2, 3)),), {"label": label}


def _draw_vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(3, 12, generator=generator)
    return (x, torch.randn(3, 3, generator=generator)), {}


def _adapted() -> nn.Module:
    model = _gpt().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv = Adapter(block.attn.qkv)  # type: ignore[union-attr, assignment]
    model.norm.requires_grad_(True)
    return model


def _draw_images(generator: torch.Generator) -> Batch:
    label = torch.randint(0, 5, (2,), generator=generator)
    return (torch.randn(2, 3, 6, 6, generator=generator), label), {}


def _draw_stage(generator: torch.Generator) -> Batch:
    x = torch.randn(3, 12, generator=generator).requires_grad_()
    return (x, torch.randn(3, 12, generator=generator)), {}


# -- unmodified transformers models, from small configs -------------------------------------------
_SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip


def _hf(model: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        made = getattr(transformers, config)(**fields)
        return getattr(transformers, model)(made)

    return build


def _draw_ids(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, 32)
    return (), {"input_ids": tokens, "labels": tokens}


def _draw_cacheless_ids(generator: torch.Generator) -> Batch:
    args, kwargs = _draw_ids(generator)
    return args, {**kwargs, "use_cache": False}


def _draw_padded(generator: torch.Generator) -> Batch:
    """Return texts of which the first begins with padding; its first queries see no key."""
    args, kwargs = _draw_cacheless_ids(generator)
    kept = torch.ones_like(kwargs["input_ids"]).index_fill_(1, torch.tensor([0, 1]), 0)
    kept[1:] = 1
    return args, {**kwargs, "attention_mask": kept}


def _draw_pixels(generator: torch.Generator) -> Batch:
    label = torch.randint(0, 2, (2,), generator=generator)
    return (), {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": label}


_ALL = [
    Case("gpt", _gpt, _draw_text),
    Case("gpt-dropout", lambda: _gpt(dropout=0.2), _draw_text, is_random=True),
    Case("lstm", LSTMClassifier, _draw_labelled),
    Case("binary", BinaryNet, _draw_vectors),
    Case("chain", Chain, _draw_vectors),
    Case("adapters", _adapted, _draw_text),
    Case("convnet", ConvNet, _draw_images),
    Case("branches", Branches, _draw_vectors, is_random=True),
    Case("stage", Stage, _draw_stage),
    Case(
        "hf-gpt2",
        _hf("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=16,
            vocab_size=32, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
    Case(
        "hf-llama",
        _hf("LlamaForCausalLM", "LlamaConfig", vocab_size=32, **_SMALL),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
    Case(
        "hf-bert",
        _hf("BertForMaskedLM", "BertConfig", vocab_size=32, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, **_SMALL),
        _draw_ids,
        is_foreign=True,
    ),
    Case(
        "hf-vit",
        _hf("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=8, **_SMALL),
        _draw_pixels,
        is_foreign=True,
    ),
    Case(
        "hf-resnet",
        _hf("ResNetForImageClassification", "ResNetConfig", embedding_size=4, hidden_sizes=[4, 8],
            depths=[2, 2], layer_type="basic", num_labels=2),
        _draw_pixels,
        is_foreign=True,
    ),
]  # fmt: skip

# Further architectures, trained in test_strides.py only.
_TOKENS = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_QWEN3_NEXT = {
    **_SMALL, **_TOKENS, "num_key_value_heads": 1, "head_dim": 8,
    "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip


def _draw_speech(generator: torch.Generator) -> Batch:
    features = torch.randn(2, 8, 16, generator=generator)
    labels = _tokens(generator, 32, (2, 6))
    return (), {"input_features": features, "labels": labels, "use_cache": False}


_WIDE = [
    Case(
        "hf-t5",  # as in T5 itself, its heads together are as wide as the model
        _hf("T5ForConditionalGeneration", "T5Config", vocab_size=32, d_model=64, d_kv=16, d_ff=64,
            num_layers=1, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
    Case(
        "hf-whisper",
        _hf("WhisperForConditionalGeneration", "WhisperConfig", num_mel_bins=8, d_model=16,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
            max_source_positions=8, max_target_positions=8, dropout=0.0, suppress_tokens=None,
            begin_suppress_tokens=None, decoder_start_token_id=1, **_TOKENS),
        _draw_speech,
        is_foreign=True,
    ),
    Case(
        "hf-mixtral",
        _hf("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=1, num_local_experts=4,
            **_SMALL, **_TOKENS),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
    Case(
        "hf-qwen3-next",
        _hf("Qwen3NextForCausalLM", "Qwen3NextConfig",
            layer_types=["linear_attention", "full_attention"], **_QWEN3_NEXT),
        _draw_cacheless_ids,
        is_foreign=True,
    ),
]  # fmt: skip

# For tests of attention whose mask is computed from what the model is given.
_PADDED = [
    Case(
        "hf-llama-padded",
        _hf("LlamaForCausalLM", "LlamaConfig", vocab_size=32, **_SMALL),
        _draw_padded,
        is_foreign=True,
    ),
]

OWN = [case.name for case in _ALL if not case.is_foreign]
FOREIGN = [case.name for case in _ALL if case.is_foreign]
WIDE = [case.name for case in _WIDE]
CASES = {case.name: case for case in _ALL + _WIDE + _PADDED}
