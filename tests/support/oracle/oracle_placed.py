"""What values cut over an axis are on one simulated rank of the oracle.

A dimension is cut as (groups, ranks, rest), in the middle. All ranks of the world launch alike, and
each takes what its own tensor or context group has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from oracle_memory import OracleError, poison
from torch import Tensor

Blocking = Generator[None, None, Any]


def cut(x: Tensor, dim: int, groups: int, rank: int, ranks: int, zigzag: bool = False) -> Tensor:
    """Return one rank's part of a value: of each group its chunk, or its first and last one."""
    own = [rank, 2 * ranks - 1 - rank] if zigzag else [rank]
    count = 2 * ranks if zigzag else ranks
    if x.shape[dim] % (groups * count):
        raise OracleError(f"{list(x.shape)} in {groups} x {count} chunks along {dim}")
    found = [group.chunk(count, dim)[n] for group in x.chunk(groups, dim) for n in own]
    return torch.cat(found, dim)


def uncut(parts: list[Tensor], dim: int, groups: int, zigzag: bool = False) -> Tensor:
    """Return the value that parts are of."""
    if not zigzag:
        return torch.cat([p.chunk(groups, dim)[g] for g in range(groups) for p in parts], dim)
    halves = [[group.chunk(2, dim) for group in p.chunk(groups, dim)] for p in parts]
    rows = [[h[g][0] for h in halves] + [h[g][1] for h in reversed(halves)] for g in range(groups)]
    return torch.cat([x for row in rows for x in row], dim)


def added(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _poisoned(x: Tensor, made: Tensor) -> Tensor:
    """Return garbage of a shape, whose dimensions lie in memory in the order of those of `x`."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride(d), d))
    dense = made.permute(order).clone(memory_format=torch.contiguous_format)
    poison(dense)
    return dense.permute([order.index(d) for d in range(x.dim())])


def _alike(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with as many heads as queries have."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _laid(x: Tensor) -> Tensor:
    """Return a value with the heads behind the sequence in memory, as torch's operators do."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    found = q @ _alike(k, q).mT * scale
    if mask is not None:
        found = found + mask
    ahead = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
    return found.masked_fill(ahead, -torch.inf) if causal else found


def _weights(
    q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return weights and the logarithms of their sums; zeros for a row of which all is hidden."""
    found = _scores(q, k, causal, scale, mask)
    lse = found.logsumexp(-1)
    return found.softmax(-1).nan_to_num(0.0), lse.masked_fill(lse == -torch.inf, 0.0)


class Placed:
    """One rank's side of every op on values that are cut over the tensor or the context axis."""

    rank: int
    team: int  # how many ranks share each layer: they are neighbours
    context: int  # how many share each sequence: neighbours of those with the same part of a layer
    zigzag: bool = False  # whether each of these has two chunks, from either end

    def _members(self, axis: str, ranks: int | None = None) -> tuple[list[int], int]:
        """Return the ranks along an axis that this one exchanges with, and its place among them."""
        sizes = {"tensor": (self.team, 1), "context": (self.context, self.team)}
        size, stride = sizes.get(axis, (1, 1))
        if size == 1 or ranks not in (None, size):
            raise OracleError(f"a conversion over {ranks} ranks of the axis {axis}")
        place = self.rank // stride % size
        first = self.rank - place * stride
        return list(range(first, first + size * stride, stride)), place

    def _turns(self, axis: str) -> bool:
        return self.zigzag and axis == "context"

    def _launch(self, dest: Tensor, signature: tuple, sources: list[Tensor], land: Any) -> Blocking:
        raise NotImplementedError

    def _exchange(
        self, kind: str, x: Tensor, axis: str, more: tuple[Any, ...],
        made: Callable[[list[Tensor]], Tensor],
    ) -> Blocking:  # fmt: skip
        """Launch what gives `made` of what each rank of the axis has of a value."""
        members, _ = self._members(axis)
        dest = _poisoned(x, made([x] * len(members)))

        def land(parts: list[list[Tensor]]) -> None:
            dest.copy_(made([parts[member][0] for member in members]))

        return self._launch(dest, (kind, axis, tuple(x.shape), x.dtype, *more), [x], land)

    def _reduce_values(self, x: Tensor, axis: str) -> Blocking:
        return self._exchange("reduce values", x, axis, (), added)

    def _reduce_joined(self, xs: list[Tensor], axis: str) -> Blocking:
        members, _ = self._members(axis)
        dest = torch.cat([x.reshape(-1) for x in xs])
        poison(dest)

        def land(parts: list[list[Tensor]]) -> None:
            mine = [torch.cat([x.reshape(-1) for x in parts[member]]) for member in members]
            dest.copy_(added(mine))

        signature = ("reduce joined", axis, *(tuple(x.shape) for x in xs))
        return self._launch(dest, signature, list(xs), land)

    def _joined_value(self, flat: Tensor, number: int, offset: int, shape: list[int]) -> Blocking:
        yield from ()
        return flat[offset : offset + torch.Size(shape).numel()].view(shape)

    def _scatter_values(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        _, place = self._members(axis, ranks)

        def made(parts: list[Tensor]) -> Tensor:
            return cut(added(parts), dim, groups, place, ranks, self._turns(axis))

        return self._exchange("scatter values", x, axis, (dim, groups), made)

    def _gather_values(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        self._members(axis, ranks)
        more, turns = (dim, groups), self._turns(axis)
        return self._exchange(
            "gather values", x, axis, more, lambda parts: uncut(parts, dim, groups, turns)
        )

    def _swap_values(
        self, x: Tensor, axis: str, dim: int, groups: int, to_dim: int, to_groups: int, ranks: int
    ) -> Blocking:
        _, place = self._members(axis, ranks)
        turns = self._turns(axis)

        def made(parts: list[Tensor]) -> Tensor:
            return cut(uncut(parts, dim, groups, turns), to_dim, to_groups, place, ranks, turns)

        return self._exchange("swap values", x, axis, (dim, groups, to_dim, to_groups), made)

    def _part(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        yield from ()
        _, place = self._members(axis, ranks)
        return cut(x, dim, groups, place, ranks, self._turns(axis))

    def _summand(self, x: Tensor, axis: str) -> Blocking:
        yield from ()
        _, place = self._members(axis)
        return x.clone() if place == 0 else torch.zeros_like(x)

    def _padded(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        yield from ()
        _, place = self._members(axis, ranks)
        none = torch.zeros_like(x)
        parts = [x if r == place else none for r in range(ranks)]
        return uncut(parts, dim, groups, self._turns(axis))

    # -- attention --------------------------------------------------------------------------
    def _everywhere(self, kind: str, xs: list[Tensor], more: tuple[Any, ...]) -> Blocking:
        """Return the whole of values that are cut along the sequence."""
        found: list[Tensor] = []
        members, _ = self._members("context")

        def land(parts: list[list[Tensor]]) -> None:
            mine = [parts[member] for member in members]
            found.extend(uncut([p[i] for p in mine], 2, 1, self.zigzag) for i in range(len(xs)))

        signature = (kind, *(tuple(x.shape) for x in xs), *more)
        transfer = yield from self._launch(torch.empty(1), signature, xs, land)
        yield from self._wait(transfer)  # type: ignore[attr-defined]
        return found

    def _ring_over(self, axis: str, ranks: int) -> None:
        self._members(axis, ranks)
        if axis != "context":
            raise OracleError(f"a ring over the axis {axis}")

    def _rows(self, x: Tensor) -> Tensor:
        members, place = self._members("context")
        return _laid(cut(x, 2, 1, place, len(members), self.zigzag))

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float,
        mask: Tensor | None = None,
    ) -> Blocking:  # fmt: skip
        yield from ()
        weights, lse = _weights(q, k, causal, scale, mask)
        return _laid(weights @ _alike(v, q)), _laid(lse)

    def _attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        causal: bool, scale: float, mask: Tensor | None = None,
    ) -> Blocking:  # fmt: skip
        yield from ()
        heads, count = k.shape[1], q.shape[1] // k.shape[1]
        weights = (_scores(q, k, causal, scale, mask) - lse.unsqueeze(-1)).exp()
        up = grad @ _alike(v, q).mT
        steps = weights * (up - (grad * out).sum(-1, keepdim=True)) * scale
        made = steps.mT @ q, weights.mT @ grad
        dk, dv = (x.unflatten(1, (heads, count)).sum(2) for x in made)
        return _laid(steps @ _alike(k, q)), _laid(dk), _laid(dv)

    def _ring_attention(
        self, q: Tensor, k: Tensor, v: Tensor, axis: str, ranks: int, causal: bool, scale: float,
        mask: Tensor | None = None,
    ) -> Blocking:  # fmt: skip
        self._ring_over(axis, ranks)
        hides = [] if mask is None else [mask]
        whole = yield from self._everywhere("ring", [q, k, v, *hides], (causal, scale))
        made = yield from self._attention(*whole[:3], causal, scale, *whole[3:])
        return tuple(self._rows(x) for x in made)

    def _ring_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        axis: str, ranks: int, causal: bool, scale: float, mask: Tensor | None = None,
    ) -> Blocking:  # fmt: skip
        self._ring_over(axis, ranks)
        given = [grad, q, k, v, out, lse, *([] if mask is None else [mask])]
        whole = yield from self._everywhere("ring of gradients", given, (causal, scale))
        made = yield from self._attention_backward(*whole[:6], causal, scale, *whole[6:])
        return tuple(self._rows(x) for x in made)

    # -- tables that are cut by rows --------------------------------------------------------
    def _embedding_rows(self, table: Tensor, ids: Tensor, axis: str, rows: int) -> Blocking:
        yield from ()
        behind = torch.cat([table, table.new_zeros(1, table.shape[1])])
        return behind[self._own_rows(ids, axis, rows)]

    def _embedding_rows_backward(
        self, grad: Tensor, ids: Tensor, axis: str, rows: int, padding: int
    ) -> Blocking:
        yield from ()
        made = grad.new_zeros(rows + 1, grad.shape[-1])
        own = self._own_rows(ids, axis, rows).masked_fill(ids == padding, rows)
        made.index_add_(0, own.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return made[:rows].clone()

    # -- products of experts ----------------------------------------------------------------
    def _own_experts(self, ends: Tensor, axis: str) -> list[tuple[int, int]]:
        """Return (row, its expert's number here) of the rows of this rank's experts."""
        members, place = self._members(axis)
        each = len(ends) // len(members)
        found = []
        for row in range(int(ends.max())):
            expert = int((ends <= row).sum())
            if expert // each == place:
                found.append((row, expert % each))
        return found

    def _grouped_rows(self, x: Tensor, weight: Tensor, ends: Tensor, axis: str) -> Blocking:
        yield from ()
        made = x.new_zeros(x.shape[0], weight.shape[2])
        for row, number in self._own_experts(ends, axis):
            made[row] = x[row] @ weight[number]
        return made

    def _grouped_rows_backward(
        self, x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, axis: str
    ) -> Blocking:
        yield from ()
        of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
        for row, number in self._own_experts(ends, axis):
            of_x[row] = weight[number] @ grad[row]
            of_weight[number] += torch.outer(x[row], grad[row])
        return of_x, of_weight

    def _grouped_weights(
        self, a: Tensor, b: Tensor, ends: Tensor, axis: str, number: int
    ) -> Blocking:
        yield from ()
        made = a.new_zeros(number, a.shape[0], b.shape[1])
        for row, expert in self._own_experts(ends, axis):
            made[expert] += torch.outer(a[:, row], b[row])
        return made

    # -- slots of experts ---------------------------------------------------------------------
    def _expert_slots(
        self, ids: Tensor, layer: str, experts: int, capacity: int, groups: int, ranks: int
    ) -> Blocking:
        yield from ()
        parts = _parts(len(ids), groups, ranks)
        rows = ids.new_full((experts, ranks * capacity), len(ids) // ranks)
        slots = ids.new_full((len(ids),), experts * capacity)
        for number, part in enumerate(parts):
            taken = [0] * experts
            for place, row in enumerate(part):
                expert = int(ids[row])
                if taken[expert] < capacity:
                    rows[expert, number * capacity + taken[expert]] = place
                    slots[row] = expert * capacity + taken[expert]
                    taken[expert] += 1
        return rows, slots

    def _rows_to_slots(
        self, x: Tensor, rows: Tensor, groups: int, ranks: int, per: int
    ) -> Blocking:
        yield from ()
        made = []
        for part, numbers in zip(
            _parts(len(x), groups, ranks), rows.chunk(ranks, dim=1), strict=True
        ):
            behind = torch.cat([x[part].repeat_interleave(per, 0), x.new_zeros(1, x.shape[1])])
            made.append(behind[numbers])
        return torch.cat(made, dim=1)

    def _rows_from_slots(self, x: Tensor, slots: Tensor, groups: int, ranks: int) -> Blocking:
        yield from ()
        made = x.new_empty(len(slots), x.shape[2])
        for part, held in zip(
            _parts(len(slots), groups, ranks), x.chunk(ranks, dim=1), strict=True
        ):
            behind = torch.cat([held.reshape(-1, x.shape[2]), x.new_zeros(1, x.shape[2])])
            made[part] = behind[slots[part]]
        return made

    def _own_rows(self, ids: Tensor, axis: str, rows: int) -> Tensor:
        """Return the numbers of ids among this rank's rows, `rows` for those of others."""
        _, place = self._members(axis)
        own = ids - place * rows
        return own.masked_fill((own < 0) | (own >= rows), rows)


def _parts(number: int, groups: int, ranks: int) -> list[list[int]]:
    """Return the rows of each rank: of every group of equal length, ranks have equal stretches."""
    stretch = number // (groups * ranks)
    return [
        [(group * ranks + rank) * stretch + i for group in range(groups) for i in range(stretch)]
        for rank in range(ranks)
    ]
