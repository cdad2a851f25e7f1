"""join-sums: the small sums over the tensor axis of one bucket's gradients are one message."""

from __future__ import annotations

import pytest
from mutants import OURS, SEQUENCE
from oracle_cases import Choice, final

from zerofx.ir.meta import info
from zerofx.ir.program import BACKWARD
from zerofx.ops.placed import joined_value, reduce_joined, reduce_values


@pytest.mark.parametrize("bucket_bytes", [6000, 1 << 20])
def test_small_sums_of_a_bucket_are_one_message(bucket_bytes: int) -> None:
    choice = Choice(3, 2, parallel=SEQUENCE + OURS, bucket_bytes=bucket_bytes)
    program = final("gpt", choice)
    nodes = list(program.graph(BACKWARD).nodes)
    joined = [n for n in nodes if n.target is reduce_joined]
    sums = sum(n.target is joined_value for n in nodes)
    alone = [n for n in nodes if n.target is reduce_values and not info(n).unit]
    assert len(joined) + len(alone) <= len(program.layout.buckets)
    assert sums == sum(len(n.args[0]) for n in joined) >= 12  # norms, and biases behind a sum
