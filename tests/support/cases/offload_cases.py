"""Models whose activations wait on the host: what the tests of that share."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from models import CASES
from torch import Tensor
from training import loss_of

import zerofx
from zerofx.hardware import load_hardware

SMALL = replace(load_hardware("cpu-box"), offload_min_bytes=0)  # the models of the tests are tiny
FINE = {"kernels": "aten", "bucket_bytes": 2000, "persist_below": 200}
ALL = {"activations": {"*": "offload"}}
MIXED = {"activations": {"blocks.0": "recompute", "blocks.*": "offload"}}
TIER = {"offload": {"activations": "cpu"}}


def compiled(case: str, plan: dict[str, Any]) -> zerofx.CompiledModule:
    """Compile a case; what is released, and what has left, is NaN."""
    model = zerofx.compile(CASES[case].make(), {**FINE, **plan}, machine=SMALL)
    model._engine.slots.poison = model._engine.host.poison = True
    return model


def batch_loss(model: Any, case: str, step: int) -> Tensor:
    args, kwargs = CASES[case].batch(10 * step + int(os.environ.get("RANK", "0")))
    return loss_of(model(*args, **kwargs))


def gradients(model: Any) -> list[Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [(g.to_local() if hasattr(g, "to_local") else g).clone() for g in grads]
