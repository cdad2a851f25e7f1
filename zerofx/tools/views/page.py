"""The page of a program: one file with its data, script and style inside; it opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

_HERE = Path(__file__).parent / "templates"
_SCRIPTS = (
    "page_axis.js",
    "page_lanes.js",
    "page_memory.js",
    "page_words.js",
    "page_tables.js",
    "page.js",
)


def render(data: dict[str, Any], facts: Sequence[tuple[str, str]]) -> str:
    """Return the page of a program's data, headed by (name, value) facts."""
    said = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    script = "\n".join(_text(name) for name in _SCRIPTS)
    template = jinja2.Template(_text("page.html.j2"))
    return template.render(
        title=data["title"], facts=facts, css=_text("page.css"), script=script, data=said
    )


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
