"""Linear layer + cross-entropy in tiles of the logits: neither forward nor backward holds all.

    x = hidden @ weight^T + bias                                      [tokens, vocabulary]
    lse[n] = log sum_v exp(x[n, v])
    loss[n] = lse[n] - (1 - s) * x[n, target[n]] - s * mean_v x[n, v]   s: label smoothing
    loss = sum of loss[n] over tokens that are not ignored, divided by their number for a mean

    dx[n, v] = (exp(x[n, v] - lse[n]) - (1 - s) * (v is target[n]) - s / V) * dloss[n]
    dhidden = dx @ weight,   dweight = dx^T @ hidden,   dbias = sum_n dx[n]

A tile is `rows` tokens by `columns` words. Forward keeps lse; backward recomputes each tile's
logits. In bf16 this rounds as the plain model does: logits in bf16, softmax in fp32. Gradients of
the logits are multiplied by the incoming gradient, so that a loss scale protects them from fp16
underflow.

Source: online softmax (arXiv 1805.02867); Liger Kernel (arXiv 2410.10989), section 3.2, and Cut
    Cross-Entropy (arXiv 2411.09009), which tile the same product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx.compat.tensors import assert_async

TILE_BYTES = 32 << 20  # fp32 logits of one tile
_ROWS = 8192  # most tokens per tile: with more, a tile has too few columns for a fast product
_COLUMNS = 256  # fewest words per tile


@dataclass(frozen=True)
class Options:
    """The options of cross-entropy, as in torch.nn.functional.cross_entropy."""

    ignore_index: int = -100
    is_mean: bool = True
    label_smoothing: float = 0.0


# Works in place on fp32 rows: (logits of a tile, targets, first word, lse, picked, totals or None).
Step = Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor | None], None]
# (logits of a tile, targets, first word, lse, dloss of each token, V, smoothing) -> dx.
Gradient = Callable[[Tensor, Tensor, int, Tensor, Tensor, int, float], Tensor]


def tile_sizes(tokens: int, vocabulary: int) -> tuple[int, int]:
    """Return (rows, columns) of a tile: all tokens if possible, then as many words as fit.

    With all tokens in one tile, each row of the weight's gradient is written only once.
    """
    rows = max(min(tokens, _ROWS), 1)
    columns = max(TILE_BYTES // (4 * rows), _COLUMNS)
    return rows, min(columns, vocabulary)


def linear_cross_entropy_plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: Options,
) -> Tensor:
    """Return the loss from all logits at once, as a model does: the oracle, differentiable."""
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(
        logits,
        target,
        ignore_index=options.ignore_index,
        reduction="mean" if options.is_mean else "sum",
        label_smoothing=options.label_smoothing,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    options: Options,
    step: Step | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (loss, lse), tile by tile.

    Args:
        step: adds a tile's logits to the state of its tokens; plain torch by default.

    Shapes: hidden [N, D], weight [V, D], bias [V] or None, target int64 [N]; loss fp32 [], lse
        fp32 [N].

    Raises:
        IndexError: a target is not a class, as in eager PyTorch.
    """
    take = step or step_torch
    tokens, vocabulary = len(hidden), len(weight)
    _check_targets(target, vocabulary, options.ignore_index)
    lse = hidden.new_full((tokens,), -torch.inf, dtype=torch.float32)
    picked = torch.zeros_like(lse)
    totals = torch.zeros_like(lse) if options.label_smoothing else None
    for rows, columns in _tiles(tokens, vocabulary):
        logits = _logits(hidden, weight, bias, rows, columns)
        total = totals[rows] if totals is not None else None
        take(logits, target[rows], columns.start, lse[rows], picked[rows], total)
        del logits  # before the next tile's logits are allocated
    losses = lse - (1 - options.label_smoothing) * picked
    if totals is not None:
        losses -= options.label_smoothing / vocabulary * totals
    is_counted = target != options.ignore_index
    loss = torch.where(is_counted, losses, 0.0).sum()
    return (loss / is_counted.sum() if options.is_mean else loss), lse


def _check_targets(target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Refuse targets outside the vocabulary: no tile has them, so their loss would be missing."""
    is_outside = ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
    if target.device.type != "cpu":  # reading the result would synchronise with the device
        assert_async(~is_outside.any(), "cross-entropy: a target is out of bounds")
    elif is_outside.any():
        raise IndexError(f"Target {int(target[is_outside][0])} is out of bounds.")


def linear_cross_entropy_backward(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    options: Options,
    needs: tuple[bool, bool] = (True, True),
    gradient: Gradient | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of (hidden, weight, bias), tile by tile.

    Args:
        needs: whether the gradients of hidden, and of weight and bias, are needed. A gradient that
            is not needed is empty, and so is that of a bias that is None.
        gradient: turns a tile's logits into their gradient; plain torch by default.

    Shapes: grad_loss []; the others as in `linear_cross_entropy`. Gradients have the dtypes of
        their inputs; sums over tiles are accumulated in fp32.
    """
    make = gradient or gradient_torch
    is_counted = target != options.ignore_index
    each = grad_loss.float() / is_counted.sum() if options.is_mean else grad_loss.float()
    dlosses = torch.where(is_counted, each, 0.0)
    tokens, vocabulary = len(hidden), len(weight)
    needs_hidden, needs_weight = needs
    grads = _Gradients(hidden, weight, bias, needs_hidden, needs_weight)
    for rows, columns in _tiles(tokens, vocabulary):
        logits = _logits(hidden, weight, bias, rows, columns)
        dx = make(
            logits, target[rows], columns.start, lse[rows], dlosses[rows], vocabulary,
            options.label_smoothing,
        )  # fmt: skip
        grads.add(dx, rows, columns)
        del logits, dx
    return grads.finish()


class _Gradients:
    """The gradients of a linear layer, summed over the tiles of its output."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        for_hidden: bool,
        for_weight: bool,
    ) -> None:
        self.given, self.bias = (hidden, weight), bias
        is_whole = tile_sizes(len(hidden), len(weight))[0] == len(hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = hidden.new_zeros(hidden.shape if for_hidden else (0,), dtype=wide)
        form = weight.shape if for_weight else (0,)
        dtype = weight.dtype if is_whole else wide
        # if one tile has all tokens, each row of dweight is written once and needs no zeros
        self.weight = (weight.new_empty if is_whole else weight.new_zeros)(form, dtype=dtype)
        length = len(weight) if for_weight and bias is not None else 0
        self.bias_sum = weight.new_zeros(length, dtype=wide)
        self.is_whole = is_whole

    def add(self, dx: Tensor, rows: slice, columns: slice) -> None:
        hidden, weight = self.given
        if self.hidden.numel():
            self._product(self.hidden[rows], dx, weight[columns])
        if self.weight.numel():
            if self.is_whole:
                torch.mm(dx.t(), hidden[rows], out=self.weight[columns])
            else:
                self._product(self.weight[columns], dx.t(), hidden[rows])
        if self.bias_sum.numel():
            self.bias_sum[columns] += dx.sum(0, dtype=self.bias_sum.dtype)

    def _product(self, to: Tensor, a: Tensor, b: Tensor) -> None:
        if to.dtype == a.dtype:
            to.addmm_(a, b)
        else:
            to += a @ b

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        hidden, weight = self.given
        dtype = weight.dtype if self.bias is None else self.bias.dtype
        return self.hidden.to(hidden.dtype), self.weight.to(weight.dtype), self.bias_sum.to(dtype)


def step_torch(
    logits: Tensor, target: Tensor, first: int, lse: Tensor, picked: Tensor, total: Tensor | None
) -> None:
    """Add a tile's logits to lse, the target's logit and the sum of all; overwrite the tile."""
    x = logits.float()
    index = target - first
    inside = (index >= 0) & (index < x.shape[1])
    word = x.gather(1, torch.where(inside, index, 0)[:, None])[:, 0]
    picked += torch.where(inside, word, 0.0)
    if total is not None:
        total += x.sum(1)
    largest = x.amax(1)
    sums = x.sub_(largest[:, None]).exp_().sum(1)
    lse.copy_(torch.logaddexp(lse, sums.log_().add_(largest)))


def gradient_torch(
    logits: Tensor,
    target: Tensor,
    first: int,
    lse: Tensor,
    dloss: Tensor,
    vocabulary: int,
    label_smoothing: float,
) -> Tensor:
    """Return the gradient of a tile's logits, in their dtype; overwrite the tile."""
    x = logits.float().sub_(lse[:, None]).exp_()
    if label_smoothing:
        x -= label_smoothing / vocabulary
    index = target - first
    inside = (index >= 0) & (index < x.shape[1])
    taken = torch.where(inside, 1 - label_smoothing, 0.0)
    x.scatter_add_(1, torch.where(inside, index, 0)[:, None], -taken[:, None])
    return x.mul_(dloss[:, None]).to(logits.dtype)


def _tiles(tokens: int, vocabulary: int) -> Iterator[tuple[slice, slice]]:
    height, width = tile_sizes(tokens, vocabulary)
    for row in range(0, tokens, height):
        for column in range(0, vocabulary, width):
            yield (
                slice(row, min(row + height, tokens)),
                slice(column, min(column + width, vocabulary)),
            )


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    return F.linear(hidden[rows], weight[columns], None if bias is None else bias[columns])
