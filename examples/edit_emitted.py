"""Emit a program, edit its schedule by hand, and load it back: it is verified, and then run.

$ torchrun --standalone --nproc-per-node 2 examples/edit_emitted.py
the edited schedule gives the same loss: True
refused: forward: the view of fc0.weight reads gathered bucket 0 (fc0
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import zerofx


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc0 = nn.Linear(16, 16)
        self.fc1 = nn.Linear(16, 1)

    def forward(self, x, y):
        return F.mse_loss(self.fc1(torch.relu(self.fc0(x))), y)


def edited(text, is_broken):
    """Wait for fc1's parameters earlier, or (broken) release fc0's before the region reads them."""
    rows = text.split("\n")
    release = next(i for i, row in enumerate(rows) if "rt.release(full_0" in row)
    wait = next(i for i, row in enumerate(rows) if "full_1 = rt.wait" in row)
    first = next(i for i, row in enumerate(rows) if "full_0 = rt.wait" in row)
    source = release if is_broken else wait
    rows.insert(first + 1, rows.pop(source))
    return "\n".join(rows)


def main():
    torch.manual_seed(0)
    model = zerofx.compile(Net(), zerofx.Plan(stage=3, kernels="aten", bucket_bytes=0))
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    before = model(x, y).item()
    for is_broken in (False, True):
        folder = Path(tempfile.mkdtemp()) / "emitted"
        schedule = model.programs[0].emit(folder) / "schedule.py"
        schedule.write_text(edited(schedule.read_text(), is_broken))
        try:
            model.adopt(folder)
            said = f"the edited schedule gives the same loss: {model(x, y).item() == before}"
        except zerofx.errors.ProgramError as error:
            said = f"refused: {str(error).splitlines()[0].split(': ', 1)[1][:60]}"
        if os.environ.get("RANK", "0") == "0":
            print(said)


if __name__ == "__main__":
    main()
