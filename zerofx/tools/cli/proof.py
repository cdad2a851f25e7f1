"""Prove a program on paper, and compare real training with plain PyTorch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from zerofx.tools.cli.app import (
    DEFAULT_RANKS,
    PROVE,
    RANKS,
    Batch,
    HardwareName,
    Json,
    Model,
    PlanFile,
    Seq,
    Set,
    Stage,
    command,
)
from zerofx.tools.cli.programs import plan_of, print_text, program_of, refuse_directory


@command(
    PROVE,
    "zerofx verify zerofx.tools.demo.targets:byte_gpt --world 2 --world 64",
    "zerofx verify model.py:build --run --steps 5",
)
def verify(
    model: Model,
    worlds: Annotated[
        list[int] | None,
        typer.Option("--world", min=1, help=f"Ranks to prove it for; repeatable. {DEFAULT_RANKS}"),
    ] = None,
    plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    is_run: Annotated[
        bool, typer.Option("--run", help="Also train on real ranks; compare with plain PyTorch.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of --run.")] = 3,
    accumulation: Annotated[
        int, typer.Option(min=1, help="With --run: micro-batches (backward passes) per step.")
    ] = 1,
    no_sync: Annotated[
        bool,
        typer.Option("--no-sync", help="With --run: all but the last backward under no_sync()."),
    ] = False,
    same_batch: Annotated[
        bool, typer.Option("--same-batch", help="With --run: all ranks get the same example call.")
    ] = False,
    tolerance: Annotated[
        float | None,
        typer.Option(help=r"Relative error allowed per tensor. \[default: by the precision]"),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Prove the program for every rank; with --run, compare training with plain PyTorch."""
    from zerofx.errors import CaptureError
    from zerofx.ir.verify import verify_stages
    from zerofx.tools.trial.launch import run_trial
    from zerofx.tools.trial.settings import Settings
    from zerofx.tools.views.proof import ProofView

    if is_run:
        refuse_directory(model)
    chosen = plan_of(plan, stage, set_)
    found: list[Any] = []
    each: list[int | None] = [*worlds] if worlds else [None]
    for world in each:
        view: Any = None
        try:
            programs = [
                program_of(model, world, chosen, hardware, batch, seq, position=position)
                for position in range(chosen.parallel.num_stages)
            ]
            if len(programs) > 1:
                verify_stages(programs)
            views = [*map(ProofView.of, programs)]
            found += views
            view = views[-1]
            if not as_json:
                print_text("\n".join(map(str, views)))
        except CaptureError as error:
            if chosen.islands == "refuse":
                raise
            said = f"{error}\nIts forward runs eagerly, as an island, which cannot be proved."
            if not is_run:
                raise CaptureError(
                    f"{said} Add --run to compare its training with plain PyTorch."
                ) from error
            typer.echo(said, err=True)
        if is_run:
            settings = Settings(
                model, chosen.to_dict(), view.world if view else world or RANKS, steps, batch, seq,
                accumulation, no_sync, same_batch, tolerance,
            )  # fmt: skip
            found.append(run_trial(settings))
            if not as_json:
                print_text(str(found[-1]))
    if as_json:
        typer.echo(json.dumps([view.to_dict() for view in found], indent=1))
    if not all(getattr(view, "is_equal", True) for view in found):
        raise typer.Exit(1)
