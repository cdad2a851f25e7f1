"""One rank of a calibration: it measures at the same time as the others; rank 0 reports.

[torchrun ... -m] python -m zerofx.tools.calibrate.ranks SETTINGS.json REPORT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from zerofx.comm.world import World
from zerofx.tools.calibrate.calls import BLOCKS, Calls
from zerofx.tools.calibrate.compute import aten, attentions, matmuls, others
from zerofx.tools.calibrate.convolutions import convolutions
from zerofx.tools.calibrate.crowd import Crowd
from zerofx.tools.calibrate.disk import Disk
from zerofx.tools.calibrate.probe import ROUND, Probe
from zerofx.tools.calibrate.regions import compiled
from zerofx.tools.calibrate.transfers import (
    Algorithms,
    Beside,
    Between,
    arrivals,
    besides,
    betweens,
    sum_bytes,
    transfers,
)

LEAST_S = 1e-7  # of a difference of two times
Report = dict[str, list[list[Any]]]


class Measured(Protocol):
    """One measurement of each round."""

    def measure(self) -> None: ...


def main(argv: list[str]) -> int:
    """Measure; rank 0 writes the report."""
    settings = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    algorithms = Algorithms()
    world = World.connect("cpu", algorithm=algorithms)
    found = measure(world, algorithms, settings)
    if world.rank == 0:
        Path(argv[1]).write_text(json.dumps(found), encoding="utf-8")
    return 0


def measure(world: World, algorithms: Algorithms, settings: dict[str, Any]) -> Report:
    """Return `rates`, rows of (curve, x, amount, seconds), of compute, copies and the disk on all
    ranks at once; and `times`, rows of (curve, x, us), of transfers and calls."""
    ranks, folder = world.size, settings["regions"]
    probes = others()
    crowd = Crowd(world)
    if ranks == 1:  # side by side, all compute takes as many times longer as a `Crowd` does
        probes += [*matmuls(), *convolutions(), *attentions(), *aten()]
        probes += compiled(Path(folder)) if folder else []
    sums = arrivals(ranks) if ranks > 1 else []
    moves = transfers(world, algorithms) if ranks > 1 else []
    for probe in (*probes, *sums, *moves):
        probe.prepare()
    calls = [Calls(blocks, ranks) for blocks in BLOCKS]
    disk = Disk(Path(settings["folder"])) if ranks == 1 else None
    first: list[Measured] = [*probes, *sums, *moves, *calls, crowd]
    _go_round(world, [*first, *([disk] if disk else [])], settings)
    algorithms.now = "direct"
    beside: list[Beside | Between] = []
    if moves:
        beside += [*besides(world, moves), *betweens(world)]
    _go_round(world, beside, settings)
    if disk:
        disk.close()
        probes += disk.probes
    times = _times(ranks, sums, moves, beside)
    times += [[*point] for each in calls for point in each.points()]
    times += [[*point] for point in crowd.points()]
    return {"rates": [[p.curve, p.x, p.amount, p.seconds] for p in probes], "times": times}


def _go_round(world: World, all_: Sequence[Measured], settings: dict[str, Any]) -> None:
    """Measure in rounds, so that a temporary disturbance affects all probes equally."""
    rounds = settings["rounds"]
    for number in range(1, rounds + 1):
        if all_ and world.rank == 0:
            sys.stdout.write(f"{ROUND} {number} of {rounds}, {len(all_)} measurements each\n")
            sys.stdout.flush()
        for each in all_:
            world.all_reduce(torch.zeros(1)).wait()
            each.measure()


def _times(
    ranks: int,
    sums: Sequence[Probe],
    moves: Sequence[Probe],
    beside: Sequence[Beside | Between],
) -> list[list[Any]]:
    """Return sums, and transfers without the sums that their waits end with."""
    summed = {probe.x: probe.seconds for probe in sums}
    found = [(p.curve, p.x, p.seconds) for p in (*sums, *moves)]
    found += [(each.curve, each.x, each.lost_s) for each in beside]
    times: list[list[Any]] = []
    for curve, x, seconds in found:
        within = sum_bytes(curve, int(x), ranks)
        seconds -= summed[within] if within else 0.0
        times.append([curve, x, 1e6 * max(seconds, LEAST_S)])
    return times


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
