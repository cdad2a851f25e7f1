"""Compare the figures of README.md and docs/ with the files in benchmarks/results/.

Usage: python -m benchmarks.figures [--write]

Each claim is a row of a table, or a paragraph, with the figures that a file of results gives for
it. The exit status is 1 if a row shows another figure. With --write, rows that show as many figures
as the file gives get those of the file. It measures nothing: the commands in the docs make new
files, whose names are entered below.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.predicted import PROMISED, orders
from benchmarks.report import RESULTS
from benchmarks.runs import file_of

ROOT = RESULTS.parents[1]
README, MEASURED, SLOW = "README.md", "docs/measured.md", "docs/slow-networks.md"
NUMBER = re.compile(r"(?<![A-Za-z\d])\d+(?:,\d{3})*(?:\.\d+)?")  # not those of FSDP2 and bf16
SIZES = {"4x32": "4 x 32", "4x128": "4 x 128", "8x384": "8 x 384", "4x1024": "4 x 1024"}
STEP_TIME, PRECISION = file_of("step time"), file_of("precision of steps")
MEMORY, MATRIX = file_of("memory"), file_of("memory matrix")
BUDGET, OFFLOAD = file_of("budget"), file_of("offload")
COMPILE_TIME, FIRST_STEPS = file_of("compile time"), file_of("first steps")
ONE_PROCESS = file_of("one process")
PREDICTED = {"Inductor": file_of("predicted"), "ATen": file_of("predicted, aten")}
AXES = file_of("predicted, axes")
OVERLAP = {"cpu": file_of("overlap"), "nvme": file_of("overlap, nvme")}
OVERLAP_PREDICTED = {
    "cpu": file_of("overlap, predicted"),
    "nvme": file_of("overlap, nvme predicted"),
}
LARGER, BIG_TILES = file_of("larger than memory"), file_of("large tiles")
ISLANDS, MORE_ISLANDS = file_of("islands"), file_of("islands, libraries")
LENGTHS = {"ATen": file_of("lengths, aten"), "Inductor": file_of("lengths")}
PARALLEL, ON_4_RANKS = file_of("parallel"), file_of("parallel, 4 ranks")
DEEPSPEED, ROWS = file_of("parallel, deepspeed"), file_of("table rows")
LINKS, NODE_LINKS = file_of("slow links"), file_of("slow links, nodes")
LOSSES = file_of("slow links, losses")

OVER = {  # axes of benchmarks.parallel, as docs/measured.md has them
    "tensor": "tensor", "sequence": "tensor, sequence", "pipeline": "pipeline",
    "tensor-data": "tensor x data", "sequence-data": "tensor, sequence x data",
    "pipeline-data": "pipeline x data", "deepspeed": "pipeline, the peer is DeepSpeed's",
}  # fmt: skip

FORMS = {  # systems of benchmarks.slow_links, as docs/slow-networks.md has them
    "fsdp2": "FSDP2", "zerofx-3": "zerofx stage 3",
    "zerofx-3, weights": "weights in blocks",
    "zerofx-3, weights and gradients": "weights and gradients in blocks",
    "zerofx-3, secondary shards": "secondary shards",
    "zerofx-3, two steps": "two steps",
    "zerofx-3, secondary shards, two steps": "secondary shards, two steps",
    "zerofx-3, secondary shards, weights and gradients":
        "secondary shards, weights and gradients in blocks",
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """Figures that a page shows in this order, in the row or paragraph that begins like this."""

    page: str
    section: str
    begin: str
    figures: tuple[str, ...]
    source: str

    def fault(self) -> str:
        """Return what the page shows instead, or "" if it shows these figures."""
        text = self._text()
        start, end = self._shown(text)
        if start == end:
            return f"{self.page}: section {self.section!r} has nothing that begins {self.begin!r}"
        shown = text[start:end]
        found = iter(NUMBER.findall(shown))
        for figure in self.figures:
            if figure not in found:  # goes on behind the one before
                wanted = ", ".join(self.figures)
                return f"{self.page}: {self.begin} {shown.strip()}\n  {self.source}: {wanted}"
        return ""

    def write(self) -> None:
        """Enter the figures into the page, if it shows as many."""
        text = self._text()
        start, end = self._shown(text)
        if len(NUMBER.findall(text[start:end])) == len(self.figures):
            figures = iter(self.figures)
            shown = NUMBER.sub(lambda _: next(figures), text[start:end])
            (ROOT / self.page).write_text(text[:start] + shown + text[end:], encoding="utf-8")

    def _text(self) -> str:
        return (ROOT / self.page).read_text(encoding="utf-8")

    def _shown(self, text: str) -> tuple[int, int]:
        """Return where the figures begin and end in the text of the page; equal if nowhere."""
        section = re.search(rf"^#+ {re.escape(self.section)}$", text, re.MULTILINE)
        if section is None:
            return 0, 0
        after = re.compile(r"^#+ ", re.MULTILINE).search(text, section.end())
        at = text.find(self.begin, section.end(), after.start() if after else None)
        if at < 0:
            return 0, 0
        start = at + len(self.begin)
        end = text.find("\n" if self.begin.startswith("|") else "\n\n", start)
        return start, end if end >= 0 else len(text)


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """Return the results of a file."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return found


def row(name: str, **keys: object) -> dict[str, Any]:
    """Return the one row of a file with these values."""
    (found,) = (r for r in rows(name) if all(r[key] == value for key, value in keys.items()))
    return found


def numbers(form: str, *values: float) -> tuple[str, ...]:
    return tuple(form.format(value) for value in values)


def claims() -> Iterator[Claim]:
    """Yield every claim that a file of results covers."""
    yield from _memory()
    yield from _times()
    yield from _predicted()
    yield from _budgets()
    yield from _offload()
    yield from _overlap()
    yield from _start_up()
    yield from _links()
    yield from _others()


def _memory() -> Iterator[Claim]:
    ratios = []
    for size in ("4x128", "8x384", "4x1024"):
        mine = row(MEMORY, size=size, system="zerofx-3")
        lowest = row(MEMORY, size=size, system="fsdp2")["low_bytes"] / 2**20  # as in the ratio
        figures = numbers("{:.1f}", lowest, mine["predicted_mib"], mine["measured_mib"])
        ratios.append(f"{mine['ratio']:.2f}")
        yield Claim(MEASURED, "Memory", f"| {SIZES[size]} |", (*figures, ratios[-1]), MEMORY)
    begin = "| peak memory, stage 3, 4 x 128; 8 x 384; 4 x 1024 |"
    yield Claim(README, "How fast", begin, (*ratios, "1"), MEMORY)
    errors = [abs(cell["error"]) for cell in rows(MATRIX)]
    worst = f"{100 * max(errors):.2f}"
    figures = ("0.6", worst, f"{100 * sum(errors) / len(errors):.2f}")
    assert float(worst) <= 0.6
    yield Claim(MEASURED, "Memory", "Predicted and measured over 64", figures, MATRIX)
    yield Claim(
        README, "How fast", "| predicted peak memory, 64 runs of 6 models |", ("0.6",), MATRIX
    )


def _times() -> Iterator[Claim]:
    shown = {}
    systems = ("zerofx-3", "zerofx-0", "ddp", "zerofx-3-gloo", "fsdp2-heap", "ddp-heap", "nocomm")
    for size in SIZES:
        found = [row(STEP_TIME, size=size, system=s) for s in systems]
        ratios = [r[key] for r in found for key in ("time_ratio", "cpu_ratio")]
        figures = numbers("{:.2f}", *ratios)
        yield Claim(MEASURED, "Step time", f"| {SIZES[size]} |", figures, STEP_TIME)
        shown |= {(size, system): figures[2 * i] for i, system in enumerate(systems)}
    for begin, of in (
        ("| step time, stage 3, 4 x 128; 4 x 1024 |", ("zerofx-3", "ddp")),
        ("| the same, zerofx over gloo too |", ("zerofx-3-gloo",)),
    ):
        pairs = [[shown[size, system] for size in ("4x128", "4x1024")] for system in of]
        figures = (*pairs[0], "1", *pairs[1]) if len(pairs) > 1 else (*pairs[0], "1")
        yield Claim(README, "How fast", begin, figures, STEP_TIME)
    for system, label in (
        ("zerofx-3-bf16", "bf16 over fp32 weights, stage 3"),
        ("zerofx-0-bf16", "bf16 over fp32 weights, stage 0"),
        ("zerofx-3-recompute", "every block recomputed, stage 3"),
    ):
        found = row(PRECISION, size="8x384", system=system)
        figures = numbers("{:.2f}", found["time_ratio"], found["cpu_ratio"])
        yield Claim(MEASURED, "Step time", f"| {label} |", figures, PRECISION)


def _predicted() -> Iterator[Claim]:
    def span(found: list[float]) -> tuple[str, ...]:
        return numbers("{:.2f}", min(found), max(found))

    section = "Predicted step times"
    for kernels, run in PREDICTED.items():
        cells = rows(run)
        close = sum(abs(cell["ratio"] - 1) <= PROMISED for cell in cells)
        counts = (close, len(cells), sum(cell["is_inside"] for cell in cells), *orders(cells))
        figures = numbers("{}", *counts)
        for world in (1, 2):
            for resnet in (False, True):
                figures += span(
                    [
                        cell["ratio"]
                        for cell in cells
                        if cell["world"] == world and (cell["model"] == "resnet") == resnet
                    ]
                )
        yield Claim(MEASURED, section, f"| {kernels} |", figures, run)
    for axis in dict.fromkeys(cell["axis"] for cell in rows(AXES)):
        on_2, on_4 = (
            [cell for cell in rows(AXES) if (cell["axis"], cell["world"]) == (axis, world)]
            for world in (2, 4)
        )
        figures = span([cell["ratio"] for cell in on_2]) + span([cell["paced"] for cell in on_2])
        figures += span([cell["cpu_ratio"] for cell in on_2])
        figures += span([cell["cpu_paced"] for cell in on_4])
        label = OVER.get(axis, axis)
        yield Claim(MEASURED, section, f"| {label} |", figures, AXES)

    def close(ranks: int, ratio: str) -> int:
        ratios = [cell[ratio] for cell in rows(AXES) if cell["world"] == ranks]
        return sum(abs(found - 1) <= PROMISED for found in ratios)

    on_2_ranks = [close(2, ratio) for ratio in ("ratio", "paced", "cpu_ratio")]
    figures = numbers("{}", *on_2_ranks, 4, close(4, "cpu_paced"), *orders(rows(AXES)))
    yield Claim(MEASURED, section, "Of the 16 cells on 2 ranks, within 15 %:", figures, AXES)


def _budgets() -> Iterator[Claim]:
    for run in rows(BUDGET):
        figures = (f"{run['measured_mib']:.1f}", f"{run['time_ratio']:.2f}")
        kinds = {"fsdp2": "FSDP2", "fsdp2-checkpoint": "FSDP2, every block checkpointed"}
        allowed = f"zerofx, {run['budget_mib'] or 0:.1f} MiB allowed"
        label = kinds.get(run["run"], allowed)
        if label in (ROOT / MEASURED).read_text(encoding="utf-8"):  # four of the eight are shown
            yield Claim(MEASURED, "Memory budgets", f"| {label}", figures, BUDGET)
    least = min(rows(BUDGET), key=lambda r: r["budget_mib"] or 1e9)
    checked = row(BUDGET, run="fsdp2-checkpoint")
    figures = (*numbers("{:.1f}", least["measured_mib"]), *numbers("{:.2f}", least["time_ratio"]))
    figures += numbers("{:.1f}", checked["measured_mib"])
    yield Claim(
        README, "How fast", "| smallest budget, 8 x 384: peak; step time |", (*figures, "1"), BUDGET
    )


def _offload() -> Iterator[Claim]:
    labels = {
        "zerofx-3-flat": "zerofx stage 3, no offload",
        "zerofx-3-host-states": "zerofx, states on the host",
        "zerofx-3-host": "zerofx, states and parameters on the host",
        "fsdp2-offload": "FSDP2, `CPUOffloadPolicy`",
        "deepspeed-offload": "DeepSpeed ZeRO-3, both offloaded",
    }
    ratios = {}
    for system, label in labels.items():
        found = [row(OFFLOAD, size=s, system=system)["time_ratio"] for s in ("4x128", "8x384")]
        ratios[system] = figures = numbers("{:.2f}", *found)
        yield Claim(MEASURED, "Offload", f"| {label} |", figures, OFFLOAD)
    figures = tuple(ratios[s][0] for s in ("zerofx-3-host", "fsdp2-offload", "deepspeed-offload"))
    begin = "| step time with parameters and states on the host, 4 x 128 |"
    yield Claim(README, "How fast", begin, (*figures, "1"), OFFLOAD)
    (larger,) = rows(LARGER)
    mib = [larger[f"{name}_mib"] for name in ("states", "limit", "peak", "predicted")]
    begin = "A GPT of 48 x 768 whose parameters, gradients and states are"
    yield Claim(MEASURED, "Offload", begin, numbers("{:,.0f}", *mib), LARGER)


def _overlap() -> Iterator[Claim]:
    for tier, label in (("cpu", "the states on the host"), ("nvme", "the states on NVMe")):
        figures = numbers("{:.2f}", *(r["ratio"] for r in rows(OVERLAP[tier])))
        yield Claim(MEASURED, "Offload", f"| {label} |", figures, OVERLAP[tier])
    more: tuple[str, ...] = ()
    for run in OVERLAP.values():
        longer = [r["step_ms"] - r["compute_ms"] for r in rows(run)]
        more += numbers("{:.0f}", min(longer), max(longer))
    yield Claim(MEASURED, "Offload", "A step takes longer than its compute by", more, run)
    host, disk = (rows(run)[0] for run in OVERLAP_PREDICTED.values())
    for label, of in (("step", ""), ("compute", "compute_")):
        names = (f"predicted_{of}ms", f"recorded_{of}ms")
        figures = numbers("{:,.0f}", *(r[name] for r in (host, disk) for name in names))
        yield Claim(MEASURED, "Offload", f"| {label} |", figures, OVERLAP_PREDICTED["nvme"])
    for label, form, shown, lanes in (
        ("to the host; from it", "{:.1f}", (host, disk), ("to host", "from host")),
        ("from NVMe; to it", "{:.0f}", (disk,), ("from nvme", "to nvme")),
        ("host update", "{:.1f}", (host, disk), ("host update",)),
    ):
        found = [r["predicted_lanes_ms"][lane] for r in shown for lane in lanes]
        figures = numbers(form, *found)
        yield Claim(MEASURED, "Offload", f"| {label} |", figures, OVERLAP_PREDICTED["nvme"])
    apart = [r for run in OVERLAP.values() for r in rows(run)]
    figures = ()
    for lane in ("transfer_ms", "update_ms", "disk_ms"):
        found = [r[lane] for r in apart if r[lane]]
        figures += numbers("{:.0f}", min(found), max(found))
    begin = "Measured separately, as above, copies take"
    yield Claim(MEASURED, "Offload", begin, figures, OVERLAP["nvme"])


def _start_up() -> Iterator[Claim]:
    for layers in (4, 12, 24, 48):
        mine, torch_s = (
            row(COMPILE_TIME, layers=layers, system=s) for s in ("zerofx", "torch.compile")
        )
        times = (mine["cold_s"], torch_s["cold_s"], mine["warm_s"], torch_s["warm_s"])
        figures = numbers("{:.1f}", *times)
        yield Claim(MEASURED, "Start-up", f"| {layers} |", figures, COMPILE_TIME)
    mixed = (figures[0], figures[2], figures[1], figures[3])
    yield Claim(README, "How fast", "| first step of 48 layers, cold; warm |", mixed, COMPILE_TIME)
    for model in dict.fromkeys(r["model"] for r in rows(FIRST_STEPS)):
        systems = ("eager", "aten", "auto", "inductor", "torch.compile")
        found = [row(FIRST_STEPS, model=model, system=s) for s in systems]
        figures = numbers("{:.1f}", *(r["third_s"] for r in found))
        swapped = found[systems.index("auto")]
        figures += (f"{swapped['swap_s']:.0f}", f"{swapped['between']:.2f}")
        yield Claim(MEASURED, "Start-up", f"| {model} |", figures, FIRST_STEPS)


def _links() -> Iterator[Claim]:
    for run, section in ((LINKS, "Bytes"), (NODE_LINKS, "Bytes between nodes")):
        exact = row(run, rate="100mbit", system="zerofx-3")["sent_mib"]
        for r in rows(run):
            if r["rate"] == "100mbit":
                label = FORMS[r["system"]]
                figures = numbers("{:.2f}", r["sent_mib"], r["sent_mib"] / exact)
                yield Claim(SLOW, section, f"| {label} |", figures, run)
    for run, form in ((LINKS, "{}"), (NODE_LINKS, "two ranks per node: {}")):
        for system in dict.fromkeys(r["system"] for r in rows(run)):
            rates = [row(run, rate=rate, system=system) for rate in ("100mbit", "1gbit")]
            if system != "fsdp2":
                figures = numbers("{:.2f}", *(r["ratio"] for r in rates))
                begin = f"| {form.format(FORMS[system])} |"
                yield Claim(SLOW, "Step times", begin, figures, run)
            if rates[0].get("predicted_ms"):
                of_both = [r[key] for r in rates for key in ("predicted_ms", "step_ms")]
                figures = numbers("{:.0f}", *of_both)
                yield Claim(SLOW, "Predicted", f"| {FORMS[system]} |", figures, run)
    peers = [row(run, rate=rate, system="fsdp2")["step_ms"] for run in (LINKS, NODE_LINKS)
             for rate in ("100mbit", "1gbit")]  # fmt: skip
    begin = "Step times of the same runs, as ratios of FSDP2's"
    yield Claim(SLOW, "Step times", begin, numbers("{:.0f}", *peers), NODE_LINKS)
    ratios = [r["ratio"] for r in rows(LOSSES)[1:]]
    begin = "After 300 steps, the mean of the last 20 losses"
    yield Claim(SLOW, "Step times", begin, numbers("{:.4f}", *ratios), LOSSES)


def _others() -> Iterator[Claim]:
    labels = {
        "experts": "top-1 experts", "packed": "LSTMs over packed sequences",
        "layer drop": "layer drop", "DETR": "DETR with its loss", "GCN": "GCN",
    }  # fmt: skip
    for model, label in labels.items():
        run = MORE_ISLANDS if model in ("DETR", "GCN") else ISLANDS
        r = row(run, model=model)
        figures = (str(r["islands"]), f"{100 * r['inside']:.0f}")
        figures += numbers("{:.2f}", r["wall"], r["cpu"])
        figures += (f"{r['peak_mib']:.1f}", f"{r['peak']:.2f}")
        yield Claim(MEASURED, "Islands", f"| {label} |", figures, run)
    for kernels, run in LENGTHS.items():
        (r,) = rows(run)
        of = r["to_static"] if kernels == "ATen" else r["to_compile"]
        figures = (str(r["programs"]), *numbers("{:.2f}", of), *numbers("{:.1f}", r["peak_mib"]))
        figures += numbers("{:.1f}", 100 * r["error"])
        yield Claim(MEASURED, "Lengths that vary", f"| {kernels} |", figures, run)
    for stage in (0, 1):
        found = [r for r in rows(ROWS) if r["stage"] == stage]
        figures = numbers("{:.1f}", found[0]["whole_mib"], *(r["rows_mib"] for r in found))
        figures += numbers("{:.2f}", *(r["ratio"] for r in found))
        begin = f"| {stage} | 1,024; 8,192; 65,536 |"
        yield Claim(MEASURED, "Gradients by rows", begin, figures, ROWS)
    for axis, label in OVER.items():
        source = DEEPSPEED if axis == "deepspeed" else PARALLEL
        source = ON_4_RANKS if axis.endswith("-data") else source
        r = row(source, axis=axis)
        figures = (str(r["ranks"]), *numbers("{:.2f}", r["wall"], r["cpu"], r["peak"]))
        figures += numbers("{:.3f}", r["predicted"])
        yield Claim(MEASURED, "Layers over ranks", f"| {label} |", figures, source)
    for model in dict.fromkeys(r["model"] for r in rows(ONE_PROCESS)):
        aten = row(ONE_PROCESS, model=model, system="aten")
        others = ("auto", "inductor", "torch.compile", "again", "eager kept heap")
        ratios = [row(ONE_PROCESS, model=model, system=s)["ratio"] for s in others]
        figures = numbers("{:.2f}", aten["ratio"], aten["low"], aten["high"], *ratios)
        begin = f"| {model} |"
        yield Claim(MEASURED, "One process beside eager", begin, figures, ONE_PROCESS)
    working = numbers("{:,.1f}", *(r["working_mib"] for r in rows(BIG_TILES)))
    yield Claim(MEASURED, "Tiles", "gradient, `python -m benchmarks.tiling", working, BIG_TILES)


def main(arguments: Sequence[str]) -> int:
    """Print every claim that does not hold, and a count; return the exit status."""
    if list(arguments) not in ([], ["--write"]):
        print(f"it takes only --write, but was given {' '.join(arguments)}", file=sys.stderr)
        return 2
    found = list(claims())
    if arguments:
        for claim in found:
            if claim.fault():
                claim.write()
    faults = [fault for claim in found if (fault := claim.fault())]
    print("\n".join([*faults, f"{len(found) - len(faults)} of {len(found)} claims hold"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
