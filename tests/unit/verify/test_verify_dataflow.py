"""Programs that compute something else than was captured are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from verify_cases import (
    Breaks,
    check_refused,
    find,
    program,
    set_argument,
)

from zerofx import ops
from zerofx.ir.meta import Role, info, set_info
from zerofx.ir.program import BACKWARD, FORWARD, Planned

broken = Breaks()


@broken(r"does not compute what was captured: output 0 .*differ. The first value .*lacks is gelu")
def changed_math() -> Planned:
    p = program()
    gelu = next(n for n in p.graph(FORWARD).nodes if n.target is torch.ops.aten.gelu.default)
    gelu.kwargs = {"approximate": "tanh"}
    return p


@broken(r"grad \S+.* differ. Each value is a captured one, but in the wrong place")
def gradients_exchanged() -> Planned:
    p = program()
    pack = find(p, ops.pack, 1)
    set_argument(pack, 1, list(reversed(pack.args[1])))  # type: ignore[call-overload]
    return p


@broken(r"does not compute what was captured")
def another_parameter_of_the_same_shape() -> Planned:
    p = program()
    nodes = {info(n).name: n for n in p.graph(FORWARD).nodes if n.target is ops.param_view}
    first = nodes["blocks.0.attn_norm.weight"]
    user = next(iter(first.users))
    user.replace_input_with(first, nodes["blocks.0.mlp_norm.weight"])
    return p


@broken(r"does not compute what was captured")
def dropout_drawn_anew() -> Planned:
    p = program("gpt-dropout")
    graph = p.graph(FORWARD)
    draw = next(n for n in graph.nodes if info(n).is_random)
    with graph.inserting_after(draw):
        graph.node_copy(draw)
    return p


@broken(r"does not compute what was captured")
def saved_values_exchanged() -> Planned:
    p = program()
    saved = {info(n).name: n for n in p.placeholders(BACKWARD, Role.SAVED)}
    forms: dict[Any, fx.Node] = {}
    for node in saved.values():
        form = (node.meta["val"].shape, node.meta["val"].stride(), node.meta["val"].dtype)
        if form in forms:
            other = forms[form]
            first, second = info(node).index, info(other).index
            set_info(node, index=second)
            set_info(other, index=first)
            return p
        forms[form] = node
    raise AssertionError("no two saved values of one form")


@pytest.mark.parametrize(("make", "message"), broken.found, ids=broken.names)
def test_a_broken_program_is_refused(make: Callable[[], Planned], message: str) -> None:
    check_refused(make(), message)
