"""Optimizers over flat shards: torch.optim's signatures and states, stepping long flat runs.

The states of a parameter are views of flat tensors, as are parameters and gradients, so that a step
runs a few kernels over whole buckets however many parameters there are. `state_dict()` has the form
of the torch optimizer of the same name, so that either can load what the other saved.

Clipping (`max_grad_norm`) is part of the update: the norm over all groups and ranks is computed
first and is `optimizer.grad_norm` afterwards. The content of `p.grad` after a step is undefined. If
gradients were clipped or unscaled, torch's fused kernels (on CPU) write the scaled gradients back,
and Lamb's kernels on CUDA leave its directions there. Read gradients before the step.

Example:
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=3e-4, max_grad_norm=1.0)
    model(x, y).backward()
    optimizer.step()
    print(optimizer.grad_norm)
"""

from __future__ import annotations

from zerofx.optim.adam import Adam, AdamW
from zerofx.optim.lamb import Lamb
from zerofx.optim.lion import Lion
from zerofx.optim.sgd import SGD
from zerofx.runtime.store.whole_updates import whole_matrices

__all__ = ["SGD", "Adam", "AdamW", "Lamb", "Lion", "whole_matrices"]
