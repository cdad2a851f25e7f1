"""Optimizers over flat shards: torch.optim's signatures and states, a step over long flat runs.

    optimizer = zerofx.optim.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)

A parameter's states are views of flat tensors, as the parameters and their gradients are, so that
a step is a few kernels over whole buckets however many parameters there are. `state_dict()` is that
of the torch optimizer of the same name: saved by one, it is loaded by the other.

Clipping (`max_grad_norm`) is part of the update: the norm over all groups and ranks is agreed on
first and is `optimizer.grad_norm` afterwards. What `p.grad` holds after a step is not defined:
where something was clipped or unscaled, torch's fused kernels (on CPU) write back the gradients
that they used, and Lamb's on CUDA leave its directions there; read gradients before the step.
"""

from __future__ import annotations

from zerofx.optim.adam import Adam, AdamW
from zerofx.optim.lamb import Lamb
from zerofx.optim.lion import Lion
from zerofx.optim.sgd import SGD
from zerofx.runtime.store.whole_updates import whole_matrices

__all__ = ["SGD", "Adam", "AdamW", "Lamb", "Lion", "whole_matrices"]
