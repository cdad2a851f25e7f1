"""Random mutants of correct programs: one small change each, as passes and hands make mistakes.

    for mutant in generate(60, seed=0): ...               # the same list every time

A kind of change is a function in `mutants_kinds`; here is what they share, and the draw.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import op_sets
from oracle_cases import BOTH, FINE, OPTIMIZER, PARAMETERS, SPILLED, STORED, Choice, captured, final
from torch import Tensor, fx

from zerofx.ir.meta import info, value
from zerofx.ir.program import Planned
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Parallel

Statement = list[fx.Node]


@dataclass(frozen=True)
class Base:
    """A correct program: a model of models.py under a plan."""

    case: str
    choice: Choice

    @property
    def program(self) -> Planned:
        return final(self.case, self.choice)

    @property
    def reference(self) -> Planned:
        """The program against which verify proves: of whole values, before layers are cut."""
        given = captured(self.case, self.choice.units, self.choice.dtype)
        made = run(given, self.choice.setting(), until="merge-tied")
        made.plan = replace(made.plan, parallel=Parallel())
        return made

    @property
    def is_placed(self) -> bool:
        """Whether its layers are cut, so that its sums round unlike those of the whole graph."""
        return self.choice.team > 1


@dataclass(frozen=True)
class Mutant:
    """A changed program. rank: the only rank that runs it, None for all.

    kind, what: the sort of change, and what it did where.
    """

    number: int
    kind: str
    what: str
    base: Base
    program: Planned
    rank: int | None = None

    def programs(self) -> list[Planned]:
        """Return what each rank runs."""
        world = range(self.base.choice.world_size)
        if self.rank is None:
            return [self.program for _ in world]
        return [self.program if r == self.rank else self.base.program for r in world]

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank} only"
        base = f"{self.base.case} {self.base.choice}"
        return f"#{self.number} {self.kind}{where}: {self.what} ({base})"


TILED = (("blocks.1.mlp", 4), ("blocks.0.attn", 2), ("position", 2))
AWAY = (("blocks.0.attn", "recompute"), ("*", "offload"))
HALF = (*OPTIMIZER, ("device_fraction", 0.5))
BASES = [
    Base("gpt", Choice(3, units=FINE)),
    Base("convnet", Choice(3)),
    Base("branches", Choice(3, prefetch=0)),
    Base("gpt", Choice(2)),
    Base("gpt", Choice(3, prefetch=2, activations="recompute", units=FINE)),
    Base("gpt", Choice(3, budget=1 << 20)),
    Base("gpt-dropout", Choice(1, activations=0.5)),
    Base("adapters", Choice(3)),
    Base("gpt", Choice(0)),
    Base("stage", Choice(2)),
    Base("gpt", Choice(3, 4, shard_axis_size=2)),
    Base("binary", Choice(3, activations="recompute")),
    Base("lstm", Choice(3)),
    Base("gpt", Choice(3, 1)),
    Base("gpt", Choice(3, tiling=TILED)),
    Base("gpt", Choice(3, activations=AWAY, units=FINE)),
    Base("branches", Choice(0, activations=AWAY, prefetch=2)),
    Base("gpt", Choice(3, units=FINE, update="in-backward")),
    Base("gpt", Choice(0, update="in-backward")),
    Base("gpt", Choice(3, units=FINE, offload=BOTH)),
    Base("gpt", Choice(3, units=FINE, offload=OPTIMIZER, update="in-backward")),
    Base("gpt", Choice(3, units=FINE, offload=BOTH, precision="bf16", update="in-backward")),
    Base("gpt", Choice(3, 1, units=FINE, offload=BOTH)),
    Base("gpt", Choice(1, units=FINE, offload=OPTIMIZER, precision="bf16")),
    Base("gpt", Choice(2, 1, offload=HALF, update="in-backward")),
    Base("adapters", Choice(3, prefetch=2, offload=PARAMETERS)),
    Base("gpt", Choice(3, 1, budget=1 << 20, offload=BOTH)),
    Base("gpt", Choice(3, tiling=TILED, offload=BOTH)),
    Base("gpt", Choice(3, prefetch=3, activations=AWAY, units=FINE, offload=BOTH)),
    Base("gpt", Choice(3, tiling=TILED, offload=STORED)),
    Base("gpt", Choice(3, units=FINE, offload=SPILLED)),
    Base("chain", Choice(0, 1, offload=SPILLED, prefetch=0)),
]

# Whose layers are cut over the tensor axis.
TENSOR = (("tensor", 2),)
SEQUENCE = (*TENSOR, ("sequence", True))
_MLP = (("blocks.*.mlp.up", "colwise"), ("blocks.*.mlp.down", "rowwise"))
OURS = (("placements", _MLP),)
PLACED_BASES = [
    Base("gpt", Choice(3, 2, parallel=SEQUENCE + OURS)),
    Base("gpt", Choice(3, 4, parallel=TENSOR + OURS)),
    Base("hf-llama", Choice(2, 4, parallel=SEQUENCE)),
    Base("hf-gpt2", Choice(1, 2, parallel=TENSOR, activations="recompute")),
    Base("hf-bert", Choice(3, 2, parallel=TENSOR)),
    Base("hf-gpt2", Choice(3, 2, parallel=SEQUENCE)),
    Base("hf-llama", Choice(3, 2, parallel=TENSOR, prefetch=2)),
    Base("hf-vit", Choice(0, 2, parallel=SEQUENCE)),
    Base("gpt-dropout", Choice(3, 2, parallel=TENSOR + OURS)),
]

# Of which each rank tiles its part; words are whole, so that mutants are of tiles.
_WHOLE = (("placements", (*_MLP, ("embed", "whole"), ("head", "whole"))),)
TILED_PARTS = [
    Base("gpt", Choice(3, 4, parallel=SEQUENCE + _WHOLE, tiling=(("blocks.1.mlp", 2),))),
    Base("gpt", Choice(3, 2, parallel=(("context", 2),), tiling=(("blocks.1.mlp", 2),))),
]

# Whose experts are divided among the ranks of the tensor axis.
EXPERTS = (*TENSOR, ("experts", True))

# Whose sequences are cut over the context axis.
CONTEXT = (("context", 2),)
CONTEXT_BASES = [
    Base("hf-llama", Choice(3, 2, parallel=CONTEXT)),
    Base("gpt", Choice(3, 4, parallel=CONTEXT)),
    Base("hf-gpt2", Choice(1, 2, parallel=CONTEXT, activations="recompute")),
    Base("hf-bert", Choice(0, 2, parallel=CONTEXT)),
    Base("gpt", Choice(2, 2, parallel=CONTEXT, prefetch=2)),
]

RING = (*CONTEXT, ("attention", "ring"))
RING_BASES = [
    Base("hf-llama", Choice(3, 2, parallel=RING)),
    Base("gpt", Choice(2, 4, parallel=RING, prefetch=2)),
    Base("hf-gpt2", Choice(1, 2, parallel=RING, activations="recompute")),
    Base("hf-bert", Choice(0, 2, parallel=RING)),
]
MASKED_BASES = [Base("hf-llama-padded", Choice(2, 2, parallel=RING))]

# Whose layers are cut over the tensor axis, and whose sequences over the context axis.
CROSSED = (*TENSOR, *CONTEXT)
CROSSED_BASES = [
    Base("hf-llama", Choice(3, 4, parallel=CROSSED)),
    Base("hf-gpt2", Choice(2, 4, parallel=CROSSED, activations="recompute")),
    Base("hf-llama", Choice(1, 4, parallel=(*SEQUENCE, *CONTEXT))),
]
EXPERT_BASES = [
    Base("hf-mixtral", Choice(3, 2, parallel=EXPERTS)),
    Base("hf-mixtral", Choice(1, 4, parallel=EXPERTS, activations="recompute")),
    Base("hf-mixtral", Choice(3, 4, parallel=(*EXPERTS, *CONTEXT))),
]
CAPACITY = (*SEQUENCE, ("experts", True), ("capacity", 1.0))
CAPACITY_BASES = [
    Base("hf-mixtral", Choice(3, 2, parallel=CAPACITY, numerics="fast")),
    Base("hf-mixtral", Choice(1, 4, parallel=CAPACITY, activations="recompute", numerics="fast")),
]


class Editor:
    """One graph of a program under change, with random choices of what is legal in fx.

    A change keeps the graph runnable: values are defined before they are read, and what is
    replaced has the shape and dtype of what replaces it. A statement is what the emitted schedule
    has a line for: one zerofx op, or a whole region.
    """

    def __init__(self, program: Planned, rng: random.Random) -> None:
        self.program, self.rng = program, rng
        self.name = rng.choice(sorted(program.graphs))
        self.graph = program.graph(self.name)

    # -- looking ----------------------------------------------------------------------------
    def positions(self) -> dict[fx.Node, int]:
        return {n: i for i, n in enumerate(self.graph.nodes)}

    def is_behind(self, node: fx.Node, first: fx.Node) -> bool:
        """Say whether `node` stands later than `first`."""
        position = self.positions()
        return position[node] > position[first]

    def find(self, *targets: object) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in targets]

    def compute(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if info(n).region is not None]

    def any_of(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        return self.rng.choice(list(nodes)) if nodes else None

    def statements(self) -> list[Statement]:
        """Return the body as statements, in order."""
        found: list[Statement] = []
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            region = info(node).region
            if region is not None and found and info(found[-1][0]).region == region:
                found[-1].append(node)
            else:
                found.append([node])
        return found

    def alike(self, node: fx.Node, before: fx.Node) -> list[fx.Node]:
        """Return the other values defined above `before` that have the node's shape and dtype."""
        found = []
        for other in self.graph.nodes:
            if other is before:
                break
            if other is not node and is_same_kind(value(other), value(node)):
                found.append(other)
        return found

    # -- moving -----------------------------------------------------------------------------
    def gaps(self, moved: Statement) -> list[fx.Node]:
        """Return the statements (or the output) before which `moved` may legally stand."""
        position = self.positions()
        inside = set(moved)
        inputs = [a for n in moved for a in n.all_input_nodes if a not in inside]
        users = [u for n in moved for u in n.users if u not in inside]
        low = max((position[a] for a in inputs), default=-1)
        high = min((position[u] for u in users), default=len(position))
        heads = [s[0] for s in self.statements()] + [self.graph.output_node()]
        behind = moved[-1].next
        return [
            h for h in heads if low < position[h] <= high and h not in inside and h is not behind
        ]

    def move(self, moved: Statement, before: fx.Node) -> None:
        for node in moved:
            before.prepend(node)

    def erase(self, node: fx.Node, instead: fx.Node | None = None) -> None:
        """Take a node out; its readers read `instead`."""
        if instead is not None:
            node.replace_all_uses_with(instead)
        self.graph.erase_node(node)


def is_same_kind(a: object, b: object) -> bool:
    """Say whether two fake values could stand for each other."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype


def set_argument(node: fx.Node, index: int, new: object) -> None:
    """Replace one positional argument."""
    node.args = (*node.args[:index], new, *node.args[index + 1 :])  # type: ignore[assignment]


def label(node: fx.Node) -> str:
    """Name a node for a report."""
    where = info(node)
    return f"{node.name}[b{where.index}]" if node.target in op_sets.ALL else node.name


Kind = Callable[[Editor], str | None]


def generate(
    count: int,
    seed: int = 0,
    bases: Sequence[Base] = BASES,
    kinds: Sequence[Kind] | None = None,
) -> Iterator[Mutant]:
    """Yield `count` mutants, every kind in turn, on every base in turn; the same for one seed."""
    from mutants_kinds import KINDS

    kinds = kinds or KINDS
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = kinds[number % len(kinds)]
        first = number // len(kinds) + number
        yield next(
            found
            for attempt in range(200)
            if (found := mutate(number, kind, bases[(first + attempt) % len(bases)], rng))
        )


def mutate(number: int, kind: Kind, base: Base, rng: random.Random) -> Mutant | None:
    """Apply a change to a copy; None where this base or the choices made have no place for it."""
    from mutants_kinds import ON_ONE_RANK

    program = base.program.clone()
    what = kind(Editor(program, rng))
    if what is None:
        return None
    for gm in program.graphs.values():
        gm.graph.lint()
    rank = None
    if kind in ON_ONE_RANK:
        if base.choice.world_size == 1:
            return None
        rank = rng.randrange(base.choice.world_size)
    return Mutant(number, kind.__name__.replace("_", "-"), what, base, program, rank)
