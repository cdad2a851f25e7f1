"""Ray Train on its own local cluster: a worker dies, Ray starts all anew, and they go on.

Needs `pip install "ray[train]"`. Worker 1 kills itself once, at the step that is given.

$ python examples/ray_train.py run 13
started at step 0
killed at step 13
started at step 10
step 20  loss 4.183
"""

import os
import signal
import sys

import ray
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import zerofx


def train(config):  # on each worker, whose process group Ray has made
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = zerofx.compile(model, zerofx.Plan(stage=3), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    held_out = torch.randn(64, 16)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    extra = zerofx.resume(config["folder"], model, optimizer)
    first = extra["step"] if extra else 0
    tell(config, rank == 0, f"started at step {first}")
    for step in range(first, 20):
        if rank == 1 and first == 0 and step == config["kill_at"] - 1:
            tell(config, True, f"killed at step {step + 1}")
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        F.mse_loss(model(x[rank::world_size]), y[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            zerofx.save(config["folder"], model, optimizer, {"step": step + 1}, step=step + 1)
    with torch.no_grad():
        loss = F.mse_loss(model(held_out), held_out.sum(1, keepdim=True))
    tell(config, rank == 0, f"step 20  loss {loss:.3f}")


def tell(config, is_teller, line):
    if is_teller:
        with open(f"{config['folder']}.txt", "a") as file:
            print(line, file=file)


if __name__ == "__main__":
    folder, kill_at = os.path.abspath(sys.argv[1]), int(sys.argv[2])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "kill_at": kill_at},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=f"{folder}-ray", failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    print(open(f"{folder}.txt").read())
