"""Random in-place fills: every rank draws the whole tensor and keeps its piece.

With equal generators on all ranks (which zerofx keeps them) the whole parameter has the bits that
an unsharded one would have, and `torch.nn.init` works on sharded parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from zerofx.compat.tensors import local_tensor
from zerofx.runtime.param_elementwise import pointwise_
from zerofx.runtime.param_tensor import HANDLERS, ShardedTensor

FILLS = """
bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
""".split()


# These torch.nn.init functions hand subclasses the whole call, by keyword.
INITS = (
    torch.nn.init.constant_,
    torch.nn.init.kaiming_uniform_,
    torch.nn.init.normal_,
    torch.nn.init.uniform_,
)


def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Draw a tensor of the global shape and write this rank's range of it."""
    target = args[0]
    local = local_tensor(target)
    full = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    func(full, *args[1:], **kwargs)
    with torch.set_grad_enabled(func not in INITS and torch.is_grad_enabled()):
        return pointwise_(torch.Tensor.copy_, (target, full), {})


HANDLERS.update({getattr(torch.Tensor, name): fill for name in FILLS})
HANDLERS.update(dict.fromkeys(INITS, fill))
