"""Predict a step on some hardware."""

from __future__ import annotations

from typing import Annotated

import typer

from zerofx.tools.cli.app import (
    KNOW,
    RANKS,
    Accumulation,
    Basis,
    Batch,
    HardwareName,
    Json,
    KeepsResults,
    Model,
    NoSync,
    OptimizerBytes,
    PlanFile,
    Seq,
    Set,
    Stage,
    World,
    command,
    say,
)
from zerofx.tools.cli.programs import emitted, hardware_of, plan_of, show


@command(
    KNOW,
    "zerofx predict zerofx.tools.demo.targets:byte_gpt --hardware dgx-h100 --world 8",
    "zerofx predict hf:path/to/config --hardware dgx-h100 --world 64 --set precision=bf16",
)
def predict(
    model: Model, hardware: HardwareName = None, world: World = None, plan: PlanFile = None,
    stage: Stage = None, set_: Set = None, batch: Batch = 1, seq: Seq = 128,
    accumulation: Accumulation = 1, no_sync: NoSync = False,
    clips: Annotated[
        bool, typer.Option("--clip", help="The loop clips the global gradient norm.")
    ] = False,
    optimizer_bytes: OptimizerBytes = 8,
    keeps_results: KeepsResults = False, basis: Basis = "aten",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Predict memory, time and throughput of a step; the exit status is 1 if it does not fit."""
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
