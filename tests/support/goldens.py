"""Texts that must not change unseen: kept in tests/goldens/, written again on request.

ZEROFX_UPDATE_GOLDENS=1 pytest tests/unit/ir/test_dump.py      # then read the diff
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "goldens"


def check(name: str, text: str) -> None:
    """Compare `text` with the golden of that name, or replace it where that was asked for."""
    path = FOLDER / f"{name}.txt"
    text = text.rstrip() + "\n"
    if os.environ.get("ZEROFX_UPDATE_GOLDENS"):
        path.write_text(text, encoding="utf-8")
        return
    assert path.exists(), f"{path} is missing; run with ZEROFX_UPDATE_GOLDENS=1"
    expected = path.read_text(encoding="utf-8")
    assert text == expected, f"differs from {path}; if meant, run with ZEROFX_UPDATE_GOLDENS=1"
