"""Slices that nothing says: parameters that differ along other axes of the mesh, without a mark.

A model that is compiled over a slice of a mesh may hold other values along the other axes. Without
marks (`layout.slices`) zerofx trains it, but cannot put a whole parameter together. Ranks along the
other axes need not save at the same time, so no collective can compare them then. Each world posts
a digest of its parameters when it is compiled, and the first save looks at those of the others. It
waits for a while if a world has not posted one; some may never compile such a model.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.comm.grid import PIPELINE, TENSOR
from zerofx.comm.meeting import BoundedStore, store_errors, timeout_s
from zerofx.comm.together import tell
from zerofx.comm.world import World
from zerofx.compat.groups import default_store
from zerofx.errors import SnapshotError
from zerofx.layout.slices import HOW_TO_MARK, local_of

log = logging.getLogger("zerofx")
_PATIENCE = 0.1  # how long to wait for another world, as a part of the time limit
_NAP_S = 0.05
_SAMPLES = 4096  # elements of a parameter that its digest is made of
_compiled: Counter[str] = Counter()  # models of this process, by class and ranks of the mesh


def crc_of(tensor: Tensor, most: int | None = None) -> int:
    """Return a number that identifies the shape and the values of a tensor.

    most: how many elements to look at, evenly spaced. All by default.
    """
    shape = zlib.crc32(str(tuple(tensor.shape)).encode())
    if tensor.is_meta or not tensor.numel():
        return shape
    flat = local_of(tensor).contiguous().view(-1)
    step = 1 if most is None else -(-flat.numel() // most)
    looked_at = flat[::step].contiguous().view(torch.uint8).cpu()
    return zlib.crc32(looked_at.numpy().tobytes(), shape)


class Posted:
    """The digests of a world's parameters, as posted for the worlds along other axes.

    Ranks compile models of a class in the same order, so the number of one finds its counterparts.
    """

    def __init__(self, world: World, model: nn.Module, ignored: Collection[str] = ()) -> None:
        self._own: dict[str, list[object]] = {}
        self._is_known = False  # whether no parameter differs
        if not world.others or world.rank != 0:
            return  # rank 0's values are those of its world
        ranks = "-".join(map(str, world.others[0].root.mesh.flatten().tolist()))
        kind = f"{type(model).__name__}/{ranks}"
        self._topic = f"{kind}/{_compiled[kind]}"
        _compiled[kind] += 1
        for name, param in model.named_parameters():
            if name not in ignored:
                self._own[name] = [list(param.shape), crc_of(param, _SAMPLES)]
        with store_errors():
            store = BoundedStore(default_store(), timeout_s())
            store.set(self._key(dist.get_rank()), json.dumps(self._own))

    def _key(self, rank: int) -> str:
        return f"zerofx/values/{self._topic}/{rank}"

    def check(self, world: World, what: str) -> None:
        """Raise if a parameter had other values along another axis, so that it may be a slice.

        Axes of pipelines are left out: their ranks hold different models. A collective call.

        Raises:
            SnapshotError: on all ranks; names the parameter.
        """
        if world.others and not self._is_known:
            tell(world, what, self._difference(world, what), SnapshotError)
            self._is_known = True

    def _difference(self, world: World, what: str) -> SnapshotError | None:
        if world.rank != 0:
            return None
        until = time.monotonic() + _PATIENCE * timeout_s()
        for axis in world.others:
            if axis.name in PIPELINE:
                continue
            for rank in axis.peers(dist.get_rank()):
                theirs = self._of(rank, until)
                differ = [n for n, own in self._own.items() if n in theirs and theirs[n] != own]
                if not differ:
                    continue
                name, own = differ[0], self._own[differ[0]]
                said = (
                    f"{what}: {name} {own[0]} of rank {dist.get_rank()} differs from that "
                    f"of rank {rank}, {theirs[name][0]}, along the mesh axis {axis.name} "
                    f"({axis.size} ranks), over which the model is not compiled. "
                    f"{HOW_TO_MARK}: a snapshot then has the whole parameter."
                )
                if axis.name in TENSOR:
                    return SnapshotError(said)
                log.warning("zerofx: %s. If these are separate models, save each to its own.", said)
                break
        return None

    def _of(self, rank: int, until: float) -> dict[str, list[object]]:
        key = self._key(rank)
        with store_errors():
            store = BoundedStore(default_store(), timeout_s())
            while not store.check([key]):
                if time.monotonic() > until:
                    return {}
                time.sleep(_NAP_S)
            found: dict[str, list[object]] = json.loads(store.get(key))
        return found
