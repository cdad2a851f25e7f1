"""Gated activations: SwiGLU and GeGLU, forward and backward.

    y = act(gate) * up
    dgate = dy * up * act'(gate),   dup = dy * act(gate)

    silu(a) = a * sigmoid(a)
    gelu(a) = a * Phi(a), Phi the normal distribution; "tanh" approximates Phi by
        (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a^3))) / 2

Backward needs only gate and up: it recomputes the activation.

Source: GLU Variants Improve Transformer (arXiv 2002.05202); Gaussian Error Linear Units (arXiv
    1606.08415), section 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up.

    Shapes: gate, up and the result are equal.
    """
    return _activate(gate, activation) * up


def gated_activation_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return (dgate, dup), computed in fp32 and rounded to the dtype of gate and up."""
    dy, wide = grad_y.float(), gate.float()
    inner = dy * up.float()
    aten = torch.ops.aten
    if activation == "silu":
        dgate = aten.silu_backward(inner, wide)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        dgate = aten.gelu_backward(inner, wide, approximate=approximate)
    return dgate.to(gate.dtype), (dy * _activate(wide, activation)).to(up.dtype)


def _activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
