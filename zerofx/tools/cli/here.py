"""Commands that run on this machine: its check, its calibration, a postmortem, and the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import HERE, Json, command, say
from zerofx.tools.cli.programs import YAML, check_output, show


@command(HERE, "zerofx doctor", "zerofx doctor --calibrate --out mine.yaml")
def doctor(
    calibrates: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine instead; takes a minute.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --calibrate: hardware YAML file to write.")
    ] = None,
    world: Annotated[int, typer.Option(min=1, help="With --calibrate: ranks to start.")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="With --calibrate: folder on the disk to measure as NVMe.")
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--postmortem", help="Report how a job ended, from its flight records."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that this installation can compile and train; the exit status is 1 if it cannot."""
    if records is not None:
        if calibrates or out or folder:
            raise PlanError(
                "doctor --postmortem reads records and measures nothing. Leave out every other "
                "option but --json."
            )
        from zerofx.tools.postmortem import postmortem

        show(postmortem(records), as_json)
        return
    if calibrates:
        _calibrate(out, world, folder, as_json)
        return
    if out or folder:
        raise PlanError("doctor uses --out and --folder for --calibrate alone. Add --calibrate.")
    from zerofx.tools.doctor import Diagnosis, checks

    diagnosis = Diagnosis(checks())
    show(diagnosis, as_json)
    if not diagnosis.is_well:
        raise typer.Exit(1)


def _calibrate(out: Path | None, world: int, folder: Path | None, as_json: bool) -> None:
    """Measure this machine, and write it as hardware if `out` is given."""
    check_output("--out", out, YAML)
    from zerofx.hardware import write_hardware
    from zerofx.tools.calibrate.launch import calibrate
    from zerofx.tools.calibrate.view import CalibrationView

    found = calibrate(world, folder, say)
    if out is not None:
        write_hardware(found, out)
    show(CalibrationView(found, out), as_json)


@command(
    HERE,
    "zerofx demo --steps 20 --layers 2",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True,
                      "help_option_names": []}
)  # fmt: skip
def demo(context: typer.Context) -> None:
    """Train a byte-level GPT on Python's own sources; `zerofx demo --help` lists the options."""
    from zerofx.tools.demo.train import main as run

    raise typer.Exit(run(context.args))
