"""Show what a plan does to a model: passes, dump, schedule, memory, diff."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import (
    RANKS,
    Basis,
    Batch,
    HardwareName,
    Json,
    KeepsResults,
    MachineName,
    Model,
    PlanFile,
    Seq,
    Set,
    Stage,
    World,
    app,
)
from zerofx.tools.cli.programs import (
    hardware_of,
    plan_of,
    program_of,
    refuse_machine,
    show,
    with_fields,
)


@app.command(rich_help_panel="See what a plan does")
def passes(
    model: Annotated[str | None, typer.Argument(help="a model, to show what each does")] = None,
    world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    pipeline: Annotated[
        str | None, typer.Option(help="run these passes: text as printed here, or @FILE")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the passes in order, or what each of them does to a model."""
    from zerofx.passes.order import Setting, build
    from zerofx.tools.views import passes as view

    chosen, text = plan_of(plan, stage, set_), _text_of(pipeline)
    built = build(Setting(chosen, world or RANKS, hardware_of(hardware), pipeline=text))
    program = None
    if model:
        program = program_of(model, world, chosen, hardware, batch, seq, pipeline=text)
    show(view.PassesView.of(built.passes, program), as_json)


def _text_of(pipeline: str | None) -> str:
    """Return a pipeline's text: what was given, or what the file after an @ holds."""
    if pipeline is None or not pipeline.startswith("@"):
        return pipeline or ""
    try:
        return Path(pipeline[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"--pipeline {pipeline}: {error.strerror}") from None


@app.command(rich_help_panel="See what a plan does")
def dump(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    after: Annotated[str | None, typer.Option("--pass", help="show it after this pass")] = None,
    level: Annotated[str, typer.Option(help="summary, units, regions, nodes or full")] = "nodes",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print the program: after the last pass, or after the one named."""
    from zerofx.ir.dump import check_level

    check_level(level)
    chosen = plan_of(plan, stage, set_)
    program = program_of(model, world, chosen, hardware, batch, seq, after)
    text = program.dump(level=level)
    if as_json:
        entry = program.history[-1]
        sizes = {"nodes": entry.num_nodes, "peak_bytes": entry.peak_bytes}
        text = json.dumps({"pass": entry.pass_spec, **sizes, "lines": text.splitlines()}, indent=1)
    typer.echo(text)


@app.command(rich_help_panel="See what a plan does")
def schedule(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    basis: Basis = "aten", as_json: Json = False,
) -> None:  # fmt: skip
    """Print what runs when: compute, gathers, reduces, and what is resident meanwhile."""
    program = program_of(model, world, plan_of(plan, stage, set_), hardware, batch, seq)
    show(program.schedule(basis), as_json)


@app.command(rich_help_panel="See what a plan does")
def memory(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    optimizer_bytes: Annotated[
        int, typer.Option(min=0, help="bytes of optimizer state an element; AdamW in fp32 has 8")
    ] = 8,
    keeps_results: KeepsResults = False, basis: Basis = "aten",
    accumulation: Annotated[int, typer.Option(min=1, help="backwards a step")] = 1,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="all but the last backward run under no_sync")
    ] = False,
    why: Annotated[
        str | None, typer.Option(help="a value, module, bucket or line: what was decided, and why")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print what a rank holds: by category, and the names at the peak."""
    loop = {"accumulation": accumulation, "no_sync": no_sync}
    program = program_of(model, world, plan_of(plan, stage, set_), hardware, batch, seq, loop=loop)
    options = {"optimizer_bytes": optimizer_bytes, "keeps_results": keeps_results, **loop}
    view = program.memory(basis=basis, **options)
    show(view if why is None else view.why(why), as_json)


@app.command(rich_help_panel="See what a plan does")
def diff(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    to: Annotated[list[str] | None, typer.Option(help="field of the second: key=value")] = None,
    to_plan: Annotated[Path | None, typer.Option(help="file of the second plan")] = None,
    to_world: Annotated[int | None, typer.Option(min=1, help="ranks of the second")] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="predict times too: preset or file, dgx-h100")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare a model under two plans: memory, bytes sent, times, and the lines that differ."""
    from zerofx.tools.predict import predict_program
    from zerofx.tools.views.diff import DiffView

    if not (to or to_plan or to_world):
        raise PlanError("diff: say what is different: --to stage=2, --to-plan FILE or --to-world N")
    left = plan_of(plan, stage, set_)
    right = with_fields(plan_of(to_plan, None, None) if to_plan else left, "--to", to)
    each = (left, world), (right, to_world or world)
    if hardware is None:
        one, other = (program_of(model, n, chosen, machine, batch, seq) for chosen, n in each)
        show(DiffView(one, other), as_json)
        return
    refuse_machine(machine, hardware)
    before, after = (
        predict_program(
            model, chosen, hardware=hardware, world_size=ranks or RANKS, batch=batch, seq=seq
        )
        for chosen, ranks in each
    )
    show(DiffView.of(before.forecast, after.forecast), as_json)
