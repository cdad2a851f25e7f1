"""Imports go one way, and foreign packages stay in their rooms.

Read from the syntax trees, so that imports inside functions and under TYPE_CHECKING count too. At
the end a training in a process of its own shows what is really loaded.
"""

from __future__ import annotations

import ast
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
# folder or a top-level file; "zerofx" is the face, zerofx/__init__.py.
LEAVES = {"errors", "sizes", "fields", "compat"}  # errors, and below it nothing
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "compat": {"errors"},
    "collector": set(),
    "sizes": {"errors"},
    "fields": {"errors", "sizes"},
    "plan_parts": {"errors", "sizes", "fields"},
    "plan_rules": {"errors", "sizes", "fields", "plan_parts", "plan"},  # plan: for its type only
    "plan": {"errors", "sizes", "fields", "plan_parts", "plan_rules"},
    "hardware": {"errors", "sizes", "fields"},
    "runtime": {"errors", "sizes", "compat", "collector"},
    "nvme": {"runtime"},
    "ir": {"runtime", "hardware", "plan"} | LEAVES,
    "analysis": {"ir", "hardware"},
    "views": {"analysis"},
    "codegen": {"ir"},
    "ops": {"analysis", "codegen", "ir"},
    "passes": {"ops", "analysis", "ir", "plan", "hardware"},
    "capture": {"ir"},
    "compiled": {"capture", "passes", "codegen", "runtime", "plan"},
    "snapshot": {"compiled", "runtime"},
    "optim": {"runtime", "fields"},
    "reports": {"views", "compiled", "ir"},
    "recording": {"compiled", "views", "analysis", "runtime"},
    "targets": {"errors"},
    "predicting": {"api", "reports", "views", "hardware", "targets", "searching"},
    "searching": {"api", "views", "hardware", "targets"},
    "api": {"compiled", "snapshot", "capture", "passes", "codegen", "plan", "hardware", "optim"},
    "zerofx": {"api", "optim", "nvme", "recording", "predicting", "searching"},
    "demo": {"zerofx"},
    "trial": {"api", "zerofx", "targets", "optim", "plan", "ir"},
    "doctor": {"api", "zerofx"},
    "calibrate": {"api", "zerofx", "hardware", "optim", "nvme", "ir", "runtime"},
    "cli": {
        "api",
        "reports",
        "views",
        "demo",
        "doctor",
        "calibrate",
        "targets",
        "trial",
        "zerofx",
        "predicting",
        "searching",
    },
    "__main__": {"cli"},
}

# What a module imports against BELOW, inside functions and for types only, and why it may.
WHEN_CALLED: dict[str, tuple[set[str], str]] = {
    "zerofx.ir.program": (
        {"reports", "views", "codegen"},
        "program.schedule() and its like are methods, and their views are loaded when called",
    ),
}

# What a training loop does not load.
TOOLS = (
    "views", "reports", "cli", "demo", "searching", "recording", "calibrate", "trial", "predicting",
    "doctor", "targets",
)  # fmt: skip

# Foreign packages: what pyproject.toml depends on, and where. `ANYWHERE` includes the runtime.
ANYWHERE = {"torch", "numpy"}
DEPENDENCIES = {"networkx", "jinja2", "typer", "rich", "tqdm", "yaml", "safetensors"}
OPTIONAL = {"scipy", "transformers", "triton"}  # imported inside functions only
ONLY_IN = {
    "networkx": {"analysis", "passes", "ir"},
    "jinja2": {"codegen", "views"},
    "typer": {"cli"},
    "rich": {"cli", "views", "demo", "api"},
    "triton": {"runtime", "codegen"},
}


def room_of(module: str) -> str:
    """Return the room of a dotted module name: `zerofx.passes.base` is in `passes`."""
    return module.split(".")[1] if "." in module else "zerofx"


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
            is_room = (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists()
            yield node, room if is_room else "zerofx"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = room_of(module_of(path))
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
        assert room not in ("runtime", "compat", "errors") or package == "triton", (
            f"{where}: {room} imports torch, numpy and the standard library only"
        )
        rooms = ONLY_IN.get(package)
        assert rooms is None or room in rooms, f"{where}: {package} belongs to {sorted(rooms)}"
        assert package not in OPTIONAL or id(node) not in top_level, (
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
    assert [name for name in loaded if room_of(name) in TOOLS] == []


def test_the_rules_are_seen() -> None:
    """Rooms are read from names, and what a room may import is followed downwards."""
    assert room_of("zerofx") == "zerofx"
    assert room_of("zerofx.passes.base") == "passes"
    assert "api" not in allowed("passes") and "ir" in allowed("views")
    assert allowed("runtime") == {"errors", "sizes", "compat", "collector"}
