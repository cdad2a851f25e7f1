"""Live numbers of a training loop: `meter = zerofx.meter(model)`, and a dict from every step."""

from __future__ import annotations

import itertools
import math
import os
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerofx.analysis.memory.memory import memory
from zerofx.analysis.time.forecast import peak_flops_per_s
from zerofx.analysis.time.kernels import node_flops
from zerofx.capture.original import SLOT
from zerofx.errors import ArgumentError
from zerofx.hardware import Hardware, load_hardware
from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.settle import with_sizes

_GRAPHS = {"forward": FORWARD, "backward": BACKWARD}
_POINTS = 3  # of each size: operations grow with its square at most, so three give them exactly
_MOST_KNOWN = 4096  # combinations of sizes whose operations are kept

Numbers = dict[str, float | int | None]


def meter(model: nn.Module, hardware: Hardware | str | os.PathLike[str] | None = None) -> Meter:
    """Return a meter of a compiled model's steps; see `Meter`.

    Example:
        meter = zerofx.meter(model)
        for batch in loader:
            train(batch)
            numbers = meter.step(samples=len(batch))
            print(numbers["seconds"], numbers["samples_per_s"])
    """
    return Meter(model, hardware)


class Meter:
    """Operations, throughput and memory of a compiled model, step by step.

        meter = zerofx.meter(model, hardware="dgx-h100")
        for batch in loader:
            train(batch)
            log(meter.step(samples=len(batch), tokens=batch.numel()))

    It adds no synchronisation. On a GPU the seconds are those of the host, which launches ahead, so
    that a single step may seem faster or slower than it is; the mean over many steps is right.

    model: a model that `zerofx.compile` returned.
    hardware: provides the rate for MFU; without it there is no MFU.

    Raises:
        ArgumentError: the model is not compiled.
        UnpricedError: the hardware has no rate for the format that the model computes in.
    """

    def __init__(
        self, model: nn.Module, hardware: Hardware | str | os.PathLike[str] | None = None
    ) -> None:
        self._own: Any = model.__dict__.get(SLOT) if isinstance(model, nn.Module) else None
        if self._own is None:
            raise ArgumentError(
                f"zerofx.meter was given a {type(model).__name__} that is not compiled. Pass the "
                "model that zerofx.compile returned."
            )
        if isinstance(hardware, (str, os.PathLike)):
            hardware = load_hardware(hardware)
        self._rate, self._hardware = 0.0, hardware
        if hardware is not None:
            compute = self._own.plan.precision.compute
            hardware.check_format(compute)
            self._rate = hardware.dense_flops_per_s[compute]
        self._world = self._own.world
        self._costs: weakref.WeakKeyDictionary[Any, _Cost] = weakref.WeakKeyDictionary()
        self._flops, self._step, self._own_s = 0.0, 0, 0.0
        self._predicted_bytes: int | None = None
        self._began = time.perf_counter()
        self._waited_s = self._world.waited_s
        self._own.engine.tally = self._note

    def step(self, *, samples: int = 0, tokens: int = 0) -> Numbers:
        """Return the numbers since the last call, or since the meter was made.

        samples, tokens: of this rank. Rates are those of all ranks if each feeds as many.

        step: number of this call. seconds: since the last one. samples_per_s, tokens_per_s: of all
        ranks. model_flops: operations of this rank's matrix products, convolutions and attention,
        without recomputation. flops_per_s: of this rank. mfu: the share of the hardware's
        rate on paper, or of its fastest convolution, None without a hardware. wait_share: the share
        of the time for which the host waited for collectives; on a GPU it launches ahead and waits
        for none, so None.
        skipped_steps: fp16 steps skipped because a gradient overflowed. peak_bytes: the device's
        since the last step, None on a CPU. predicted_bytes: the largest predicted peak of the
        programs that have run, at the largest sizes that they serve.
        """
        now, began = time.perf_counter(), time.thread_time()
        seconds = now - self._began
        is_host = self._world.device.type == "cpu"
        waited_s = self._world.waited_s
        scaler = self._own.loss_scale
        self._step += 1
        found: Numbers = {
            "step": self._step,
            "seconds": seconds,
            "samples_per_s": samples * self._world.data_size / seconds,
            "tokens_per_s": tokens * self._world.data_size / seconds,
            "model_flops": self._flops,
            "flops_per_s": self._flops / seconds,
            "mfu": self._flops / seconds / self._rate if self._rate else None,
            "wait_share": (waited_s - self._waited_s) / seconds if is_host else None,
            "skipped_steps": scaler.num_skipped if scaler is not None else 0,
            "peak_bytes": None if is_host else self._peak_bytes(),
            "predicted_bytes": self._predicted_bytes,
        }
        self._flops, self._waited_s, self._began = 0.0, waited_s, now
        self._own_s += time.thread_time() - began
        return found

    @staticmethod
    def loggable(numbers: Numbers) -> dict[str, float]:
        """Return the numbers that are not None under names for loggers: `zerofx/<name>`."""
        return {f"zerofx/{k}": v for k, v in numbers.items() if v is not None and k != "step"}

    @property
    def rank(self) -> int:
        """The rank of this process among those that train the model."""
        return int(self._world.rank)

    @property
    def own_us(self) -> float:
        """Microseconds of processor time per step of the meter, without pricing programs."""
        return 1e6 * self._own_s / max(1, self._step)

    def close(self) -> None:
        """Stop counting."""
        self._own.engine.tally = None

    def _peak_bytes(self) -> int:
        device = self._world.device
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak

    def _note(self, executable: Any, call: Any, half: str) -> None:
        began = time.thread_time()
        cost = self._costs.get(executable)
        if cost is None:
            program = next(
                bound.program
                for bound in self._own.table.bound.values()
                if bound.executable is executable
            )
            cost = self._costs[executable] = _Cost(program)
            if self._hardware is not None:
                self._rate = max(self._rate, peak_flops_per_s(program, self._hardware))
            self._predicted_bytes = max(cost.peak_bytes, self._predicted_bytes or 0)
            began = time.thread_time()
        if half == "forward" and cost.symbols:
            call.sizes = cost.sizes_of(call.leaves)
        self._flops += cost.flops(half, call.sizes)
        self._own_s += time.thread_time() - began


class _Cost:
    """The operations of a program's halves, at any sizes, and its predicted peak."""

    def __init__(self, program: Planned) -> None:
        self.symbols = [symbol.name for symbol in program.sizes.symbols]
        self.sizes_of = program.sizes.of
        self.peak_bytes = memory(program).peak_bytes
        hints = program.sizes.hints
        grids = [_points(program, name, hints[name]) for name in self.symbols]
        self._grids = grids
        self._found: dict[str, list[float]] = {half: [] for half in _GRAPHS}
        self._known: dict[tuple[Any, ...], float] = {}
        for values in itertools.product(*grids):
            sizes = dict(zip(self.symbols, values, strict=True))
            settled = with_sizes(program, sizes) if sizes else program
            for half, name in _GRAPHS.items():
                self._found[half].append(_flops(settled, name))

    def flops(self, half: str, sizes: Mapping[str, float] | None) -> float:
        """Return the operations of a half; its sizes lie on the polynomial through the grid."""
        found = self._found[half]
        if not sizes:
            return found[0]
        key = (half, *sizes.values())
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = self._interpolated(found, sizes)
        return known

    def _interpolated(self, found: list[float], sizes: Mapping[str, float]) -> float:
        weights = [_weights(g, sizes[n]) for n, g in zip(self.symbols, self._grids, strict=True)]
        products = map(math.prod, itertools.product(*weights))
        return sum(w * value for w, value in zip(products, found, strict=True))


def _flops(program: Planned, name: str) -> float:
    if name not in program.graphs:
        return 0.0
    return sum(
        node_flops(node)
        for node in program.graph(name).nodes
        if node.op == "call_function" and not info(node).recomputed
    )


def _points(program: Planned, name: str, hint: int) -> list[int]:
    """Return sizes that the program serves, its hint among them."""
    found = [hint]
    for size in (2 * hint, 3 * hint, hint // 2, hint // 4, hint + 1, hint - 1):
        if size not in found and program.sizes.allow({**program.sizes.hints, name: size}):
            found.append(size)
        if len(found) == _POINTS:
            break
    return found


def _weights(grid: list[int], size: float) -> list[float]:
    """Return the weight of each point of a grid at a size (Lagrange's polynomials)."""
    return [
        math.prod((size - other) / (point - other) for other in grid if other != point)
        for point in grid
    ]
