"""Models for the command line: `zerofx memory zerofx.tools.demo.targets:gpt_175b --world 512`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zerofx.tools.demo.gpt import GPT, GPTConfig

Call = tuple[GPT, tuple[Any, ...], dict[str, Any]]


def byte_gpt() -> Call:
    """Return the demo's model at its default size, and one training call per rank."""
    return _call(GPTConfig(), batch=4)


def gpt_175b() -> Call:
    """Return GPT-3's shape, 175 B parameters, and one sequence per rank; nothing is allocated."""
    return _call(GPTConfig(layers=96, width=12288, heads=96, seq=2048, vocab=50257), batch=1)


def gpt_1t() -> Call:
    """Return ZeRO-Infinity's model of 1 T parameters, and two sequences per rank."""
    return _call(GPTConfig(layers=128, width=25600, heads=256, seq=1024, vocab=50257), batch=2)


def llama_7b() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the shape of Llama 2 7B from transformers, and four sequences per rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(use_cache=False)).train()
        tokens = torch.zeros(4, 2048, dtype=torch.long)
    return model, (), {"input_ids": tokens, "labels": tokens}


def _call(config: GPTConfig, batch: int) -> Call:
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(batch, config.seq, dtype=torch.long)
    return model, (tokens, tokens), {}
