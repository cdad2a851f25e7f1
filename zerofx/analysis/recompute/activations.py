"""Activations: the forward values that backward needs, and those that a policy keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

from zerofx.ir.graphs import alias_source, is_broadcast, root_producer
from zerofx.ir.meta import OutputInfo, Phase, Role, info, value
from zerofx.ir.program import JOINT, Program

FORWARD_ROLES = (Role.OUTPUT, Role.BUFFER_UPDATE, Role.INPUT_UPDATE)


@dataclass(frozen=True)
class Solved:
    """Names of the values at which recomputation stops, and of those offloaded to the host.

    label: the plan's setting that was solved.
    """

    kept: frozenset[str]
    offloaded: frozenset[str] = frozenset()
    label: str = "auto"

    def __str__(self) -> str:
        return self.label


Policy = str | Mapping[str, str] | Solved


@dataclass(frozen=True)
class JointParts:
    """The forward and backward halves of a joint graph, and the values between them."""

    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    frontier: tuple[fx.Node, ...]  # forward values that backward nodes or gradients read


@dataclass(frozen=True)
class Halves:
    """A joint graph's parts, and its results in two groups: forward's and backward's."""

    parts: JointParts
    forward: list[tuple[OutputInfo, fx.Node | None]]
    backward: list[tuple[OutputInfo, fx.Node | None]]


def halve(program: Program) -> Halves:
    """Divide a program's joint graph; its results are reordered in place, forward's first."""
    pairs = list(zip(program.outputs[JOINT], program.results(JOINT), strict=True))
    first = [(s, r) for s, r in pairs if s.role in FORWARD_ROLES]
    second = [(s, r) for s, r in pairs if s.role not in FORWARD_ROLES]
    graph = program.graph(JOINT)
    graph.output_node().args = (tuple(r for _, r in first + second),)
    program.outputs[JOINT] = tuple(s for s, _ in first + second)
    return Halves(divide(graph, [r for _, r in first]), first, second)


def divide(graph: fx.Graph, forward_results: Iterable[fx.Node]) -> JointParts:
    """Divide a joint graph: backward nodes depend on a tangent or were traced in backward."""
    needed_forward = _ancestors(forward_results)
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if info(node).role is Role.TANGENT:
                behind.add(node)
        elif node.op != "output" and node not in needed_forward:
            traced_backward = info(node).phase is Phase.BACKWARD and node.op != "get_attr"
            if traced_backward or any(a in behind for a in node.all_input_nodes):
                behind.add(node)
    inner = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    backward = tuple(n for n in inner if n in behind)
    forward = tuple(n for n in inner if n not in behind)
    read = dict[fx.Node, None]()
    for node in (*backward, graph.output_node()):
        inputs = node.all_input_nodes if node.op != "output" else _gradients(node, forward_results)
        read.update((a, None) for a in inputs if a not in behind)
    return JointParts(forward, backward, tuple(read))


def _gradients(out: fx.Node, forward_results: Iterable[fx.Node]) -> list[fx.Node]:
    num_forward = len(list(forward_results))
    return [n for n in out.args[0][num_forward:] if isinstance(n, fx.Node)]  # type: ignore[index]


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [n for n in nodes if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def is_param_alias(node: fx.Node) -> bool:
    """Return whether the node is a parameter or a chain of views of one (never to be saved)."""
    return info(alias_source(node)).role is Role.PARAM


def must_keep(node: fx.Node) -> bool:
    """Return whether a value cannot be recomputed: an input, a buffer, or a random draw."""
    if node.op == "placeholder":
        return not is_param_alias(node)
    return node.op != "get_attr" and info(root_producer(node)).is_random


def kept_values(parts: JointParts, policy: Policy) -> set[fx.Node]:
    """Return the forward values to save for backward under `policy`.

    "keep" saves everything that backward reads. "recompute" saves only values that cross a unit's
    boundary (and random draws). A mapping decides by unit name: the first matching pattern wins,
    and unmatched units keep. A solved policy names its values. For broadcast views, their source is
    saved.
    """
    return {as_kept(n) for n in _kept(parts, policy)}


def as_kept(node: fx.Node) -> fx.Node:
    """Return the value to save for a node: for a broadcast view, its source.

    Compiled code would return the view as a full-size tensor of its own.
    """
    while is_broadcast(node):
        node = node.all_input_nodes[0]
    return node


def _kept(parts: JointParts, policy: Policy) -> set[fx.Node]:
    everything = {n for n in parts.frontier if n.op == "call_function" and not is_param_alias(n)}
    everything |= {n for n in parts.frontier if n.op == "placeholder" and not is_param_alias(n)}
    if policy == "keep":
        return everything
    if isinstance(policy, Solved):
        return {n for n in parts.forward if n.name in policy.kept}
    floor = everything & _boundary(parts) | {n for n in everything if must_keep(n)}
    floor |= _boundary(parts)
    floor |= {n for n in parts.forward if must_keep(n) and isinstance(value(n), torch.Tensor)}
    if policy == "recompute":
        return floor
    assert isinstance(policy, Mapping), policy
    return floor | {n for n in everything if _decision(policy, info(n).unit) != "recompute"}


def _decision(policy: Mapping[str, str], unit: str) -> str:
    for pattern, choice in policy.items():
        if fnmatchcase(unit, pattern):
            return choice
    return "keep"


def _boundary(parts: JointParts) -> set[fx.Node]:
    """Return the forward values that a node of another unit reads."""
    crossing: set[fx.Node] = set()
    for node in parts.forward:
        if is_param_alias(node) or not isinstance(value(node), torch.Tensor):
            continue
        unit = info(node).unit
        if any(
            info(u).phase is Phase.FORWARD and info(u).unit != unit
            for u in node.users
            if u.op == "call_function"
        ):
            crossing.add(node)
    return crossing
