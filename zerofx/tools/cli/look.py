"""Show a program over time: as text, as an offline page, or as a trace for Perfetto."""

from __future__ import annotations

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
    """Return the look of a program that is planned for some hardware, with predicted times."""
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
    except UnpricedError:  # the schedule and recordings can be shown without predicted times
        program = program_of(model, world, plan, described, batch, seq)
        return look_at(program, recording, described, basis=basis)
    return look_at(found.program, recording, predicted=found, basis=basis)
