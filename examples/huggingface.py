"""An unmodified transformers model, built on meta: no rank ever holds the whole model.

$ torchrun --standalone --nproc-per-node 2 examples/huggingface.py
step  0  loss 5.6  logits [2, 32, 256]
step 10  loss 4.3  logits [2, 32, 256]
step 20  loss 3.6  logits [2, 32, 256]
"""

import os

import torch
import transformers

import zerofx


def main():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(config)
    model = zerofx.compile(llama, {"stage": 3, "activations": "recompute"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank = int(os.environ.get("RANK", "0"))
    tokens = torch.arange(2 * 32).view(2, 32) + 64 * rank
    for step in range(21):
        out = model(input_ids=tokens, labels=tokens)  # a ModelOutput, as always
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {out.loss.item():.1f}  logits {list(out.logits.shape)}")


if __name__ == "__main__":
    main()
