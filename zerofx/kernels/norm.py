"""RMSNorm and LayerNorm, with the residual sum before them, forward and backward.

    s = x + residual                                 (s = x if there is no residual)
    RMSNorm:    xhat = s * rstd,           rstd = 1 / sqrt(mean(s^2) + eps),  y = weight * xhat
    LayerNorm:  xhat = (s - mean) * rstd,  rstd = 1 / sqrt(var(s) + eps),
                y = weight * xhat + bias

    g = dy * weight
    ds = rstd * (g - xhat * mean(g * xhat)) + dsum            (LayerNorm: - mean(g))
    dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy

`dsum` is the gradient that flows back along the residual stream after the norm; x and residual both
get ds. Arithmetic is in fp32, and results are rounded to their dtype.

Source: Root Mean Square Layer Normalization (arXiv 1910.07467), section 3; Layer Normalization
    (arXiv 1607.06450), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, s, rstd) of RMSNorm over the last dimension.

    Shapes: x and residual [..., D], weight [D]; y and s [..., D] (s is empty if there is no
        residual), rstd fp32 [..., 1].
    """
    s = x if residual is None else x + residual
    wide = s.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    # rounded before the weight is applied, as in transformers' Llama
    y = (weight * (wide * rstd).to(s.dtype)).to(s.dtype)
    return y, s if residual is not None else x.new_empty(0), rstd


def rms_norm_backward(
    grad_y: Tensor, s: Tensor, weight: Tensor, rstd: Tensor, grad_sum: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (ds, dweight); `grad_sum` is added to ds.

    Shapes: grad_y, s, grad_sum [..., D], weight [D], rstd fp32 [..., 1].
    """
    dy = grad_y.float()
    xhat = s.float() * rstd
    g = dy * weight.float()
    ds = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    dweight = (dy * xhat).reshape(-1, s.shape[-1]).sum(0)
    return _plus(ds, grad_sum).to(s.dtype), dweight.to(weight.dtype)


def layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, s, mean, rstd) of LayerNorm over the last dimension.

    Shapes: as `rms_norm`; bias [D], mean fp32 [..., 1].
    """
    s = x if residual is None else x + residual
    wide = s.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = (centred * rstd * weight.float() + bias.float()).to(s.dtype)
    return y, s if residual is not None else x.new_empty(0), mean, rstd


def layer_norm_backward(
    grad_y: Tensor,
    s: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_sum: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ds, dweight, dbias); shapes as in `rms_norm_backward`."""
    dy = grad_y.float()
    xhat = (s.float() - mean) * rstd
    g = dy * weight.float()
    ds = g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)
    width = s.shape[-1]
    dweight = (dy * xhat).reshape(-1, width).sum(0)
    dbias = dy.reshape(-1, width).sum(0)
    return (
        _plus(rstd * ds, grad_sum).to(s.dtype),
        dweight.to(weight.dtype),
        dbias.to(weight.dtype),
    )


def _plus(ds: Tensor, grad_sum: Tensor | None) -> Tensor:
    return ds if grad_sum is None else ds + grad_sum.float()
