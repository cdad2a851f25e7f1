"""Plain training in one process, whose gradients are the mean over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zerofx.compat.graphs import pytree
from zerofx.errors import TargetError
from zerofx.tools.trial.batches import Call

LR, MOMENTUM = 0.05, 0.9


def loss_of(result: Any) -> Tensor:
    """Return what is trained: a loss that the model returns, else the mean square of its results.

    Raises:
        TargetError: no result is a floating-point tensor that depends on parameters.
    """
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        raise TargetError("verify --run: the model returns nothing that could be trained on")
    scalars = [x for x in leaves if x.dim() == 0]
    return scalars[0] if scalars else torch.stack([x.square().mean() for x in leaves]).sum()


class Plain:
    """The model as the user wrote it, on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)

    def accumulate(self, calls: list[Call], seeds: list[int]) -> list[float]:
        """Run forward and backward of one batch a rank; return the losses.

        Buffers follow rank 0, as those of a compiled model do; every rank starts from the same.
        """
        losses, buffers = [], dict(self.model.named_buffers())
        before = {name: b.clone() for name, b in buffers.items()}
        after = before
        for rank, ((args, kwargs), seed) in enumerate(zip(calls, seeds, strict=True)):
            if rank:
                self._set(before)
            torch.manual_seed(seed)
            loss = loss_of(self.model(*args, **kwargs))
            (loss / len(calls)).backward()
            losses.append(float(loss.detach()))
            if not rank:
                after = {name: b.clone() for name, b in self.model.named_buffers()}
        self._set(after)
        return losses

    @torch.no_grad()
    def _set(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])

    def step(self) -> None:
        """Update and drop the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()
