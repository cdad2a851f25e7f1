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


def cut(x: Tensor, dim: int, groups: int, rank: int, ranks: int) -> Tensor:
    """Return one rank's part of a value: of each group its chunk."""
    chunks = [group.chunk(ranks, dim)[rank] for group in x.chunk(groups, dim)]
    return torch.cat(chunks, dim)


def uncut(parts: list[Tensor], dim: int, groups: int) -> Tensor:
    """Return the value that parts are of."""
    return torch.cat([p.chunk(groups, dim)[g] for g in range(groups) for p in parts], dim)


def added(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


class Placed:
    """One rank's side of every op on values that are cut over the tensor or the context axis."""

    rank: int
    team: int  # how many ranks share each layer: they are neighbours
    context: int  # how many share each sequence: they too

    @property
    def peers(self) -> int:
        """Over how many ranks values are cut."""
        return max(self.team, self.context)

    @property
    def place(self) -> int:
        """This rank's position among these."""
        return self.rank % self.peers

    def _over(self, axis: str, ranks: int | None = None) -> None:
        mine = "context" if self.context > 1 else "tensor"
        if axis != mine or ranks not in (None, self.peers):
            raise OracleError(f"a conversion over {ranks} ranks of the axis {axis}")

    def _launch(self, dest: Tensor, signature: tuple, sources: list[Tensor], land: Any) -> Blocking:
        raise NotImplementedError

    def _exchange(
        self, kind: str, x: Tensor, more: tuple[Any, ...], made: Callable[[list[Tensor]], Tensor]
    ) -> Blocking:
        """Launch what gives `made` of what each rank of the axis has of a value."""
        dest = made([x] * self.peers).clone(memory_format=torch.contiguous_format)
        poison(dest)

        def land(parts: list[list[Tensor]]) -> None:
            first = self.rank - self.place
            dest.copy_(made([part[0] for part in parts[first : first + self.peers]]))

        return self._launch(dest, (kind, tuple(x.shape), x.dtype, *more), [x], land)

    def _reduce_values(self, x: Tensor, axis: str) -> Blocking:
        self._over(axis)
        return self._exchange("reduce values", x, (), added)

    def _reduce_joined(self, xs: list[Tensor], axis: str) -> Blocking:
        self._over(axis)
        dest = torch.cat([x.reshape(-1) for x in xs])
        poison(dest)

        def land(parts: list[list[Tensor]]) -> None:
            first = self.rank - self.place
            mine = [
                torch.cat([x.reshape(-1) for x in p]) for p in parts[first : first + self.peers]
            ]
            dest.copy_(added(mine))

        signature = ("reduce joined", *(tuple(x.shape) for x in xs))
        return self._launch(dest, signature, list(xs), land)

    def _joined_value(self, flat: Tensor, number: int, offset: int, shape: list[int]) -> Blocking:
        yield from ()
        return flat[offset : offset + torch.Size(shape).numel()].view(shape)

    def _scatter_values(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        self._over(axis, ranks)

        def made(parts: list[Tensor]) -> Tensor:
            return cut(added(parts), dim, groups, self.place, ranks)

        return self._exchange("scatter values", x, (dim, groups), made)

    def _gather_values(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        self._over(axis, ranks)
        more = (dim, groups)
        return self._exchange("gather values", x, more, lambda parts: uncut(parts, dim, groups))

    def _swap_values(
        self, x: Tensor, axis: str, dim: int, groups: int, to_dim: int, to_groups: int, ranks: int
    ) -> Blocking:
        self._over(axis, ranks)

        def made(parts: list[Tensor]) -> Tensor:
            return cut(uncut(parts, dim, groups), to_dim, to_groups, self.place, ranks)

        return self._exchange("swap values", x, (dim, groups, to_dim, to_groups), made)

    def _part(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        yield from ()
        self._over(axis, ranks)
        return cut(x, dim, groups, self.place, ranks)

    def _summand(self, x: Tensor, axis: str) -> Blocking:
        yield from ()
        self._over(axis)
        return x.clone() if self.place == 0 else torch.zeros_like(x)

    def _padded(self, x: Tensor, axis: str, dim: int, groups: int, ranks: int) -> Blocking:
        yield from ()
        self._over(axis, ranks)
        none = torch.zeros_like(x)
        return uncut([x if r == self.place else none for r in range(ranks)], dim, groups)

    # -- tables that are cut by rows --------------------------------------------------------
    def _embedding_rows(self, table: Tensor, ids: Tensor, axis: str, rows: int) -> Blocking:
        yield from ()
        self._over(axis)
        behind = torch.cat([table, table.new_zeros(1, table.shape[1])])
        return behind[self._own_rows(ids, rows)]

    def _embedding_rows_backward(
        self, grad: Tensor, ids: Tensor, axis: str, rows: int, padding: int
    ) -> Blocking:
        yield from ()
        self._over(axis)
        made = grad.new_zeros(rows + 1, grad.shape[-1])
        own = self._own_rows(ids, rows).masked_fill(ids == padding, rows)
        made.index_add_(0, own.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return made[:rows].clone()

    def _own_rows(self, ids: Tensor, rows: int) -> Tensor:
        """Return the numbers of ids among this rank's rows, `rows` for those of others."""
        own = ids - self.place * rows
        return own.masked_fill((own < 0) | (own >= rows), rows)
