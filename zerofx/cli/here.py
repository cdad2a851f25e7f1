"""What runs on this machine: its check, and the demo."""

from __future__ import annotations

import typer

from zerofx.cli.app import app
from zerofx.cli.options import Json
from zerofx.cli.programs import show


@app.command(rich_help_panel="This machine")
def doctor(as_json: Json = False) -> None:
    """Check that this installation can compile and train; the status is 1 where it cannot."""
    from zerofx.doctor import Diagnosis, checks

    diagnosis = Diagnosis(checks())
    show(diagnosis, as_json)
    if not diagnosis.is_well:
        raise typer.Exit(1)


@app.command(
    rich_help_panel="This machine",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True,
                      "help_option_names": []}
)  # fmt: skip
def demo(context: typer.Context) -> None:
    """Train a byte-level GPT on this Python's own sources; `zerofx demo --help` lists options."""
    from zerofx.demo.train import main as run

    raise typer.Exit(run(context.args))
