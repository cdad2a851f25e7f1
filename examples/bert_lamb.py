"""BERT trained on Python's own help, with LAMB, a 1Cycle schedule, and 4 micro-batches per step.

$ torchrun --standalone --nproc-per-node 2 examples/bert_lamb.py
3,000 words; a step takes 4 x 2 x 16 rows of 32
step   0  loss 8.0  lr 0.0008
step  20  loss 6.9  lr 0.0162
step  40  loss 5.9  lr 0.0001
"""

import contextlib
import pydoc_data.topics
import re
from collections import Counter

import torch
from torch.optim.lr_scheduler import OneCycleLR
from transformers import BertConfig, BertForMaskedLM

import zerofx

WORDS = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()))
KNOWN = {word: i for i, (word, _) in enumerate(Counter(WORDS).most_common(2998), 2)}
UNKNOWN, MASK, STEPS, PARTS = 0, 1, 41, 4


def main():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=3000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=32,
    )  # fmt: skip
    model = zerofx.compile(BertForMaskedLM(config), zerofx.Plan(stage=2, kernels="aten"))
    optimizer = zerofx.optim.Lamb(model.parameters(), lr=0.02, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)  # betas cycle with it
    text = torch.tensor([KNOWN.get(word, UNKNOWN) for word in WORDS])
    world = model.zerofx.world
    draws = torch.Generator().manual_seed(world.rank)
    if world.rank == 0:
        print(f"{config.vocab_size:,} words; a step takes {PARTS} x {world.size} x 16 rows of 32")
    for step in range(STEPS):
        for part in range(PARTS):
            places = torch.randint(len(text) - 32, (16, 1), generator=draws)
            tokens = text[places + torch.arange(32)]
            hidden = torch.rand(tokens.shape, generator=draws) < 0.15
            labels = tokens.where(hidden, torch.tensor(-100))
            # Gradients are reduced once per step, after the last micro-batch.
            with contextlib.nullcontext() if part == PARTS - 1 else model.no_sync():
                loss = model(input_ids=tokens.masked_fill(hidden, MASK), labels=labels).loss
                (loss / PARTS).backward()
        optimizer.step()
        if world.rank == 0 and step % 20 == 0:
            rate = schedule.get_last_lr()[0]
            print(f"step {step:3d}  loss {loss.item():.1f}  lr {rate:.4f}")
        schedule.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
