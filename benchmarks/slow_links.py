"""Stage 3 with and without what slow links want, and FSDP2: step time, bytes and loss.

    sudo python -m benchmarks.slow_links [--rates 100mbit,1gbit] [--sizes 4x128] [--turns 8]
    sudo python -m benchmarks.slow_links --ranks-per-node 2
    sudo python -m benchmarks.slow_links --hardware mine.yaml
    python -m benchmarks.slow_links --losses 300

Two nodes are network namespaces, joined by a veth pair whose both ends are shaped by tbf (needs
root, and iproute2). With several ranks per node, those of one node reach each other over loopback,
and plans that know of nodes run too. `--hardware` also shows what is predicted for a host that was
calibrated over gloo (`ZEROFX_TRANSPORT=gloo zerofx doctor --calibrate --out mine.yaml`), with this
link between hosts. What is counted is what leaves a node. All systems train the
same model in the same processes and take turns, one step each; ratios are medians over the turns.
`--losses` needs no namespaces: it trains from the same weights and batches with and without blocks,
and compares the means of the last 20 losses.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import zerofx
from benchmarks.report import Column, finish
from benchmarks.sizes import SIZES, TEXT_BYTES
from benchmarks.systems import SEED, flat_adamw, fsdp2, fused_adamw
from zerofx.hardware import load_hardware
from zerofx.tools.demo.gpt import GPT
from zerofx.tools.demo.text import Batches, load_text

WARMUP = 3
EXACT: dict[str, Any] = {"stage": 3, "kernels": "aten", "numerics": "fast"}
PLANS: dict[str, dict[str, Any]] = {
    "zerofx-3": EXACT,
    "zerofx-3, weights": {**EXACT, "quantized_weights": True},
    "zerofx-3, weights and gradients": {
        **EXACT,
        "quantized_weights": True,
        "quantized_gradients": True,
    },
}
BASELINE = "fsdp2"
NUM_NODES = 2
LATENCY_US = 200.0  # of a hop, assumed: the transfers take milliseconds


def plans_by_node(per_node: int) -> dict[str, dict[str, Any]]:
    """Return the plans to compare on nodes of so many ranks."""
    if per_node == 1:
        return PLANS
    kept, steps = {"secondary_shard_size": per_node}, {"hierarchical_size": per_node}
    return {
        "zerofx-3": EXACT,
        "zerofx-3, secondary shards": EXACT | kept,
        "zerofx-3, two steps": EXACT | steps,
        "zerofx-3, secondary shards, two steps": EXACT | kept | steps,
        "zerofx-3, secondary shards, weights and gradients": (
            PLANS["zerofx-3, weights and gradients"] | kept
        ),
    }


def make(system: str, size: str, plans: dict[str, dict[str, Any]] = PLANS) -> tuple[Any, Any]:
    torch.manual_seed(SEED)
    model = GPT(SIZES[size].model)
    if system == BASELINE:
        wrapped = fsdp2(model)
        return wrapped, fused_adamw(wrapped)
    compiled = zerofx.compile(model, plans[system])
    return compiled, flat_adamw(compiled)


def wire_bytes(interface: str) -> int:
    """Return the bytes that an interface has sent, headers included."""
    with open(f"/sys/class/net/{interface}/statistics/tx_bytes") as file:
        return int(file.read())


def work(
    rank: int, size: str, turns: int, interface: str, store: str, folder: str, per_node: int
) -> None:
    """Train all systems by turns; leave the rows on rank 0."""
    torch.set_num_threads(1)
    host, port = store.split(":")
    world = NUM_NODES * per_node
    meeting = dist.TCPStore(host, int(port), world, rank == 0, timeout=timedelta(minutes=5))
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    plans = plans_by_node(per_node)
    systems = [BASELINE, *plans]
    made = {system: make(system, size, plans) for system in systems}
    chosen, text = SIZES[size], load_text(TEXT_BYTES).train
    batches = Batches(text, chosen.batch, chosen.model.seq, rank=rank, world_size=world)
    taken: dict[str, list[tuple[float, int]]] = {system: [] for system in systems}
    for number in range(WARMUP + turns):
        x, y = batches.at(number)
        for system in systems if number % 2 else reversed(systems):
            model, optimizer = made[system]
            dist.barrier()
            sent, began = wire_bytes(interface), time.perf_counter()
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if number >= WARMUP:
                took = time.perf_counter() - began
                taken[system].append((took, wire_bytes(interface) - sent))
    rows = []
    for system in systems:
        pairs = zip(taken[system], taken[BASELINE], strict=True)
        rows.append({
            "system": system, "params": chosen.num_params,
            "step_ms": 1e3 * statistics.median(t for t, _ in taken[system]),
            "ratio": statistics.median(a[0] / b[0] for a, b in pairs),
            "sent_mib": statistics.median(b for _, b in taken[system]) / 2**20,
        })  # fmt: skip
    if rank == 0:
        torch.save(rows, f"{folder}/rows")
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def linked(rate: str) -> Iterator[list[str]]:
    """Make two namespaces whose link carries `rate`; yield their names, and remove them again."""
    names = [f"zerofx-{os.getpid()}-{node}" for node in range(NUM_NODES)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ends = ["veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0"]
        ip("link", "add", *ends, "netns", names[1])
        for node, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.98.0.{node + 1}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", name, "link", "set", device, "up")
            shape = f"qdisc add dev veth0 root tbf rate {rate} burst 256kb latency 400ms"
            subprocess.run(["tc", "-n", name, *shape.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def measure(rate: str, size: str, turns: int, per_node: int) -> list[dict[str, Any]]:
    """Return the rows of all systems for one size over one link."""
    with linked(rate) as names, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1"}
        here = [sys.executable, "-m", "benchmarks.slow_links", "--size-of-a-rank", size]
        options = ["--turns", str(turns), "--store", "10.98.0.1:29611", "--folder", folder]
        options += ["--ranks-per-node", str(per_node)]
        places = [name for name in names for _ in range(per_node)]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *here, *options, "--rank", str(rank)],
                env=environment,
            )
            for rank, name in enumerate(places)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        about = {"rate": rate, "size": size, "per_node": per_node}
        return [{**about, **row} for row in torch.load(f"{folder}/rows")]


def predict(rate: str, size: str, plan: dict[str, Any], per_node: int, hardware: str) -> float:
    """Return the predicted milliseconds of a step on calibrated hosts with this link."""
    bits = float(rate.removesuffix("bit")[:-1]) * {"m": 1e6, "g": 1e9}[rate.removesuffix("bit")[-1]]
    nodes = replace(
        load_hardware(hardware), devices_per_node=per_node, network_bytes_per_s=bits / 8,
        network_latency_us=LATENCY_US,
    )  # fmt: skip
    chosen = SIZES[size]
    ids = torch.zeros(chosen.batch, chosen.model.seq, dtype=torch.long)
    program = zerofx.capture(GPT(chosen.model), (ids, ids))
    view: Any = zerofx.predict(program, plan, hardware=nodes, world_size=NUM_NODES * per_node)
    return float(view.forecast.step_us.middle / 1e3)


def losses_of(rank: int, system: str, size: str, steps: int, folder: str) -> None:
    """Train one system on 2 ranks and leave the mean of its last 20 losses, over both ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{system}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, _ = make(system, size)
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3)
    chosen = SIZES[size]
    text = load_text(TEXT_BYTES).train
    batches = Batches(text, chosen.batch, chosen.model.seq, rank=rank, world_size=2)
    last = []
    for number in range(steps):
        loss = model(*batches.at(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last.append(loss.detach())
    mean = torch.stack(last[-20:]).mean()
    dist.all_reduce(mean)
    if rank == 0:
        torch.save(float(mean) / 2, f"{folder}/{system} loss")
    dist.destroy_process_group()


def compare_losses(size: str, steps: int) -> list[dict[str, Any]]:
    """Return the final loss of every plan, and its ratio to the exact one's."""
    with tempfile.TemporaryDirectory() as folder:
        for system in PLANS:
            arguments = (system, size, steps, folder)
            torch.multiprocessing.spawn(losses_of, arguments, 2)  # type: ignore[no-untyped-call]
        found = {system: torch.load(f"{folder}/{system} loss") for system in PLANS}
    exact = found["zerofx-3"]
    return [
        {"system": s, "size": size, "steps": steps, "loss": loss, "ratio": loss / exact}
        for s, loss in found.items()
    ]


COLUMNS = [
    Column("rate", "link"),
    Column("per_node", "ranks per node", "{:d}"),
    Column("size", "layers x width"),
    Column("system", "system"),
    Column("step_ms", "step ms", "{:.0f}"),
    Column("ratio", "x FSDP2", "{:.3f}"),
    Column("sent_mib", "MiB per step that leave a node", "{:.2f}"),
    Column("predicted_ms", "predicted ms", "{:.0f}"),
]
LOSSES = [
    Column("size", "layers x width"),
    Column("system", "system"),
    Column("steps", "steps", "{:d}"),
    Column("loss", "mean of the last 20", "{:.4f}"),
    Column("ratio", "x exact", "{:.4f}"),
]


def main() -> None:
    """Measure, show it and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="100mbit,1gbit", help="as tc writes them")
    parser.add_argument("--sizes", default="4x128")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--hardware", help="a calibrated hardware file, to predict with")
    parser.add_argument("--losses", type=int, default=0, help="steps to compare final losses after")
    for name in ("--size-of-a-rank", "--store", "--folder"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.size_of_a_rank:
        work(
            options.rank, options.size_of_a_rank, options.turns, "veth0", options.store,
            options.folder, options.ranks_per_node,
        )  # fmt: skip
        return
    if options.losses:
        rows = [r for s in options.sizes.split(",") for r in compare_losses(s, options.losses)]
        finish("slow_links_losses", LOSSES, rows, options)
        return
    rows = [
        row
        for size in options.sizes.split(",")
        for rate in options.rates.split(",")
        for row in measure(rate, size, options.turns, options.ranks_per_node)
    ]
    for row in rows:
        plan = plans_by_node(options.ranks_per_node).get(row["system"])
        row["predicted_ms"] = options.hardware and plan and predict(
            row["rate"], row["size"], plan, options.ranks_per_node, options.hardware
        )  # fmt: skip
    name = "slow_links" if options.ranks_per_node == 1 else "slow_links_nodes"
    finish(name, COLUMNS, rows, options)


if __name__ == "__main__":
    main()
