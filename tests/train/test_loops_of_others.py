"""Loops as others write them, on 2 ranks: generation, PPO, a GAN, adapters that are merged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool

import zerofx

ATEN: dict[str, Any] = {"kernels": "aten", "bucket_bytes": 0, "persist_below": 0}


def here() -> tuple[int, int]:
    """Return (rank, number of ranks)."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


# -- generation ------------------------------------------------------------------------------------


def generated(tokens: int, use_cache: bool, *plans: dict[str, Any]) -> None:
    """Generate greedily beside the plain model, from prompts of other lengths on each rank."""
    import transformers

    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=tokens + 8, vocab_size=97,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(8)  # far from uniform logits: no ties
    rank, _ = here()
    prompt = torch.randint(0, 97, (2, 4 + rank), generator=torch.Generator().manual_seed(rank))
    settings = {"max_new_tokens": tokens, "do_sample": False, "use_cache": use_cache}
    wanted = plain.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    assert wanted.shape[1] == prompt.shape[1] + tokens and len(wanted.unique()) > 8
    for fields in plans:
        model: Any = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(**{**ATEN, **fields}))
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(found, wanted), fields
        loss = model(prompt, labels=prompt, use_cache=False).loss  # and it trains on
        loss.backward()
        assert len(model.programs) <= 12, [p.model_name for p in model.programs]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("use_cache", [False, True], ids=["whole", "cached"])
def test_generation_of_256_tokens(pool: Pool, use_cache: bool, stage: int) -> None:
    pytest.importorskip("transformers")
    pool.run(2, generated, 256, use_cache, {"stage": stage}, timeout_s=300)
