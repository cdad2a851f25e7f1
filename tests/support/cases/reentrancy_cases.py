"""The GPT of the tests with released slots poisoned, and its losses: for calls in any order."""

from __future__ import annotations

import os
from typing import Any

from models import CASES
from torch import Tensor

import zerofx

GPT = CASES["gpt"]


def poisoned(stage: int, **plan: Any) -> zerofx.CompiledModule:
    fields = {"stage": stage, "kernels": "aten", "bucket_bytes": 4096, **plan}
    model = zerofx.compile(GPT.make(), fields)
    model._engine.slots.poison = True
    return model


def loss_at(model: Any, step: int) -> Tensor:
    args, _ = GPT.batch(10 * step + int(os.environ.get("RANK", "0")))
    return model(*args)
