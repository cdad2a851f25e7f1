"""Kernel source: fused nodes as Triton code, one template per kernel, with constants baked in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.text import Source, templates
from zerofx.compat.graphs import op_name, schema_of
from zerofx.kernels import ops
from zerofx.kernels.cross_entropy import tile_sizes

_TEMPLATES = templates()
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_TRITON = {"f32": "tl.float32", "bf16": "tl.bfloat16", "f16": "tl.float16"}
_ACROSS = 1024  # elements of a row per program of a pointwise kernel
_WORDS = 4096  # vocabulary entries that a cross-entropy program processes at a time
_PROGRAMS = 264  # programs of a norm's backward: two per multiprocessor of a large GPU


@dataclass(frozen=True)
class KernelCall:
    """One kernel of an emitted file: its template and constants, and the function to call.

    Calls with the same `name` share one source; the loss head's backward is in the source of its
    forward.
    """

    name: str
    template: str
    constants: dict[str, Any] = field(hash=False)
    suffix: str = ""

    @property
    def function(self) -> str:
        return self.name + self.suffix


def kernel_call(target: Any, *args: Any) -> KernelCall:
    """Return the kernel for a call of a fused op; only the form and dtype of tensors are read.

    Raises:
        KeyError: the op is not a fused one, or no kernel supports the dtype of a tensor.
    """
    return _CALLS[target](target, args)


def tensor_args(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of the emitted function; the others are baked into it.

    `needs_hidden` and `needs_weight` of the loss head's backward remain, as one pair.
    """
    formal = schema_of(target).arguments
    taken = [a for a, f in zip(args, formal, strict=True) if "Tensor" in str(f.type)]
    if target is ops.linear_cross_entropy_backward:
        taken.append((args[6], args[7]))
    return tuple(taken)


def render_kernels(calls: Iterable[KernelCall]) -> str:
    """Return the text of `kernels.py`: each kernel once, in the given order."""
    unique = {call.name: call for call in calls}
    bodies = [
        Source(_rendered(call.template, name=call.name, **call.constants).removesuffix("\n"))
        for call in unique.values()
    ]
    return _rendered("kernels.py.j2", bodies=bodies).rstrip() + "\n"


def _rendered(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(**values)


def _common(x: Tensor) -> dict[str, Any]:
    dtype = _DTYPES[x.dtype]
    return {"dtype": dtype, "tl_dtype": _TRITON[dtype]}


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def _op_name(target: Any) -> str:
    return op_name(target)[1]


def _norm(target: Any, args: tuple[Any, ...]) -> KernelCall:
    x, residual, eps = args[0], args[1], args[-1]
    width = x.shape[-1]
    rows = x.numel() // width
    block = _power_of_2(width)
    constants = _common(x) | {
        "op": _op_name(target), "rows": rows, "width": width, "block": block,
        "warps": _warps(block), "eps": eps, "has_residual": residual is not None,
    }  # fmt: skip
    words = [_op_name(target), constants["dtype"], f"{rows}x{width}", _number(eps)]
    words += ["residual"] if residual is not None else []
    return KernelCall("_".join(words), "norm.py.j2", constants)


def _norm_backward(target: Any, args: tuple[Any, ...]) -> KernelCall:
    s, grad_sum = args[1], args[-1]
    width = s.shape[-1]
    rows = s.numel() // width
    block, programs = _power_of_2(width), min(rows, _PROGRAMS)
    constants = _common(s) | {
        "op": _op_name(target), "rows": rows, "width": width, "block": block,
        "warps": _warps(block), "programs": programs, "turns": -(-rows // programs),
        "has_sum": grad_sum is not None,
    }  # fmt: skip
    words = [_op_name(target), constants["dtype"], f"{rows}x{width}"]
    words += ["sum"] if grad_sum is not None else []
    return KernelCall("_".join(words), "norm_backward.py.j2", constants)


def _gated(target: Any, args: tuple[Any, ...]) -> KernelCall:
    up, activation = args[-2], args[-1]
    width = up.shape[-1]
    block = min(_power_of_2(width), _ACROSS)
    constants = _common(up) | {
        "rows": up.numel() // width, "width": width, "block": block,
        "columns": -(-width // block), "activation": activation,
    }  # fmt: skip
    op = _op_name(target)
    name = f"{op}_{activation}_{constants['dtype']}_{constants['rows']}x{width}"
    return KernelCall(name, f"{op}.py.j2", constants)


def _rotary(target: Any, args: tuple[Any, ...]) -> KernelCall:
    x = args[0]
    batch, heads, length, width = x.shape
    constants = _common(x) | {
        "op": _op_name(target), "batch": batch, "heads": heads, "length": length, "width": width,
        "half": width // 2, "block": _power_of_2(width // 2), "block_heads": _power_of_2(heads),
    }  # fmt: skip
    name = f"{_op_name(target)}_{constants['dtype']}_{batch}x{heads}x{length}x{width}"
    return KernelCall(name, "rotary.py.j2", constants)


def _cross_entropy(target: Any, args: tuple[Any, ...]) -> KernelCall:
    hidden, weight = args[:2] if target is ops.linear_cross_entropy else args[1:3]
    ignore_index, is_mean, label_smoothing = args[-3:]
    rows, columns = tile_sizes(len(hidden), len(weight))
    block = min(_power_of_2(columns), _WORDS)
    constants = _common(hidden) | {
        "tokens": len(hidden), "width": hidden.shape[1], "vocabulary": len(weight),
        "tile_rows": rows, "tile_columns": columns, "block": block, "warps": _warps(block),
        "options": f"{ignore_index}, {is_mean}, {label_smoothing}",
        "label_smoothing": label_smoothing,
    }  # fmt: skip
    words = ["linear_cross_entropy", constants["dtype"], f"{len(hidden)}x{len(weight)}"]
    words += ["mean" if is_mean else "sum"]
    words += [f"smooth_{_number(label_smoothing)}"] if label_smoothing else []
    words += [f"ignore_{_number(ignore_index)}"] if ignore_index != -100 else []
    suffix = "" if target is ops.linear_cross_entropy else "_backward"
    return KernelCall("_".join(words), "cross_entropy.py.j2", constants, suffix)


def _number(value: float) -> str:
    """Write a number as part of a name: 1e-06 as 1em06."""
    return repr(value).replace("-", "m").replace(".", "p").replace("+", "")


_CALLS: dict[Any, Callable[[Any, tuple[Any, ...]], KernelCall]] = {
    ops.linear_cross_entropy: _cross_entropy,
    ops.linear_cross_entropy_backward: _cross_entropy,
    ops.rms_norm: _norm,
    ops.layer_norm: _norm,
    ops.rms_norm_backward: _norm_backward,
    ops.layer_norm_backward: _norm_backward,
    ops.gated_activation: _gated,
    ops.gated_activation_backward: _gated,
    ops.rotary_embedding: _rotary,
    ops.rotary_embedding_backward: _rotary,
}
