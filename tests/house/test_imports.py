"""Imports go one way, and foreign packages stay in their rooms.

Read from the syntax trees, so that imports inside functions and under TYPE_CHECKING count too. At
the end a training in a process of its own shows what is really loaded.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "zerofx"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each room may import of zerofx: these rooms, and what they in turn stand on. A room is a
# folder or a top-level file; in analysis and tools, each folder or file within. "zerofx" is the
# face, zerofx/__init__.py. The core imports no tool.
NESTED = ("analysis", "tools")
LEAVES = {"errors", "plan", "compat", "schema"}  # errors, and below it nothing
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "schema": set(),
    "compat": {"errors"},
    "plan": {"errors", "schema"},
    "hardware": {"errors", "plan"},
    "layout": LEAVES,
    "process": set(),
    "versions": {"errors"},
    "policy": {"layout", "process"},
    "kernels": {"compat"},
    "comm": {"policy"} | LEAVES,
    "nvme": LEAVES,
    "runtime": {"comm", "nvme", "kernels", "policy", "layout", "process"} | LEAVES,
    "ir": {"runtime", "hardware"} | LEAVES,
    "analysis.memory": {"ir"},
    "analysis.time": {"analysis.memory", "hardware"},
    "analysis.recompute": {"analysis.memory", "analysis.time"},
    "codegen": {"ir"},
    "ops": {"analysis.memory", "analysis.time", "codegen", "ir"},
    "passes": {"ops", "analysis.recompute", "hardware"},
    "capture": {"ir"},
    "model": {"capture", "passes", "codegen", "runtime", "plan"},
    "snapshot": {"model", "runtime"},
    "optim": {"runtime", "plan"},
    "api": {"model", "snapshot", "capture", "passes", "codegen", "plan", "hardware", "optim"},
    "zerofx": {
        "api",
        "optim",
        "nvme",
        "tools.record",
        "tools.meter",
        "tools.predict",
        "tools.progress",
        "tools.search",
        "versions",
    },
    "integrations": {"zerofx"},
    "tools.words": set(),
    "tools.room": set(),
    "tools.targets": {"errors", "tools.words"},
    "tools.views": {"analysis.time", "tools.words", "tools.room"},
    "tools.reports": {"tools.views", "model", "ir"},
    "tools.record": {"model", "tools.views", "tools.words", "analysis.time", "runtime"},
    "tools.search": {"api", "hardware", "tools.targets", "tools.views", "tools.words"},
    "tools.predict": {"tools.search", "tools.reports", "tools.targets", "api", "hardware"},
    "tools.demo": {"zerofx"},
    "tools.trial": {"zerofx", "tools.targets", "tools.words"},
    "tools.doctor": {"zerofx"},
    "tools.postmortem": {"comm"},
    "tools.meter": {"model", "analysis.time", "hardware"},
    "tools.progress": {"tools.meter", "hardware"},
    "tools.calibrate": {"zerofx", "analysis.time", "hardware", "optim", "nvme", "tools.words"},
    "tools.cli": {
        "tools.calibrate",
        "tools.demo",
        "tools.doctor",
        "tools.postmortem",
        "tools.predict",
        "tools.reports",
        "tools.room",
        "tools.search",
        "tools.targets",
        "tools.trial",
        "tools.views",
    },
    "__main__": {"tools.cli"},
}
BARE = {"errors", "compat", "layout", "policy", "kernels", "comm", "nvme", "runtime", "schema"}

# What a module imports against BELOW, inside functions and for types only, and why it may.
WHEN_CALLED: dict[str, tuple[set[str], str]] = {
    "zerofx.ir.program": (
        {"tools.reports", "tools.views", "codegen"},
        "program.schedule() and its like are methods, and their views are loaded when called",
    ),
}

# Foreign packages: what pyproject.toml depends on, and where. `ANYWHERE` includes the rooms that an
# emitted module needs, which import nothing else (`BARE`).
ANYWHERE = {"torch", "numpy"}
DEPENDENCIES = {"networkx", "jinja2", "typer", "rich", "tqdm", "yaml", "safetensors"}
OPTIONAL = {"scipy", "transformers", "triton", "wandb", "lightning", "torchmetrics", "accelerate"}
# Optional packages are imported inside functions only, but for the files of their users alone.
OWN = {
    "zerofx.integrations.accelerate": {"accelerate"},
    "zerofx.integrations.lightning": {"lightning", "torchmetrics"},
    "zerofx.integrations.trainer_meter": {"transformers"},
    "zerofx.integrations.transformers": {"transformers", "accelerate"},
}
ONLY_IN = {
    "networkx": {"analysis.memory", "analysis.recompute", "analysis.time", "passes", "ir"},
    "jinja2": {"codegen", "tools.views"},
    "typer": {"tools.cli"},
    "rich": {"tools.cli", "tools.views", "tools.demo", "tools.progress", "api"},
    "triton": {"kernels", "codegen"},
}


def room_of(module: str) -> str:
    """Return the room of a dotted module name: `zerofx.passes.base` is in `passes`."""
    first, *rest = module.split(".")[1:] or ["zerofx"]
    return f"{first}.{rest[0]}" if first in NESTED and rest else first


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Yield every imported dotted name, `from a.b import c` as `a.b.c`, relative ones resolved."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


@cache
def allowed(room: str) -> frozenset[str]:
    """Return the rooms that `room` may import, following BELOW downwards."""
    reached: set[str] = set()
    todo = [room]
    while todo:
        new = BELOW[todo.pop()] - reached
        reached |= new
        todo += new
    return frozenset(reached)


def rooms_imported(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    for node, name in imports(path):
        if name == "zerofx" or name.startswith("zerofx."):
            # `from zerofx import errors` names a room, `from zerofx import compile` the face.
            room = room_of(name)
            path_of_room = PACKAGE / room.replace(".", "/")
            is_room = path_of_room.is_dir() or path_of_room.with_suffix(".py").exists()
            yield node, room if is_room else "zerofx"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(module_of(path))
    if room in NESTED:  # the package itself, which has nothing in it
        assert not tree_of(path).body[1:]
        return
    assert room in BELOW, f"{room}: a new room needs its line in BELOW, and one in docs/layout.md"
    top_level = set(map(id, tree_of(path).body))
    when_called, _ = WHEN_CALLED.get(module_of(path), (set(), ""))
    for node, target in rooms_imported(path):
        if target in when_called and id(node) not in top_level:
            continue
        assert target == room or target in allowed(room), (
            f"{path.relative_to(ROOT)}:{node.lineno} imports zerofx.{target}; "
            f"{room} may import {', '.join(sorted(allowed(room))) or 'nothing of zerofx'}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_foreign_packages_are_declared_and_in_their_rooms(path: Path) -> None:
    room = room_of(module_of(path))
    top_level = set(map(id, tree_of(path).body))
    for node, name in imports(path):
        package = name.split(".")[0]
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        if package in sys.stdlib_module_names or package == "zerofx" or package in ANYWHERE:
            continue
        assert package in DEPENDENCIES | OPTIONAL, f"{where}: {package} is not a dependency"
        assert room not in BARE or package == "triton", (
            f"{where}: {room} imports torch, numpy and the standard library only"
        )
        rooms = ONLY_IN.get(package)
        assert rooms is None or room in rooms, f"{where}: {package} belongs to {sorted(rooms)}"
        is_own = package in OWN.get(module_of(path), ())
        assert package not in OPTIONAL or is_own or id(node) not in top_level, (
            f"{where}: {package} is optional; import it where it is used"
        )


def defines_a_pass(path: Path) -> bool:
    return any(
        isinstance(node, ast.ClassDef)
        and any(isinstance(b, ast.Name) and b.id == "Pass" for b in node.bases)
        for node in tree_of(path).body
    )


def test_passes_do_not_import_one_another() -> None:
    """A pass file stands on the shared files of its folder, never on another pass."""
    folder = PACKAGE / "passes"
    passes = {module_of(path): path for path in folder.glob("*.py") if defines_a_pass(path)}
    assert len(passes) > 10
    for module, path in passes.items():
        for node, name in imports(path):
            target = name.rsplit(".", 1)[0]
            assert target == module or target not in passes, (
                f"{path.relative_to(ROOT)}:{node.lineno} imports the pass file {target}"
            )


def test_patterns_are_no_passes() -> None:
    """A pattern file says what to replace by what; of passes it imports its own folder only."""
    patterns = sorted((PACKAGE / "passes" / "patterns").glob("*.py"))
    assert patterns
    for path in patterns:
        assert not defines_a_pass(path), f"{path.relative_to(ROOT)} defines a pass; move it up"
        for node, name in imports(path):
            is_inside = name.startswith("zerofx.passes.patterns.")
            assert is_inside or not name.startswith("zerofx.passes"), (
                f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
            )


TRAINING = """
import sys, torch, zerofx
model = zerofx.compile(torch.nn.Linear(4, 4), {"kernels": "aten"})
optimizer = zerofx.optim.AdamW(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(*(name for name in sys.modules if name.startswith("zerofx.")))
"""


def test_training_loads_no_tool() -> None:
    """A compile and a step leave views, the command line, search and the rest where they are."""
    ran = subprocess.run(
        [sys.executable, "-c", TRAINING], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    loaded = ran.stdout.split()
    assert "zerofx.model.module" in loaded
    others = ("zerofx.tools.", "zerofx.integrations", "zerofx.plan.ds_")
    assert [name for name in loaded if name.startswith(others)] == []


def test_files_that_are_no_modules_are_installed_too() -> None:
    """Every template and preset in the package is named by package-data in pyproject.toml."""
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("package-data]")[2]
    patterns = re.findall(r'"([^"]+)"', table.partition("]")[0])
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    there = {p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert {p for p in there if p.suffix != ".py"} == installed


def test_the_rules_are_seen() -> None:
    """Rooms are read from names, and what a room may import is followed downwards."""
    assert room_of("zerofx") == "zerofx"
    assert room_of("zerofx.passes.base") == "passes"
    assert room_of("zerofx.tools.views.look") == "tools.views"
    assert "api" not in allowed("passes") and "ir" in allowed("tools.views")
    core = {room for room in BELOW if not room.startswith("tools.")}
    core -= {"zerofx", "__main__", "integrations"}
    assert [room for room in core if any(r.startswith("tools.") for r in allowed(room))] == []
    assert allowed("runtime") == (BARE - {"runtime"}) | {"plan", "process"}
