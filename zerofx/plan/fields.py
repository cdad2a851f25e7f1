"""Readers of user-written fields: one per kind; each error names the field and the fix.

A reader takes (where, value) and returns the value in its canonical form, or raises PlanError.
`spec_field` ties a reader to a dataclass field; `read_fields` runs them from `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import yaml

from zerofx.errors import PlanError, as_sentence
from zerofx.plan.sizes import parse_bytes
from zerofx.schema import read_text, shown

Reader = Callable[[str, Any], Any]


class Patterns(Mapping[str, Any]):
    """An ordered, immutable, hashable mapping from name patterns to choices.

    `match(name)` returns the choice of the first pattern that covers `name` (see `covers`).
    """

    __slots__ = ("_pairs",)

    def __init__(self, choices: Mapping[str, Any]) -> None:
        self._pairs = tuple(choices.items())

    def __getitem__(self, pattern: str) -> Any:
        return dict(self._pairs)[pattern]

    def __iter__(self) -> Any:
        return (pattern for pattern, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(frozenset(self._pairs))

    def __eq__(self, other: object) -> bool:
        # Unlike in dicts, order counts: it decides which pattern matches first.
        return self._pairs == other._pairs if isinstance(other, Patterns) else NotImplemented

    def __repr__(self) -> str:
        return repr(dict(self._pairs))

    def match(self, name: str) -> Any | None:
        """Return the choice of the first pattern that covers `name`, or None."""
        return next((choice for pattern, choice in self._pairs if covers(pattern, name)), None)


def covers(pattern: str, name: str) -> bool:
    """Return whether `pattern` names `name` itself or a module that contains it.

    `*` and `?` match within one dotted component: `blocks.*` covers `blocks.3` and therefore its
    content, such as `blocks.3.mlp.fc1`; `*.mlp` covers neither.
    """
    want, have = pattern.split("."), name.split(".")
    return len(want) <= len(have) and all(map(fnmatchcase, have, want))


def refuse(where: str, value: object, allowed: str, way_out: str = "") -> PlanError:
    """Build the error for one bad value: field, value, allowed values, fix."""
    fix = f" {as_sentence(way_out)}" if way_out else ""
    return PlanError(f"{where} = {shown(value)}: allowed {allowed}.{fix}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `. Did you mean 'x'?` for the closest known name, or else a list of all names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f". Did you mean {close[0]!r}?" if close else f". Known are {', '.join(known)}."


def check_names(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Refuse the first unknown name in `given`, and suggest the nearest known one."""
    known = list(known)
    for name in given:
        if name not in known:
            raise PlanError(f"unknown {what} field {name!r}{nearest(str(name), known)}")


def one_of(*choices: Any) -> Reader:
    """Accept one of `choices`, of the same type (True is not 1)."""

    def read(where: str, value: Any) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        texts = [c for c in choices if isinstance(c, str)]
        close = difflib.get_close_matches(value, texts, n=1) if isinstance(value, str) else []
        way_out = f"Did you mean {close[0]!r}?" if close else ""
        raise refuse(where, value, "are " + ", ".join(map(repr, choices)), way_out)

    return read


def flag(where: str, value: Any) -> bool:
    """Accept True or False."""
    return one_of(False, True)(where, value)


def whole(least: int) -> Reader:
    """Accept a whole number of at least `least`."""

    def read(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise refuse(where, value, f"are whole numbers from {least}")
        return value

    return read


def real(least: float, most: float = float("inf"), above: bool = False) -> Reader:
    """Accept a number in [least, most], or in (least, most] if `above`."""

    def read(where: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most or (above and value == least):
            bounds = f"above {least:g}" if above else f"from {least:g}"
            limit = f" to {most:g}" if most != float("inf") else ""
            raise refuse(where, value, f"are numbers {bounds}{limit}")
        return float(value)

    return read


def size(least: int) -> Reader:
    """Accept a number of bytes of at least `least` (see `parse_bytes`)."""

    def read(where: str, value: Any) -> int:
        num_bytes = parse_bytes(value, where)
        if num_bytes < least:
            raise refuse(where, value, f"are sizes from {least} B")
        return num_bytes

    return read


def text(where: str, value: Any) -> str:
    """Accept a non-empty string or a path object."""
    value = str(value) if isinstance(value, Path) else value
    if not isinstance(value, str) or not value:
        hint = f"If it is a name, quote it: '{value}'" if type(value) in (int, float, bool) else ""
        raise refuse(where, value, "is a non-empty string", hint)
    return value


def optional(reader: Reader) -> Reader:
    """Accept None, or any value that `reader` accepts."""
    return lambda where, value: None if value is None else reader(where, value)


def either(word: str, reader: Reader) -> Reader:
    """Accept the word itself, or any value that `reader` accepts."""

    def read(where: str, value: Any) -> Any:
        if isinstance(value, str) and value == word:
            return word
        try:
            return reader(where, value)
        except PlanError as error:
            raise PlanError(f"{error} {word!r} is allowed too.") from None

    return read


def patterns(choice: Reader) -> Reader:
    """Accept a mapping from name patterns to values that `choice` accepts."""

    def read(where: str, value: Any) -> Patterns:
        if not isinstance(value, Mapping) or not value:
            raise refuse(where, value, "is a non-empty mapping from name patterns to choices")
        return Patterns({text(where, p): choice(f"{where}[{p!r}]", c) for p, c in value.items()})

    return read


def spec_field(default: Any, reader: Reader) -> Any:
    """Declare a dataclass field with its default and its reader."""
    return dataclasses.field(default=default, metadata={"reader": reader})


def read_fields(spec: Any, name: str) -> None:
    """Convert every field of a frozen dataclass to its canonical form; call in `__post_init__`."""
    for f in dataclasses.fields(spec):
        value = f.metadata["reader"](f"{name}.{f.name}", getattr(spec, f.name))
        object.__setattr__(spec, f.name, value)


_STR, _NULL, _BOOL = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool"))
_INT, _FLOAT, _MERGE = (f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "merge"))


class _Loader(yaml.SafeLoader):
    """YAML with the plain scalars of version 1.2: `off`, dates and `1:30` are strings.

    Keys of a mapping are names, so each key is kept as written (`0`, `on`, `null`).
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping from names; a repeated name is an error."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    said = f"{key.value!r} is given twice. Keep one"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
                seen.add(key.value)
        self.flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = _STR
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader`, or a YAML 1.1 reader, would read as another type."""


for _tag, _form, _first in (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    (_MERGE, r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_form})\Z"), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_form})\Z"), _first)
_Loader.add_constructor(_MERGE, yaml.SafeLoader.construct_yaml_str)  # `<<` as a value, not a key


def write_yaml(value: Any, *, is_flow: bool = False) -> str:
    """Return plain values as YAML, which `read_mapping` and `read_value` read back unchanged.

    is_flow: write one line, suitable for a command line.
    """
    width = 10**6 if is_flow else 80
    said = yaml.dump(value, None, _Dumper, sort_keys=False, default_flow_style=is_flow, width=width)
    return said.removesuffix("...\n").strip() if is_flow else said


def read_value(source: str, what: str) -> Any:
    """Parse one YAML value, such as the value in `--set field=value`; `what` starts every error."""
    try:
        loader = _Loader(source)
        node = loader.get_single_node()
        if _num_values(node, {}) > _MOST_VALUES:
            raise ValueError(f"it has over {_MOST_VALUES} values once its aliases are expanded.")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise PlanError(f"{what} is not YAML: {as_sentence(error)}") from error
    except RecursionError:
        raise PlanError(f"{what} is nested too deep.") from None


_MOST_BYTES, _MOST_VALUES = 16 << 20, 1_000_000


def _num_values(node: Any, known: dict[int, int | None]) -> int:
    """Return the number of values of a YAML document once its aliases are expanded.

    Raises:
        ValueError: a value contains itself.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in known:
        if (count := known[id(node)]) is None:
            raise ValueError("an alias refers to a value that contains it.")
        return count
    known[id(node)] = None
    pairs = isinstance(node, yaml.MappingNode)
    parts = [part for item in node.value for part in (item if pairs else (item,))]
    known[id(node)] = count = 1 + sum(_num_values(part, known) for part in parts)
    return count


def read_mapping(source: str, what: str, is_json: bool = False) -> dict[str, Any]:
    """Parse YAML or JSON text that must hold a mapping; `what` starts every error."""
    if is_json:
        try:
            content = json.loads(source, object_pairs_hook=_once)
        except ValueError as error:
            raise PlanError(f"{what} is not JSON: {as_sentence(error)}") from error
        except RecursionError:
            raise PlanError(f"{what} is nested too deep.") from None
    else:
        content = read_value(source, what)
    if not isinstance(content, dict):
        raise PlanError(f"{what} holds {type(content).__name__}, not a mapping of fields.")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is given twice. Keep one.")
    return dict(pairs)


def load_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read the mapping in a `.yaml`, `.yml` or `.json` file; every error names the file."""
    what = f"{what} file {path}"
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise PlanError(f"{what}: the name must end in .yaml, .yml or .json.")
    try:
        source = read_text(path, _MOST_BYTES)
    except OSError as error:
        raise PlanError(f"{what}: {error.strerror}. Give an existing file.") from error
    except ValueError as error:  # also raised for a path with a null character
        raise PlanError(f"{what}: {as_sentence(error)}") from error
    return read_mapping(source, what, is_json=path.suffix == ".json")
