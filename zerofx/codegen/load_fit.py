"""Does a loaded program fit a model that runs: the same ranks, and every parameter at its place."""

from __future__ import annotations

from zerofx.errors import ProgramError
from zerofx.ir.program import Planned
from zerofx.layout.buckets import Bucket, Layout


def check_fits(program: Planned, layout: Layout, world_size: int) -> None:
    """Check that a program runs on these ranks and reads its parameters where they lie.

    Raises:
        ProgramError: naming the first thing that differs, both numbers, and the fix.
    """
    if program.world_size != world_size:
        raise _unfit(
            program, f"it is for {program.world_size} ranks, this model runs on {world_size}"
        )
    mine = program.layout
    if mine.mesh != layout.mesh:
        raise _unfit(
            program,
            f"it shards over {mine.shard_size} ranks and replicates over {mine.replicate_size}, "
            f"the model over {layout.shard_size} and {layout.replicate_size}",
        )
    if len(mine.buckets) != len(layout.buckets):
        raise _unfit(
            program, f"it has {len(mine.buckets)} buckets, the model {len(layout.buckets)}"
        )
    for a, b in zip(mine.buckets, layout.buckets, strict=True):
        if a != b:
            raise _unfit(program, _difference(a, b))


def _unfit(program: Planned, what: str) -> ProgramError:
    where = program.directory or program.model_name
    return ProgramError(
        f"{where} does not fit this model: {what}; emit a program of this model under its plan "
        "(model.programs[0].emit(directory)) and edit that"
    )


def _difference(a: Bucket, b: Bucket) -> str:
    for left, right in zip(a.params, b.params, strict=False):
        if left != right:
            return (
                f"bucket {a.index} has {left.name}{list(left.shape)} at {left.offset}, the model's "
                f"{right.name}{list(right.shape)} at {right.offset}"
            )
    if (a.home, a.source) != (b.home, b.source):
        return (
            f"bucket {a.index} ({a.label()}) lives on the {a.home.value} and is gathered from the "
            f"{a.source.value}, the model's on the {b.home.value} and from the {b.source.value}"
        )
    return (
        f"bucket {a.index} has {len(a.params)} parameters in {a.numel} elements of {a.dtype}, the "
        f"model's {len(b.params)} in {b.numel} of {b.dtype}"
    )
