"""This checkout compared with an earlier one: step time, warm start and import, in turns.

    git worktree add ../earlier 52b680f
    python -m benchmarks.earlier ../earlier

Both sides run the benchmarks of their own checkout, with the same interpreter and libraries, on the
same machine. Steps are taken in interleaved rounds by processes that sleep while the other side
runs; starts and imports alternate. Ratios are this checkout's to the earlier one's, taken within a
round; below 1 this one is faster. The losses of all steps must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import sizes
from benchmarks.pool import ROOT, Group
from benchmarks.report import Column, finish, need_memory
from benchmarks.step_time import BYTES_PER_PARAM, WARMUP_STEPS, Rounds, interleave
from benchmarks.systems import SYSTEMS

WARM_LAYERS, WIDTH = 12, 128  # of the model that is started
TIMEOUT_S = 1800
_Used = tuple[float, float]  # seconds, CPU-seconds


def steps(name: str, size: sizes.Size, options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of one size: steps of both checkouts in interleaved rounds."""
    args = {"system": options.system, "size": name, "batch": size.batch}
    data: dict[str, Rounds] = {}
    with ExitStack() as stack:
        groups = {}
        for side, root in (("here", ROOT), ("earlier", options.tree)):
            group = Group(
                side, "benchmarks.step_time:Job", args, options.ranks,
                SYSTEMS[options.system].env, root=root,
            )  # fmt: skip
            groups[side] = stack.enter_context(group)
            group.ready()
            data[side] = Rounds([], [], [], [[] for _ in range(options.ranks)])
            data[side].add_losses(group.call("steps", count=WARMUP_STEPS))
        interleave(groups, data, size.steps, options.rounds)
    here, earlier = data["here"], data["earlier"]
    if here.losses != earlier.losses:
        raise SystemExit(f"{options.system} at {name}: the losses of the two checkouts differ")
    return line(f"step, {name}", [*zip(here.wall_s, here.cpu_s, strict=True)],
                [*zip(earlier.wall_s, earlier.cpu_s, strict=True)])  # fmt: skip


def starts(options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of warm starts: new processes to the end of their first step."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {ROOT: Path(folder) / "here", options.tree: Path(folder) / "earlier"}
        return alternate("warm start", lambda root: _start(root, caches[root], options), options)


def _start(root: Path, caches: Path, options: argparse.Namespace) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    env |= {"ZEROFX_CACHE_DIR": str(caches / "zerofx")}
    args = {"system": "zerofx", "layers": options.layers, "width": WIDTH}
    job = "benchmarks.compile_time:Job"
    with Group(str(root), job, args, options.ranks, env, root=root) as group:
        group.ready(TIMEOUT_S)
        group.call("first_step", TIMEOUT_S)


def imports(options: argparse.Namespace) -> dict[str, Any]:
    """Return the line of `import zerofx` in new processes."""
    return alternate("import zerofx", _import, options)


def _import(root: Path) -> None:
    subprocess.run([sys.executable, "-c", "import zerofx"], cwd=root, check=True)


def alternate(
    title: str, run: Callable[[Path], None], options: argparse.Namespace
) -> dict[str, Any]:
    """Run both sides once to fill their caches, then in turns; return the line."""
    taken: dict[Path, list[_Used]] = {ROOT: [], options.tree: []}
    for number in range(options.rounds + 1):
        for root in sorted(taken, reverse=bool(number % 2)):
            used = _timed(lambda root=root: run(root))  # type: ignore[misc]
            if number:
                taken[root].append(used)
    return line(title, taken[ROOT], taken[options.tree])


def _timed(run: Callable[[], None]) -> _Used:
    """Return the time that `run` takes, and the CPU time of the processes that it starts."""
    before, began = _children_s(), time.perf_counter()
    run()
    return time.perf_counter() - began, _children_s() - before


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def line(title: str, here: list[_Used], earlier: list[_Used]) -> dict[str, Any]:
    """Return the medians over rounds, and their lowest and highest ratios of CPU-seconds."""
    pairs = list(zip(here, earlier, strict=True))
    cpus = [a[1] / b[1] for a, b in pairs]
    return {
        "what": title,
        "time_ratio": statistics.median(a[0] / b[0] for a, b in pairs),
        "cpu_ratio": statistics.median(cpus),
        "low": min(cpus),
        "high": max(cpus),
        "here_s": statistics.median(a[0] for a in here),
        "here_cpu_s": statistics.median(a[1] for a in here),
        "earlier_s": statistics.median(b[0] for b in earlier),
        "earlier_cpu_s": statistics.median(b[1] for b in earlier),
        "rounds": {"here": here, "earlier": earlier},
    }


COLUMNS = [
    Column("what", "what"),
    Column("time_ratio", "time ratio", "{:.3f}"),
    Column("cpu_ratio", "CPU s ratio", "{:.3f}"),
    Column("low", "lowest", "{:.3f}"),
    Column("high", "highest", "{:.3f}"),
    Column("here_s", "here, s", "{:.4f}"),
    Column("here_cpu_s", "CPU s", "{:.4f}"),
    Column("earlier_s", "earlier, s", "{:.4f}"),
    Column("earlier_cpu_s", "CPU s", "{:.4f}"),
]


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tree", type=Path, help="a checkout of the earlier commit")
    sizes.add_options(parser, ",".join(sizes.SIZES))
    parser.add_argument("--system", default="zerofx-3", choices=SYSTEMS, help="whose steps")
    parser.add_argument("--layers", type=int, default=WARM_LAYERS, help="of the model started")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="a claim needs 8 or more")
    parser.add_argument("--parts", default="steps,starts,imports")
    options = parser.parse_args()
    options.tree = options.tree.resolve()
    if not (options.tree / "benchmarks" / "worker.py").exists():
        parser.error(f"{options.tree} is not a checkout of zerofx: it has no benchmarks/worker.py")
    parts = options.parts.split(",")
    if not set(parts) <= {"steps", "starts", "imports"}:
        parser.error(f"--parts {options.parts}: known are steps, starts, imports")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.tree, check=True, capture_output=True, text=True
    ).stdout.strip()
    lines = []
    if "steps" in parts:
        for name, size in sizes.chosen(options).items():
            need_memory(size.num_params * BYTES_PER_PARAM * options.ranks * 2)
            lines.append(steps(name, size, options))
    if "starts" in parts:
        lines.append(starts(options))
    if "imports" in parts:
        lines.append(imports(options))
    options.tree = commit  # the file names the commit, not where it lay
    finish("earlier", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
