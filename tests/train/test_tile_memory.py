"""What tiling saves: gathered parameters and gradients, predicted, measured, and on paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool

import zerofx
from benchmarks.tiling import MLP
from zerofx import ops
from zerofx.analysis.memory.memory import memory
from zerofx.analysis.memory.storage import Category
from zerofx.ir.program import Planned
from zerofx.plan.plan import Plan
from zerofx.tools.demo.measure import PeakMemory


def rewritten(
    width: int, hidden: int, k: int, with_input_grad: bool = False, **plan: Any
) -> Planned:
    with torch.device("meta"):
        model = MLP(width, hidden)
        x = torch.empty(8, width, requires_grad=with_input_grad)
    program = zerofx.capture(model, (x,), {})
    tiling = {"up": k, "down": k} if k > 1 else "off"
    return zerofx.rewrite(program, Plan(tiling=tiling, **plan), 2)


def working_bytes(program: Planned) -> int:
    """Return the most that gathered parameters and full gradients take at a time.

    Slots, what reductions receive into, and gradients on their way into a bucket; not the shards.
    """
    found = memory(program)
    shards = {"p.grad"}
    held = [
        s
        for s in found.storages
        if s.category is Category.COMMUNICATION
        or (s.category is Category.TEMPORARIES and s.nbytes >= _least_tile(program))
        or (s.category is Category.GRADIENTS and s.name not in shards)
    ]
    return max(
        sum(s.nbytes for s in held if s.birth <= t <= s.death) for t in range(len(found.curve))
    )


def _least_tile(program: Planned) -> int:
    return max(b.full_bytes for b in program.layout.buckets) // 2


@pytest.mark.parametrize("with_input_grad", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(8192, 8192), (1024, 32768), (512, 2048)])
def test_working_memory_falls_as_one_over_k(width: int, hidden: int, with_input_grad: bool) -> None:
    whole = working_bytes(rewritten(width, hidden, 1, with_input_grad))
    for k in (4, 16):
        tiled = rewritten(width, hidden, k, with_input_grad)
        assert working_bytes(tiled) <= 1.15 / k * whole, k


def test_recomputing_keeps_tiles_apart() -> None:
    whole = working_bytes(rewritten(2048, 8192, 1, activations="recompute"))
    assert working_bytes(rewritten(2048, 8192, 16, activations="recompute")) <= 1.15 / 16 * whole


def largest(program: Planned) -> tuple[int, int]:
    """Return (bytes of the largest gathered bucket and its gradient, the largest buffer)."""
    layout, graphs = program.layout, program.graphs.values()
    assert layout is not None
    nodes = [n for gm in graphs for n in gm.graph.nodes]
    gathered = {n.args[1] for n in nodes if n.target is ops.all_gather}
    reduced = {n.args[1] for n in nodes if n.target is ops.grad_buffer}
    both = [layout.buckets[b] for b in gathered & reduced]
    top = max(both, key=lambda b: b.full_bytes)
    return top.full_bytes + top.numel * top.reduce_dtype.itemsize, max(program.slot_bytes)


def test_the_layer_of_64k_hidden_on_paper() -> None:
    """64 GiB of fp16 parameter and gradient whole, 4 GiB in 16 tiles, of 2 GiB each.

    Source: the ZeRO-Infinity announcement: [64K, 4 * 64K] is the layer's largest operator.
    """
    hidden = 64 * 1024
    with torch.device("meta"):
        model, x = MLP(hidden, 4 * hidden), torch.empty(1, hidden)
    program = zerofx.capture(model, (x,), {}, compute_dtype=torch.float16)
    precision = {"compute": "fp16", "reduce": "fp16", "loss_scale": "dynamic"}
    found = {
        k: zerofx.rewrite(
            program, Plan(precision=precision, tiling={"up": k, "down": k} if k > 1 else "off"), 512
        )
        for k in (1, 16)
    }  # fmt: skip
    gib, biases = 2**30, 2 * 2 * 4 * hidden  # of the linear, beside its weight
    assert largest(found[1])[0] - biases == 64 * gib and largest(found[1])[1] // gib == 32
    assert largest(found[16]) == (4 * gib, 2 * gib)


def measured(width: int, hidden: int, k: int) -> tuple[int, int]:
    """Return the peak bytes of a real rank beyond what it holds between steps, and predicted."""
    torch.manual_seed(0)
    tiling = {"up": k, "down": k} if k > 1 else "off"
    with PeakMemory(torch.device("cpu")) as peaks:
        model = zerofx.compile(MLP(width, hidden), {"kernels": "aten", "tiling": tiling})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            x = torch.randn(8, width)
            with peaks.step():
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
    [program] = model.programs
    return max(p.high_bytes for p in peaks.steps[2:]), memory(program, optimizer_bytes=0).peak_bytes


@pytest.mark.parametrize(
    ("width", "hidden"), [(512, 2048), pytest.param(2048, 8192, marks=pytest.mark.slow)]
)
def test_measured_on_two_ranks(pool: Pool, width: int, hidden: int) -> None:
    """A rank's shards and their gradients stay (2 times half the model); the rest falls."""
    stays = 2 * width * hidden * 4 * 2 // 2
    rest = {}
    for k in (1, 4, 16):
        results = pool.run(2, measured, width, hidden, k, timeout_s=600)
        for peak, predicted in results:
            assert abs(peak / predicted - 1) <= 0.05, k
        rest[k] = max(peak for peak, _ in results) - stays
    assert rest[4] <= 1.25 / 4 * rest[1] and rest[16] <= 1.6 / 16 * rest[1]
