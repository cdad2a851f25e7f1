"""One layer of an LSTM, GRU or RNN as a single op, with its backward.

Traced step by step, a recurrent layer has about thirty nodes per time step and direction: two
layers over 512 steps take minutes to capture and to compile. As one op it runs torch's own kernel
(ATen, oneDNN, cuDNN). Its backward runs the forward again, so that only the inputs are kept. Values
equal eager PyTorch's bit for bit in ATen's kernel. oneDNN has one kernel for inference, which the
op's forward runs, and another for training: on some processors they differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerofx.compat.autograd import recording_autograd

MODES: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}

_LIB = torch.library.Library("zerofx_nn", "DEF")
_LIB.define(
    "recurrent(Tensor input, Tensor[] hidden, Tensor[] weights, str mode, bool has_biases, "
    "bool is_bidirectional) -> (Tensor, Tensor, Tensor)"
)
_LIB.define(
    "recurrent_grads(Tensor[] grads, Tensor input, Tensor[] hidden, Tensor[] weights, str mode, "
    "bool has_biases, bool is_bidirectional) -> Tensor[]"
)


def _forward(
    input: Tensor,
    hidden: list[Tensor],
    weights: list[Tensor],
    mode: str,
    has_biases: bool,
    is_bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer over a sequence.

    Shapes: input [T, B, F]; hidden (h [D, B, P], and c [D, B, H] for an LSTM); the result is
        (output [T, B, D*P], h, c), with c empty if there is none. T steps, batch B, F features,
        D directions, H cells, P = H or the size of the projection.
    """
    state = (hidden,) if mode == "lstm" else tuple(hidden)
    is_training = torch.is_grad_enabled()  # only then does cuDNN keep what its backward needs
    output, h, *c = MODES[mode](
        input, *state, weights, has_biases, 1, 0.0, is_training, is_bidirectional, False
    )
    # Under a dispatch mode torch 2.11's oneDNN states have a dimension of 1 too many.
    h = h.reshape(hidden[0].shape)
    return output, h, c[0].reshape(hidden[1].shape) if c else input.new_empty(0)


def _forward_op(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        output, h, c = _forward(*args)
    return output.contiguous(), h.contiguous(), c.contiguous()


def _backward_op(
    grads: list[Tensor], input: Tensor, hidden: list[Tensor], weights: list[Tensor], *how: Any
) -> list[Tensor]:
    """Return the gradients of (input, *hidden, *weights)."""
    with recording_autograd():
        leaves = [t.detach().requires_grad_() for t in (input, *hidden, *weights)]
        split = 1 + len(hidden)
        results = _forward(leaves[0], leaves[1:split], leaves[split:], *how)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if r.requires_grad]
        found = torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs])
    return [g.contiguous() for g in found]


def _forward_shapes(
    input: Tensor,
    hidden: list[Tensor],
    weights: list[Tensor],
    mode: str,
    has_biases: bool,
    is_bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = input.shape
    directions, _, width = hidden[0].shape
    output = input.new_empty(steps, batch, directions * width)
    c = hidden[1].new_empty(hidden[1].shape) if mode == "lstm" else input.new_empty(0)
    return output, hidden[0].new_empty(hidden[0].shape), c


def _backward_shapes(
    grads: list[Tensor], input: Tensor, hidden: list[Tensor], weights: list[Tensor], *how: Any
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (input, *hidden, *weights)]


_LIB.impl("recurrent", _forward_op, "CompositeExplicitAutograd")
_LIB.impl("recurrent_grads", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("zerofx_nn::recurrent", _forward_shapes, lib=_LIB)
torch.library.register_fake("zerofx_nn::recurrent_grads", _backward_shapes, lib=_LIB)

recurrent = torch.ops.zerofx_nn.recurrent.default
recurrent_grads = torch.ops.zerofx_nn.recurrent_grads.default


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, hidden, weights, *ctx.how = inputs
    ctx.num_hidden = len(hidden)
    ctx.save_for_backward(input, *hidden, *weights)
    ctx.likes = [(tuple(t.shape), t.dtype, t.device) for t in output]


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    input, *rest = ctx.saved_tensors
    hidden, weights = rest[: ctx.num_hidden], rest[ctx.num_hidden :]
    full = [
        torch.zeros(shape, dtype=dtype, device=device) if g is None else g
        for g, (shape, dtype, device) in zip(grads, ctx.likes, strict=True)
    ]
    found = recurrent_grads(full, input, hidden, weights, *ctx.how)
    split = 1 + ctx.num_hidden
    return found[0], found[1:split], found[split:], None, None, None


torch.library.register_autograd("zerofx_nn::recurrent", _backward, setup_context=_setup, lib=_LIB)


# -- the calls of torch that run as these ops: one node per layer, not one per step and gate -------
def is_recurrent(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a torch call is a recurrent stack on a padded batch.

    A packed batch depends on its lengths; under autocast, torch casts inside the call.
    """
    name = getattr(func, "__name__", "")
    if name not in MODES or func is not MODES[name] or not args:
        return False
    is_padded = isinstance(args[1], (list, tuple)) == (name == "lstm")
    return is_padded and args[0].dim() == 3 and not torch.is_autocast_enabled(args[0].device.type)


def run_recurrent(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Run a stack layer by layer, with dropout between the layers as in torch."""
    x, state, weights, has_biases, layers, dropout, training, is_bidirectional, batch_first = args
    hidden = tuple(state) if name == "lstm" else (state,)
    directions = 2 if is_bidirectional else 1
    per_layer = len(weights) // layers
    x = x.transpose(0, 1) if batch_first else x
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        first = [h[layer * directions : (layer + 1) * directions] for h in hidden]
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        x, *last = recurrent(x, first, list(own), name, has_biases, is_bidirectional)
        finals.append(tuple(last[: len(hidden)]))
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout, training=True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(parts) for parts in zip(*finals, strict=True))
