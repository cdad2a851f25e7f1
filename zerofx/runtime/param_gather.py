"""Gathering the whole of one sharded tensor from its ragged pieces."""

from __future__ import annotations

import torch

from zerofx.runtime.param_piece import Piece
from zerofx.runtime.tiles import spread


@torch.no_grad()
def gather_full(local: torch.Tensor, piece: Piece, what: str = "full_tensor") -> torch.Tensor:
    """Return the plain full tensor of which `local` is this rank's piece; a collective call.

    Pieces are padded to the longest one, since an all-gather takes equal shares. Where one rank
    owns everything, the others still send that much: small parameters only. They travel between
    devices, also where they live elsewhere; the whole lies where the pieces do.
    """
    ledger = piece.ledger
    world, size = ledger.world, ledger.layout.shard_size
    if size == 1:
        return local.clone().view(piece.shape)
    world.agree(what, piece.name)
    ranges = [piece.ranges_of(r) for r in range(size)]
    lengths = [sum(stop - start for start, stop in mine) for mine in ranges]
    longest = max(lengths)
    share = local.new_zeros(longest, device=world.device)
    share[: piece.length].copy_(local)
    parts = share.new_empty(size * longest)
    world.all_gather(parts, share).wait()
    full = local.new_empty(piece.shape.numel())
    for rank, (mine, length) in enumerate(zip(ranges, lengths, strict=True)):
        spread(full, mine, parts[rank * longest :][:length])
    return full.view(piece.shape)
