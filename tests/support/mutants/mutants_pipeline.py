"""Random changes of pipelines: of the moves of one rank, and of what a stage sends, takes and adds.

A change of moves is one of a rank's pipeline.py. A change of a stage is one of its program. Some of
these are told: what the stage says of itself, or what all say of the value that crosses, is made to
agree with the change, as a pass would write that cuts wrongly and believes itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from mutants import is_same_kind
from oracle import State, execute
from oracle_pipeline import PipelineOutcome, run_pipeline
from tensor_models import MODELS, Result, batch
from torch import Tensor, fx, nn

import zerofx
from zerofx.capture import call as trees
from zerofx.codegen.moves import read_moves, render_moves
from zerofx.errors import ProgramError
from zerofx.ir.meta import Role, info, set_info, value
from zerofx.ir.program import BACKWARD, FORWARD, Planned
from zerofx.ir.verify import take_reference, verify
from zerofx.ir.verify_values import Numbering

_aten = torch.ops.aten
_MOVE = re.compile(r"rt\.(\w+)\((.*)\)")


class Tied(nn.Module):
    """Ends with the table that it begins with, and reads there what its first line makes."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.wte.weight
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 8))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Result:
        first = x = self.wte(input_ids)
        for block in self.blocks:
            x = x + block(x).tanh()
        logits = self.head((x + first) * self.scale)
        return Result(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


@dataclass(frozen=True)
class PipelineBase:
    """A correct pipeline: a model under a plan, for a number of micro-batches.

    data: the ranks of each stage; `context` of them have the same samples.
    """

    name: str
    micro_batches: int
    stage: int = 3
    fields: tuple[tuple[str, object], ...] = (("pipeline", 2),)
    data: int = 2

    def __str__(self) -> str:
        fields = "-".join(f"{k}{v}" for k, v in self.fields)
        return f"{self.name}-stage{self.stage}-{fields}-data{self.data}-of{self.micro_batches}"

    @property
    def programs(self) -> list[Planned]:
        """The stages' programs. Do not change them: mutants share them."""
        return _programs(self)

    @property
    def texts(self) -> list[str]:
        return [render_moves(p, self.micro_batches) for p in self.programs[: self.size]]

    @property
    def size(self) -> int:
        return int(str(dict(self.fields)["pipeline"]))

    @property
    def context(self) -> int:
        return int(str(dict(self.fields).get("context", 1)))


FOUR = (("pipeline", 4), ("schedule", "gpipe"))
TURNS = (("pipeline", 2), ("schedule", "interleaved"), ("interleave", 2))
SEQUENCES = (("pipeline", 2), ("context", 2))
RING = (("attention", "ring"),)
BASES = [
    PipelineBase("tied", 3),
    PipelineBase("tied", 4, 1, TURNS),
    PipelineBase("tied", 4, 2, (*FOUR, ("accumulate", "sharded"))),
    PipelineBase("tied", 4, 3, FOUR, data=1),
    PipelineBase("tied", 3, 3, SEQUENCES),
    PipelineBase("tied", 2, 1, (*SEQUENCES, *RING), data=4),
    PipelineBase("gpt2", 3, 2),
    PipelineBase("t5", 4, 3, FOUR),
    PipelineBase("t5", 4, 0, (("pipeline", 3),), data=1),
    PipelineBase("deep", 4, 3, TURNS),
    PipelineBase("llama", 2, 3, SEQUENCES),
    PipelineBase("llama", 2, 2, (*SEQUENCES, *RING)),
]


@cache
def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Tied() if name == "tied" else MODELS[name]()


@cache
def _captured(name: str) -> Planned:
    units = ("wte", "blocks.*", "head") if name == "tied" else "auto"
    return zerofx.capture(_model(name), (), batch(name), outputs="loss", units=units)  # type: ignore[return-value]


@cache
def _programs(base: PipelineBase) -> list[Planned]:
    fields = {**dict(base.fields), "micro_batches": base.micro_batches}
    plan = zerofx.Plan(stage=base.stage, kernels="aten", parallel=fields)
    num = plan.parallel.num_stages
    captured = _captured(base.name)
    world = base.size * base.data
    return [zerofx.rewrite(captured, plan, world, position=p) for p in range(num)]


@cache
def state_of(base: PipelineBase) -> State:
    """Return the weights, and the inputs of each micro-batch of each rank of a stage."""
    model, inputs = _model(base.name), []
    for number in range(base.micro_batches * base.data):
        seed = 10 + number // base.context
        _, leaves, _ = trees.flatten_call(model.forward, (), batch(base.name, seed))
        inputs.append({i: v for i, v in enumerate(leaves) if isinstance(v, Tensor)})
    params = {n: p.detach() for n, p in model.named_parameters()}
    return State(params, dict(model.named_buffers()), inputs, [], [])


@cache
def whole(base: PipelineBase) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses of the micro-batches, and the gradients of their mean, of no pipeline."""
    state, captured = state_of(base), _captured(base.name)
    losses: list[Tensor] = []
    pieces = base.micro_batches * base.data
    total: dict[str, Tensor] = {}
    loss = captured.calling.loss
    assert loss is not None
    for given in state.inputs:
        tangent = {loss: torch.tensor(1.0 / pieces)}
        one = State(state.params, state.buffers, [given], [tangent], [0])
        [outcome] = execute([captured], one)
        losses += [v for (r, _, i), v in outcome.results.items() if (r, i) == ("output", loss)]
        for name, grad in outcome.gradients.items():
            total[name] = grad if name not in total else total[name] + grad
    return losses, total


@cache
def right_outcome(base: PipelineBase) -> PipelineOutcome:
    return run_pipeline(base.programs, base.texts, state_of(base))


@dataclass(frozen=True)
class PipelineMutant:
    """A changed pipeline: the programs of its stages, and the texts of its ranks."""

    number: int
    kind: str
    what: str
    base: PipelineBase
    programs: list[Planned]
    texts: list[str]

    def __str__(self) -> str:
        return f"#{self.number} {self.kind}: {self.what} ({self.base})"


def harm_of(mutant: PipelineMutant) -> str | None:
    """Return what goes wrong when all ranks run it, None if all is as without a pipeline."""
    base = mutant.base
    try:
        got = run_pipeline(mutant.programs, mutant.texts, state_of(base))
    except Exception as error:  # what a mutant is given may raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return wrong(base, got)


def wrong(base: PipelineBase, got: PipelineOutcome) -> str | None:
    """Return where an outcome is another than that of the whole model."""
    losses, gradients = whole(base)
    made = [loss for number in sorted(got.losses) for loss in got.losses[number]]
    if len(made) != len(losses) or any(map(_is_off, losses, made)):
        return f"the losses of micro-batches {sorted(got.losses)}"
    for rank, found in enumerate(got.gradients):
        held = {n for p in base.programs[rank :: base.size] for n in p.params}
        for name in sorted(held & gradients.keys()):
            if name not in found:
                return f"rank {rank} has no gradient of {name}"
            if _is_off(gradients[name], found[name]):
                return f"rank {rank}: the gradient of {name}"
    right = right_outcome(base)
    if got.reductions != right.reductions:
        return f"gradients are reduced {dict(got.reductions)} times"
    if any(n > right.under_way[stage] for stage, n in got.under_way.items()):
        return f"{dict(got.under_way)} micro-batches are under way"
    return None


def _is_off(expected: Tensor, got: Tensor) -> bool:
    if expected.shape != got.shape:
        return True
    return not bool((got - expected).abs().max() <= 2e-5 * expected.abs().max() + 1e-8)


def refusal_of(mutant: PipelineMutant) -> str | None:
    """Return why one of the ranks would refuse it: each proves its own stages and its own text."""
    base = mutant.base
    try:
        for stage, program in enumerate(mutant.programs):
            if program is not base.programs[stage]:
                verify(program)
        for rank, text in enumerate(mutant.texts):
            read_moves(mutant.programs[rank], text)
    except ProgramError as error:
        return str(error).splitlines()[0]
    return None


# -- moves ----------------------------------------------------------------------------------------
class TextEditor:
    """The moves of one rank under change, with random choices."""

    def __init__(self, base: PipelineBase, rng: random.Random) -> None:
        self.base, self.rng = base, rng
        self.texts = base.texts
        self.rank = rng.randrange(base.size)
        self.head, self.lines = _split(self.texts[self.rank])

    def done(self) -> list[str]:
        self.texts[self.rank] = self.head + "".join(self.lines)
        return self.texts

    def at(self, *verbs: str) -> list[int]:
        return [i for i, line in enumerate(self.lines) if _verb(line) in verbs]

    def one(self, *verbs: str) -> int | None:
        found = self.at(*verbs)
        return self.rng.choice(found) if found else None

    def move(self, at: int, to: int) -> None:
        self.lines.insert(to, self.lines.pop(at))


def _split(text: str) -> tuple[str, list[str]]:
    head, step, rest = text.partition("def step(rt):\n")
    return head + step, rest.splitlines(keepends=True)


def _verb(line: str) -> str:
    found = _MOVE.search(line)
    assert found is not None, line
    return found[1]


def _number(line: str) -> int:
    found = re.search(r"micro_batch=(\d+)", line)
    assert found is not None, line
    return int(found[1])


def _numbered(line: str, number: int) -> str:
    return re.sub(r"micro_batch=\d+", f"micro_batch={number}", line)


def late_send(edit: TextEditor) -> str | None:
    if (at := edit.one("send")) is None or at == len(edit.lines) - 1:
        return None
    line, to = edit.lines[at], edit.rng.randrange(at + 1, len(edit.lines))
    edit.move(at, to)
    return f"{line.strip()} {to - at} lines later"


def early_receive(edit: TextEditor) -> str | None:
    if not (at := edit.one("receive")):
        return None
    line, to = edit.lines[at], edit.rng.randrange(at)
    edit.move(at, to)
    return f"{line.strip()} {at - to} lines earlier"


def drop_transfer(edit: TextEditor) -> str | None:
    at = edit.one("send", "receive")
    return None if at is None else f"without {edit.lines.pop(at).strip()}"


def drop_transfer_on_both(edit: TextEditor) -> str | None:
    """Leave out a send and its receive."""
    if (at := edit.one("send")) is None:
        return None
    line = edit.lines.pop(at)
    other = line.replace("send", "receive")
    for rank, text in enumerate(edit.texts):
        if rank != edit.rank:
            edit.texts[rank] = text.replace(other, "")
    return f"without {line.strip()} on both sides"


def drop_half(edit: TextEditor) -> str | None:
    at = edit.one("forward", "backward")
    return None if at is None else f"without {edit.lines.pop(at).strip()}"


def double_move(edit: TextEditor) -> str | None:
    at = edit.rng.randrange(len(edit.lines))
    edit.lines.insert(edit.rng.randrange(at, len(edit.lines)) + 1, edit.lines[at])
    return f"{edit.lines[at].strip()} twice"


def other_micro_batch(edit: TextEditor) -> str | None:
    at = edit.rng.randrange(len(edit.lines))
    line = edit.lines[at]
    number = edit.rng.choice([n for n in range(edit.base.micro_batches) if n != _number(line)])
    edit.lines[at] = _numbered(line, number)
    return f"{line.strip()} of {number}"


def swap_micro_batches(edit: TextEditor) -> str | None:
    """Exchange the micro-batches of two moves of one kind."""
    if (at := edit.one("send", "receive", "forward", "backward")) is None:
        return None
    line = edit.lines[at]
    alike = [
        i for i, other in enumerate(edit.lines)
        if _numbered(other, 0).replace(", reduces=True", "")
        == _numbered(line, 0).replace(", reduces=True", "")
        and _number(other) != _number(line)
    ]  # fmt: skip
    if not alike:
        return None
    other = edit.rng.choice(alike)
    mine, theirs = _number(line), _number(edit.lines[other])
    edit.lines[at] = _numbered(line, theirs)
    edit.lines[other] = _numbered(edit.lines[other], mine)
    return f"{line.strip()} as of {theirs}, and the other way round"


def wrong_reduce(edit: TextEditor) -> str | None:
    """Reduce with another backward, with one more, or not at all."""
    if (at := edit.one("backward")) is None:
        return None
    line, flag = edit.lines[at], ", reduces=True"
    if flag in line:
        edit.lines[at] = line.replace(flag, "")
        return f"{line.strip()} does not reduce"
    edit.lines[at] = line.replace(")", f"{flag})")
    what = f"{line.strip()} reduces"
    if edit.rng.random() < 0.5:
        stage = re.search(r"stage=\d+", line)
        assert stage is not None
        for i in edit.at("backward"):
            if i != at and stage[0] in edit.lines[i]:
                edit.lines[i] = edit.lines[i].replace(flag, "")
        what += " alone"
    return what


def move_any(edit: TextEditor) -> str | None:
    at, to = edit.rng.randrange(len(edit.lines)), edit.rng.randrange(len(edit.lines))
    if at == to:
        return None
    line = edit.lines[at]
    edit.move(at, to)
    return f"{line.strip()} by {to - at} lines"


def swap_neighbours(edit: TextEditor) -> str | None:
    at = edit.rng.randrange(len(edit.lines) - 1)
    edit.move(at, at + 1)
    return f"{edit.lines[at].strip()} before {edit.lines[at + 1].strip()}"


def other_value(edit: TextEditor) -> str | None:
    """Let a transfer be of another value that crosses."""
    if (at := edit.one("send", "receive")) is None:
        return None
    line = edit.lines[at]
    hops = edit.base.programs[0].stage.hops
    hop = edit.rng.choice(hops)
    made = f'rt.{_verb(line)}("{hop.name}", micro_batch={_number(line)}, source={hop.source}, '
    made = f"    {made}target={hop.target})\n"
    if made == line:
        return None
    edit.lines[at] = made
    return f"{line.strip()} as {made.strip()}"


# -- stages ---------------------------------------------------------------------------------------
class StageEditor:
    """The programs of a pipeline with one stage under change."""

    def __init__(self, base: PipelineBase, rng: random.Random) -> None:
        self.base, self.rng = base, rng
        self.programs = list(base.programs)
        self.at = rng.randrange(len(self.programs))
        self.program = self.programs[self.at] = self.programs[self.at].clone()

    def sent(self, graph: str) -> list[int]:
        """Return the positions of what is sent among a graph's results."""
        indices = {w.output for w in self.program.stage.sent(graph)}
        role = Role.OUTPUT if graph == FORWARD else Role.INPUT_GRAD
        specs = self.program.outputs[graph]
        return [i for i, s in enumerate(specs) if s.role is role and s.index in indices]

    def set_result(self, graph: str, at: int, node: fx.Node) -> None:
        out = self.program.graph(graph).output_node()
        results = list(self.program.results(graph))
        results[at] = node
        out.args = (tuple(results),)


def swap_sent(edit: StageEditor) -> str | None:
    """Send two values in each other's place."""
    for graph in _shuffled(edit, [FORWARD, BACKWARD]):
        results, places = edit.program.results(graph), edit.sent(graph)
        pairs = [
            (a, b) for a in places for b in places
            if a < b and is_same_kind(value(results[a]), value(results[b]))
        ]  # fmt: skip
        if pairs:
            a, b = edit.rng.choice(pairs)
            edit.set_result(graph, a, results[b])
            edit.set_result(graph, b, results[a])
            return f"stage {edit.at} sends {results[a]} and {results[b]} exchanged"
    return None


def send_another(edit: StageEditor) -> str | None:
    """Send another value of the same form."""
    for graph in _shuffled(edit, [FORWARD, BACKWARD]):
        results = edit.program.results(graph)
        for at in _shuffled(edit, edit.sent(graph)):
            node = results[at]
            others = [
                n for n in edit.program.graph(graph).nodes
                if n is not node and info(n).region is not None
                and is_same_kind(value(n), value(node))
            ]  # fmt: skip
            if others:
                other = edit.rng.choice(others)
                edit.set_result(graph, at, other)
                return f"stage {edit.at} sends {other} for {node}"
    return None


def swap_taken(edit: StageEditor) -> str | None:
    """Take two received values in each other's place."""
    for graph in _shuffled(edit, [FORWARD, BACKWARD]):
        taken = [n for n in edit.program.placeholders(graph) if info(n).digest]
        pairs = [
            (a, b) for i, a in enumerate(taken) for b in taken[i + 1 :]
            if is_same_kind(value(a), value(b))
        ]  # fmt: skip
        if pairs:
            a, b = edit.rng.choice(pairs)
            first, second = info(a).index, info(b).index
            set_info(a, index=second)
            set_info(b, index=first)
            return f"stage {edit.at} takes {a} and {b} exchanged"
    return None


def drop_summand(edit: StageEditor) -> str | None:
    """Leave a summand out of a sum of gradients: those of a tied parameter first of all."""
    graph = edit.program.graph(BACKWARD)
    sums = [
        n for n in graph.nodes
        if n.target is _aten.add.Tensor
        and all(isinstance(a, fx.Node) and is_same_kind(value(a), value(n)) for a in n.args)
    ]  # fmt: skip
    tables = [n for n in sums if tuple(value(n).shape) in _tied_shapes(edit.program)]
    if not sums:
        return None
    node = edit.rng.choice(tables or sums)
    kept = edit.rng.choice(node.args)
    node.replace_all_uses_with(kept)
    graph.erase_node(node)
    return f"stage {edit.at}: {kept} for {node}"


def _tied_shapes(program: Planned) -> set[tuple[int, ...]]:
    return {tuple(program.params[n].shape) for n in program.stage.sums if n in program.params}


def no_sum_over_stages(edit: StageEditor) -> str | None:
    """Let each stage keep its part of a tied gradient: no rank is told that others have some."""
    shared = [b for b in edit.program.layout.buckets if len(b.positions) > 1]
    if not shared:
        return None
    bucket = edit.rng.choice(shared)
    kept = edit.rng.choice(bucket.positions)
    for at, program in enumerate(edit.programs):
        changed = program.clone()
        buckets = [
            replace(b, positions=(kept,)) if b.index == bucket.index else b
            for b in program.layout.buckets
        ]
        own = at % edit.base.size
        if own != kept and own in bucket.positions:
            buckets = [
                replace(b, positions=(own,)) if b.index == bucket.index else b for b in buckets
            ]
        changed.layout = replace(program.layout, buckets=tuple(buckets))
        edit.programs[at] = changed
    edit.program = edit.programs[edit.at]
    return f"the gradients of bucket {bucket.index} are not summed over {bucket.positions}"


def _shuffled(edit: StageEditor, items: Sequence) -> list:
    found = list(items)
    edit.rng.shuffle(found)
    return found


def _told(kind: Callable[[StageEditor], str | None], everywhere: bool) -> Callable:
    """Return a change after which the stage's reference is what it then computes.

    everywhere: what all stages say of the values that it sends is, too.
    """

    def changed(edit: StageEditor) -> str | None:
        what = kind(edit)
        if what is None:
            return None
        program = edit.program
        made = take_reference(program)
        program.reference = made
        if everywhere:
            outputs = Numbering(program).outputs
            digests = {
                (graph, wire.output): outputs[label].digest
                for graph, role in ((FORWARD, "output"), (BACKWARD, "input_grad"))
                for wire in program.stage.sent(graph)
                for label in outputs
                if re.match(rf"{role}\w* {wire.output} \(to_", label)
            }
            for at, each in enumerate(edit.programs):
                wires = tuple(
                    replace(w, digest=digests.get((w.graph, w.output), w.digest))
                    if w.source == program.stage.position
                    else w
                    for w in each.stage.wires
                )
                each = each if at == edit.at else each.clone()
                each.stage = replace(each.stage, wires=wires)
                edit.programs[at] = each
        return what

    changed.__name__ = f"{kind.__name__}_told{'_to_all' if everywhere else ''}"
    return changed


MOVES: list[Callable[[TextEditor], str | None]] = [
    late_send, early_receive, drop_transfer, drop_transfer_on_both, drop_half, double_move,
    other_micro_batch, swap_micro_batches, wrong_reduce, move_any, swap_neighbours, other_value,
]  # fmt: skip
CUTS: list[Callable[[StageEditor], str | None]] = [
    swap_sent, send_another, swap_taken, drop_summand, no_sum_over_stages,
]  # fmt: skip
TOLD = [
    _told(kind, everywhere)
    for kind in (swap_sent, send_another, drop_summand)
    for everywhere in (False, True)
]
KINDS: list[Callable] = [*MOVES, late_send, early_receive, swap_neighbours, *CUTS, *TOLD]


def generate(
    count: int, seed: int, bases: Sequence[PipelineBase] = BASES, kinds: Sequence[Callable] = KINDS
) -> Iterator[PipelineMutant]:
    """Yield `count` mutants, every kind in turn, on every base in turn; the same for one seed."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = kinds[number % len(kinds)]
        first = number // len(kinds) + number
        for attempt in range(200):
            base = bases[(first + attempt) % len(bases)]
            if found := _mutate(number, kind, base, rng):
                yield found
                break


def _mutate(
    number: int, kind: Callable, base: PipelineBase, rng: random.Random
) -> PipelineMutant | None:
    programs, texts = base.programs, base.texts
    if kind in MOVES:
        lines = TextEditor(base, rng)
        what = kind(lines)
        texts = lines.done()
        if texts == base.texts:
            return None
    else:
        edit = StageEditor(base, rng)
        what = kind(edit)
        programs = edit.programs
    if what is None:
        return None
    return PipelineMutant(number, kind.__name__.replace("_", "-"), what, base, programs, texts)
