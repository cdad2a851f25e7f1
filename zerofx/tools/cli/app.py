"""The application on which each file of commands declares its own."""

from __future__ import annotations

import typer

app = typer.Typer(
    help="ZeRO as a compiler: see what runs, and what it needs, before it runs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
