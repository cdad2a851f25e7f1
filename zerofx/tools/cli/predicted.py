"""Predict a step on some hardware."""

from __future__ import annotations

from typing import Annotated

import typer

from zerofx.tools.cli.app import (
    RANKS,
    Basis,
    Batch,
    HardwareName,
    Json,
    KeepsResults,
    Model,
    PlanFile,
    Seq,
    Set,
    Stage,
    World,
    app,
    say,
)
from zerofx.tools.cli.programs import emitted, hardware_of, plan_of, show


@app.command(rich_help_panel="Know before you run")
def predict(
    model: Model, hardware: HardwareName = None, world: World = None, plan: PlanFile = None,
    stage: Stage = None, set_: Set = None, batch: Batch = 1, seq: Seq = 128,
    accumulation: Annotated[int, typer.Option(min=1, help="backwards a step")] = 1,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="all but the last backward run under no_sync")
    ] = False,
    clips: Annotated[bool, typer.Option("--clip", help="the loop clips the global norm")] = False,
    optimizer_bytes: Annotated[
        int, typer.Option(min=0, help="bytes of optimizer state an element; AdamW in fp32 has 8")
    ] = 8,
    keeps_results: KeepsResults = False, basis: Basis = "aten",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print what a step holds and takes on a hardware; the status is 1 where it does not fit."""
    from pathlib import Path

    from zerofx.tools.predict import predict as predicted

    chosen, program = plan_of(plan, stage, set_), None
    if Path(model).is_dir():
        program = emitted(model, world, chosen, None, hardware)
    view = predicted(
        program or model, None if program else chosen,
        hardware=program.hardware if program else hardware_of(hardware),
        world_size=world or RANKS, batch=batch, seq=seq, accumulation=accumulation,
        no_sync=no_sync, clips=clips, optimizer_bytes=optimizer_bytes,
        keeps_results=keeps_results, basis=basis, says=say,
    )  # fmt: skip
    show(view, as_json)
    if not view.fits:
        raise typer.Exit(1)
