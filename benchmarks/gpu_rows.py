"""Rows from processes: run rounds in turn and compare; each failure stays separate."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.gpu_cases import MEMORY_TOLERANCE, Case, Comparison, Target, case_named
from benchmarks.gpu_jobs import ADAMW_BYTES
from benchmarks.gpu_report import Row
from benchmarks.gpu_runner import Budget, Runner

ADAMW = "adamw"
ADAMW_REPEATS = 5
ADAMW_SHARE = Target(">=", 0.9)
ADAMW_TOLERANCE = 1e-3  # of the distance from the start: rounding alone stays below it
COPY_BYTES = 8  # an fp32 element read and written


def _ratios(over: list[float], under: list[float]) -> list[float]:
    """Return each round's ratio; skip rounds that only one of the two ran."""
    return [a / b for a, b in zip(over, under, strict=False)]


def _compared(row: Row, ratios: list[float], target: Target | None) -> Row:
    row.value, row.low, row.high = statistics.median(ratios), min(ratios), max(ratios)
    row.target, row.met = target and str(target), target and target.is_met(row.value)
    return row


def _short(done: int, rounds: int) -> str:
    return "" if done >= rounds else f"; only {done} of {rounds} rounds within --limit"


# -- the flat optimizer step --------------------------------------------------------------------
def adamw_rows(options: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Yield the fraction of a copy's bandwidth that our step reaches, and torch's fused one."""
    args = {
        "elements": options.elements,
        "repeats": ADAMW_REPEATS,
        "rehearse": options.rehearse,
    }
    runner = Runner(ADAMW, "AdamW", args, budget)
    runner.ready()
    for number in range(options.rounds):
        if not (runner.rounds and budget.is_spent):
            runner.round(number)
    if runner.error is None:
        error = runner.call("error")
        if error is not None and not error <= ADAMW_TOLERANCE:
            runner.fail(
                f"zerofx's parameter differs from torch's by {error:.1e} of its change, more than "
                f"{ADAMW_TOLERANCE:.0e}: that was a different step"
            )
    runner.close()
    for system, target in (("zerofx", ADAMW_SHARE), ("torch fused", None)):
        row = Row(ADAMW, system, "bandwidth / copy's", error=runner.error)
        if runner.error is None:
            times, copies = runner.rounds[system], runner.rounds["copy"]
            more = ADAMW_BYTES / COPY_BYTES
            _compared(row, [more * share for share in _ratios(copies, times)], target)
            step_s, copy_s = statistics.median(times), statistics.median(copies)
            row.figures = {"step_s": step_s, "elements": options.elements, "copy_s": copy_s}
            speeds = (ADAMW_BYTES / step_s, COPY_BYTES / copy_s)
            mine, plain = (f"{speed * options.elements / 1e9:,.0f}" for speed in speeds)
            row.note = f"{mine} GB/s of {plain}, {options.elements:,} elements"
            row.note += _short(len(times), options.rounds)
            row.rounds = {"step_s": times, "copy_s": copies}
        yield row


# -- trainings ----------------------------------------------------------------------------------
def training_rows(name: str, options: argparse.Namespace, budget: Budget) -> Iterator[Row]:
    """Yield a case's rows: each system's own figures and its memory, then the comparisons."""
    case = case_named(name, options.batch, options.rehearse)
    with ExitStack() as stack:
        runners = {}
        for system in case.systems:  # all at once: they compile concurrently
            args = {"case": name, "system": system, "batch": options.batch}
            args |= {"stage": options.stage, "rehearse": options.rehearse}
            runners[system] = Runner(system, "Training", args, budget)
            stack.callback(runners[system].close)
        for runner in runners.values():
            runner.ready()
            runner.facts = runner.call("facts") or {}
        _check_losses(case, runners)
        for system, runner in runners.items():
            if case.systems[system].kind == "zerofx":
                yield _memory_row(name, runner)
        _take_rounds(list(runners.values()), options.rounds, budget)
    for runner in runners.values():
        yield _system_row(name, runner, options.rounds)
    for comparison in case.comparisons:
        yield _comparison_row(name, comparison, runners)


def _take_rounds(runners: list[Runner], rounds: int, budget: Budget) -> None:
    """Run all in turn, starting with the next one in each round."""
    for number in range(rounds):
        start = number % len(runners)
        for runner in runners[start:] + runners[:start]:
            if number and budget.is_spent:
                return
            runner.round(number)


def _check_losses(case: Case, runners: dict[str, Runner]) -> None:
    """Fail systems whose training differs from the reference; their times would mean nothing."""
    known = runners[case.reference].facts.get("losses")
    for runner in runners.values():
        mine = runner.facts.get("losses")
        if mine is None or known is None:
            continue
        error = max(abs(a - b) / abs(b) for a, b in zip(mine, known, strict=True))
        runner.facts["loss_error"] = error
        if not (math.isfinite(error) and error <= case.loss_tolerance):
            runner.fail(
                f"losses differ from {case.reference}'s by {error:.1e} relative, more than "
                f"{case.loss_tolerance:.0e}: a different training"
            )


def _memory_row(name: str, runner: Runner) -> Row:
    """Return the predicted peak and the allocator's; a failure here affects only this row."""
    row = Row(name, runner.name, "predicted / measured peak - 1", form="{:+.1%}")
    row.target = f"within {MEMORY_TOLERANCE:.0%}"
    predicted, row.error = runner.ask("predicted")
    if row.error is not None:
        return row
    measured, workspace = (runner.facts[k] for k in ("peak_bytes", "workspace_bytes"))
    row.value = predicted / measured - 1
    row.met = abs(row.value) <= MEMORY_TOLERANCE
    row.figures = runner.facts | {"predicted_bytes": predicted}
    row.note = f"predicted {predicted / 2**20:,.1f} MiB"
    if workspace:
        without = predicted / (measured - workspace) - 1
        row.note += f"; {without:+.1%} without cuBLAS's workspaces of {workspace / 2**20:.1f} MiB"
    return row


def _system_row(name: str, runner: Runner, rounds: int) -> Row:
    row = Row(name, runner.name, "training step", error=runner.error, figures=runner.facts)
    times = runner.rounds.get("step_s", [])
    if times and runner.error is None:
        step_s = statistics.median(times)
        row.figures |= {"step_s": step_s, "tokens_s": runner.facts["tokens"] / step_s}
        row.note = _short(len(times), rounds)
    row.rounds = runner.rounds
    return row


def _comparison_row(name: str, comparison: Comparison, runners: dict[str, Runner]) -> Row:
    over, under = runners[comparison.over], runners[comparison.under]
    row = Row(name, comparison.system, comparison.measure)
    row.target = comparison.target and str(comparison.target)
    for runner in (over, under):
        if runner.error is not None:
            row.error = (
                runner.error
                if runner.name == comparison.system
                else (f"WorkerError: {runner.name} failed, see its row")
            )
            return row
    if comparison.key == "peak_bytes":
        ratios = [over.facts["peak_bytes"] / under.facts["peak_bytes"]]
    else:
        ratios = _ratios(over.rounds[comparison.key], under.rounds[comparison.key])
    return _compared(row, ratios, comparison.target)
