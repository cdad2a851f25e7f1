"""Forecasts: memory by tier and time of a step on a hardware, and the figures derived from both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from zerofx.analysis.memory.memory import ADAMW_STATE_BYTES, Memory, memory
from zerofx.analysis.memory.storage import Compiled
from zerofx.analysis.time.kernels import MULTIPLIES, PRODUCT, format_of, kind_of, node_flops
from zerofx.analysis.time.prices import FORMATS, Roofline
from zerofx.analysis.time.steps import Lane
from zerofx.analysis.time.tasks import tasks
from zerofx.analysis.time.timeline import Timeline, timeline
from zerofx.analysis.time.traffic import Traffic, traffic
from zerofx.hardware import Hardware
from zerofx.ir.graphs import is_compute
from zerofx.ir.meta import Role, info, value
from zerofx.ir.program import FORWARD, JOINT, Planned, Program
from zerofx.plan.sizes import format_bytes

# From counted to measured bytes: within 5 % on every cell of the memory matrix.
MEMORY_LOW, MEMORY_HIGH = 0.97, 1.05
# Device memory used by the CUDA context, NCCL's buffers and the allocator's fragments.
RESERVED_BYTES = {"cuda": 1536 << 20, "cpu": 0}


def available_bytes(hardware: Hardware) -> int:
    """Return the bytes of one device that a program may use."""
    return max(0, hardware.device_memory_bytes - RESERVED_BYTES[hardware.device_type])


@dataclass(frozen=True)
class Range:
    """A figure with its bounds; the middle is the prediction."""

    low: float
    middle: float
    high: float

    def inverse(self, amount: float) -> Range:
        """Return `amount` divided by this range; its upper bound divides by the lower one."""
        return Range(*(amount / v if v else 0.0 for v in (self.high, self.middle, self.low)))


@dataclass(frozen=True)
class Shortage:
    """A tier, of one device or of one node, that is too small for its content."""

    tier: str
    needed_bytes: int
    available_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.available_bytes

    def __str__(self) -> str:
        return (
            f"{self.tier}: {format_bytes(self.needed_bytes)} needed, "
            f"{format_bytes(self.available_bytes)} available, "
            f"{format_bytes(self.missing_bytes)} missing"
        )


@dataclass(frozen=True)
class Forecast:
    """One rank's step: its memory, and when every task runs.

    samples, tokens: of one rank's micro-batch; tokens is 0 if inputs are not sequences.
    """

    program: Planned
    hardware: Hardware
    memory: Memory
    timeline: Timeline
    samples: int
    tokens: int

    @cached_property
    def traffic(self) -> Traffic:
        """What a rank sends in a step."""
        return traffic(self.program)

    @property
    def step_us(self) -> Range:
        return Range(self.timeline.low_us, self.timeline.step_us, self.timeline.high_us)

    @property
    def exposed_us(self) -> Range:
        """Exposed communication of a step: the time that no compute overlaps."""
        return self._like_step(self.timeline.exposed_communication_us)

    def _like_step(self, middle: float) -> Range:
        step = self.step_us
        if not step.middle:
            return Range(0.0, 0.0, 0.0)
        return Range(middle * step.low / step.middle, middle, middle * step.high / step.middle)

    @property
    def peak_bytes(self) -> Range:
        peak = self.memory.peak_bytes
        return Range(MEMORY_LOW * peak, peak, MEMORY_HIGH * peak)

    @cached_property
    def flops(self) -> float:
        """The operations of one rank's step, including recomputed ones."""
        return sum(span.task.flops for span in self.timeline.spans)

    @cached_property
    def model_flops(self) -> float:
        """The operations of one rank's step that the model itself requires."""
        again = 0.0
        known: dict[tuple, float] = {}
        for gm in self.program.graphs.values():
            for node in gm.graph.nodes:
                if info(node).recomputed and is_compute(node):
                    shapes = tuple(getattr(value(n), "shape", None) for n in node.all_input_nodes)
                    key = node.target, shapes, getattr(value(node), "shape", None)
                    if key not in known:
                        known[key] = node_flops(node)
                    again += known[key]
        return self.flops - again * self.program.loop.accumulation

    @property
    def samples_per_s(self) -> Range:
        return self.step_us.inverse(self._of_all(self.samples))

    @property
    def tokens_per_s(self) -> Range:
        return self.step_us.inverse(self._of_all(self.tokens))

    def _of_all(self, of_one: int) -> float:
        ranks = self.program.layout.mesh.num_data_ranks  # the others have the same samples
        return 1e6 * of_one * ranks * self.program.loop.accumulation

    @property
    def flops_per_s(self) -> Range:
        """Operations per second and device, including recomputed ones."""
        return self.step_us.inverse(1e6 * self.flops)

    @property
    def mfu(self) -> Range:
        """The fraction of `peak_flops_per_s` that the model's own operations reach."""
        return utilisation(self.step_us, self.model_flops, [self.program], self.hardware)

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        """The tiers that are too small for their content."""
        hardware, sharing = self.hardware, self.sharing
        device = max(0, hardware.device_memory_bytes - RESERVED_BYTES[hardware.device_type])
        found = [
            Shortage("each device", self.memory.peak_bytes, device),
            Shortage(
                "host memory of a node", self.host_bytes * sharing, hardware.host_memory_bytes
            ),
            Shortage("nvme of a node", self.memory.nvme_bytes * sharing, hardware.nvme_bytes),
        ]
        return tuple(s for s in found if s.needed_bytes > s.available_bytes)

    @property
    def host_bytes(self) -> int:
        """The host memory of a rank; if the host is the device, all of the rank's memory."""
        on_host = self.memory.host_bytes
        return on_host + (self.memory.peak_bytes if self.hardware.device_type == "cpu" else 0)

    @property
    def sharing(self) -> int:
        """The number of ranks per node."""
        return min(self.program.world_size, self.hardware.devices_per_node)

    def lane_bytes(self) -> dict[Lane, int]:
        """Return the bytes that a rank's step moves on each lane."""
        found: dict[Lane, int] = {}
        for span in self.timeline.spans:
            if span.task.lane not in (Lane.COMPUTE, Lane.HOST):
                found[span.task.lane] = found.get(span.task.lane, 0) + span.task.nbytes
        return found


def forecast(
    program: Planned,
    hardware: Hardware,
    clips: bool = False,
    optimizer_bytes: int = ADAMW_STATE_BYTES,
    keeps_results: bool = False,
    compiled: Compiled | None = None,
    held: Memory | None = None,
) -> Forecast:
    """Predict the memory and time of a step of a finished program on a hardware.

    clips: the loop clips the global norm. optimizer_bytes: bytes of optimizer state per element.
    keeps_results: the loop holds all results to the end of the step, rather than only the loss.
    compiled: the allocations of the regions that Inductor compiled here. held: the memory of the
        step, if it is known.

    Raises:
        UnpricedError: the hardware lacks something that the schedule uses.
    """
    hardware.check_world(program.world_size)
    prices = Roofline.of(program.plan, hardware, program.world_size)
    held = held or memory(program, optimizer_bytes, compiled, keeps_results)
    found = timeline(tasks(program, prices, clips))
    samples, tokens = batch(program)
    return Forecast(program, hardware, held, found, samples, tokens)


def utilisation(
    step_us: Range, model_flops: float, programs: Iterable[Planned], hardware: Hardware
) -> Range:
    """Return the fraction of `peak_flops_per_s` that a step reaches; its upper end is 1 at most."""
    rate = max(peak_flops_per_s(program, hardware) for program in programs)
    found = step_us.inverse(1e6 * model_flops / rate if rate else 0.0)
    return Range(*(min(v, 1.0) for v in (found.low, found.middle, found.high)))


def peak_flops_per_s(program: Planned, hardware: Hardware) -> float:
    """Return the fastest rate that a hardware has for products of the kinds that a program has.

    That is the nominal rate of matrix products, except where a measured curve is above it. A 3x3
    convolution may be: fast algorithms multiply less often than its operations are counted.
    """
    kinds = {(compute_format(program), PRODUCT)}
    seen = set()
    for node in (n for gm in program.graphs.values() for n in gm.graph.nodes if is_compute(n)):
        kind = node.target, format_of(node)
        if kind not in seen:
            seen.add(kind)
            if (found := kind_of(node)) in MULTIPLIES and node_flops(node):
                kinds.add((FORMATS.get(kind[1], "fp32"), found))
    return max(_fastest(hardware, *each) for each in kinds)


def _fastest(hardware: Hardware, form: str, kind: str) -> float:
    start = f"{kind}.{form}"
    curves = [c for n, c in hardware.curves.items() if n == start or n.startswith(f"{start}.")]
    shares = (share for curve in curves for _, share in curve.points)
    return hardware.dense_flops_per_s.get(form, 0.0) * max((1.0, *shares))


def compute_format(program: Planned) -> str:
    """Return the format of most of a program's products: "fp32", "fp16" or "bf16"."""
    layout = program.layout
    formats = [b.compute_dtype for b in layout.buckets]
    return FORMATS.get(max(formats, key=formats.count, default=torch.float32), "fp32")


def batch(program: Program) -> tuple[int, int]:
    """Return (samples, tokens) of a call, from its first input with a batch dimension."""
    graph = FORWARD if FORWARD in program.graphs else JOINT
    given = [value(n) for n in program.placeholders(graph, Role.INPUT)]
    tensors = [t for t in given if isinstance(t, torch.Tensor) and t.dim() > 0]
    if not tensors:
        return 1, 0
    text = next((t for t in tensors if t.dim() == 2 and not t.is_floating_point()), None)
    return tensors[0].shape[0], 0 if text is None else text.numel()
