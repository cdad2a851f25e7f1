"""One rank of one system under a memory budget: the models, their batches, and a training loop."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.demo.measure import PeakMemory

WARMUP_STEPS, MEASURED_STEPS = 2, 2
SEED, LR = 0, 1e-4
GPT_CONFIG = GPTConfig(layers=8, width=384, heads=6, seq=256)
LLAMA = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 512,
    "num_key_value_heads": 4, "intermediate_size": 704, "max_position_embeddings": 256,
    "use_cache": False,
}  # fmt: skip
BATCH = 2


class Loss(nn.Module):
    """A transformers model called with labels, as a function of two tensors to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss


def _llama() -> tuple[nn.Module, list[nn.Module]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    return Loss(model), list(model.model.layers)


def _gpt() -> tuple[nn.Module, list[nn.Module]]:
    model = GPT(GPT_CONFIG)
    return model, list(model.blocks)


MODELS = {"gpt": (_gpt, GPT_CONFIG.seq, 256), "llama": (_llama, 256, 512)}


def tokens_of(name: str, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a rank and step, which is the same for every system."""
    _, seq, vocab = MODELS[name]
    given = torch.Generator().manual_seed(1000 * step + rank)
    text = torch.randint(0, vocab, (BATCH, seq + 1), generator=given)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def fsdp2(model: nn.Module, blocks: list[nn.Module], checkpoints: bool) -> nn.Module:
    """Shard every block and the root; with `checkpoints` each block is recomputed in backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        if checkpoints:
            plain = block.forward
            block.forward = lambda *a, plain=plain, **k: checkpoint(  # type: ignore[method-assign]
                plain, *a, use_reentrant=False, **k
            )
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Job:
    """One rank of one system, as a worker's job."""

    def __init__(self, model: str, system: str, budget: int | None, measures: bool) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._name, self._rank, self._done = model, int(os.environ["RANK"]), 0
        self._memory = PeakMemory(torch.device("cpu")) if measures else None
        if self._memory is not None:
            self._memory.__enter__()
        torch.manual_seed(SEED)
        plain, blocks = MODELS[model][0]()
        if system == "zerofx":
            import zerofx

            plan = zerofx.Plan(stage=3, activations="auto", memory_budget=budget)
            self._model: nn.Module = zerofx.compile(plain, plan, device="cpu")
        else:
            self._model = fsdp2(plain, blocks, system.endswith("checkpoint"))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)

    def _step(self) -> float:
        loss = self._model(*tokens_of(self._name, self._rank, self._done))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._done += 1
        return float(loss.item())

    def steps(self, count: int) -> dict[str, Any]:
        """Train; report seconds, CPU seconds and losses."""
        start, cpu = time.perf_counter(), time.process_time()
        losses = [self._step() for _ in range(count)]
        return {
            "wall_s": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "losses": losses,
        }

    def peaks(self) -> dict[str, Any]:
        """Train a few steps under the profiler; report the bounds of the peak."""
        assert self._memory is not None
        for _ in range(WARMUP_STEPS):
            self._step()
        for _ in range(MEASURED_STEPS):
            with self._memory.step():
                self._step()
        self._memory.__exit__(None, None, None)
        programs = getattr(self._model, "programs", None)
        return {
            "low_bytes": min(p.low_bytes for p in self._memory.steps),
            "high_bytes": min(p.high_bytes for p in self._memory.steps),
            "predicted_bytes": programs[0].memory(basis="compiled").peak_bytes
            if programs
            else None,
        }
