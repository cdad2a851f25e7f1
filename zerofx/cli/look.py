"""Look at a program: lanes over time as text, as an offline page, as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerofx.cli.app import app
from zerofx.cli.options import Batch, Json, MachineName, Model, PlanFile, Seq, Set, Stage, World
from zerofx.cli.programs import plan_of, program_of, show
from zerofx.sizes import format_bytes


@app.command(rich_help_panel="See what a plan does")
def view(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    out: Annotated[Path | None, typer.Option(help="write an offline HTML page")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto (gzip)")] = None,
    recording: Annotated[
        list[Path] | None, typer.Option(help="what zerofx.record saved; a file each rank")
    ] = None,
    passes: Annotated[
        bool, typer.Option(help="on the page: what each pass changed; all of them run again")
    ] = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show the lanes over time: as text, or as a page (--out) or a trace (--trace)."""
    program = program_of(model, world, plan_of(plan, stage, set_), machine, batch, seq)
    found = program.look(recording)
    if out is not None:
        found.page(out, passes)
    if trace is not None:
        found.trace(trace)
    for path in filter(None, (out, trace)):
        typer.echo(f"{path}  {format_bytes(path.stat().st_size)}", err=as_json)
    if as_json or (out is None and trace is None):
        show(found, as_json)
