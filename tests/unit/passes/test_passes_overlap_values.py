"""overlap-values: what a sum over the tensor axis does not hold up is computed meanwhile."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from mutants import OURS, TENSOR
from oracle_cases import Choice, captured, final

from zerofx.comm.collectives import Work
from zerofx.ir.graphs import is_compute
from zerofx.ir.meta import info, value
from zerofx.ir.program import BACKWARD, Planned
from zerofx.ir.spec import is_exchange, wait_for
from zerofx.passes.order import build
from zerofx.passes.pipeline import run
from zerofx.runtime.placed import ValueFlight

CUT = Choice(3, 4, parallel=TENSOR + OURS, bucket_bytes=1 << 20)


def at_once(choice: Choice) -> Planned:
    """Return the program in which each launch is waited for where it stands."""
    setting = choice.setting()
    text = str(build(setting)).replace("{moves=true}", "{moves=false}")
    return run(captured("gpt"), replace(setting, pipeline=text))


def between(program: Planned, launch: object) -> list[str]:
    """Return the products between a launch and its wait."""
    found, node = [], launch.next  # type: ignore[attr-defined]
    while node is not wait_for(launch):  # type: ignore[arg-type]
        if is_compute(node) and "mm" in str(node.target):
            found.append(node.name)
        node = node.next
    return found


def test_weight_gradients_are_made_while_the_inputs_gradient_is_summed() -> None:
    program = final("gpt", CUT)
    launches = [n for n in program.graph(BACKWARD).nodes if is_exchange(n)]
    in_blocks = [n for n in launches if info(n).unit.startswith("blocks.")]
    assert len(in_blocks) == 4
    assert all(between(program, launch) for launch in in_blocks)


def test_waiting_at_once_sends_the_same() -> None:
    early, late = final("gpt", CUT), at_once(CUT)
    exchanges = [
        [(n.target, value(n).shape) for n in p.graph(BACKWARD).nodes if is_exchange(n)]
        for p in (early, late)
    ]
    assert exchanges[0] == exchanges[1]
    assert not any(between(late, n) for n in late.graph(BACKWARD).nodes if is_exchange(n))


def test_a_value_that_has_come_holds_nothing_that_was_sent() -> None:
    sent = torch.ones(4)
    work = Work()
    flight = ValueFlight(torch.zeros(4), work, sent)
    held = weakref.ref(sent)
    del sent
    assert flight.wait() is not None
    assert held() is None and flight.work is not work
