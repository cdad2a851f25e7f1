"""Standalone run: an emitted program in one process that simulates all ranks."""

from __future__ import annotations

import collections
import inspect
import json
import math
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofx.comm.collectives import DONE, Axis, Work
from zerofx.comm.world import World
from zerofx.layout.buckets import ACROSS, AXES, CONTEXT, NODE, Bucket, Layout, Mesh, ParamSlice
from zerofx.layout.placements import Cut, Part
from zerofx.layout.tiers import Tier
from zerofx.layout.tiles import Tile
from zerofx.runtime.engine import Engine
from zerofx.runtime.tensors.piece import Ledger


class LoopbackAxis(Axis):
    """An axis on which every rank is assumed to hold the same data as this one."""

    def all_gather(self, out: Tensor, shard: Tensor, label: str = "all-gather") -> Work:
        out.view(self.size, -1).copy_(shard.clone())  # the shard may be part of `out`
        return DONE

    def reduce_scatter(
        self, out: Tensor, full: Tensor, scale: float, label: str = "reduce-scatter"
    ) -> Work:
        torch.mul(full.view(self.size, -1)[self.rank], scale * self.size, out=out)
        return DONE

    def all_reduce(
        self,
        buf: Tensor,
        scale: float = 1.0,
        label: str = "all-reduce",
        source: Tensor | None = None,
    ) -> Work:
        torch.mul(buf if source is None else source, scale * self.size, out=buf)
        return DONE

    def broadcast(self, buf: Tensor, src: int = 0, label: str = "broadcast") -> Work:
        return DONE


class LooseStore:
    """Shards without a model."""

    epoch = writes = 0
    updates = None

    def __init__(self, layout: Layout, world: World, folder: str) -> None:
        self.layout, self.world, self.folder = layout, world, folder
        self.ledger = Ledger(layout, world)
        self.homes = self.ledger.homes
        self.shards = [_made(layout.shard_numel(b), b.dtype, world.device) for b in layout.buckets]
        self.grads = LooseGrads(layout, self.shards)


class LooseGrads:
    """Gradients of these shards, kept by bucket."""

    def __init__(self, layout: Layout, shards: list[Tensor]) -> None:
        self.layout, self.shards = layout, shards
        self.arrived: dict[int, Tensor] = {}
        self._targets: dict[int, Tensor] = {}

    def target(self, bucket: int) -> tuple[Tensor, bool]:
        self._targets[bucket] = torch.empty_like(self.shards[bucket])
        return self._targets[bucket], False

    def views(self, bucket: int) -> list[Tensor]:
        flat = self._targets[bucket]
        return [flat[p.offset : p.end].view(p.shape) for p in self.layout.buckets[bucket].params]

    def publish(self, bucket: int, names: Collection[str] | None = None) -> None:
        self.arrived[bucket] = self._targets[bucket]

    def take(
        self,
        bucket: int,
        positions: Sequence[int],
        grads: Sequence[Tensor],
        copied: Collection[int],
        names: Collection[str],
    ) -> None:
        self.arrived[bucket] = grads[0]

    def abandon(self) -> None:
        """Forget gradients in flight."""
        self._targets.clear()

    def prepare_update(self, bucket: int) -> None:
        """Prepare an update: nothing to do, since there is no optimizer."""

    def may_update_beside(self, names: Collection[str]) -> bool:
        """Return whether an update may run on another thread: never, updates run inline here."""
        return False

    def take_update(self, bucket: int, names: Collection[str]) -> Callable[[], None]:
        """Return a plain gradient step, since there is no optimizer."""
        taken = self._targets.pop(bucket)

        def update() -> None:
            self.shards[bucket].sub_(taken, alpha=1e-3)

        return update


def run_standalone(schedule_file: str) -> None:
    """Run the schedule's forward (and backward) once, in one process, and report the results."""
    module: Any = sys.modules["__main__"]
    facts = json.loads((Path(schedule_file).parent / "fingerprint.json").read_text())
    layout = layout_from_facts(facts["layout"])
    torch.manual_seed(0)
    axes = {
        name: LoopbackAxis(0, layout.mesh.along(name)) for name in (*AXES, CONTEXT, NODE, ACROSS)
    }
    device = torch.device(facts["placeholders"]["forward"][0][4][3])
    world = World(device=device, backend="loopback", axes=axes, whole=axes["replicate"])
    sizes = {name: hint for name, hint, _ in facts.get("sizes", {}).get("symbols", ())}
    inputs, buffers, _ = _placeholders(facts["placeholders"]["forward"], sizes)
    with torch.no_grad(), tempfile.TemporaryDirectory(prefix="zerofx-") as folder:
        store = LooseStore(layout, world, folder)
        engine = Engine(store)  # type: ignore[arg-type]
        engine.reserve(facts["slots"])
        outs, _, saved = module.forward(engine, engine.store.shards, buffers, inputs)
        _say("forward returned " + ", ".join(f"{list(o.shape)}" for o in outs))
        if "backward" in facts["placeholders"]:
            _, _, tangents = _placeholders(facts["placeholders"]["backward"], sizes)
            made = module.backward(engine, engine.store.shards, saved, tangents)
            if inspect.isgenerator(made):  # it pauses between the gradients of inputs and weights
                collections.deque(made, maxlen=0)
            _say(f"backward reduced {len(store.grads.arrived)} buckets")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _placeholders(
    rows: list[list[Any]],
    sizes: dict[str, int],
) -> tuple[dict[int, Tensor], dict[str, Tensor], dict[int, Tensor]]:
    """Return made-up inputs, buffers and tangents of the recorded shapes.

    sizes: values of the dynamic sizes that may appear in shapes and strides as expressions.
    """

    def numbers(written: list[Any]) -> list[int]:
        return [eval(n, {"math": math}, sizes) if isinstance(n, str) else n for n in written]

    inputs: dict[int, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    tangents: dict[int, Tensor] = {}
    for role, name, index, _, (dtype, shape, stride, device) in rows:
        if role not in ("input", "buffer", "tangent"):
            continue
        kind = getattr(torch, dtype)
        made = torch.empty_strided(numbers(shape), numbers(stride), dtype=kind, device=device)
        made.fill_(1) if role != "input" or made.is_floating_point() else made.zero_()
        if role == "input":
            inputs[index] = made
        elif role == "buffer":
            buffers[name] = made
        else:
            tangents[index] = made
    return inputs, buffers, tangents


def _made(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(numel, device=device).mul_(0.02).to(dtype)


def _slice_from_facts(facts: list[Any]) -> ParamSlice:
    name, shape, offset, tile = facts
    if tile is None:
        return ParamSlice(name, tuple(shape), offset)
    whole, whole_shape, index, count, *cuts = tile
    part = None
    for dim, groups, ranks in cuts:
        part = Part(tuple(whole_shape), Cut(dim, groups), ranks)
    made = Tile(whole, tuple(whole_shape), index, count, part)
    return ParamSlice(name, tuple(shape), offset, made, made.own_part)


def layout_from_facts(facts: dict[str, Any]) -> Layout:
    """Build the layout that fingerprint.json describes."""
    buckets = tuple(
        Bucket(
            index=i,
            units=tuple(b["units"]),
            dtype=getattr(torch, b["dtype"]),
            compute_dtype=getattr(torch, b["compute_dtype"]),
            reduce_dtype=getattr(torch, b["reduce_dtype"]),
            params=tuple(_slice_from_facts(p) for p in b["params"]),
            numel=b["numel"],
            persistent=b["persistent"],
            trainable=b["trainable"],
            home=Tier(b["home"]),
            source=Tier(b["source"]),
            positions=tuple(b.get("positions", (0,))),
        )
        for i, b in enumerate(facts["buckets"])
    )
    sizes = {axis: facts[f"{axis}_size"] for axis in AXES}
    sizes |= {axis: facts.get(f"{axis}_size", 1) for axis in (CONTEXT, NODE)}
    return Layout(buckets, replace(Mesh.of(**sizes), zigzag=facts.get("zigzag", False)))
