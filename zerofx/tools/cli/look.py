"""Look at a program: lanes over time as text, as an offline page, as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerofx.plan.sizes import format_bytes
from zerofx.tools.cli.app import (
    RANKS,
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
    app,
)
from zerofx.tools.cli.programs import plan_of, program_of, refuse_machine, show

if TYPE_CHECKING:
    from zerofx.plan.plan import Plan


@app.command(rich_help_panel="See what a plan does")
def view(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="predict times: preset or file, dgx-h100")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="write an offline HTML page")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto (gzip)")] = None,
    recording: Annotated[
        list[Path] | None, typer.Option(help="what zerofx.record saved; a file each rank")
    ] = None,
    basis: Basis = "aten",
    passes: Annotated[
        bool, typer.Option(help="on the page: what each pass changed; all of them run again")
    ] = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show the lanes over time: as text, or as a page (--out) or a trace (--trace)."""
    chosen = plan_of(plan, stage, set_)
    if hardware is None:
        found = program_of(model, world, chosen, machine, batch, seq).look(recording, basis=basis)
    else:
        found = _predicted(model, chosen, hardware, world, machine, batch, seq, recording, basis)
    if out is not None:
        found.page(out, passes)
    if trace is not None:
        found.trace(trace)
    for path in filter(None, (out, trace)):
        typer.echo(f"{path}  {format_bytes(path.stat().st_size)}", err=as_json)
    if as_json or (out is None and trace is None):
        show(found, as_json)


def _predicted(
    model: str, plan: Plan, hardware: str, world: int | None, machine: str | None, batch: int,
    seq: int, recording: list[Path] | None, basis: str,
) -> Any:  # fmt: skip
    """Return the look of a program that is planned and predicted for some hardware."""
    from zerofx.errors import UnpricedError
    from zerofx.hardware import load_hardware
    from zerofx.tools.predict import predict_program
    from zerofx.tools.reports import look_at

    refuse_machine(machine, hardware)
    described = load_hardware(hardware)
    try:
        found = predict_program(
            model, None if Path(model).is_dir() else plan, hardware=described,
            world_size=world or RANKS, batch=batch, seq=seq, basis=basis,
        ).forecast  # fmt: skip
    except UnpricedError:  # the schedule and what was recorded can be shown without times
        program = program_of(model, world, plan, described, batch, seq)
        return look_at(program, recording, described, basis=basis)
    return look_at(found.program, recording, predicted=found, basis=basis)
