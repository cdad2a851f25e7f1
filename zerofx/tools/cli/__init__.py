"""The command line: what a plan does to a model, for any world size, without starting ranks.

A MODEL is `package.module:function` or `file.py:function`, which returns (module, args, kwargs);
`hf:path/config.json` for a transformers config (random weights on meta; --batch, --seq); or the
directory of an emitted program, which is loaded, verified and shown with its own plan.
"""

from __future__ import annotations

import sys

import typer

from zerofx.tools.cli.app import app, done

# Each file declares its commands on the app; help lists them in this order.
# isort: off
from zerofx.tools.cli import shown as shown
from zerofx.tools.cli import look as look
from zerofx.tools.cli import predicted as predicted
from zerofx.tools.cli import searched as searched
from zerofx.tools.cli import proof as proof
from zerofx.tools.cli import here as here

# isort: on
from zerofx.errors import ZerofxError


def main(argv: list[str] | None = None) -> None:
    """Run the command line. A ZerofxError ends it with its message and exit status 1."""
    try:
        app(argv, prog_name="zerofx")
    except ZerofxError as error:
        done()
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)
