"""The fused patterns as torch ops: nodes that any graph can run, with bodies in plain torch.

Forward and backward are separate ops, so that a joint graph shows both. Results are new and
contiguous; those of `rotary_embedding` keep the strides of their input (as the plain nodes do).
They are registered in the runtime because an emitted `kernels.py` calls them if Triton cannot run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerofx.kernels import cross_entropy, gated, norm, rotary
from zerofx.kernels.cross_entropy import Options

_LIB = torch.library.Library("zerofx", "FRAGMENT")


def _define(schema: str, real: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIB.define(schema)
    _LIB.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zerofx::{name}", fake, lib=_LIB)
    return getattr(torch.ops.zerofx, name).default


def _dense(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.contiguous()
    return tuple(t.contiguous() for t in found)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- linear + cross-entropy ------------------------------------------------------------------------
def _loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    return cross_entropy.linear_cross_entropy(hidden, weight, bias, target, Options(*options))


def _loss_shapes(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float32
    return hidden.new_empty((), dtype=wide), hidden.new_empty(hidden.shape[:1], dtype=wide)


linear_cross_entropy = _define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "int ignore_index, bool is_mean, float label_smoothing) -> (Tensor, Tensor)",
    _loss,
    _loss_shapes,
)


def _loss_grads(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy.linear_cross_entropy_backward(
        grad_loss,
        hidden,
        weight,
        bias,
        target,
        lse,
        Options(*options),
        (needs_hidden, needs_weight),
    )


def _loss_grads_shapes(
    grad_loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    like = weight if bias is None else bias
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,)),
        like.new_empty(len(weight) if needs_weight and bias is not None else 0),
    )


linear_cross_entropy_backward = _define(
    "linear_cross_entropy_backward(Tensor grad_loss, Tensor hidden, Tensor weight, Tensor? bias, "
    "Tensor target, Tensor lse, bool needs_hidden, bool needs_weight, int ignore_index, "
    "bool is_mean, float label_smoothing) -> (Tensor, Tensor, Tensor)",
    _loss_grads,
    _loss_grads_shapes,
)


# -- norms -----------------------------------------------------------------------------------------
def _norm_shapes(num_stats: int) -> Callable[..., tuple[Tensor, ...]]:
    def shapes(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        s = x.new_empty(0) if residual is None else _like(x)
        stat = (*x.shape[:-1], 1)
        return _like(x), s, *(x.new_empty(stat, dtype=torch.float32) for _ in range(num_stats))

    return shapes


def _norm_grads_shapes(num_params: int) -> Callable[..., tuple[Tensor, ...]]:
    def shapes(grad_y: Tensor, s: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return _like(s), *(_like(weight) for _ in range(num_params))

    return shapes


rms_norm = _define(
    "rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    lambda *args: _dense(norm.rms_norm(*args)),
    _norm_shapes(1),
)
rms_norm_backward = _define(
    "rms_norm_backward(Tensor grad_y, Tensor s, Tensor weight, Tensor rstd, Tensor? grad_sum) "
    "-> (Tensor, Tensor)",
    lambda *args: _dense(norm.rms_norm_backward(*args)),
    _norm_grads_shapes(1),
)
layer_norm = _define(
    "layer_norm(Tensor x, Tensor? residual, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda *args: _dense(norm.layer_norm(*args)),
    _norm_shapes(2),
)
layer_norm_backward = _define(
    "layer_norm_backward(Tensor grad_y, Tensor s, Tensor weight, Tensor mean, Tensor rstd, "
    "Tensor? grad_sum) -> (Tensor, Tensor, Tensor)",
    lambda *args: _dense(norm.layer_norm_backward(*args)),
    _norm_grads_shapes(2),
)

# -- pointwise -------------------------------------------------------------------------------------
gated_activation = _define(
    "gated_activation(Tensor gate, Tensor up, str activation) -> Tensor",
    lambda *args: _dense(gated.gated_activation(*args)),
    lambda gate, up, activation: _like(gate),
)
gated_activation_backward = _define(
    "gated_activation_backward(Tensor grad_y, Tensor gate, Tensor up, str activation) "
    "-> (Tensor, Tensor)",
    lambda *args: _dense(gated.gated_activation_backward(*args)),
    lambda grad_y, gate, up, activation: (_like(gate), _like(up)),
)
rotary_embedding = _define(
    "rotary_embedding(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: torch.empty_like(x).copy_(rotary.rotary_embedding(x, cos, sin)),
    lambda x, cos, sin: torch.empty_like(x),
)
rotary_embedding_backward = _define(
    "rotary_embedding_backward(Tensor grad_y, Tensor cos, Tensor sin) -> Tensor",
    lambda *args: _dense(rotary.rotary_embedding_backward(*args)),
    lambda grad_y, cos, sin: _like(grad_y),
)

FUSED = frozenset({
    linear_cross_entropy, linear_cross_entropy_backward, rms_norm, rms_norm_backward, layer_norm,
    layer_norm_backward, gated_activation, gated_activation_backward, rotary_embedding,
    rotary_embedding_backward,
})  # fmt: skip
