"""The application on which each file of commands declares its own; options and progress."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="ZeRO as a compiler: see what runs, and what it needs, before it runs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


# -- Options that commands share: a model, the ranks, the plan -------------------------------------


RANKS = 2  # to plan for where nothing is said

Model = Annotated[str, typer.Argument(help="package.module:function, file.py:function or hf:path")]
World = Annotated[int | None, typer.Option("--world", min=1, help="ranks to plan for [default: 2]")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="YAML or JSON file of plan fields")]
Stage = Annotated[int | None, typer.Option("--stage", help="ZeRO stage, over the plan's")]
Set = Annotated[list[str] | None, typer.Option("--set", help="plan field: key=value; repeatable")]
HardwareName = Annotated[
    str | None,
    typer.Option("--hardware", "--machine", help="preset or file: dgx-h100 [default: cpu-box]"),
]
MachineName = Annotated[
    str | None, typer.Option("--machine", help="hardware to plan for, without times")
]
Basis = Annotated[
    str,
    typer.Option(
        "--basis", help="memory of regions: aten (op by op) or compiled (compiles what is missing)"
    ),
]
KeepsResults = Annotated[
    bool, typer.Option("--keep-results/--loss-only", help="what the loop holds until step()")
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="batch size of an hf: model's call")]
Seq = Annotated[int, typer.Option("--seq", min=1, help="sequence length of an hf: model's call")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


# -- What a command that takes a while is doing: on stderr, in one line on a terminal --------------


CLEAR = "\r\x1b[K"
_standing: list[str] = []  # the line that is on the terminal now


def say(what: str, is_passing: bool = False) -> None:
    """Say what is done next; on a terminal over what was said before.

    is_passing: of interest until the next only, so that a file or a pipe does not get it.
    """
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        typer.echo(f"{CLEAR}{what[:width]}", err=True, nl=False)
        _standing[:] = [what]
    elif not is_passing:
        typer.echo(what, err=True)


def done() -> None:
    """Take the line away, before anything else is printed."""
    if _standing:
        typer.echo(CLEAR, err=True, nl=False)
        _standing.clear()
