"""What a command that takes a while is doing: on stderr, in one line on a terminal."""

from __future__ import annotations

import shutil
import sys

import typer

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
