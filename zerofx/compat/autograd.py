"""Hooks and running backwards: which are there, and what was asked of them.

Whether retain_graph was asked for, and which gradients, has no public accessor: saved values can be
freed during backward only if it was not, and autograd.grad must leave p.grad alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# The hook forms of these norms set a plain attribute before every forward.
NORM_HOOKS = (WeightNorm, SpectralNorm)


def is_profiling() -> bool:
    """Tell whether a torch.profiler runs that sees this thread."""
    return bool(torch.autograd._profiler_enabled())


def dual_level() -> int:
    """Return how many levels of forward-mode differentiation are entered, less one."""
    return int(torch.autograd.forward_ad._current_level)


def is_transforming() -> bool:
    """Tell whether a transform of `torch.func` (grad, jvp, vmap) is under way."""
    return torch._C._functorch.maybe_current_level() is not None


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Tell whether `register_hook` or `register_post_accumulate_grad_hook` was called on a leaf."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(param._backward_hooks) or bool(param._post_accumulate_grad_hooks)


@contextlib.contextmanager
def recording_autograd() -> Iterator[None]:
    """Record gradients inside an op's own body, which compiled code calls below autograd."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for kind in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor):
        excluded = excluded.remove(kind)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def keeps_graph() -> bool:
    """Return whether the backward now running was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_number() -> int:
    """Return a number of the backward that runs now, which no other one has; -1 outside."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Call `run` when the backward that runs now has done all else."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def will_run(node: Any) -> bool:
    """Return whether the backward now running will reach this node of autograd's graph."""
    return bool(torch._C._will_engine_execute_node(node))


def asks_for(leaf: Any) -> str:
    """Return what the backward now running wants of a leaf, given as its AccumulateGrad node.

    "accumulate": it is among the `inputs` of backward(). "return": autograd.grad was called for it.
    "": neither. To be asked only while a backward runs that is not for all leaves.
    """
    try:
        return "accumulate" if will_run(leaf) else ""
    except RuntimeError as error:  # torch tells of autograd.grad by refusing the question
        if "autograd.grad" not in str(error):
            raise
        return "return"
