"""A griffe extension: docstrings of zerofx name their arguments without a heading; give them one.

    device: where the shards live. Default: LOCAL_RANK's GPU where there is one,
        else the CPU.

A line that begins with the name of a parameter (or of a dataclass's field) and a colon begins the
list of arguments. It ends at the next empty line or section. The lines of an example become a block
of code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Class, Extension, Function


def with_heading(text: str, names: set[str], heading: str) -> str:
    """Return a docstring with a heading above each run of lines that begins with a name."""
    lines: list[str] = []
    is_in_run = False
    for line in text.splitlines():
        found = re.match(r"(\w+(?:, \w+)*): \S", line)
        if found and names.issuperset(found[1].split(", ")):
            if not is_in_run:
                lines += ["", heading]
            is_in_run = True
        elif is_in_run and (not line.strip() or not line.startswith(" ")):
            is_in_run = False
        lines.append(f"    {line}" if is_in_run else line)
    return "\n".join(lines)


def with_code(text: str) -> str:
    """Return a docstring whose example is a block of code, without the prompts of a shell."""
    before, found, rest = text.partition("\nExample:\n")
    if not found:
        return text
    code = re.split(r"\n(?=\S)", rest)[0]
    plain = re.sub(r"^(\s*)(?:>>>|\.\.\.) ?", r"\1", code, flags=re.M).rstrip()
    after = rest[len(code) :]
    return f"{before}{found}    ```python\n{plain}\n    ```\n{after}"


class Arguments(Extension):
    """Gives every function's and class's docstring its heading."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        if func.docstring and "Args:" not in func.docstring.value:
            names = {p.name for p in func.parameters}
            func.docstring.value = with_heading(func.docstring.value, names, "Args:")
        if func.docstring:
            func.docstring.value = with_code(func.docstring.value)

    def on_class(self, *, cls: Class, **_: Any) -> None:
        if cls.docstring and "Attributes:" not in cls.docstring.value:
            names = {n for n, m in cls.members.items() if not m.is_function}
            cls.docstring.value = with_heading(cls.docstring.value, names, "Attributes:")
        if cls.docstring:
            cls.docstring.value = with_code(cls.docstring.value)
