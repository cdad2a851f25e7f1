"""pipeline.py: what a rank of a pipeline does in a training step, as straight-line Python.

It is written for so many micro-batches, and what runs is that text: `Steps` renders and imports it
for each number of micro-batches that a call has, or takes it from the directory of a program that
was loaded. Each line is a move; a hand edit is read by running the function on a recorder.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zerofx.errors import PlanError, ProgramError, as_sentence
from zerofx.ir.program import Planned
from zerofx.ir.verify import check_moves
from zerofx.policy import reduction, schedules
from zerofx.policy.schedules import BACKWARD, FORWARD, INPUT, WEIGHTS, Hop, PipelineMove

NAME = "pipeline.py"
_HEAD = '''"""{title}: what rank {rank} of the pipeline does in a training step, in order.

receive begins to receive a value that a stage of another rank sends; {halves} wait for
what they read. reduces=True: gradients of all micro-batches, summed on each rank, are reduced
with this backward. Lines may be moved: what is loaded is proved again, next to what others do.
{part}"""

MICRO_BATCHES = {num}


def step(rt):
'''


_PART = """
backward_input computes the gradients of a stage's inputs; backward_weights computes those of its
weights, later. In between a micro-batch holds what these need.
"""


_OUTSIDE = """
yield hands the results of all micro-batches to the caller, who computes the loss. The caller's
backward goes on from there.
"""
_YIELD = "yield"


def moves_of_all(program: Planned, num: int) -> list[tuple[PipelineMove, ...]]:
    """Return what each rank of a program's pipeline does with so many micro-batches."""
    parallel = program.plan.parallel
    orders = schedules.orders(parallel.schedule, parallel.pipeline, num, parallel.interleave)
    found = schedules.moves(orders, program.stage.hops, _puts_off(program))
    return [*map(schedules.forwards_first, found)] if program.has_loss_outside else found


def _puts_off(program: Planned) -> bool:
    return reduction.is_put_off(program.layout, program.plan)


def _rank(program: Planned) -> int:
    return program.stage.position % program.plan.parallel.pipeline


def has_moves(program: Planned) -> bool:
    """Tell whether a program has them: a training step's first stage of each rank of a pipeline."""
    parallel = program.plan.parallel
    is_first = program.stage.position < parallel.pipeline
    return program.stage.size > 1 and program.is_training and is_first


def render_moves(program: Planned, num: int | None = None) -> str:
    """Return the text of pipeline.py for the rank that a program is for.

    num: micro-batches; None for as many as are planned for.
    """
    parallel, rank = program.plan.parallel, _rank(program)
    if num is None:
        num = schedules.expected_micro_batches(parallel.micro_batches, parallel.pipeline)
    title = f"{program.model_name}: {parallel.schedule} of {num} micro-batches"
    moves = moves_of_all(program, num)[rank]
    lines = [_line(move) for move in moves]
    if program.has_loss_outside:
        lines.insert(sum(not move.is_of_backward for move in moves), _YIELD)
    splits = parallel.splits_backward
    part = _PART if splits else _OUTSIDE if program.has_loss_outside else ""
    halves = f"{FORWARD} and {INPUT if splits else BACKWARD}"
    head = _HEAD.format(title=title, rank=rank, num=num, halves=halves, part=part)
    return head + "".join(f"    {x}\n" for x in lines)


def _line(move: PipelineMove) -> str:
    if move.hop is not None:
        where = f"source={move.hop.source}, target={move.hop.target}"
        return f'rt.{move.verb}("{move.hop.name}", micro_batch={move.micro_batch}, {where})'
    reduces = ", reduces=True" if move.reduces else ""
    return f"rt.{move.verb}(stage={move.stage}, micro_batch={move.micro_batch}{reduces})"


class _MoveCollector:
    """Stands for the runtime: notes each move in place of making it."""

    def __init__(self, hops: Sequence[Hop], rank: int, size: int) -> None:
        self._hops = {(hop.name, hop.source, hop.target): hop for hop in hops}
        self._rank, self._size = rank, size
        self.moves: list[PipelineMove] = []

    def _hop(self, verb: str, name: str, source: int, target: int) -> Hop:
        hop = self._hops.get((name, source, target))
        if hop is None:
            raise ProgramError(
                f"{verb}: no value {name} goes from stage {source} to stage {target}. There are "
                f"{', '.join(f'{n} ({a} to {b})' for n, a, b in self._hops)}."
            )
        mine, other = (target, source) if verb == "receive" else (source, target)
        if mine % self._size != self._rank or other % self._size == self._rank:
            raise ProgramError(
                f"{verb} of {name} from stage {source} to stage {target}: it is not for this rank."
            )
        return hop

    def receive(self, name: str, micro_batch: int, source: int, target: int) -> None:
        hop = self._hop("receive", name, source, target)
        self.moves.append(PipelineMove("receive", target, micro_batch, hop))

    def send(self, name: str, micro_batch: int, source: int, target: int) -> None:
        hop = self._hop("send", name, source, target)
        self.moves.append(PipelineMove("send", source, micro_batch, hop))

    def forward(self, stage: int, micro_batch: int) -> None:
        self.moves.append(PipelineMove(FORWARD, stage, micro_batch))

    def backward(self, stage: int, micro_batch: int, reduces: bool = False) -> None:
        self.moves.append(PipelineMove(BACKWARD, stage, micro_batch, reduces=reduces))

    def backward_input(self, stage: int, micro_batch: int) -> None:
        self.moves.append(PipelineMove(INPUT, stage, micro_batch))

    def backward_weights(self, stage: int, micro_batch: int, reduces: bool = False) -> None:
        self.moves.append(PipelineMove(WEIGHTS, stage, micro_batch, reduces=reduces))


def read_moves(program: Planned, text: str, path: Path | None = None) -> tuple[PipelineMove, ...]:
    """Return the moves that a text makes, proved next to those of the other ranks.

    Raises:
        ProgramError: it does not run, or what it does is wrong; names what.
    """
    where = str(path or NAME)
    recorder = _MoveCollector(program.stage.hops, _rank(program), program.plan.parallel.pipeline)
    try:
        num, step = _functions(text, where)
        pauses = [len(recorder.moves) for _ in step(recorder) or ()]
        _check_pauses(program, recorder.moves, pauses)
    except ProgramError as error:
        raise ProgramError(f"{where}{_at(error, where)}: {as_sentence(error)}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ProgramError(
            f"{where}{_at(error, where)}: {said}. The file has a number MICRO_BATCHES, and a "
            "function step(rt) that calls receive, forward, send and backward of rt."
        ) from error
    done = moves_of_all(program, num)
    done[_rank(program)] = tuple(recorder.moves)
    try:
        check_moves(program, done, num, _puts_off(program))
    except ProgramError as error:
        raise ProgramError(f"{where}: {as_sentence(error)}") from error
    return tuple(recorder.moves)


def _check_pauses(program: Planned, moves: Sequence[PipelineMove], pauses: Sequence[int]) -> None:
    """Check that a step hands out results where all of forward, and nothing of backward, has run.

    pauses: the number of moves before each `yield`.
    """
    if not program.has_loss_outside:
        if pauses:
            raise ProgramError("it has a yield, but forward returns the loss, and nothing waits.")
        return
    if len(pauses) != 1:
        raise ProgramError(
            f"it has {len(pauses)} times yield. The caller computes the loss, so that the step "
            "waits for it once, between the last forward and the first backward."
        )
    for i, move in enumerate(moves):
        if move.is_of_backward != (i >= pauses[0]):
            side = "before" if i < pauses[0] else "after"
            raise ProgramError(
                f"{move}: it comes {side} yield, where the caller computes the loss."
            )


def _at(error: BaseException, where: str) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == where]
    return f":{lines[-1]}" if lines else ""


def _functions(text: str, where: str) -> tuple[int, Callable[[Any], Iterator[None] | None]]:
    found: dict[str, Any] = {}
    exec(compile(text, where, "exec"), found)  # as schedule.py is: Python that is executed
    num, step = found.get("MICRO_BATCHES"), found.get("step")
    if not isinstance(num, int) or num < 1 or not callable(step):
        raise ProgramError("MICRO_BATCHES or step is missing.")
    return num, step


class Steps:
    """Returns the function `step` of pipeline.py for each number of micro-batches."""

    def __init__(self, program: Planned) -> None:
        self._program = program
        self._known: dict[int, Callable[[Any], Iterator[None] | None]] = {}
        if program.directory is not None and (program.directory / NAME).exists():
            path = program.directory / NAME
            num, step = _functions(path.read_text(encoding="utf-8"), str(path))
            self._known[num] = step
        self._is_given = bool(self._known)

    def __call__(self, num: int) -> Callable[[Any], Iterator[None] | None]:
        if num not in self._known:
            if self._is_given:
                raise PlanError(
                    f"{self._program.directory / NAME} is for {next(iter(self._known))} "  # type: ignore[operator]
                    f"micro-batches, and the batch is cut into {num}. Give a batch and "
                    "Plan.parallel.micro_batches that fit it."
                )
            text = render_moves(self._program, num)
            read_moves(self._program, text)
            self._known[num] = _functions(text, f"<{NAME} of {num} micro-batches>")[1]
        return self._known[num]
