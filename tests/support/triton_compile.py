"""Compile kernels to machine code for an H100 where there is none: launches are only recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import gated_calls, loss_calls, norm_calls, rotary_calls

from zerofx import kernels
from zerofx.codegen.kernels import kernel_call, render_kernels, tensor_args
from zerofx.kernels import adamw, lamb, launch, pack, quantise
from zerofx.runtime.regions.load import import_file


def compiled_kernels(monkeypatch: pytest.MonkeyPatch, path: Path, dtype: torch.dtype) -> set[str]:
    """Compile every kernel of the package and of an emitted file; return their names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction, mangle_type

    names: set[str] = set()

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | named
        constants = {p.name: given[p.name] for p in self.params if p.is_constexpr}
        types = {p.name: mangle_type(given[p.name]) for p in self.params if not p.is_constexpr}
        types |= dict.fromkeys(constants, "constexpr")
        signature = {p.name: types[p.name] for p in self.params}
        options = {k: v for k, v in named.items() if k not in self.arg_names}
        source = ASTSource(fn=self, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"]
        names.add(self.fn.__name__)

    monkeypatch.setattr(JITFunction, "run", compile_launch)
    for module in (kernels, launch, adamw, lamb, pack, quantise):
        monkeypatch.setattr(module, "use_triton", lambda device: True)
    _launch_flat(dtype)
    _launch_emitted(path, dtype)
    return names


def _launch_flat(dtype: torch.dtype) -> None:
    a, b, c, d = torch.ones(4, 3000).unbind()
    low, scale = torch.ones(3000, dtype=dtype), torch.ones(())
    adamw.flat_adamw_(
        a, b, c, d, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1,
        grad_scale=scale, lowp=low,
    )  # fmt: skip
    bounds, rule = torch.tensor([0, 100, 3000]), lamb.LambRule(0.9, 0.99, 1e-6, 0.01, 1)
    norms = lamb.flat_lamb_direction(a, b, c, d, bounds, rule, update=b, grad_scale=scale)
    lamb.flat_lamb_apply_(a, b, bounds, norms, lr=1e-2, max_coeff=0.5, min_coeff=0.1, lowp=low)
    pack.pack_grads_(low, [a], [0], scale=scale)
    code = quantise.dynamic_code(True)
    quantise.dequantise(*quantise.quantise(a, code), code)


def _launch_emitted(path: Path, dtype: torch.dtype) -> None:
    calls = [
        *norm_calls(dtype, "cpu", 600, 64), *gated_calls(dtype, "cpu", 6, 1100),
        *rotary_calls(dtype, "cpu", 3, 7), *loss_calls(dtype, "cpu", 33, 37),
    ]  # fmt: skip
    made = [kernel_call(target, *args) for target, args in calls]
    path.write_text(render_kernels(made))
    module = import_file(path, "zerofx_kernels")
    for (target, args), call in zip(calls, made, strict=True):
        getattr(module, call.function)(*tensor_args(target, args))
