"""fuse on whole models: what is found, in any precision, and what runs behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capture_check import execute
from fuse_cases import FOUND, both, captured, error, fused
from models import CASES, FOREIGN, OWN
from oracle import execute as oracle_execute
from oracle_cases import Choice, expected, make_state
from oracle_cases import captured as oracle_captured
from torch import nn

import zerofx
from zerofx.passes import pipeline


# -- every model -----------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [*OWN, *FOREIGN])
def test_what_is_found_in_models(case: str) -> None:
    before = captured(case)
    after, summary = fused(before)
    assert summary == FOUND.get(case, "no pattern found")
    args, kwargs = CASES[case].batch(0)
    if case in FOUND:
        assert both(before, after, CASES[case].make(), args, kwargs) < 1e-5
    assert fused(after)[1] == "no pattern found"


@pytest.mark.parametrize("case", ["gpt", "hf-llama", "hf-gpt2", "hf-bert"])
def test_half_precision_is_found_alike(case: str) -> None:
    """Casts belong to the patterns; rounding differs, no more than bf16 does from fp32."""
    args, kwargs = CASES[case].batch(0)
    before = captured(case, torch.bfloat16)
    after, summary = fused(before)
    assert summary == FOUND[case]
    exact = execute(captured(case), CASES[case].make(), args, kwargs)
    model = CASES[case].make().bfloat16()
    plain = error(execute(before, model, args, kwargs), exact)
    assert both(before, after, model, args, kwargs) < 1.5 * plain
    assert error(execute(after, model, args, kwargs), exact) < 1.5 * plain


def test_inference_is_fused_forward_only() -> None:
    args, kwargs = CASES["hf-llama"].batch(0)
    check_inference(
        CASES["hf-llama"].make(), args, kwargs,
        "5 rms-norm, 2 gated-activation, 4 rotary-embedding",
    )  # fmt: skip


def test_a_classifier_in_inference() -> None:
    args, kwargs = CASES["convnet"].batch(0)
    check_inference(CASES["convnet"].make(), args, kwargs, "1 linear-cross-entropy")


def check_inference(model: nn.Module, args: Any, kwargs: Any, found: str) -> None:
    model.eval()
    with torch.no_grad():
        before = zerofx.capture(model, args, kwargs)
    after, summary = fused(before)
    assert summary == found
    values = zip(
        execute(after, model, args, kwargs).values(),
        execute(before, model, args, kwargs).values(),
        strict=True,
    )
    for a, b in values:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_returned_logits_keep_the_head() -> None:
    args, kwargs = CASES["hf-llama"].batch(0)
    before = zerofx.capture(CASES["hf-llama"].make(), args, kwargs)
    assert fused(before)[1] == FOUND["hf-llama"].partition(", ")[2]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("case", ["gpt", "hf-llama"])
def test_the_pipeline_runs_behind(case: str, activations: str) -> None:
    """Two simulated ranks at stage 3, all passes: outputs and gradients of the unfused program."""
    program, _ = fused(oracle_captured(case))
    after = pipeline.run(program, Choice(3, activations=activations).setting())
    for got, wanted in zip(
        oracle_execute([after] * 2, make_state(case, 2)), expected(case, 2), strict=True
    ):
        assert got.gradients.keys() == wanted.gradients.keys()
        for name, value in wanted.gradients.items():
            torch.testing.assert_close(got.gradients[name], value, rtol=1e-4, atol=1e-6, msg=name)
        for key, value in wanted.results.items():
            torch.testing.assert_close(got.results[key], value, rtol=1e-5, atol=1e-6)
