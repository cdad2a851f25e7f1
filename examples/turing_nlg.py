"""Turing-NLG: its 17 B shape planned on paper, and a small GPT with the same kind of cut layers.

$ python -m zerofx plan-for "256x V100" --target examples/turing_nlg.py:turing --out plan.yaml \
    --global-batch 512 --stage 3 --set precision=fp16 --set activations=recompute --set offload=none
plan.yaml: stage 3, 1 x 2 samples, activations recompute, prefetch 1
$ torchrun --standalone --nproc-per-node 2 examples/turing_nlg.py
17.2 B parameters on paper; here 0.8 M, each layer on 2 ranks
step   0  loss 5.5
step  40  loss 3.3
"""

import pydoc_data.topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import zerofx

TEXT = "\n".join(pydoc_data.topics.topics.values())  # Python's own help, 450 KB


def gpt(layers, hidden, heads, context, vocabulary):
    return GPT2LMHeadModel(GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=context, vocab_size=vocabulary,
        attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False,
    ))  # fmt: skip


def turing():
    """Return shape, batch (512 x 1024 tokens) and devices of "Turing-NLG: A 17-billion-parameter
    language model by Microsoft" (C. Rosset, 2020), where 4 ranks shared each layer."""
    with torch.device("meta"):
        tokens = torch.zeros(2, 1024, dtype=torch.long)
        return gpt(78, 4256, 28, 1024, 50257), (), {"input_ids": tokens, "labels": tokens}


def main():
    torch.manual_seed(0)
    small = gpt(4, 128, 4, 128, 256)
    size = sum(p.numel() for p in small.parameters()) / 1e6
    model = zerofx.compile(small, {"stage": 1, "parallel": {"tensor": 2}, "kernels": "aten"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text, own = torch.tensor(list(TEXT.encode())), model.zerofx
    draws = torch.Generator().manual_seed(own.data_rank)  # ranks that share layers: equal samples
    if own.world.rank == 0:
        full = sum(p.numel() for p in turing()[0].parameters()) / 1e9
        print(f"{full:.1f} B parameters on paper; here {size:.1f} M, each layer on 2 ranks")
    for step in range(41):
        places = torch.randint(len(text) - 128, (8, 1), generator=draws)
        tokens = text[places + torch.arange(128)]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if own.world.rank == 0 and step % 40 == 0:
            print(f"step {step:3d}  loss {loss.item():.1f}")


if __name__ == "__main__":
    main()
