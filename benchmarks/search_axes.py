"""Time a search over all parallel axes: a Llama of 70 B on 64 GPUs, planned on meta tensors.

$ python -m benchmarks.search_axes

Prints the seconds of the processor and of the clock, the most memory that the process held, the
plan, and why it has its axes. Nothing is compared with: no other library plans so.
"""

from __future__ import annotations

import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zerofx
from zerofx.tools.targets import Target

SIZES = {
    "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
TOKENS, RANKS, SAMPLES = 4096, 64, 512


def main() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    target = Target("llama-70b", model, (), {"input_ids": ids, "labels": ids})
    began_s, used_s = time.perf_counter(), time.process_time()
    found = zerofx.search(
        target, hardware="dgx-h100", world_size=RANKS, global_samples=SAMPLES,
        plan={"precision": "bf16", "kernels": "aten"},
    )  # fmt: skip
    used_s, took_s = time.process_time() - used_s, time.perf_counter() - began_s
    held_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    spent = f"{used_s:.0f} s of the processor, {took_s:.0f} s by the clock, {held_gb:.2f} GB held"
    print(f"{spent}\n\n{found}")


if __name__ == "__main__":
    main()
