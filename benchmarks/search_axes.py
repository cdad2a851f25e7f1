"""Time a search over all parallel axes: a Llama of 70 B on 64 GPUs, planned on meta tensors.

$ python -m benchmarks.search_axes

Shows the seconds of the processor and of the clock, the most memory that the process held, the
plan, and why it has its axes. Nothing is compared with: no other library plans so.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zerofx
from benchmarks.report import Column, finish
from zerofx.tools.targets import Target

SIZES = {
    "hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
TOKENS, RANKS, SAMPLES = 4096, 64, 512


COLUMNS = [
    Column("used_s", "s of the processor", "{:.0f}"),
    Column("took_s", "s by the clock", "{:.0f}"),
    Column("held_gb", "GB held", "{:.2f}"),
    Column("plan", "plan"),
]


def main() -> None:
    """Plan, show it and write it."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    target = Target("llama-70b", model, (), {"input_ids": ids, "labels": ids})
    began_s, used_s = time.perf_counter(), time.process_time()
    found = zerofx.search(
        target, hardware="dgx-h100", world_size=RANKS, global_samples=SAMPLES,
        plan={"precision": "bf16", "kernels": "aten"},
    )  # fmt: skip
    row = {
        "used_s": time.process_time() - used_s,
        "took_s": time.perf_counter() - began_s,
        "held_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "plan": str(found.plan),
    }
    print(found)
    finish("search_axes", COLUMNS, [row], options)


if __name__ == "__main__":
    main()
