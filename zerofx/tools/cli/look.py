"""Show a program over time: as text, as an offline page, or as a trace for Perfetto."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerofx.plan.sizes import format_bytes
from zerofx.tools.cli.app import (
    RANKS,
    SEE,
    Basis,
    Batch,
    Json,
    MachineName,
    Model,
    PlanFile,
    Seq,
    Set,
    Stage,
    World,
    command,
)
from zerofx.tools.cli.programs import check_output, plan_of, program_of, refuse_machine, show

if TYPE_CHECKING:
    from zerofx.plan.plan import Plan
    from zerofx.tools.views.look import Look


@dataclass(frozen=True)
class StageLooks:
    """The looks of a pipeline's stages: print them, or `to_dict()`."""

    stages: tuple[Look, ...]

    def __str__(self) -> str:
        parts = (f"pipeline stage {i}\n{look}" for i, look in enumerate(self.stages))
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return all of them as plain values."""
        return {"stages": [look.to_dict() for look in self.stages]}


@command(
    SEE,
    "zerofx view zerofx.tools.demo.targets:byte_gpt --world 8 --hardware dgx-h100",
    "zerofx view zerofx.tools.demo.targets:byte_gpt --world 8 --hardware dgx-h100 --out page.html",
)
def view(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Predict times for it: preset (dgx-h100) or YAML file."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write an offline HTML page.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto (gzip).")] = None,
    recording: Annotated[
        list[Path] | None,
        typer.Option(help="Recording that zerofx.record saved, one file per rank; repeatable."),
    ] = None,
    basis: Basis = "aten",
    passes: Annotated[
        bool,
        typer.Option(help="Whether the page shows the changes of each pass (passes run again)."),
    ] = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show the lanes over time as text, as an HTML page (--out) or as a trace (--trace)."""
    check_output("--out", out)
    check_output("--trace", trace)
    chosen = plan_of(plan, stage, set_)
    if hardware is None:
        found = [program_of(model, world, chosen, machine, batch, seq).look(recording, basis=basis)]
    else:
        found = _predicted(model, chosen, hardware, world, machine, batch, seq, recording, basis)
    for number, each in enumerate(found):
        files = [_numbered(path, number, len(found)) for path in (out, trace)]
        if files[0] is not None:
            each.page(files[0], passes)
        if files[1] is not None:
            each.trace(files[1])
        for path in filter(None, files):
            typer.echo(f"{path}  {format_bytes(path.stat().st_size)}", err=as_json)
    if as_json or (out is None and trace is None):
        show(found[0] if len(found) == 1 else StageLooks(tuple(found)), as_json)


def _numbered(path: Path | None, number: int, count: int) -> Path | None:
    """Return the file of a pipeline stage: `page.html` becomes `page.stage0.html`."""
    if path is None or count == 1:
        return path
    stem, dot, ending = path.name.partition(".")
    return path.with_name(f"{stem}.stage{number}{dot}{ending}")


def _predicted(
    model: str, plan: Plan, hardware: str, world: int | None, machine: str | None, batch: int,
    seq: int, recording: list[Path] | None, basis: str,
) -> list[Look]:  # fmt: skip
    """Return the look of a program that is planned for some hardware, with predicted times.

    Of a pipeline it is one for each stage, as if the stage waited for no other.
    """
    from zerofx.analysis.time.pipelines import PipelineForecast
    from zerofx.errors import UnpricedError
    from zerofx.hardware import load_hardware
    from zerofx.tools.predict import predict
    from zerofx.tools.reports import look_at

    refuse_machine(machine, hardware)
    described = load_hardware(hardware)
    try:
        found = predict(
            model, None if Path(model).is_dir() else plan, hardware=described,
            world_size=world or RANKS, batch=batch, seq=seq, basis=basis,
        ).forecast  # fmt: skip
    except UnpricedError:  # the schedule and recordings can be shown without predicted times
        program = program_of(model, world, plan, described, batch, seq)
        return [look_at(program, recording, described, basis=basis)]
    stages = found.stages if isinstance(found, PipelineForecast) else (found,)
    return [look_at(f.program, recording, predicted=f, basis=basis) for f in stages]
