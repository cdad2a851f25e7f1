"""Predict a step on some hardware."""

from __future__ import annotations

from typing import Annotated

import typer

from zerofx.cli.app import app
from zerofx.cli.options import RANKS, Batch, Json, Model, PlanFile, Seq, Set, Stage, World
from zerofx.cli.programs import plan_of, show
from zerofx.cli.progress import say

HardwareName = Annotated[
    str, typer.Option("--hardware", help="preset or file: dgx-h100, dgx2-v100-32gb, mine.yaml")
]


@app.command(rich_help_panel="Know before you run")
def predict(
    model: Model, hardware: HardwareName, world: World = None, plan: PlanFile = None,
    stage: Stage = None, set_: Set = None, batch: Batch = 1, seq: Seq = 128,
    accumulation: Annotated[int, typer.Option(min=1, help="backwards a step")] = 1,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="all but the last backward run under no_sync")
    ] = False,
    clips: Annotated[bool, typer.Option("--clip", help="the loop clips the global norm")] = False,
    optimizer_bytes: Annotated[
        int, typer.Option(min=0, help="bytes of optimizer state an element; AdamW in fp32 has 8")
    ] = 8,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print what a step holds and takes on a hardware; the status is 1 where it does not fit."""
    from pathlib import Path

    from zerofx.predicting import predict as predicted

    is_emitted = Path(model).is_dir()
    view = predicted(
        model, None if is_emitted else plan_of(plan, stage, set_), hardware=hardware,
        world_size=world or RANKS, batch=batch, seq=seq, accumulation=accumulation,
        no_sync=no_sync, clips=clips, optimizer_bytes=optimizer_bytes, says=say,
    )  # fmt: skip
    show(view, as_json)
    if not view.fits:
        raise typer.Exit(1)
