"""The application, the options that commands share, and the progress line."""

from __future__ import annotations

import platform
import shutil
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

F = TypeVar("F", bound=Callable[..., Any])

app = typer.Typer(
    help="See what a sharded training program does and needs before it runs.",
    epilog="Exit status: 0 for success, 1 for an error or a negative answer (a plan does not fit, "
    "a proof or a check fails), 2 for a command line that cannot be parsed.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

EXAMPLES: dict[str, tuple[str, ...]] = {}  # of each command, as its help prints them


def command(panel: str, *examples: str, **settings: Any) -> Callable[[F], F]:
    """Declare a command. Its help ends with the examples, one per line."""

    def declare(function: F) -> F:
        name = function.__name__.replace("_", "-")
        EXAMPLES[name] = examples
        lines = "\n".join(map(_wrapped, examples)).replace("[", r"\[")
        epilog = f"\b\n{'Example' if len(examples) == 1 else 'Examples'}:\n{lines}"
        app.command(rich_help_panel=panel, epilog=epilog, **settings)(function)
        return function

    return declare


def _wrapped(example: str) -> str:
    """Return an example on lines of up to 74 characters, continued as a shell continues them."""
    lines = textwrap.wrap(
        example, 72, initial_indent="  ", subsequent_indent="      ", break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return " \\\n".join(lines)


def _version(is_wanted: bool) -> None:
    """Print the versions of zerofx, torch and Python without importing torch."""
    if not is_wanted:
        return
    from zerofx import __version__

    typer.echo(
        f"zerofx {__version__}, torch {metadata.version('torch')}, "
        f"Python {platform.python_version()}"
    )
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True,
            help="Print the versions of zerofx, torch and Python.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Parse the options that precede a command."""


# -- Options that commands share: a model, the ranks, the plan -------------------------------------


RANKS = 2  # to plan for by default
# Help is rich markup, in which an unescaped bracket begins a style.
DEFAULT_RANKS = rf"\[default: {RANKS}]"
DEFAULT_HARDWARE = r"\[default: cpu-box]"
SEE = "See what a plan does"
KNOW = "Know before you run"
PROVE = "Prove it"
HERE = "This machine"

Model = Annotated[
    str,
    typer.Argument(
        help="package.module:function, file.py:function, hf:DIR (a transformers config.json), or "
        "the directory of an emitted program."
    ),
]
World = Annotated[
    int | None, typer.Option("--world", min=1, help=f"Ranks to plan for. {DEFAULT_RANKS}")
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Plan to start from, a YAML or JSON file.")
]
Stage = Annotated[
    int | None,
    typer.Option("--stage", help=r"ZeRO stage, 0 to 3; replaces the plan's. \[default: 3]"),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Plan field as key=value, for example precision=bf16; repeatable."),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware", "--machine",
        help=f"Preset, for example dgx-h100, or YAML file. {DEFAULT_HARDWARE}",
    ),
]  # fmt: skip
MachineName = Annotated[
    str | None,
    typer.Option(
        "--machine",
        help=f"Preset or YAML file to plan for, without predicted times. {DEFAULT_HARDWARE}",
    ),
]
Basis = Annotated[
    str,
    typer.Option(
        "--basis",
        help="How memory inside regions is counted: aten (op by op) or compiled (as Inductor "
        "compiles them).",
    ),
]
KeepsResults = Annotated[
    bool,
    typer.Option(
        "--keep-results/--loss-only",
        help="Whether the loop holds all outputs until step(), or the loss alone.",
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Batch size of an hf: model.")]
Seq = Annotated[int, typer.Option("--seq", min=1, help="Sequence length of an hf: model.")]
Accumulation = Annotated[
    int, typer.Option("--accumulation", min=1, help="Micro-batches (backward passes) per step.")
]
NoSync = Annotated[
    bool, typer.Option("--no-sync", help="All but the last backward pass run under no_sync().")
]
OptimizerBytes = Annotated[
    int,
    typer.Option(
        "--optimizer-bytes", min=0,
        help="Bytes of optimizer state per parameter element; AdamW in fp32 has 8.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


# -- Progress of a command that takes a while: on stderr, in one line on a terminal ----------------


CLEAR = "\r\x1b[K"
_shown: list[str] = []  # the line that is on the terminal now


def say(what: str, is_passing: bool = False) -> None:
    """Print what is done next; on a terminal it replaces the line before.

    is_passing: of interest until the next message only, so that files and pipes do not get it.
    """
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        typer.echo(f"{CLEAR}{what[:width]}", err=True, nl=False)
        _shown[:] = [what]
    elif not is_passing:
        typer.echo(what, err=True)


def done() -> None:
    """Clear the progress line before anything else is printed."""
    if _shown:
        typer.echo(CLEAR, err=True, nl=False)
        _shown.clear()
