"""One call of a model: its arguments as numbered, named leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.capture import trees
from zerofx.capture.guard import check_arguments, check_packed
from zerofx.compat.graphs import FakeTensorMode, TreeSpec


@dataclass(frozen=True)
class Call:
    """The leaves of ((args...), {kwargs}), in the order that `spec` puts them back.

    names: `x`, `batch.ids`, `labels`. tensors: the numbers of the leaves that are tensors.
    """

    names: list[str]
    leaves: list[Any]
    spec: TreeSpec
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten a call.

        Raises:
            CaptureError: an argument is neither a plain tensor nor a hashable constant.
        """
        check_packed(args, kwargs)
        names, leaves, spec = trees.flatten_call(model.forward, tuple(args), kwargs)
        check_arguments(names, leaves)
        tensors = tuple(i for i, v in enumerate(leaves) if isinstance(v, Tensor))
        return cls(names, leaves, spec, tensors)

    def fakes(self, mode: FakeTensorMode, device: torch.device | None) -> tuple[Tensor, ...]:
        """Make a fake for each tensor: same shape, strides, dtype and requires_grad."""
        made = []
        with mode, torch.inference_mode(False), torch.no_grad():
            for number in self.tensors:
                own = self.leaves[number]
                fake = torch.empty_strided(
                    own.shape, own.stride(), dtype=own.dtype, device=place(own, device)
                )
                made.append(fake.requires_grad_(own.requires_grad))
        return tuple(made)

    def rebuild(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with other tensors in the places of the call's own."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            leaves[number] = tensor
        args, kwargs = trees.unflatten(leaves, self.spec)
        return args, kwargs


def place(tensor: Tensor, device: torch.device | None) -> torch.device:
    """Return where a fake lies: on the tensor's device, or on `device` for one on meta."""
    return tensor.device if tensor.device.type != "meta" else device or torch.device("cpu")
