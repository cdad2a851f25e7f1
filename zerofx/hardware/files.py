"""Hardware by name or file: the presets, and files that build on one."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from zerofx.errors import PlanError
from zerofx.fields import check_names, load_mapping, refuse
from zerofx.hardware.description import KNOWN_FIELDS, UNSOURCED, Hardware

NODES = Path(__file__).parent / "nodes"
OPTIONAL = ("curves", "sources")
MERGED = ("dense_flops_per_s", *OPTIONAL)


def hardware_names() -> list[str]:
    """List the presets, in the order of their names."""
    return sorted(path.stem for path in NODES.glob("*.yaml"))


def load_hardware(name_or_path: str | os.PathLike[str]) -> Hardware:
    """Return the preset of that name, or what a YAML or JSON file describes.

    `base: dgx-h100` in a file takes from that preset (or file, from the folder of this one) what
    it leaves out; entries of `dense_flops_per_s`, `curves` and `sources` are added to the base's.
    What a file changes without a source is said to be given there.

    Raises:
        PlanError: no such preset, or a field that is unknown, missing or out of range.
    """
    if isinstance(name_or_path, os.PathLike) or Path(name_or_path).suffix in (
        ".yaml", ".yml", ".json"
    ):  # fmt: skip
        return _from_file(Path(name_or_path), ())
    return _preset(str(name_or_path))


@cache
def _preset(name: str) -> Hardware:
    known = hardware_names()
    if name not in known:
        longer = [each for each in known if name and name.lower() in each]
        close = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise PlanError(
            f"unknown hardware {name!r}; {hint}known are {', '.join(known)}, or give a file that "
            "ends in .yaml, .yml or .json"
        )
    return _from_file(NODES / f"{name}.yaml", ())


def _from_file(path: Path, above: tuple[Path, ...]) -> Hardware:
    path = path.resolve()
    if path in above:
        raise PlanError(f"hardware file {path} is a base of itself: {' -> '.join(map(str, above))}")
    given = load_mapping(path, "hardware")
    base = given.pop("base", None)
    try:
        check_names("hardware", given, KNOWN_FIELDS)
        # A preset's sources are complete, and a test says so; a user's file need not name any.
        if path.parent != NODES.resolve():
            given["sources"] = {**_given_in(path, given), **_mapping("sources", given)}
        return Hardware(**_complete(path, given, base, (*above, path)))
    except PlanError as error:
        raise PlanError(f"hardware file {path}: {error}") from error


def _given_in(path: Path, given: Mapping[str, Any]) -> dict[str, str]:
    curves = _mapping("curves", given)
    fields = [name for name in given if name not in UNSOURCED]
    return {str(name): f"given in {path.name}" for name in (*fields, *curves)}


def _complete(
    path: Path, given: dict[str, Any], base: Any, above: tuple[Path, ...]
) -> dict[str, Any]:
    if base is None:
        missing = [n for n in KNOWN_FIELDS if n not in given and n not in OPTIONAL]
        if missing:
            raise PlanError(
                f"leaves out {', '.join(missing)}; set them, or name a preset that has them: "
                f"base: {hardware_names()[0]}"
            )
        return given
    if not isinstance(base, str):
        raise refuse("base", base, "is the name of a preset or a file")
    is_file = Path(base).suffix in (".yaml", ".yml", ".json")
    found = _from_file(path.parent / base, above) if is_file else _preset(base)
    complete = found.to_dict() | given
    for name in MERGED:
        complete[name] = {**getattr(found, name), **_mapping(name, given)}
    return complete


def _mapping(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise refuse(f"Hardware.{name}", value, "is a mapping")
    return value


def write_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> None:
    """Write a YAML file that `load_hardware` reads back: a field, curve or source a line."""
    lines = []
    for name, value in hardware.to_dict().items():
        if not isinstance(value, dict):
            lines.append(f"{name}: {_plain(value)}")
            continue
        lines.append(f"{name}:" if value else f"{name}: {{}}")
        lines += [f"  {key}: {_plain(each)}" for key, each in value.items()]
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"hardware file {path} cannot be written: {error.strerror}") from error


def _plain(value: Any) -> str:
    """Write one value on one line; YAML takes a number with an exponent for text without a dot."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if isinstance(value, float):
        digits, e, exponent = repr(value).partition("e")
        return digits + ("" if "." in digits or not e else ".0") + e + exponent
    return json.dumps(value, ensure_ascii=False)
