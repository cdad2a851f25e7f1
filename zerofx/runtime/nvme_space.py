"""Room on NVMe for all ranks: asked for before any of them takes it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from zerofx.errors import NvmeError
from zerofx.runtime.homes import far_bytes
from zerofx.runtime.layout import Layout
from zerofx.runtime.nvme.faults import sized
from zerofx.runtime.nvme.folder import free_bytes, prepare
from zerofx.runtime.tiers import Tier
from zerofx.runtime.together import together
from zerofx.runtime.world import World


@dataclass(frozen=True)
class _Claim:
    """What a rank is going to have in a folder, and what its file system has left."""

    where: tuple[str, int]  # host and device: ranks that share both share the space
    needed_bytes: int
    free_bytes: int


def claim_space(world: World, folder: str, layout: Layout, keeps: bool) -> None:
    """Check on every rank that there is room for all ranks' files together; a collective call.

    keeps: whether gradients stay between backward and the optimizer's step.

    Raises:
        NvmeError: a folder cannot be used, or has too little space for the ranks that share it;
            both numbers are said, on every rank.
    """
    needed = far_bytes(layout, keeps)

    def claim() -> _Claim:
        home = prepare(folder)
        where = socket.gethostname(), os.stat(home).st_dev
        return _Claim(where, needed, free_bytes(home))

    claims = together(world, f"a look at {folder}, for what lives on NVMe", claim, NvmeError)
    num_buckets = sum(b.home is Tier.NVME for b in layout.buckets)
    for where in dict.fromkeys(c.where for c in claims):
        ranks = [rank for rank, c in enumerate(claims) if c.where == where]
        asked = sum(claims[rank].needed_bytes for rank in ranks)
        free = min(claims[rank].free_bytes for rank in ranks)
        if asked > free:
            raise NvmeError(
                f"{folder} on {where[0]}: parameters, gradients and AdamW's states of "
                f"{num_buckets} buckets need {sized(asked)} ({_say(ranks)}) but {sized(free)} are "
                "free; free space there, choose another path, or offload less"
            )


def check_folder(world: World, folder: str) -> None:
    """Check on every rank that a folder can be used; a collective call.

    Raises:
        NvmeError: it cannot be, on some rank.
    """
    together(world, f"a look at {folder}", lambda: str(prepare(folder)), NvmeError)


def _say(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
