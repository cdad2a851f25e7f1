"""What runs on this machine: its check, and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import Json, app, say
from zerofx.tools.cli.programs import show


@app.command(rich_help_panel="This machine")
def doctor(
    calibrates: Annotated[
        bool, typer.Option("--calibrate", help="measure this machine instead; takes a minute")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="write what --calibrate found as hardware YAML")
    ] = None,
    world: Annotated[int, typer.Option(min=1, help="ranks that --calibrate runs")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="a folder on the disk that stands for NVMe")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            "--postmortem", help="say what happened to a job, from its ranks' flight records"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that this installation can compile and train; the status is 1 where it cannot."""
    if records is not None:
        if calibrates or out or folder:
            raise PlanError("doctor: --postmortem goes with no option but --json")
        from zerofx.tools.postmortem import postmortem

        show(postmortem(records), as_json)
        return
    if calibrates:
        _calibrate(out, world, folder, as_json)
        return
    if out or folder:
        raise PlanError("doctor: --out and --folder belong to --calibrate; add it")
    from zerofx.tools.doctor import Diagnosis, checks

    diagnosis = Diagnosis(checks())
    show(diagnosis, as_json)
    if not diagnosis.is_well:
        raise typer.Exit(1)


def _calibrate(out: Path | None, world: int, folder: Path | None, as_json: bool) -> None:
    from zerofx.hardware import write_hardware
    from zerofx.tools.calibrate.launch import calibrate
    from zerofx.tools.calibrate.view import CalibrationView

    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise PlanError(f"doctor: --out {out} must end in .yaml or .yml")
    found = calibrate(world, folder, say)
    if out is not None:
        write_hardware(found, out)
    show(CalibrationView(found, out), as_json)


@app.command(
    rich_help_panel="This machine",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True,
                      "help_option_names": []}
)  # fmt: skip
def demo(context: typer.Context) -> None:
    """Train a byte-level GPT on this Python's own sources; `zerofx demo --help` lists options."""
    from zerofx.tools.demo.train import main as run

    raise typer.Exit(run(context.args))
