"""Jobs of the processes of `benchmarks.gpu`: a training of one system, or optimizer steps.

The same code runs on a CPU for a rehearsal, with the host's clock and without compilation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu_cases import Setup, case_named
from benchmarks.systems import LR, SEED, fsdp2
from zerofx.tools.demo.gpt import GPT
from zerofx.tools.demo.measure import PeakMemory

WARMUP_STEPS, PEAK_STEPS = 6, 2  # the first compiles; a CUDA graph is recorded at the second
NUM_BATCHES = 4
# Per element: parameter, gradient and two moments are read, all except the gradient written.
ADAMW_BYTES = 28


def device_of(rehearse: bool) -> torch.device:
    return torch.device("cpu") if rehearse else torch.device("cuda", 0)


def seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """Return the time of one `work`: between CUDA events, on a CPU by the host's clock."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - began) / repeats
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


class AdamW:
    """Steps over one flat fp32 parameter: zerofx's, torch's fused ones, and a plain copy."""

    def __init__(self, elements: int, repeats: int, rehearse: bool) -> None:
        import zerofx

        self._device, self._repeats = device_of(rehearse), repeats
        torch.manual_seed(SEED)
        start = torch.randn(elements, device=self._device)
        self._copied = torch.empty_like(start)
        self._source = start
        self._mine, self._peer = (nn.Parameter(start.clone()) for _ in range(2))
        self._mine.grad = self._peer.grad = torch.randn_like(start)
        self._works: dict[str, Callable[[], object]] = {
            "copy": lambda: self._copied.copy_(self._source),
            "zerofx": zerofx.optim.AdamW([self._mine], lr=LR).step,
            "torch fused": torch.optim.AdamW([self._peer], lr=LR, fused=True).step,
        }
        for work in self._works.values():
            seconds(self._device, work, 2)

    def round(self, number: int) -> dict[str, float]:
        """Return seconds of each, starting with a different one in each round."""
        names = list(self._works)
        start = number % len(names)
        order = names[start:] + names[:start]
        return {name: seconds(self._device, self._works[name], self._repeats) for name in order}

    def error(self) -> float:
        """Return how far the two parameters are apart after all steps, relative to their change."""
        with torch.no_grad():
            apart = torch.linalg.vector_norm(self._mine - self._peer)
            way = torch.linalg.vector_norm(self._peer - self._source)
        return float(apart / way)


class Training:
    """A model trained by one system, with torch's fused AdamW."""

    def __init__(
        self, case: str, system: str, batch: int | None, stage: int, rehearse: bool
    ) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # one plain process, not a torchrun of 1
            os.environ.pop(name)
        chosen = case_named(case, batch, rehearse)
        self._case, self._device = chosen, device_of(rehearse)
        self._workspace_bytes = _workspace_bytes(self._device)
        with PeakMemory(self._device) as memory:
            torch.manual_seed(SEED)
            with self._device:
                model = GPT(chosen.model)
            plan = {"stage": stage, "precision": chosen.precision}
            if rehearse:
                plan |= {"kernels": "aten"}
            self._model = _wrap(model, chosen.systems[system], plan, self._device, rehearse)
            del model
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, fused=True)
            self._batches = [self._make_batch(number) for number in range(NUM_BATCHES)]
            self._done = 0
            self._losses = [float(self._step()) for _ in range(WARMUP_STEPS)]
            if self._device.type == "cuda":  # the other systems' processes need the memory
                torch.cuda.empty_cache()
            for _ in range(PEAK_STEPS):
                with memory.step():
                    self._losses.append(float(self._step()))
        self._peak_bytes = max(peak.high_bytes for peak in memory.steps)

    def facts(self) -> dict[str, Any]:
        """Return facts that were found during setup."""
        return {
            "peak_bytes": self._peak_bytes,
            "workspace_bytes": self._workspace_bytes,
            "losses": self._losses,
            "tokens": self._case.batch * self._case.model.seq,
            "num_params": sum(p.numel() for p in self._model.parameters()),
        }

    def predicted(self) -> int:
        """Return the peak that zerofx predicts for this step."""
        return self._model.programs[0].memory(basis="compiled").peak_bytes  # type: ignore[union-attr, index]

    def round(self, number: int) -> dict[str, float]:
        """Return seconds per step, after an untimed one, because another system ran before."""
        self._step()
        taken = seconds(self._device, self._step, self._case.steps)
        loss = float(self._step())
        if not loss < float("inf"):
            raise RuntimeError(f"the loss is {loss} after {self._done} steps, in round {number}")
        return {"step_s": taken}

    def _make_batch(self, number: int) -> tuple[Tensor, Tensor]:
        config = self._case.model
        generator = torch.Generator().manual_seed(number)
        shape = (self._case.batch, config.seq + 1)
        tokens = torch.randint(0, config.vocab, shape, generator=generator).to(self._device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _step(self) -> Tensor:
        x, y = self._batches[self._done % NUM_BATCHES]
        self._done += 1
        loss = self._model(x, y)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class _InBF16(nn.Module):
    """A model computed with bf16 copies of its fp32 weights, as with zerofx and FSDP2's policy.

    This is the fair peer. Autocast computes norms and the sums of residuals in fp32 and so moves
    more bytes. Weights kept in bf16 would leave out the fp32 ones that the optimizer here updates.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: p.to(torch.bfloat16) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, (x, y))


def _wrap(
    model: GPT, setup: Setup, plan: dict[str, Any], device: torch.device, rehearse: bool
) -> nn.Module:
    is_bf16 = plan["precision"] == "bf16"
    if setup.kind == "torch.compile":
        whole = _InBF16(model) if is_bf16 else model
        backend = "aot_eager" if rehearse else "inductor"  # inductor's default has no CUDA graphs
        return torch.compile(whole, backend=backend, dynamic=False, fullgraph=True)  # type: ignore
    if setup.kind == "fsdp2":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
        return fsdp2(model, torch.bfloat16 if is_bf16 else None, device.type)
    import zerofx  # imported here, so that the peers' processes do not import it

    fields = plan | setup.plan
    if rehearse:
        fields.pop("cuda_graph", None)
    return zerofx.compile(model, zerofx.Plan(**fields), device=device)


def _workspace_bytes(device: torch.device) -> int:
    """Return the bytes that matrix products take once per process from torch's allocator.

    They belong to no tensor of any program: cuBLAS's workspaces, one for this thread, one for
    autograd's.
    """
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    layer = nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()
    del layer
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before
