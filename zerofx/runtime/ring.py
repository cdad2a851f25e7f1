"""Attention, whole and around a ring of ranks (see `policy.ring` for the steps).

The blocks run in torch's fused attention operators, which return the logarithm of the sum of
exponentials (lse) of each row. Two partial results of a row are merged by these:

    lse = log(exp(lse_a) + exp(lse_b)),  out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

The operator's backward takes the output and lse of whole rows, and gives a block's summand of each
gradient. Sums are in fp32 at least. Keys and values may have fewer heads than queries: they travel
as they are, and are repeated for the operator.

A mask other than a causal one is added to the scores. A rank has the rows of its own queries, with
all keys, so that nothing of it is sent: each block takes its columns. The operator's lse of a row
does not say how much of a block the mask hides, which two kinds of rows need:

    all hidden by -inf        the operator gives an output and an lse of 0: its lse is -inf here
    hidden by large numbers   scores vanish in their rounding (-1e9, the lowest of the format), and
                              so does the logarithm of how many there are: blocks are computed
                              without the scores and without the numbers

A row that the whole mask hides so gets, in the end, what the operator gives for whole attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerofx.comm.collectives import DONE
from zerofx.layout.placements import chunks_of, num_chunks
from zerofx.policy.ring import Block, blocks

if TYPE_CHECKING:
    from zerofx.comm.collectives import Axis

_aten = torch.ops.aten
_KEYS = "ring of keys and values"


# -- one block ------------------------------------------------------------------------------------
def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention [batch, heads, queries, width] and lse [batch, heads, queries].

    Shapes: q [batch, heads, queries, width]; k, v [batch, heads / n, keys, width] for any n; mask,
    which is added to the scores, any that [batch, heads, queries, keys] can be viewed from.
    """
    k, v = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cpu":
        cpu = _aten._scaled_dot_product_flash_attention_for_cpu.default
        return cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if _is_half(q) and mask is None:
        found = _aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        found = _aten._scaled_dot_product_efficient_attention.default(
            q, k, v, _of_all_heads(mask, q, k), True, 0.0, causal, scale=scale
        )
    return found[0], found[1][..., : q.shape[2]]


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values; `out` and `lse` are of whole rows."""
    heads = k.shape[1]
    k, v = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cpu":
        cpu = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        dq, dk, dv = cpu(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        dq, dk, dv = _of_device(grad, q, k, v, out, lse, causal, scale, mask)
    return dq, _summed(dk, heads), _summed(dv, heads)


def _of_device(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float, mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients on CUDA. Without dropout the kernels read no state of a generator."""
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    if _is_half(q) and mask is None:
        return _aten._scaled_dot_product_flash_attention_backward.default(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
            none, none, scale=scale,
        )  # fmt: skip
    aligned = torch.zeros(*lse.shape[:2], -(-lse.shape[2] // 32) * 32, device=q.device)
    aligned[..., : lse.shape[2]] = lse
    found = _aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, _of_all_heads(mask, q, k), out, aligned, none, none, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return found[0], found[1], found[2]


def _of_all_heads(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a view of a mask as the kernel of CUDA reads it: rows begin at multiples of 16."""
    if mask is None:
        return None
    keys = k.shape[2]
    wide = torch.nn.functional.pad(mask.expand(*mask.shape[:-1], keys), (0, -keys % 16))
    return wide[..., :keys].expand(*q.shape[:3], keys)


def _is_half(x: Tensor) -> bool:
    return x.element_size() < 4


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Return the gradient of heads of which each was repeated."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


@torch.no_grad()
def attention(
    engine: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention and lse of whole values."""
    return attend(q, k, v, causal, scale, mask)


@torch.no_grad()
def attention_backward(
    engine: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of whole queries, keys and values."""
    return attend_backward(grad, q, k, v, out, lse, causal, scale, mask)


# -- around the ring ------------------------------------------------------------------------------
class _Message:
    """Tensors that travel together, in one flat buffer. views: of their shapes, in it."""

    def __init__(self, flat: Tensor, like: tuple[Tensor, Tensor]) -> None:
        self.flat, self._like = flat, like
        first, second = flat.split([each.numel() for each in like])
        self.views = first.view(like[0].shape), second.view(like[1].shape)

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> _Message:
        made = cls(k.new_empty(k.numel() + v.numel()), (k, v))
        made.views[0].copy_(k)
        made.views[1].copy_(v)
        return made

    def part(self, ends: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return a range of positions of both tensors, as views."""
        return _of(self.views[0], ends), _of(self.views[1], ends)

    def add(self, ends: tuple[int, int], more: Sequence[Tensor]) -> None:
        """Add to a range of positions of both tensors."""
        for mine, given in zip(self.part(ends), more, strict=True):
            mine.add_(given)

    def empty(self) -> _Message:
        """Return a message of the same form."""
        return _Message(torch.empty_like(self.flat), self._like)


class _Flight:
    """A message on its way to the next rank, and the one that comes from the previous rank."""

    def __init__(self, line: Axis, message: _Message, label: str) -> None:
        self._landing = message.empty()
        self._work = line.shift(self._landing.flat, message.flat, label)

    def wait(self) -> _Message:
        """Return what has arrived; what was sent is no longer kept alive."""
        self._work.wait()
        self._work = DONE
        return self._landing


def _of(x: Tensor, ends: tuple[int, int]) -> Tensor:
    """Return a range of positions, as a view."""
    return x[:, :, ends[0] : ends[1]]


def _plan(line: Axis, q: Tensor, k: Tensor, causal: bool) -> tuple[Block, ...]:
    return blocks(line.rank, line.size, q.shape[2], k.shape[2], causal)


class _Mask:
    """The rows of a mask that belong to this rank's queries.

    top: the highest number of each row if it absorbs all scores, and is not -inf; else 0.
    """

    def __init__(self, rows: Tensor, ranks: int) -> None:
        self.rows, self.ranks = rows, ranks
        top = rows.amax(-1, keepdim=True)
        absorbs = -2 / torch.finfo(torch.promote_types(rows.dtype, torch.float32)).eps
        self.top = torch.where((top <= absorbs) & (top > -math.inf), top, 0)

    def of(self, block: Block, keys: int) -> Tensor:
        """Return the columns of a block's keys; a rank has `keys` of them, in zigzag order."""
        if self.rows.shape[-1] == 1:
            return self.rows.expand(*self.rows.shape[:-1], keys).contiguous()
        chunks = self.rows.unflatten(-1, (num_chunks(self.ranks, zigzag=True), -1))
        numbers = chunks_of(block.source, self.ranks, zigzag=True)
        return torch.cat([chunks[..., number, :] for number in numbers], -1)

    def begin(self, q: Tensor) -> Tensor:
        """Return queries without those whose scores are absorbed, which weigh all keys alike."""
        return q.clone().masked_fill_(self.top != 0, 0)  # in the layout of `q`: results have it too

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, block: Block
    ) -> tuple[Tensor, Tensor]:
        """Return attention to a block's keys, and its lse, which is -inf where all is hidden.

        The lse leaves `top` out, next to which it would vanish.
        """
        columns = self.of(block, k.shape[2]).sub_(self.top)
        out, lse = attend(q, k, v, False, scale, columns)
        lse.masked_fill_(columns.amax(-1) == -math.inf, -math.inf)
        out.masked_fill_((lse == -math.inf).unsqueeze(-1), 0)  # whatever a kernel gives there
        return out, lse

    def finish(self, lse: Tensor) -> None:
        """Turn the lse of whole rows into what the operator gives, and its backward reads."""
        lse.masked_fill_(lse <= torch.finfo(lse.dtype).min, 0)  # see `_merge`
        lse.add_(self.top.squeeze(-1))


def _exact(x: Tensor) -> Tensor:
    """Return a tensor in the format of sums; the tensor itself if it has it."""
    return x.float() if _is_half(x) else x


@torch.no_grad()
def ring_attention(
    engine: Any, q: Tensor, k: Tensor, v: Tensor, axis: str, ranks: int, causal: bool,
    scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention and lse of this rank's queries over the keys of all ranks of the axis.

    mask: the rows of these queries, for the keys of all ranks.
    """
    line = engine.world.axis(axis)
    hides = None if mask is None else _Mask(mask, ranks)
    first, *rest = _plan(line, q, k, causal)
    held = _Message.of(k, v)
    flight = _Flight(line, held, _KEYS)
    if hides is None:
        out, lse = attend(q, k, v, first.is_causal, scale)
    else:
        q = hides.begin(q)
        out, lse = hides.attend(q, k, v, scale, first)
    dtype, total = out.dtype, _exact(out)
    del out
    for block in rest:
        held = flight.wait()
        if block is not rest[-1]:
            flight = _Flight(line, held, _KEYS)
        keys = held.part(block.columns)
        if hides is None:
            made, more = attend(_of(q, block.rows), *keys, False, scale)
        else:
            made, more = hides.attend(q, *keys, scale, block)
        del keys
        made = _exact(made)
        _merge(_of(total, block.rows), _of(lse, block.rows), made, more)
        del made, more
    if hides is not None:
        hides.finish(lse)
    return total.to(dtype), lse


def _merge(out: Tensor, lse: Tensor, more_out: Tensor, more: Tensor) -> None:
    """Merge a partial result of rows into another one, in place; rows may be hidden in both."""
    both = torch.logaddexp(lse, more).clamp_(min=torch.finfo(lse.dtype).min)  # no -inf - -inf
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.add_(more_out.mul_((more - both).exp_().unsqueeze(-1)))
    lse.copy_(both)


@torch.no_grad()
def ring_attention_backward(
    engine: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    axis: str, ranks: int, causal: bool, scale: float, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of this rank's queries, keys and values.

    The sums of gradients of keys travel one step after these, and end at the rank that has them.
    """
    line = engine.world.axis(axis)
    first, *rest = _plan(line, q, k, causal)
    held = _Message.of(k, v)
    flight = _Flight(line, held, _KEYS)
    dtype = q.dtype
    hides = None if mask is None else _Mask(mask, ranks)

    def masked(block: Block) -> Tensor | None:
        return None if hides is None else hides.of(block, k.shape[2])

    made = attend_backward(grad, q, k, v, out, lse, first.is_causal, scale, masked(first))
    dq, dk, dv = map(_exact, made)
    del made
    sums: _Message | None = None
    back: _Flight | None = None
    for block in rest:
        held = flight.wait()
        if block is not rest[-1]:
            flight = _Flight(line, held, _KEYS)
        keys = held.part(block.columns)
        up, queries, found, sums_of = (_of(x, block.rows) for x in (grad, q, out, lse))
        more = attend_backward(up, queries, *keys, found, sums_of, False, scale, masked(block))
        del keys
        _of(dq, block.rows).add_(more[0])
        if back is None:
            sums = _Message(torch.zeros_like(held.flat, dtype=dk.dtype), (k, v))
        else:
            sums = back.wait()
        sums.add(block.columns, more[1:])
        del more
        back = _Flight(line, sums, "ring of gradients")
    assert back is not None, "a ring has two ranks at least"
    sums = back.wait()
    dk.add_(sums.views[0])
    dv.add_(sums.views[1])
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


# -- memory ---------------------------------------------------------------------------------------
def inside_bytes(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, causal: bool, mask: Tensor | None = None
) -> int:
    """Return the most that `ring_attention` holds on any rank, beside arguments and results."""
    columns = _columns_bytes(mask, k)
    queries = 0 if mask is None else q.numel() * q.element_size()
    return queries + max(
        _forward_bytes(q, k, v, rank, ranks, causal, columns) for rank in (0, ranks - 1)
    )


def inside_backward_bytes(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, causal: bool, mask: Tensor | None = None
) -> int:
    """Return the most that `ring_attention_backward` holds beside arguments and results."""
    columns = _columns_bytes(mask, k)
    return max(_backward_bytes(q, k, v, rank, ranks, causal, columns) for rank in (0, ranks - 1))


def _columns_bytes(mask: Tensor | None, k: Tensor) -> int:
    """Return the bytes of a block's columns of a mask."""
    if mask is None:
        return 0
    return mask.numel() // mask.shape[-1] * k.shape[2] * mask.element_size()


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what a block reads and makes. repeated: of its keys and values, if they are."""

    queries: int
    out: int
    lse: int
    keys: int
    repeated: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, block: Block) -> _Sizes:
        rows = block.rows[1] - block.rows[0]
        columns = block.columns[1] - block.columns[0]
        item, times = q.element_size(), q.shape[1] // k.shape[1]
        lines = q.shape[0] * q.shape[1] * rows
        keys = (k.numel() + v.numel()) * columns // k.shape[2] * item
        out = lines * v.shape[3] * item
        repeated = keys * times if times > 1 else 0
        return cls(lines * q.shape[3] * item, out, lines * 4, keys, repeated)


def _forward_bytes(
    q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int, causal: bool, columns: int
) -> int:
    first, *rest = blocks(rank, ranks, q.shape[2], k.shape[2], causal)
    own = _Sizes.of(q, k, v, first)
    widened = own.out * 4 // q.element_size() - own.out if _is_half(q) else 0
    most = 2 * own.keys + own.repeated + columns
    for block in rest:
        here = _Sizes.of(q, k, v, block)
        copy = here.out * 4 // q.element_size() if _is_half(q) else 0
        inside = here.out + max(here.repeated + here.lse + columns, copy + 3 * here.lse)
        messages = own.keys * (1 if block is rest[-1] else 2)
        most = max(most, widened + messages + inside)
    return max(most, own.keys + widened + own.out) if _is_half(q) else most


def _backward_bytes(
    q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int, causal: bool, columns: int
) -> int:
    first, *rest = blocks(rank, ranks, q.shape[2], k.shape[2], causal)
    own, wide = _Sizes.of(q, k, v, first), max(q.element_size(), 4) // q.element_size()
    results = own.queries + own.keys
    widened = (wide - 1) * results
    most = 2 * own.keys + max(2 * own.repeated + columns, results * wide if wide > 1 else 0)
    sums = own.keys * wide
    for number, block in enumerate(rest):
        here = _Sizes.of(q, k, v, block)
        messages = own.keys * (1 if block is rest[-1] else 2)
        made = here.queries + here.keys
        under_way = 2 * sums if number else 0
        most = max(
            most,
            widened + messages + under_way + made + 2 * here.repeated + columns,
            widened + messages + sums + made,
            widened + messages + 2 * sums,
        )
    return most
