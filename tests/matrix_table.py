"""The table that `make test-all` writes: how far each model's training lies from plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROPERTY = "matrix"
HEAD = "| model | kernels | ranks trained | worst loss | worst model |\n|---|---|---|---|---|\n"


def rows(reports: list[Any]) -> list[str]:
    """Return the lines of all reports that have one; each is a test's user property."""
    found = [p for r in reports for key, p in getattr(r, "user_properties", ()) if key == PROPERTY]
    return sorted(
        f"| {name} | {kernels} | {ranks} | {loss:.1e} | {model:.1e} |\n"
        for name, kernels, ranks, loss, model in found
    )


def write(folder: Path, rows: list[str]) -> Path | None:
    """Write the table; None where no test of the matrix has run."""
    if not rows:
        return None
    folder.mkdir(exist_ok=True)
    path = folder / "training-matrix.md"
    path.write_text(HEAD + "".join(sorted(rows)), encoding="utf-8")
    return path
