"""Slices: the parts of parameters that a model brings itself, and how each is cut.

A model of Megatron-LM marks such a parameter: `tensor_model_parallel` is true, `partition_dim` is
the dimension that is cut, and `partition_stride` is its number of groups (see `Cut`). DeepSpeed's
mark is `model_parallel`; it needs `partition_dim` too. A DTensor, as `parallelize_module` makes
them, says the same by its mesh and its placements. Each rank's tensor is one of the parts, and the
model itself exchanges what the ranks need of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from zerofx.errors import PlanError
from zerofx.layout.placements import Cut, Part

_MARKS = ("tensor_model_parallel", "model_parallel")
HOW_TO_MARK = (
    "If it is a slice, set its attributes tensor_model_parallel = True and partition_dim, the "
    "dimension that is cut, before zerofx.compile (partition_stride too if it is a part of several "
    "groups)"
)


def local_of(param: Tensor) -> Tensor:
    """Return the plain tensor that this rank has of a parameter, which may be a DTensor."""
    mine = param.detach()
    return mine.to_local() if isinstance(mine, DTensor) else mine


@dataclass(frozen=True)
class Layered:
    """How one DTensor parameter lies over the ranks of its mesh."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]

    def tensor(self, local: Tensor, shape: torch.Size) -> Tensor:
        """Return a DTensor of this shape of which `local` is this rank's part."""
        made: Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip
        return made


@dataclass(frozen=True)
class Marks:
    """What a model says about its parameters, by their first names.

    cuts: how each slice is cut. tensors: how each DTensor lies over its mesh, slices or not.
    summands: the whole parameters of whose gradients each rank has a summand only.
    """

    cuts: Mapping[str, Cut]
    tensors: Mapping[str, Layered]
    summands: tuple[str, ...] = ()

    def parts(self, model: nn.Module, ranks: int) -> dict[str, Part]:
        """Return the part that each slice is of its whole parameter, cut over so many ranks.

        Raises:
            PlanError: a whole parameter is marked `sequence_parallel`, so that each rank has a
                summand of its gradient, which zerofx does not add up; names it.
        """
        for name in self.summands:
            raise PlanError(
                f"{name} is marked sequence_parallel: each of the {ranks} ranks has a summand of "
                "its gradient, and zerofx does not add them up. Let forward do it "
                "(copy_to_tensor_model_parallel_region of the parameter) and drop the mark, or "
                f'give a model without slices and Plan(parallel={{"tensor": {ranks}, "sequence": '
                "True})."
            )
        found = {}
        for name, param in model.named_parameters():
            if name in self.cuts:
                cut, shape = self.cuts[name], list(local_of(param).shape)
                shape[cut.dim] *= ranks
                found[name] = Part(tuple(shape), cut, ranks, is_given=True)
        return found


def marks_of(model: nn.Module, has_mesh: bool = True) -> Marks:
    """Read the marks of a model's parameters.

    has_mesh: whether they can be slices over an axis of a mesh. Otherwise incomplete marks say
        nothing, as those that a library leaves on parameters of a single tensor rank.

    Raises:
        PlanError: a mark is incomplete, or a parameter is cut in a way that has no name here; names
            the parameter.
    """
    cuts: dict[str, Cut] = {}
    tensors: dict[str, Layered] = {}
    summands: list[str] = []
    for name, param in model.named_parameters():
        if getattr(param, "zfx", None) is not None:
            continue  # of a compiled model
        if isinstance(param, DTensor):
            tensors[name] = Layered(param.device_mesh, tuple(param.placements))
            cut = _of_placements(name, param)
        else:
            cut = _of_attributes(name, param, has_mesh)
        if cut is not None:
            cuts[name] = cut
        elif getattr(param, "sequence_parallel", False):
            summands.append(name)
    return Marks(cuts, tensors, tuple(summands))


def _of_placements(name: str, param: Any) -> Cut | None:
    cuts = [(dim, each) for dim, each in enumerate(param.placements) if type(each) is not Replicate]
    if not cuts:
        return None
    (axis, placement), *others = cuts
    if others or type(placement) is not Shard:
        raise PlanError(
            f"{name} is a DTensor with placements {param.placements}. zerofx takes Replicate, and "
            "Shard over one axis. Distribute it in that way."
        )
    ranks, dim = param.device_mesh.size(axis), placement.dim % max(param.dim(), 1)
    if param.shape[dim] % ranks:
        raise PlanError(
            f"{name} is a DTensor of shape {list(param.shape)} that {ranks} ranks share along "
            f"dimension {dim}. Their parts differ in size. Choose a size that {ranks} divides."
        )
    return Cut(dim)


def _of_attributes(name: str, param: Tensor, has_mesh: bool) -> Cut | None:
    if not any(getattr(param, mark, False) for mark in _MARKS):
        return None
    if getattr(param, "sequence_parallel", False):
        raise PlanError(
            f"{name} is marked as a slice and as sequence_parallel. A slice's gradient is its own, "
            "and is not summed over ranks. Drop one of the marks."
        )
    dim, stride = getattr(param, "partition_dim", -1), getattr(param, "partition_stride", 1)
    if not isinstance(dim, int) or not 0 <= dim < param.dim():
        if not has_mesh:
            return None
        raise PlanError(
            f"{name} is marked as a slice, and its partition_dim is {dim!r}, of {param.dim()} "
            f"dimensions. Set {name}.partition_dim to the dimension that is cut, from 0."
        )
    if not isinstance(stride, int) or stride < 1 or param.shape[dim] % stride:
        raise PlanError(
            f"{name} has {param.shape[dim]} rows in dimension {dim}, and its partition_stride is "
            f"{stride!r}. Set a number of groups that divides them."
        )
    return Cut(dim, stride)
