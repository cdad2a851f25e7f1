"""Ray Train on a local cluster: a worker dies, Ray restarts both workers, and they resume.

Needs ray[train]. Worker 1 kills itself once, at the given step.

$ python examples/ray_train.py run 13
started at step 0
started at step 10
ended, loss 4.831
"""

import os
import signal
import sys
from pathlib import Path

import ray
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import zerofx


def train(config):  # runs on each worker, in the process group that Ray has created
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = zerofx.compile(model, zerofx.Plan(stage=3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = (zerofx.resume(config["folder"], model, optimizer) or {"step": 0})["step"]
    log = open(config["log"] if rank == 0 else os.devnull, "a", buffering=1)  # noqa: SIM115
    print(f"started at step {first}", file=log)
    for step in range(first, 20):
        if rank == 1 and first == 0 and step == config["kill_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        y = x.sum(1, keepdim=True)
        loss = F.mse_loss(model(x[rank::world_size]), y[rank::world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            zerofx.save(config["folder"], model, optimizer, {"step": step + 1}, step=step + 1)
    print(f"ended, loss {loss:.3f}", file=log)


if __name__ == "__main__":
    folder = os.path.abspath(sys.argv[1])
    config = {"folder": folder, "log": f"{folder}.txt", "kill_at": int(sys.argv[2])}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    failures = FailureConfig(max_failures=2)
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}-ray", failure_config=failures),
    ).fit()
    print(Path(config["log"]).read_text())
