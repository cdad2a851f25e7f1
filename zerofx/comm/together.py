"""Steps that either all ranks take or none: ranks exchange results, and whether a step failed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch

from zerofx.comm.world import World
from zerofx.errors import DesyncError, ZerofxError, as_sentence

T = TypeVar("T")


def exchange(world: World, value: T, label: str) -> list[T]:
    """Return every rank's value, in rank order; `label` names the exchange for the watchdog.

    It uses the world's own broadcasts, so that it works for a mesh that is part of a larger job,
    and names a stuck rank. Values are pickled, which is safe since they come from this very job.
    """
    if world.size == 1:
        return [value]
    found: list[T] = []
    data = bytearray(pickle.dumps(value))
    mine = torch.frombuffer(data, dtype=torch.uint8).to(world.device)
    for source in range(world.size):
        num_bytes = torch.tensor([mine.numel()], device=world.device)
        world.broadcast(num_bytes, source, label).wait()
        sent = mine
        if source != world.rank:
            sent = torch.empty(int(num_bytes), dtype=torch.uint8, device=world.device)
        world.broadcast(sent, source, label).wait()
        found.append(pickle.loads(sent.cpu().numpy().tobytes()))
    return found


def exchange_apart(world: World, topic: str, value: T) -> list[T]:
    """Return every rank's value, in rank order; runs in a thread while other calls go on.

    It uses the store of the world and no collective. topic: a name for this exchange only.

    Raises:
        DesyncError: a rank died before it arrived, or the ranks have lost each other.
    """
    letters = world.letters()
    if letters is None:
        return [value]
    return [pickle.loads(data) for data in letters.exchange(topic, pickle.dumps(value))]


def together(world: World, what: str, step: Callable[[], T], raises: type[ZerofxError]) -> list[T]:
    """Run `step` on every rank and return all results in rank order; raise on all if one fails.

    Raises: on a rank where `step` failed, its error (an OSError is turned into `raises`); on the
        other ranks an error of class `raises` that names the rank and the error.
    """
    problem: Exception | None = None
    value: T | None = None
    try:
        value = step()
    except DesyncError:  # the ranks have lost each other, so no rank can be told
        raise
    except Exception as error:  # noqa: BLE001  (reported to every rank and raised below)
        problem = error
    except BaseException as error:  # Ctrl-C, sys.exit: this rank does not continue
        world.report_failure(repr(error))
        raise
    world.agree(what, "")
    return _results(what, problem, value, raises, lambda said: exchange(world, said, what))


def together_apart(
    world: World, what: str, topic: str, step: Callable[[], T], raises: type[ZerofxError]
) -> list[T]:
    """Do as `together` in a thread of every rank, while other calls go on.

    Raises: as `together`, and DesyncError as `exchange_apart`.
    """
    problem: Exception | None = None
    value: T | None = None
    try:
        value = step()
    except Exception as error:  # noqa: BLE001  (reported to every rank and raised below)
        problem = error
    return _results(what, problem, value, raises, lambda said: exchange_apart(world, topic, said))


def _results(
    what: str,
    problem: Exception | None,
    value: T | None,
    raises: type[ZerofxError],
    send: Callable[[tuple[str | None, T | None]], list[tuple[str | None, T | None]]],
) -> list[T]:
    """Exchange the results of a step on all ranks; return all of them, or raise."""
    mine = None if problem is None else _describe(problem)
    answers = send((mine, value))
    if isinstance(problem, OSError) and not isinstance(problem, ZerofxError):
        raise raises(f"{what}: {mine}") from problem
    if problem is not None:
        raise problem
    for rank, (told, _) in enumerate(answers):
        if told is not None:
            raise raises(f"{what}: rank {rank}: {told}")
    return [value for _, value in answers]  # type: ignore[misc]


def tell(world: World, what: str, problem: Exception | None, raises: type[ZerofxError]) -> None:
    """Tell all ranks whether something failed on this one; a collective call.

    Raises: `problem`; on the other ranks an error of class `raises` that names rank and error.
    """
    if isinstance(problem, DesyncError):  # the ranks have lost each other, so no rank can be told
        raise problem
    if world.all_well(what, problem is None):
        return
    world.agree(f"what went wrong in {what}", "")
    answers = exchange(world, None if problem is None else _describe(problem), what)
    if problem is not None:
        raise problem
    for rank, told in enumerate(answers):
        if told is not None:
            raise raises(f"{what}: rank {rank}: {told}")


def _describe(problem: Exception) -> str:
    if isinstance(problem, ZerofxError):
        return str(problem)
    if isinstance(problem, OSError):
        where = f"{problem.filename}: " if problem.filename else ""
        return as_sentence(f"{where}{problem.strerror or problem}")
    return as_sentence(f"{type(problem).__name__}: {problem}")
