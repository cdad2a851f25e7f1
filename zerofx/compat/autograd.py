"""Autograd: which hooks are registered, and how the running backward was called.

torch has no public accessor for whether retain_graph was set, or which gradients were requested.
Saved values can be freed during backward only if it was not set, and autograd.grad must leave
p.grad unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# The hook forms of these norms set a plain attribute before every forward.
NORM_HOOKS = (WeightNorm, SpectralNorm)


def normed(module: nn.Module, hook: Any) -> Tensor:
    """Return the weight that a hook of `NORM_HOOKS` computes from the module's parameters."""
    with torch.no_grad():
        if isinstance(hook, SpectralNorm):
            found: Tensor = hook.compute_weight(module, do_power_iteration=False)
            return found
        found = hook.compute_weight(module)
        return found


def is_profiling() -> bool:
    """Return whether a torch.profiler that observes this thread is running."""
    return bool(torch.autograd._profiler_enabled())


def dual_level() -> int:
    """Return the number of active levels of forward-mode differentiation, minus one."""
    return int(torch.autograd.forward_ad._current_level)


def is_transforming() -> bool:
    """Return whether a transform of `torch.func` (grad, jvp, vmap) is active."""
    return torch._C._functorch.maybe_current_level() is not None


def has_gradient_hooks(param: torch.Tensor) -> bool:
    """Return whether a leaf has a hook (`register_hook`, `register_post_accumulate_grad_hook`)."""
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
    """Return whether the running backward was called with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_number() -> int:
    """Return a number that is unique to the running backward; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(run: Callable[[], None]) -> None:
    """Call `run` when the running backward has done everything else."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def will_run(node: Any) -> bool:
    """Return whether the running backward will reach this node of autograd's graph."""
    return bool(torch._C._will_engine_execute_node(node))


def asks_for(leaf: Any) -> str:
    """Return how the running backward uses a leaf, given as its AccumulateGrad node.

    "accumulate": the leaf is among the `inputs` of backward(). "return": autograd.grad was called
    for it. "": neither. Call this only during a backward that is not for all leaves.
    """
    try:
        return "accumulate" if will_run(leaf) else ""
    except RuntimeError as error:  # torch signals autograd.grad by raising here
        if "autograd.grad" not in str(error):
            raise
        return "return"
