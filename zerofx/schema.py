"""Schemas for the files that zerofx reads: each file is checked whole before any of it is used.

    FACTS = record({"world_size": integer(1), "files": mapping(file_name, text())})
    facts = check(parse_json(read_file(path, MOST_BYTES)), FACTS)

A form is a function of (value, where) that raises a `FormError` whose text names the field. The
reader of a file adds the file's name and raises its own error class.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Form = Callable[[Any, str], None]

MOST = 1 << 62  # upper limit of every size, offset and count
# The exceptions that reading a damaged pickle, or an archive of pickles, may raise.
DAMAGE = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError,
    ArithmeticError, MemoryError, RuntimeError, AssertionError, struct.error, zlib.error,
)  # fmt: skip
_SHOWN = 60  # characters of a value that an error shows
# Of a file: also without halves of surrogate pairs, except those that stand for bytes in a name.
_NAME = re.compile(r"[^/\\\0\ud800-\udc7f\udd00-\udfff]+")


class FormError(ValueError):
    """A value does not have the required form; the text names the field."""


def check(value: Any, form: Form, where: str = "") -> Any:
    """Return the value if it has the form.

    Raises:
        FormError: the value does not have the form; names the first field that is wrong.
    """
    form(value, where)
    return value


def refuse(where: str, value: Any, wanted: str) -> FormError:
    """Return the error for a value that differs from what was wanted."""
    return FormError(f"{where or 'it'} is {shown(value, _SHOWN)}, but should be {wanted}")


def shown(value: object, most: int = 200) -> str:
    """Return the repr of a value, shortened for an error message."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        text = f"a value of type {type(value).__name__} with a number that is too long to print"
    return text if len(text) <= most else f"{text[:most]}..."


# -- forms ----------------------------------------------------------------------------------------
def anything(value: Any, where: str) -> None:
    """Accept any value."""


def boolean(value: Any, where: str) -> None:
    """Accept true and false."""
    if not isinstance(value, bool):
        raise refuse(where, value, "true or false")


def integer(least: int = 0, most: int = MOST) -> Form:
    """Accept whole numbers within limits, both included."""

    def form(value: Any, where: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise refuse(where, value, f"a whole number from {least} to {most}")

    return form


def number(least: float = -math.inf) -> Form:
    """Accept finite numbers that are not below a limit."""

    def form(value: Any, where: str) -> None:
        is_number = type(value) is float or (type(value) is int and abs(value) <= MOST)
        if not is_number or not (math.isfinite(value) and value >= least):
            above = "" if least == -math.inf else f" not below {least:g}"
            raise refuse(where, value, f"a finite number{above}")

    return form


def text(pattern: str = "") -> Form:
    """Accept strings, which must match the pattern if one is given."""
    wanted = re.compile(pattern, re.DOTALL)

    def form(value: Any, where: str) -> None:
        if not isinstance(value, str) or (pattern and not wanted.fullmatch(value)):
            raise refuse(where, value, f"a text like {pattern}" if pattern else "a text")

    return form


def one_of(values: Iterable[Any]) -> Form:
    """Accept the given values only."""
    known = list(values)

    def form(value: Any, where: str) -> None:
        if not any(value == each and type(value) is type(each) for each in known):
            raise refuse(where, value, f"one of {', '.join(map(repr, known))}")

    return form


def optional(inner: Form) -> Form:
    """Accept null and every value that the inner form accepts."""

    def form(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return form


def either(*forms: Form) -> Form:
    """Accept every value that one of the forms accepts; the error is that of the last form."""

    def form(value: Any, where: str) -> None:
        for each in forms[:-1]:
            try:
                each(value, where)
            except FormError:
                continue
            return
        forms[-1](value, where)

    return form


def sequence(inner: Form, least: int = 0, most: int = MOST) -> Form:
    """Accept lists whose items have a form."""

    def form(value: Any, where: str) -> None:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            limits = f" of {least} to {most} items" if most < MOST else ""
            raise refuse(where, value, f"a list{limits}")
        for number, each in enumerate(value):
            inner(each, f"{where}[{number}]")

    return form


def row(*forms: Form) -> Form:
    """Accept lists with one item per form, each item of the form at its index."""

    def form(value: Any, where: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) != len(forms):
            raise refuse(where, value, f"a list of {len(forms)} items")
        for number, (each, inner) in enumerate(zip(value, forms, strict=True)):
            inner(each, f"{where}[{number}]")

    return form


def mapping(keys: Form, values: Form) -> Form:
    """Accept mappings whose keys and values have the given forms."""

    def form(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refuse(where, value, "a mapping")
        for key, each in value.items():
            keys(key, f"a name in {where or 'it'}")
            values(each, _under(where, key))

    return form


def record(fields: Mapping[str, Form], **optionals: Form) -> Form:
    """Accept mappings with these fields; `optionals` may be missing. Other fields are ignored."""

    def form(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise refuse(where, value, "a mapping of fields")
        for name in fields:
            if name not in value:
                raise FormError(f"{_under(where, name)} is missing")
        for name, inner in (*fields.items(), *optionals.items()):
            if name in value:
                inner(value[name], _under(where, name))

    return form


def _under(where: str, key: object) -> str:
    name = str(key) if len(str(key)) <= _SHOWN else f"{str(key)[:_SHOWN]}..."
    return f"{where}.{name}" if where else name


def file_name(value: Any, where: str) -> None:
    """Accept names of files in a folder, but no name that leads out of it."""
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in (".", ".."):
        raise refuse(where, value, "the name of a file in the same folder")


def file_path(value: Any, where: str) -> None:
    """Accept paths of files in a folder or below it, but no path that leads out of it."""
    if not isinstance(value, str) or not value:
        raise refuse(where, value, "a path within the same folder")
    for part in value.split("/"):
        if not _NAME.fullmatch(part) or part in (".", ".."):
            raise refuse(where, value, "a path within the same folder")


# -- files ----------------------------------------------------------------------------------------
def read_file(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the content of a regular file of limited size.

    Raises:
        OSError: it cannot be opened or read.
        FormError: it is a pipe, a device or a directory, or has more than `most_bytes`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no wait on a pipe
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise FormError("it is not a regular file")
        if found.st_size > most_bytes:
            raise FormError(f"it has {found.st_size} bytes, but at most {most_bytes} are allowed")
        return file.read(most_bytes)


def read_text(path: Path, most_bytes: int) -> str:
    """Return the content of a file as text; raises as `read_file` does."""
    try:
        return read_file(path, most_bytes).decode()
    except UnicodeDecodeError as error:
        raise FormError(f"it is not text: {error}") from error


def parse_json(raw: str | bytes) -> Any:
    """Parse JSON text without repeated names in a mapping, NaN, infinities or very deep nesting.

    Raises:
        FormError: the text is not such JSON.
    """
    try:
        return json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise FormError("it is nested too deep") from None
    except FormError:
        raise
    except ValueError as error:  # also bytes that are not text, and numbers of too many digits
        raise FormError(f"it is truncated or not JSON ({error})") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = sorted(name for name, _ in pairs)
        twice = next(a for a, b in itertools.pairwise(names) if a == b)
        raise FormError(f"{twice!r} is given twice")
    return found


def _no_constant(name: str) -> None:
    raise FormError(f"it has a number {name}")
