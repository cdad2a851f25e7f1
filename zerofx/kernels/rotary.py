"""Rotary position embedding in the two-halves form, forward and backward.

    rotate([a, b]) = [-b, a]                    a, b: the halves of the last dimension
    y = x * cos + rotate(x) * sin
    dx = dy * cos + back(dy * sin),   back([a, b]) = [b, -a], the transpose of rotate

cos and sin may differ between the halves. They hold positions, so they get no gradients.

Source: RoFormer (arXiv 2104.09864), section 3.4.2, in the layout of GPT-NeoX and Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with each pair (i, i + D/2) of its last dimension rotated.

    Shapes: x [B, H, S, D], cos and sin [B or 1, 1, S, D]; D even.
    """
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def rotary_embedding_backward(grad_y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return dx; shapes as in `rotary_embedding`."""
    a, b = (grad_y * sin).chunk(2, -1)
    return grad_y * cos + torch.cat((b, -a), -1)
