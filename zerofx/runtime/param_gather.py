"""Gathering the whole of one sharded tensor from its ragged pieces."""

from __future__ import annotations

import torch

from zerofx.errors import ShardError
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
    world.agree(f"{what} of {piece.name}", "")
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


@torch.no_grad()
def gather_rows(rows: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the plain full tensor of which `rows` are this rank's; a collective call.

    The rows are those that torch's `Shard(0)` gives each rank of the shard axis: all but the last
    ranks have ceil(shape[0] / size), so that the padded shares in rank order are the tensor.

    Raises:
        ShardError: the rows are not those of a tensor of the parameter's shape, on all ranks alike.
    """
    ledger = piece.ledger
    world, size = ledger.world, ledger.layout.shard_size
    count, *inner = piece.shape
    longest = -(-count // size)
    start = min(world.shard_rank * longest, count)
    expected = [min(longest, count - start), *inner]
    what = f"taking in rows of {piece.name} of a full state dict"
    if not world.all_well(what, list(rows.shape) == expected):
        raise ShardError(
            f"{piece.name} has global shape {list(piece.shape)}, but the full state dict has "
            f"another: this rank was given rows of shape {list(rows.shape)} of it and expected "
            f"{expected}; load a state dict of the same model"
        )
    share = rows.new_zeros((longest, *inner), device=world.device)
    share[: rows.shape[0]].copy_(rows)
    parts = share.new_empty((size * longest, *inner))
    world.all_gather(parts.view(-1), share.view(-1)).wait()
    return parts[:count]


class Landing:
    """A stand-in for a tensor's local part, into which torch writes rows of a full state dict."""

    def __init__(self, local: torch.Tensor, piece: Piece) -> None:
        self._local, self._piece = local, piece

    @torch.no_grad()
    def copy_(self, rows: torch.Tensor) -> None:
        """Take what this rank owns out of the rows that all ranks were given; a collective call."""
        full = gather_rows(rows, self._piece)
        self._local.copy_(self._piece.cut(full.reshape(-1)))
        self._piece.ledger.note_write()
