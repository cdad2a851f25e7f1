"""One layer of an LSTM, GRU or RNN as a single op, with its backward.

Traced step by step, a recurrent layer has about thirty nodes per time step and direction: two
layers over 512 steps take minutes to capture and to compile. As one op it runs torch's own kernel.

An LSTM in fp32 on a CPU runs oneDNN's kernel, as in eager PyTorch, with one op per direction. The
forward returns what oneDNN stores for the backward (the workspace, `workspace_of` bytes), and the
backward reads it. Values equal eager PyTorch's bit for bit.

Every other layer (ATen, cuDNN, oneDNN in half precision) is one op with all its directions. Its
backward runs the forward again, so that only the inputs are kept. Values equal eager PyTorch's bit
for bit in ATen's kernel. oneDNN has one kernel for inference, which the op's forward runs, and
another for training: on some processors they differ by rounding.
"""

from __future__ import annotations

import functools
import math
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


# -- an LSTM in oneDNN: one direction, with the workspace that its backward reads ------------------
_LIB.define(
    "lstm_direction(Tensor input, Tensor h, Tensor c, Tensor[] weights, bool is_reversed, "
    "bool is_training, int workspace_bytes) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIB.define(
    "lstm_direction_grads(Tensor? grad, Tensor? grad_h, Tensor? grad_c, Tensor input, Tensor h, "
    "Tensor c, Tensor[] weights, Tensor output, Tensor last_h, Tensor last_c, Tensor workspace, "
    "bool is_reversed) -> Tensor[]"
)
_onednn = torch.ops.aten.mkldnn_rnn_layer.default
_onednn_backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
_LSTM = 2  # the mode of an LSTM in torch's enumeration of recurrent cells


def _four(weights: list[Tensor]) -> list[Tensor]:
    """Return the weights and biases of a direction, which are zeros if the layer has none."""
    biases = weights[2:] or [w.new_zeros(len(w)) for w in weights]
    return [*weights[:2], *biases]


def _direction_op(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    is_reversed: bool,
    is_training: bool,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one direction of one layer over a sequence.

    Shapes: input [T, B, F]; h and c [B, H]; the result is (output [T, B, H], h, c, the workspace).
    """
    with torch.set_grad_enabled(is_training):  # without it, oneDNN stores nothing
        output, last_h, last_c, workspace = _onednn(
            input, *_four(weights), h, c, is_reversed, [], _LSTM, h.shape[-1], 1,
            len(weights) == 4, False, False, is_training,
        )  # fmt: skip
    if not is_training:
        workspace = input.new_empty(0, dtype=torch.uint8)
    return output, last_h.reshape(h.shape), last_c.reshape(c.shape), workspace


def _direction_shapes(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    is_reversed: bool,
    is_training: bool,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output = input.new_empty(*input.shape[:2], h.shape[-1])
    workspace = input.new_empty(workspace_bytes, dtype=torch.uint8)
    return output, h.new_empty(h.shape), c.new_empty(c.shape), workspace


def _direction_backward_op(
    grad: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    output: Tensor,
    last_h: Tensor,
    last_c: Tensor,
    workspace: Tensor,
    is_reversed: bool,
) -> list[Tensor]:
    """Return the gradients of (input, h, c, *weights)."""
    dinput, dih, dhh, dbias, _, dh, dc = _onednn_backward(
        input, *_four(weights), h, c, output, last_h, last_c, grad, grad_h, grad_c, is_reversed,
        _LSTM, h.shape[-1], 1, len(weights) == 4, True, False, [], False, workspace,
    )  # fmt: skip
    # Both biases have one gradient. Each result of an op needs its own memory.
    biases = [dbias, dbias.clone()] if len(weights) == 4 else []
    return [dinput.contiguous(), dh.reshape(h.shape), dc.reshape(c.shape), dih, dhh, *biases]


def _direction_backward_shapes(
    grad: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weights: list[Tensor],
    *others: Any,
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (input, h, c, *weights)]


_LIB.impl("lstm_direction", _direction_op, "CompositeExplicitAutograd")
_LIB.impl("lstm_direction_grads", _direction_backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("zerofx_nn::lstm_direction", _direction_shapes, lib=_LIB)
torch.library.register_fake("zerofx_nn::lstm_direction_grads", _direction_backward_shapes, lib=_LIB)

lstm_direction = torch.ops.zerofx_nn.lstm_direction.default
lstm_direction_grads = torch.ops.zerofx_nn.lstm_direction_grads.default


def _setup_direction(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, h, c, weights, ctx.is_reversed, *_ = inputs
    ctx.num_weights = len(weights)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[3])
    ctx.save_for_backward(input, h, c, *weights, *output)


def _backward_direction(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    input, h, c, *rest = ctx.saved_tensors
    weights, results = rest[: ctx.num_weights], rest[ctx.num_weights :]
    if all(grad is None for grad in grads[:3]):
        return (None,) * 7
    found = lstm_direction_grads(*grads[:3], input, h, c, weights, *results, ctx.is_reversed)
    return found[0], found[1], found[2], found[3:], None, None, None


torch.library.register_autograd(
    "zerofx_nn::lstm_direction", _backward_direction, setup_context=_setup_direction, lib=_LIB
)


def workspace_of(steps: int, batch: int, features: int, cells: int) -> int:
    """Return the bytes that oneDNN stores in the forward of one direction for its backward.

    They depend on the processor and on the version of oneDNN, so the op is asked. They consist of
    arrays of fp32 over the time steps and the batch, each rounded up to whole pages. If some steps
    more fill whole pages in each array, they add the same bytes to every length. Thus the op is
    asked for a short sequence, and the rest is extrapolated.
    """
    period = _PAGE // 4 // math.gcd(_PAGE // 4, batch)
    few = period + 1 + (steps - 1) % period if steps > 2 * period else steps
    asked = _ask_workspace(few, batch, features, cells)
    if few == steps:
        return asked
    more = _ask_workspace(few + period, batch, features, cells) - asked
    return asked + (steps - few) // period * more


_PAGE = 4096


@functools.cache
def _ask_workspace(steps: int, batch: int, features: int, cells: int) -> int:
    from zerofx.compat.tracing import without_dispatch_modes  # only captures ask

    with without_dispatch_modes():
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
        state, bias = zeros(batch, cells), zeros(4 * cells)
        weights = [zeros(4 * cells, features), zeros(4 * cells, cells), bias, bias]
        found = _direction_op(zeros(steps, batch, features), state, state, weights, False, True, 0)
    return int(found[3].numel())


def _runs_in_onednn(tensors: list[Tensor], per_direction: int) -> bool:
    """Return whether eager PyTorch runs an LSTM of these tensors in oneDNN, and it is in fp32.

    per_direction: the number of weights of a direction. A projection adds one to the 2 or 4.
    """
    mkldnn: Any = torch.backends.mkldnn
    return (
        mkldnn.is_available()
        and mkldnn.enabled
        and per_direction in (2, 4)
        and tensors[0].numel() > 0
        and all(t.device.type == "cpu" and t.dtype is torch.float32 for t in tensors)
    )


def _run_directions(
    x: Tensor, hidden: list[Tensor], weights: list[Tensor], is_bidirectional: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer of an LSTM in oneDNN; shapes as in `_forward`."""
    h, c = hidden
    steps, batch, features = x.shape
    directions = 2 if is_bidirectional else 1
    per_direction = len(weights) // directions
    is_training = torch.is_grad_enabled() and any(t.requires_grad for t in (x, h, c, *weights))
    found = []
    for k in range(directions):
        own = weights[k * per_direction : (k + 1) * per_direction]
        size = workspace_of(steps, batch, features, h.shape[-1]) if is_training else 0
        found.append(lstm_direction(x, h[k], c[k], own, k > 0, is_training, size)[:3])
    outputs, last_h, last_c = zip(*found, strict=True)
    output = torch.cat(outputs, -1) if is_bidirectional else outputs[0]
    return output, torch.stack(last_h), torch.stack(last_c)


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
    per_direction = per_layer // directions
    in_onednn = name == "lstm" and _runs_in_onednn([x, *hidden, *weights], per_direction)
    x = x.contiguous() if in_onednn else x  # once, and not in forward and again in backward
    hidden = tuple(h.contiguous() for h in hidden) if in_onednn else hidden
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        first = [h[layer * directions : (layer + 1) * directions] for h in hidden]
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        if in_onednn:
            x, *last = _run_directions(x, first, list(own), is_bidirectional)
        else:
            x, *last = recurrent(x, first, list(own), name, has_biases, is_bidirectional)
        finals.append(tuple(last[: len(hidden)]))
        if dropout and training and layer + 1 < layers:
            x = F.dropout(x, dropout, training=True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.cat(parts) for parts in zip(*finals, strict=True))
