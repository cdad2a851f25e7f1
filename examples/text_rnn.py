"""A bidirectional GRU over words whose embeddings are sums of rows of a large table.

Of the table's gradient, only the rows that a step looks up are sent.

$ torchrun --standalone --nproc-per-node 2 examples/text_rnn.py
step   0  loss 2.1  table [65536, 16]
step  60  loss 0.5  table [65536, 16]
"""

import pydoc_data.topics
import re
import zlib

import torch
from torch import nn

import zerofx

ROWS, WIDTH, LENGTH, PIECES = 1 << 16, 16, 24, 6
HELP = sorted(pydoc_data.topics.topics.values(), key=len)[-8:]  # its longest pages


def pieces(word):  # the rows of its 3-letter parts; row 0 means none
    parts = [f"<{word}>"[i : i + 3].encode() for i in range(len(word))]
    return ([zlib.crc32(part) % (ROWS - 1) + 1 for part in parts] + [0] * PIECES)[:PIECES]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=0)
        self.words = nn.GRU(WIDTH, 48, batch_first=True, bidirectional=True)
        self.page = nn.Linear(96, len(HELP))

    def forward(self, rows, page):
        words = self.table(rows.flatten(0, 1)).view(*rows.shape[:2], WIDTH)
        return nn.functional.cross_entropy(self.page(self.words(words)[0].mean(1)), page)


def main():
    torch.manual_seed(0)
    model = zerofx.compile(Reader(), zerofx.Plan(stage=1, sparse_gradients=True, kernels="aten"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = [list(map(pieces, re.findall(r"\w+", page))) for page in HELP]
    windows = [torch.tensor(each).unfold(0, LENGTH, 4).transpose(1, 2) for each in words]
    pages = [torch.full((len(each),), i) for i, each in enumerate(windows)]
    rows, pages = torch.cat(windows), torch.cat(pages)
    draws = torch.Generator().manual_seed(rank := model.zerofx.world.rank)
    for step in range(61):
        at = torch.randint(len(rows), (32,), generator=draws)
        loss = model(rows[at], pages[at])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 60 == 0:
            print(f"step {step:3d}  loss {loss.item():.1f}  table {list(model.table.weight.shape)}")


if __name__ == "__main__":
    main()
