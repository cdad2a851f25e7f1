"""The global norm of gradients, and the factor that unscales and clips them within the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zerofx.compat.tensors import foreach_norm
from zerofx.optim.runs import FlatRun, name_of
from zerofx.runtime.tensors.piece import ParameterPiece, piece_of
from zerofx.runtime.tensors.refuse import refuse_partial_norm

# One row's norm is accumulated in float32, the rows' in float64: the result is exact to 1e-8, where
# one float32 sum over 8 M elements was off by 2e-4.
ROW = 4096
_WHAT = "the norm of the gradients (max_grad_norm)"


def square_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor in float64, with temporaries of 1 / 4096 of it."""
    if flat.device.type != "cpu":
        return foreach_norm([flat], dtype=torch.float32)[0].double().square()
    split = flat.numel() // ROW * ROW
    dtype = torch.float32 if flat.dtype in (torch.bfloat16, torch.float16) else None
    rows = torch.linalg.vector_norm(flat[:split].view(-1, ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[split:], dtype=dtype)
    return rows.double().square().sum() + rest.double().square()


def _order(piece: ParameterPiece) -> tuple[int, int]:
    """Return where a parameter lies in its model: a key that ranks have in common."""
    return piece.bucket.index, piece.param.offset


def global_norm(work: Iterable[tuple[FlatRun, Tensor]]) -> Tensor:
    """Return the norm of all gradients over all ranks, float64 [], the same bits on every rank.

    Sharded gradients are summed over the ranks of the shard axis; the ranks of a replicate axis
    hold equal ones. One exchange a model, in which ranks that own no element take part.
    """
    sharded: dict[int, list[tuple[ParameterPiece, Tensor]]] = {}
    whole: list[Tensor] = []
    for run, grad in work:
        axes = "" if run.ledger is None else run.ledger.world.other_axes
        if axes:
            refuse_partial_norm(name_of(run.params[0]), "max_grad_norm", axes)
        part = square_sum(grad)
        cut = [p for p in map(piece_of, run.params) if p is not None and p.is_cut]
        if cut:
            piece = min(cut, key=_order)
            sharded.setdefault(id(piece.ledger), []).append((piece, part))
        else:
            whole.append(part)
    for found in sharded.values():
        partial = _sum([part for _, part in found]).reshape(1)
        first = min((piece for piece, _ in found), key=_order)  # the same one on every rank
        whole.append(first.gather_partials(partial, _WHAT).sum())
    return _sum(whole).sqrt() if whole else torch.zeros((), dtype=torch.float64)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of parts, which may live on a device and on the host."""
    device = next((p.device for p in parts if p.device.type != "cpu"), parts[0].device)
    return torch.stack([part.to(device) for part in parts]).sum()


def divisor(
    norm: Tensor | None, max_norm: float | None, grad_scale: Tensor | None
) -> Tensor | None:
    """Return what gradients are divided by: by `grad_scale`, then down to the norm `max_norm`.

    `norm` is of the gradients as they are, scaled; the rule is clip_grad_norm_'s. None where
    nothing changes, as far as that is known without waiting for a device.

    Shapes: all [], the result float32.
    """
    found = None if grad_scale is None else grad_scale.double().reshape(())
    if norm is not None and max_norm is not None:
        true_norm = norm if found is None else norm / found
        clip = torch.clamp((true_norm + 1e-6) / max_norm, min=1.0)
        found = clip if found is None else found * clip
    if found is None or (found.device.type == "cpu" and float(found) == 1.0):
        return None
    return found.float()
