"""Compile a model, train it, and inspect the compiler's decisions: one process, CPU.

$ python examples/hello.py
33 passes; 1 slots, 4864 bytes
# Net: training   stage=3 world=4 on cpu-box   memory: regions as ATen   peak 38.3 KiB per rank
step   0  loss 14.4
step  50  loss 0.0
step 100  loss 0.0
"""

import torch
import torch.nn.functional as F
from torch import nn

import zerofx
from zerofx import Plan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc0 = nn.Linear(16, 64)
        self.fc1 = nn.Linear(64, 1)

    def forward(self, x, y):
        return F.mse_loss(self.fc1(torch.relu(self.fc0(x))), y)


def main():
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(32, 16)
    y = x.sum(1, keepdim=True)

    # The compiler as a library: what would 4 ranks do? No process group, no compute.
    program = zerofx.rewrite(zerofx.capture(net, (x, y)), Plan(stage=3), world_size=4)
    print(f"{len(program.history) - 1} passes; {program.history[-1].summary}")
    print(str(program.memory()).splitlines()[0])

    # The same model, trained here: the loop does not change.
    model = zerofx.compile(net, Plan(stage=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(101):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.1f}")


if __name__ == "__main__":
    main()
