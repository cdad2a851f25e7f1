"""What emitted modules send of values, counted in their text, against Megatron-LM's formula."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
from tensor_models import MODELS

import zerofx
from zerofx.analysis.time.traffic import traffic
from zerofx.ir.program import Planned

CALL = re.compile(r"= rt\.(reduce|gather|scatter)_values\(.*\)  # (\S* )? ?f32\[([\d, ]+)\]")
KIND = {"reduce": "all_reduce", "gather": "all_gather", "scatter": "reduce_scatter"}
BATCH, LENGTH, WIDTH = 2, 8, 32


def emitted(name: str, folder: Path, **fields: object) -> tuple[Planned, str]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    captured = zerofx.capture(MODELS[name](), (), {"input_ids": ids, "labels": ids}, outputs="loss")
    ranks = int(str(fields["tensor"]))
    program = zerofx.rewrite(captured, zerofx.Plan(kernels="aten", parallel=fields), ranks)
    return program, (program.emit(folder) / "schedule.py").read_text()


def sent(text: str, ranks: int) -> tuple[Counter[str], dict[tuple[str, str, str], list[int]]]:
    """Return the bytes that a rank sends by kind, and the numbers of each call by layer and half.

    The comment of a call has the layer and the shape of what comes of it.
    """
    total: Counter[str] = Counter()
    found: dict[tuple[str, str, str], list[int]] = {}
    half = ""
    for line in text.splitlines():
        if line.startswith("def "):
            half = line.split("(")[0].removeprefix("def ")
        if not (call := CALL.search(line)):
            continue
        verb, unit, shape = call[1], (call[2] or "").strip(), call[3]
        numel = prod(int(n) for n in shape.split(","))
        whole = numel * ranks if verb == "scatter" else numel
        times = 2 if verb == "reduce" else 1  # a ring all-reduce is a scatter and a gather
        total[KIND[verb]] += times * whole * 4 * (ranks - 1) // ranks
        found.setdefault((half, unit, verb), []).append(whole)
    return total, found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (False, {("forward", "reduce"): 2, ("backward", "reduce"): 2}),
        (
            True,
            {
                ("forward", "gather"): 2, ("forward", "scatter"): 2,
                ("backward", "gather"): 4, ("backward", "scatter"): 2,
            },
        ),
    ],
    ids=["tensor", "sequence"],
)  # fmt: skip
def test_a_layer_sends_megatrons_bytes(
    ranks: int, sequence: bool, expected: dict[tuple[str, str], int], tmp_path: Path
) -> None:
    """2 + 2 all-reduces of batch x length x width numbers; with sequence, their halves.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv
    2205.05198), section 4.2.2, and the gathers of backward of what forward did not keep.
    """
    program, text = emitted("deep", tmp_path, tensor=ranks, sequence=sequence)
    total, found = sent(text, ranks)
    for layer in ("model.layers.1", "model.layers.2"):
        mine = {(half, verb): n for (half, unit, verb), n in found.items() if unit == layer}
        assert {key: len(n) for key, n in mine.items()} == expected
        assert {numel for n in mine.values() for numel in n} == {BATCH * LENGTH * WIDTH}
    joined = program.graph("backward").find_nodes(
        op="call_function", target=torch.ops.zerofx.reduce_joined.default
    )
    total["all_reduce"] += sum(2 * n.meta["val"].nbytes * (ranks - 1) // ranks for n in joined)
    predicted = traffic(program).kinds
    assert {kind: predicted[kind].sent_bytes for kind in total} == dict(total)
