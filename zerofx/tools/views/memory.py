"""Memory as text: bytes by category at the peak, and the largest tensors there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerofx.analysis.memory.memory import ADAMW_STATE_BYTES, ATEN, Held, Memory, memory
from zerofx.analysis.memory.storage import Category, Compiled
from zerofx.analysis.time.traffic import Traffic, traffic
from zerofx.ir.meta import Role, info
from zerofx.ir.program import Decision, Program
from zerofx.ir.text import as_text, without_numbers
from zerofx.plan.sizes import format_bytes
from zerofx.runtime.tiers.host_tier import D2H, H2D, NVME_READ, NVME_WRITE
from zerofx.tools.room import is_limited, room, shortened
from zerofx.tools.views.schedule import title
from zerofx.tools.views.why import WhyView, explained, summary
from zerofx.tools.words import counted

_WAYS = {
    D2H: "to its host", H2D: "from its host", NVME_READ: "from its nvme", NVME_WRITE: "to its nvme",
}  # fmt: skip
NAMES = 16  # largest tensors at the peak that are listed
MIN_NAME, MIN_MODULE = 36, 28  # least columns of their names and modules
BAR = 24  # columns of the longest bar
SHORT = 14  # columns that names and modules have on the narrowest terminal
WORTH = 0.01  # share of the peak from which on results that a loop may keep are mentioned
MARGIN = 31  # columns of their bytes and category, and of the gaps


@dataclass(frozen=True)
class MemoryView:
    """Memory of one rank: print it, or take `to_dict()` for JSON.

    results_bytes: how much higher the peak is in a loop that keeps all results until step(); 0 if
        that is counted, or if the program returns no more than a loss.
    """

    title: str
    memory: Memory
    traffic: Traffic
    optimizer_bytes: int
    basis: str
    decisions: tuple[Decision, ...] = ()
    assumed: str = ""
    results_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def why(self, name: str) -> WhyView:
        """Return the decisions on the values and buckets that a name refers to.

        Raises:
            PlanError: there is no decision under this name; the message has the nearest names.
        """
        return WhyView(name, explained(self.decisions, name))

    def __str__(self) -> str:
        return as_text(self.lines())

    def lines(self) -> list[str]:
        """Return the table by category, the largest tensors at the peak, and the traffic."""
        report = self.memory
        held, lasting = report.by_category(report.peak_time), report.lasting()
        lines = [f"# {self.title}   peak {format_bytes(self.peak_bytes)} per rank"]
        lines += [f"at {self._place()}", self.basis]
        lines += [*([self.assumed] if self.assumed else []), *self._of_results(), ""]
        lines.append(f"{'category':<16}{'between steps':>16}{'at the peak':>16}   share")
        longest = room(BAR, 60, 0)
        for category, nbytes in held.items():
            if category not in (Category.HOST, Category.NVME) and (nbytes or lasting[category]):
                share = nbytes / max(self.peak_bytes, 1)
                line = (
                    f"{category.value:<16}{format_bytes(lasting[category]):>16}"
                    f"{format_bytes(nbytes):>16}   {share:6.1%}  {'#' * round(longest * share)}"
                )
                lines.append(line.rstrip())
        on_host, on_nvme = lasting.pop(Category.HOST), lasting.pop(Category.NVME)
        total = format_bytes(sum(lasting.values()))
        lines.append(f"{'total':<16}{total:>16}{format_bytes(self.peak_bytes):>16}")
        if on_host:
            there = format_bytes(held[Category.HOST])
            lines.append(f"{'host memory':<16}{format_bytes(on_host):>16}{there:>16}")
        if on_nvme:
            lines.append(f"{'files':<16}{format_bytes(on_nvme):>16}{format_bytes(on_nvme):>16}")
        lines.append("")
        return lines + self._names() + self._sent() + summary(self.decisions)

    def _of_results(self) -> list[str]:
        """Return the line on a loop that keeps all results, if that makes a difference."""
        if self.results_bytes < WORTH * max(self.peak_bytes, 1):
            return []
        return [
            f"A loop that keeps all results until step() holds {format_bytes(self.results_bytes)} "
            "more (--keep-results); Plan(outputs='loss') returns the loss alone."
        ]

    def _place(self) -> str:
        if not self.memory.life.nodes:
            return "no step"
        graph, node = self.memory.life.nodes[self.memory.peak_time]
        where = info(node)
        parts = [graph, where.module or where.unit, str(node.name), where.line]
        return "  ".join(p for p in parts if p)

    def _names(self) -> list[str]:
        rows = _rows(self.memory.held_at(self.memory.peak_time), NAMES)
        return ["largest at the peak, identical layers together", *rows, ""]

    def largest(self, tier: str, most: int) -> list[str]:
        """Return a line for each of the largest tensors of a tier at the peak.

        tier: "each device", "host memory ..", "nvme .."; if the device uses host memory, that.
        """
        report = self.memory
        away = {"host": report.on_host, "nvme": report.on_nvme}.get(tier.split()[0], ())
        held = [
            Held(s.category, s.name, s.nbytes, s.where.module or s.where.unit, s.where.line)
            for s in away
            if s.birth <= report.peak_time <= s.death
        ]
        return _rows(held or report.held_at(report.peak_time), most)

    def _sent(self) -> list[str]:
        lines = ["sent per rank and step"]
        for kind, sent in self.traffic.kinds.items():
            if sent.calls:
                across = f", {format_bytes(sent.across_bytes)} across nodes"
                lines.append(
                    f"  {format_bytes(sent.sent_bytes):>10}  {kind:<14} "
                    f"{counted(sent.calls, 'call')}, {counted(sent.sent_numel, 'element')}"
                    + across
                    * bool(sent.across_bytes)
                )
        for lane, moved in self.traffic.moved.items():
            if moved.calls:
                way = _WAYS[lane]
                size = format_bytes(moved.sent_bytes)
                lines.append(f"  {size:>10}  {way:<14} {counted(moved.calls, 'copy', 'copies')}")
        return lines if len(lines) > 1 else []

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, with the curve over time."""
        report = self.memory
        held = report.held_at(report.peak_time)
        return {
            "title": self.title,
            "peak_bytes": self.peak_bytes,
            "results_bytes": self.results_bytes,
            "peak_at": self._place(),
            "optimizer_bytes_per_element": self.optimizer_bytes,
            "basis": self.basis,
            "host_bytes": report.host_bytes,
            "nvme_bytes": report.nvme_bytes,
            "at_peak": {c.value: n for c, n in report.by_category(report.peak_time).items()},
            "between_steps": {c.value: n for c, n in report.lasting().items()},
            "held_at_peak": [
                {"category": h.category.value, "name": h.name, "bytes": h.nbytes,
                 "module": h.module, "line": h.line}
                for h in held
            ],
            "curve_bytes": list(report.curve),
            "decisions": [dataclasses.asdict(d) for d in self.decisions],
            "traffic": {
                kind: {"calls": s.calls, "numel": s.sent_numel, "bytes": s.sent_bytes,
                       "across_bytes": s.across_bytes}
                for kind, s in (*self.traffic.kinds.items(), *self.traffic.moved.items())
            },
        }  # fmt: skip


def _merged(all_: Sequence[Held], most: int) -> list[tuple[tuple[str, ...], tuple[int, int]]]:
    """Return the largest groups of tensors: (category, name, module, line) -> (bytes, count)."""
    sums: dict[tuple[str, ...], tuple[int, int]] = {}
    first: dict[tuple[str, ...], Held] = {}
    for held in all_:
        kind, name = held.category.value, _stem(held)
        key = (kind, name, without_numbers(held.module), held.line)
        first.setdefault(key, held)
        nbytes, count = sums.get(key, (0, 0))
        sums[key] = nbytes + held.nbytes, count + 1
    ranked = sorted(sums.items(), key=lambda kv: (-kv[1][0], kv[0]))[:most]
    return [(_label(first[key], key, count), (n, count)) for key, (n, count) in ranked]


def _rows(all_: Sequence[Held], most: int) -> list[str]:
    """Return a line for each of the largest groups, in columns as wide as their longest word.

    On a narrow terminal names and modules lose their middle.
    """
    found = []
    for (category, name, module, line), (nbytes, count) in _merged(all_, most):
        times = f" x{count}" if count > 1 else ""
        found.append((name + times, module, line, f"{format_bytes(nbytes):>10}  {category:<14}"))
    if not found:
        return []
    wide = max(len(n) for n, *_ in found)
    widest = max(len(m) for _, m, *_ in found)
    if is_limited():
        taken = MARGIN + max(len(line) for *_, line, _ in found)
        wide = room(wide, taken + widest, SHORT)
        widest = room(widest, taken + wide, SHORT)
    else:
        wide, widest = max(MIN_NAME, wide), max(MIN_MODULE, widest)
    return [
        f"  {size} {shortened(n, wide):<{wide}} {shortened(m, widest):<{widest}} {at}".rstrip()
        for n, m, at, size in found
    ]


def _label(held: Held, key: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the columns of a line: the names of a single tensor, or those of its group."""
    if count > 1:
        return key
    return held.category.value, held.name, held.module, held.line


def _stem(held: Held) -> str:
    """Return the name without the number that makes it unique, so that layers have it alike."""
    return held.name if held.is_slot else re.sub(r"_?\d+$", "", held.name)


def view(
    program: Program,
    optimizer_bytes: int = ADAMW_STATE_BYTES,
    compiled: Compiled | None = None,
    keeps_results: bool = False,
    accumulation: int | None = None,
    no_sync: bool | None = None,
    basis: str = ATEN,
) -> MemoryView:
    """Return the memory of one rank over a step of a program; see analysis.memory.memory.

    basis: the basis by which `compiled` was chosen.
    """
    planned = program.planned()
    report = memory(planned, optimizer_bytes, compiled, keeps_results, accumulation, no_sync)
    sent = traffic(planned)
    return shown(
        program, report, sent, optimizer_bytes, compiled, keeps_results, basis, accumulation,
        no_sync,
    )  # fmt: skip


def shown(
    program: Program,
    report: Memory,
    sent: Traffic,
    optimizer_bytes: int,
    compiled: Compiled | None = None,
    keeps_results: bool = False,
    basis: str = ATEN,
    accumulation: int | None = None,
    no_sync: bool | None = None,
) -> MemoryView:
    """Return the view of the memory and traffic of a program that were computed before."""
    planned, more = program.planned(), 0
    known = f"{counted(len(compiled or {}), 'region')} as Inductor compiled them"
    said = f"temporaries: {known if compiled else 'regions run op by op, as ATen'}"
    if _has_more_than_a_loss(program):
        said += f"; until step() the loop holds {'all results' if keeps_results else 'the loss'}"
        if not keeps_results:
            kept = memory(planned, optimizer_bytes, compiled, True, accumulation, no_sync)
            more = kept.peak_bytes - report.peak_bytes
    if report.micro.packs_apart:
        said += f"; {report.micro}"
    heading, decisions = title(program, basis), planned.decisions
    states = f"{optimizer_bytes} bytes per element"
    if optimizer_bytes == ADAMW_STATE_BYTES:
        states = f"AdamW in fp32 is assumed, {states} (--optimizer-bytes)"
    assumed = f"optimizer states: {states}" if program.is_training else ""
    return MemoryView(heading, report, sent, optimizer_bytes, said, decisions, assumed, more)


def _has_more_than_a_loss(program: Program) -> bool:
    """Tell whether a training program has outputs besides the loss that the loop may keep."""
    results = (s for specs in program.outputs.values() for s in specs if s.role is Role.OUTPUT)
    loss = program.calling.loss
    return program.is_training and any(s.index != loss for s in results)
