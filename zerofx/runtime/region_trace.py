"""A region's source back as a graph: it runs on proxies, and every call becomes a node."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from torch import fx

from zerofx.compat.graphs import OpNamespace


class _Recorder:
    """Stands for `aten` while a region is traced: a call becomes a node, whatever its arguments."""

    def __init__(self, tracer: fx.proxy.GraphAppendingTracer, target: Any) -> None:
        self._tracer, self._target = tracer, target

    def __getattr__(self, name: str) -> _Recorder:
        return _Recorder(self._tracer, getattr(self._target, name))

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        return self._tracer.create_proxy("call_function", self._target, args, kwargs)


def trace_region(function: Any, num_inputs: int) -> fx.GraphModule:
    """Turn a region's source back into a graph by running it on proxies."""
    tracer = fx.proxy.GraphAppendingTracer(fx.Graph())
    args = [fx.Proxy(tracer.graph.placeholder(f"x{i}"), tracer) for i in range(num_inputs)]
    recorded = {
        name: _Recorder(tracer, value) if isinstance(value, OpNamespace) else value
        for name, value in function.__globals__.items()
    }
    body = FunctionType(function.__code__, recorded, function.__name__)
    results = body(args)
    if not isinstance(results, (tuple, list)):
        results = (results,)
    tracer.graph.output(tuple(r.node for r in results))
    gm = fx.GraphModule(torch.nn.Module(), tracer.graph)
    gm.graph.lint()
    return gm
