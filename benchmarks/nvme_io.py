"""Disk bandwidth: zerofx.nvme compared with fio, with the same file and request sizes in one run.

    python -m benchmarks.nvme_io --folder /nvme/scratch

Each round measures every system once for each direction and request size, in a new random order.
Ratios are taken within a round, and their median over the rounds is shown. All systems bypass the
page cache and keep `--depth` requests in flight: libaio in one thread, psync and zerofx in as many
threads. CPU is user and system time of the job itself, like the one that fio reports.

zerofx           zerofx.nvme.File with one request for each request of fio, by default: pieces of
                 4 MiB, into which large requests are split and small neighbouring ones merged
zerofx unmerged  pieces of the size of a request, so that each is one call, as in fio
zerofx checked   zerofx.nvme.NvmeStore: one extent per request, with a checksum for every 256 KiB
zerofx plain     zerofx.nvme.File with tensors of torch.empty, which are copied to be aligned
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Column, finish
from zerofx import nvme
from zerofx.nvme.engine import PIECE_BYTES
from zerofx.plan.sizes import format_bytes, parse_bytes

FIO = ("fio libaio", "fio psync")
SYSTEMS = ("zerofx", "zerofx unmerged", "zerofx checked", "zerofx plain", *FIO)


@dataclass
class Taken:
    """The result of one measurement."""

    gb_per_s: float
    cpu_s_per_gb: float


Measure = Callable[[bool], Taken]  # is_write -> the result


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def moved(submit: Callable[[int], nvme.Request], number: int, nbytes: int) -> Taken:
    """Measure from the first submission to the end of the last."""
    cpu, start = cpu_s(), time.perf_counter()
    for request in [submit(i) for i in range(number)]:
        request.wait()
    seconds = time.perf_counter() - start
    return Taken(nbytes / seconds / 1e9, (cpu_s() - cpu) / nbytes * 1e9)


@contextmanager
def our_file(
    path: Path, memory: torch.Tensor, size: int, depth: int, piece: int
) -> Iterator[Measure]:
    """Yield a function that measures a File."""
    parts = memory.split(size)
    with nvme.IOEngine(depth, piece) as engine, nvme.File(path, "r+", engine=engine) as file:
        if not file.is_direct:
            raise SystemExit(
                f"{path.parent} is on a file system without O_DIRECT. Choose another --folder"
            )

        def submit_write(i: int) -> nvme.Request:
            return file.submit_write(parts[i], i * size)

        def submit_read(i: int) -> nvme.Request:
            return file.submit_read(parts[i], i * size)

        yield lambda is_write: moved(
            submit_write if is_write else submit_read, len(parts), memory.numel()
        )


@contextmanager
def our_store(folder: Path, memory: torch.Tensor, size: int, depth: int) -> Iterator[Measure]:
    """Yield a function that measures a store with its checksums."""
    parts = memory.split(size)
    names = [f"extent{i}" for i in range(len(parts))]
    extents = dict.fromkeys(names, size)
    with (
        nvme.IOEngine(depth) as engine,
        nvme.NvmeStore.create(folder, extents, label="benchmark", engine=engine) as store,
    ):

        def submit_write(i: int) -> nvme.Request:
            return store.write(names[i], parts[i])

        def submit_read(i: int) -> nvme.Request:
            return store.read(names[i], parts[i])

        moved(submit_write, len(parts), memory.numel())  # nothing can be read before it is written
        yield lambda is_write: moved(
            submit_write if is_write else submit_read, len(parts), memory.numel()
        )


def fio(engine: str, path: Path, nbytes: int, size: int, depth: int, is_write: bool) -> Taken:
    """Run fio once over the file, and parse its report."""
    num_jobs = depth if engine == "psync" else 1
    share = nbytes // num_jobs
    command = [
        "fio", "--name=job", f"--filename={path}", f"--rw={'write' if is_write else 'read'}",
        f"--bs={size}", f"--size={share}", f"--offset_increment={share}", "--direct=1",
        f"--ioengine={engine}", f"--numjobs={num_jobs}", "--thread",
        f"--iodepth={1 if engine == 'psync' else depth}", "--output-format=json",
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {run.returncode}\n{run.stderr}{run.stdout}")
    # warnings may precede the report
    jobs = json.loads(run.stdout[run.stdout.index("{") :])["jobs"]
    kind = "write" if is_write else "read"
    total = sum(job[kind]["io_bytes"] for job in jobs)
    assert total == nbytes, f"fio moved {total} of {nbytes} bytes"
    seconds = max(job[kind]["runtime"] for job in jobs) / 1e3
    cpu = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in jobs)
    return Taken(total / seconds / 1e9, cpu / total * 1e9)


def measures(
    stack: ExitStack, systems: list[str], folder: Path, nbytes: int, size: int, depth: int
) -> dict[str, Measure]:
    """Return a function that measures each system at one request size."""
    path = folder / "file"
    aligned = nvme.aligned_empty(nbytes, dtype=torch.uint8)
    fill(aligned)
    made: dict[str, Measure] = {}
    if "zerofx" in systems:
        made["zerofx"] = stack.enter_context(our_file(path, aligned, size, depth, PIECE_BYTES))
    if "zerofx unmerged" in systems:
        made["zerofx unmerged"] = stack.enter_context(our_file(path, aligned, size, depth, size))
    if "zerofx plain" in systems:
        plain = aligned.clone()
        made["zerofx plain"] = stack.enter_context(our_file(path, plain, size, depth, PIECE_BYTES))
    if "zerofx checked" in systems:
        made["zerofx checked"] = stack.enter_context(our_store(folder, aligned, size, depth))
    for system in set(systems) & set(FIO):
        engine = system.split()[1]
        made[system] = lambda is_write, engine=engine: fio(
            engine, path, nbytes, size, depth, is_write
        )
    return {system: made[system] for system in systems}


def fill(memory: torch.Tensor) -> None:
    """Fill with data that no device can compress."""
    memory.view(torch.int64).random_()


def measure(size: int, systems: list[str], options: argparse.Namespace, home: Path) -> list[Any]:
    """Return a line for each direction and system."""
    nbytes = parse_bytes(options.bytes) // (size * options.depth) * (size * options.depth)
    taken: dict[tuple[bool, str], list[Taken]] = {}
    with ExitStack() as stack:
        made = measures(stack, systems, home, nbytes, size, options.depth)
        for number in range(-1, options.rounds):  # the first only warms up
            order = [(is_write, system) for is_write in (False, True) for system in systems]
            random.Random(number).shuffle(order)
            for is_write, system in order:
                found = made[system](is_write)
                if number >= 0:
                    taken.setdefault((is_write, system), []).append(found)
    return [
        line(is_write, size, system, taken, options)
        for is_write in (False, True)
        for system in systems
    ]


def line(
    is_write: bool,
    size: int,
    system: str,
    taken: dict[tuple[bool, str], list[Taken]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the medians of one system, and its ratios to each engine of fio."""
    mine = taken[is_write, system]
    row: dict[str, Any] = {
        "case": f"{'write' if is_write else 'read'} {format_bytes(size)}",
        "depth": options.depth,
        "system": system,
        "gb_per_s": statistics.median(t.gb_per_s for t in mine),
        "cpu_s_per_gb": statistics.median(t.cpu_s_per_gb for t in mine),
        "rounds": [[t.gb_per_s, t.cpu_s_per_gb] for t in mine],
    }
    for peer in FIO:
        theirs = taken.get((is_write, peer))
        row[f"of {peer}"] = theirs and statistics.median(
            a.gb_per_s / b.gb_per_s for a, b in zip(mine, theirs, strict=True)
        )
    return row


COLUMNS = [
    Column("case", "case"),
    Column("system", "system"),
    Column("gb_per_s", "GB/s", "{:.2f}"),
    *(Column(f"of {peer}", f"of {peer}", "{:.2f}") for peer in FIO),
    Column("cpu_s_per_gb", "CPU s/GB", "{:.3f}"),
]


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the systems to measure."""
    systems = options.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        raise SystemExit(f"--systems: unknown {', '.join(unknown)}; known {', '.join(SYSTEMS)}")
    if set(systems) & set(FIO) and shutil.which("fio") is None:
        raise SystemExit(
            "fio is not installed, so there is nothing to compare with. Install the package "
            "fio (Debian, Fedora and others have it), or choose --systems zerofx"
        )
    return systems


def main() -> None:
    """Run the benchmark with the command line's options; show and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", default="build", help="a folder on the disk to measure")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--sizes", default="256KiB,1MiB,8MiB", help="bytes per request")
    parser.add_argument("--bytes", default="512MiB", help="moved by each measurement")
    parser.add_argument("--depth", type=int, default=4, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=12, help="a claim needs 8 or more")
    options = parser.parse_args()
    systems = chosen(options)
    torch.set_num_threads(1)
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    lines = []
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        nbytes = parse_bytes(options.bytes)
        nvme.prepare(home, 2 * nbytes, "the benchmark")
        with nvme.File(Path(home) / "file", "w") as file:
            file.reserve(nbytes)
        for size in options.sizes.split(","):
            lines += measure(parse_bytes(size), systems, options, Path(home))
    del options.folder  # its name does not affect the figures
    finish("nvme_io", COLUMNS, lines, options)


if __name__ == "__main__":
    main()
