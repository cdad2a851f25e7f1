"""The public names and signatures are a contract: what 52b680f had is still there and called alike.

goldens/public_api.json was written by `ZEROFX_UPDATE_GOLDENS=1 pytest` of this file at commit
52b680f. A later commit may add names, methods and parameters that have a default.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
import typer.main

import zerofx
import zerofx.tools.cli

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
GOLDEN = Path(__file__).parents[1] / "goldens" / "public_api.json"
# Defaults that were changed since.
CHANGED: dict[tuple[str, str], tuple[str, str]] = {}


def parameters(function: Any) -> list[list[str]]:
    """Return [name, kind, default] of each parameter, without addresses in memory."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # an exception class that takes whatever its base takes
        return []
    return [
        [p.name, p.kind.name, "" if p.default is p.empty else ADDRESS.sub("", repr(p.default))]
        for p in signature.parameters.values()
    ]


def entries(name: str, value: Any) -> dict[str, Any]:
    """Return what is promised of one public name, and of the public methods of a class."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return {name: "value"}  # caught by users, made by zerofx
    if inspect.isclass(value):
        found: dict[str, Any] = {name: parameters(value)}
        own = [c for c in value.__mro__ if c.__module__.startswith("zerofx")]
        methods = {key for c in own for key in vars(c) if not key.startswith("_")}
        if issubclass(value, torch.optim.Optimizer):
            methods &= set(dir(torch.optim.Optimizer))  # the rest is how ours is built
        for key in sorted(methods):
            attribute = inspect.getattr_static(value, key)
            is_called = inspect.isfunction(attribute) or isinstance(attribute, classmethod)
            found[f"{name}.{key}"] = parameters(getattr(value, key)) if is_called else "value"
        if dataclasses.is_dataclass(value):
            found |= {f"{name}.{f.name}": "value" for f in dataclasses.fields(value)}
        return found
    return {name: parameters(value) if callable(value) else "value"}


def public_api() -> dict[str, Any]:
    """Return every public name of the library and of the command line."""
    from zerofx import errors, nvme, optim

    found: dict[str, Any] = {}
    for name in zerofx.__all__:
        found |= entries(f"zerofx.{name}", getattr(zerofx, name))
    for module in (optim, nvme):
        for name in module.__all__:
            found |= entries(f"{module.__name__}.{name}", getattr(module, name))
    for name, value in vars(errors).items():
        if inspect.isclass(value) and value.__module__ == errors.__name__:
            found[f"zerofx.errors.{name}"] = "value"
    command: Any = typer.main.get_command(zerofx.tools.cli.app)
    for name, each in sorted(command.commands.items()):
        found[f"zerofx {name}"] = "value"
        for parameter in each.params:
            for option in parameter.opts:
                found[f"zerofx {name} {option}"] = "value"
    return found


def test_what_was_public_still_is() -> None:
    now = public_api()
    if os.environ.get("ZEROFX_UPDATE_GOLDENS"):
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in now.items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    before = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert not sorted(before.keys() - now.keys())
    for name, old in before.items():
        new = now[name]
        if old == "value":
            continue
        assert new != "value", f"{name} was called, and is a value now"
        kept = [p for p in new if p[0] in {o[0] for o in old}]
        for place, (param, kind, default) in enumerate(old):
            was, becomes = CHANGED.get((name, param), ("", ""))
            if was and default == was:
                old[place] = [param, kind, becomes]
        assert kept == old, f"{name}: the parameters {old} are now {new}"
        added = [p for p in new if p not in kept]
        assert all(p[2] or p[1].startswith("VAR") for p in added), f"{name}: {added} need defaults"


def test_a_parameter_that_goes_is_noticed() -> None:
    def function(model: Any, plan: Any = None) -> None: ...

    assert parameters(function) == [
        ["model", "POSITIONAL_OR_KEYWORD", ""],
        ["plan", "POSITIONAL_OR_KEYWORD", "None"],
    ]
