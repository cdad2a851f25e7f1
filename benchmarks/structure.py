"""Structure of zerofx: the files that a value passes through, and the shape of the package.

    python -m benchmarks.structure                  # all of it
    python -m benchmarks.structure --write-layout   # only the list of files in docs/layout.md

Walks: the distinct modules of `zerofx/` in which a Python function runs, counted by a profile hook
on all threads of rank 0 of two. The model is a GPT of two blocks on ATen. The walks are its first
call (capture, passes, code generation, binding), a warm forward, a warm backward, a rewrite under a
memory budget, and a warm optimizer step with everything on NVMe.
Import: CPU seconds of the imports of a training script, beyond torch's own, in fresh processes.
Shape: modules, lines, import cycles, classes with exactly one concrete subclass, folders with more
than `FOLDER_LIMIT` modules, modules with a single importer.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import networkx
import torch

import zerofx
from benchmarks.pool import Group
from benchmarks.report import Column, finish
from zerofx.tools.demo.gpt import GPT, GPTConfig

PACKAGE = Path(zerofx.__file__).parent
CONFIG = GPTConfig(layers=2, width=32, heads=2, seq=16)
FOLDER_LIMIT = 16
FOREIGN = ("torch", "nn")  # packages whose classes may have the same names as ours
RANKS = 2
IMPORTS_TIMED = 8


class Watch:
    """A profile hook on this thread and on every thread that starts after it."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and self._seen is not None:
            self._seen.add(frame.f_code.co_filename)

    def during(self, run: Callable[[], Any]) -> set[str]:
        """Return the files whose functions `run` enters."""
        self._seen = seen = set[str]()
        try:
            run()
        finally:
            self._seen = None
        return seen


def walked(watch: Watch, run: Callable[[], Any]) -> set[str]:
    """Return the modules of zerofx, relative to the package, whose functions `run` enters."""
    seen = watch.during(run)
    root = str(PACKAGE)
    return {name[len(root) + 1 :] for name in seen if name.startswith(root + "/")}


def _model(plan: zerofx.Plan) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model = zerofx.compile(GPT(CONFIG), plan, device="cpu")
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.randint(0, CONFIG.vocab, (2, CONFIG.seq))


class Job:
    """Job of a worker: the walks of one rank."""

    def walks(self, folder: str) -> dict[str, list[str]]:
        """Return, for each walk, the modules that it enters; `folder` is for files on NVMe."""
        return {name: sorted(files) for name, files in walks(folder).items()}


def walks(folder: str) -> dict[str, set[str]]:
    """Return, for each walk, the modules that it enters on this rank."""
    watch = Watch()
    found: dict[str, set[str]] = {}
    model, optimizer, tokens = _model(zerofx.Plan(kernels="aten"))
    found["first call"] = walked(watch, lambda: model(tokens, tokens))
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    found["warm forward"] = walked(watch, lambda: losses.append(model(tokens, tokens)))
    found["warm backward"] = walked(watch, lambda: losses[0].backward())
    captured = zerofx.capture(GPT(CONFIG), (tokens, tokens))
    free = zerofx.rewrite(captured, zerofx.Plan(kernels="aten"), 4)
    budget = int(free.memory().peak_bytes * 0.95)
    plan = zerofx.Plan(kernels="aten", memory_budget=budget, activations="auto")
    found["rewrite under a budget"] = walked(watch, lambda: zerofx.rewrite(captured, plan, 4))
    away = {"parameters": "nvme", "optimizer": "nvme", "path": folder}
    model, optimizer, tokens = _model(zerofx.Plan(kernels="aten", offload=away))
    for _ in range(2):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(tokens, tokens).backward()
    found["NVMe step"] = walked(watch, optimizer.step)
    return found


def modules() -> dict[str, ast.Module]:
    """Return every module of the package by its dotted name."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("zerofx", *path.relative_to(PACKAGE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text())
    return trees


def imports(trees: dict[str, ast.Module]) -> networkx.DiGraph:
    """Return the graph of imports: statements that run at import, outside TYPE_CHECKING."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(trees)
    for name, tree in trees.items():
        for node in _executed(tree.body):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    targets.append(whole if whole in trees else node.module)
            graph.add_edges_from((name, t) for t in targets if t in trees and t != name)
    return graph


def _executed(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module that run at import, with blocks flattened."""
    found: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try | ast.With):
            found += _executed([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])
        else:
            found.append(node)
    return found


def lone_subclasses(trees: dict[str, ast.Module]) -> list[str]:
    """Return the concrete classes of the package with exactly one concrete subclass in it.

    A class with the same name as its base in torch (`Adam`) is not a subclass of itself. Exceptions
    are left out, because users catch them by either name.
    """
    children: dict[str, list[str]] = defaultdict(list)
    abstract: set[str] = {"Protocol"}
    names: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            names[node.name] += 1
            named = [ast.unparse(b).split("[")[0] for b in node.bases]
            bases = [b.rpartition(".")[2] for b in named if b.split(".")[0] not in FOREIGN]
            text = ast.unparse(node)
            if "abstractmethod" in text or "Protocol" in bases or "ABC" in bases:
                abstract.add(node.name)
            for base in bases:
                children[base].append(node.name)
    return sorted(
        base
        for base, subs in children.items()
        if base in names
        and base not in abstract
        and not base.endswith("Error")
        and len([s for s in subs if s not in abstract and s != base]) == 1
    )


IMPORTS = """
import sys, time, torch
began = time.process_time()
import zerofx
zerofx.compile, zerofx.Plan, zerofx.save, zerofx.load, zerofx.optim.AdamW
took = time.process_time() - began
print(took, *sorted(name for name in sys.modules if name.startswith("zerofx")))
"""


def imported() -> dict[str, Any]:
    """Return the CPU seconds (median of `IMPORTS_TIMED`) and the modules of an import."""
    seconds, names = [], []
    for _ in range(IMPORTS_TIMED):
        done = subprocess.run(
            [sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, text=True, check=True
        )
        took, *names = done.stdout.split()
        seconds.append(float(took))
    tools = [n for n in names if n.startswith("zerofx.tools.")]
    return {
        "import: CPU ms": round(statistics.median(seconds) * 1e3),
        "import: modules": len(names),
        "import: modules of tools": len(tools),
    }


def shape() -> dict[str, Any]:
    """Return the counts of the package's own structure."""
    trees = modules()
    graph = imports(trees)
    lines = sum(len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py"))
    folders = Counter(p.parent.relative_to(PACKAGE.parent) for p in PACKAGE.rglob("*.py"))
    lone = [n for n in trees if graph.in_degree(n) == 1]
    classes = Counter(
        n.name for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)
    )
    return {
        "modules": len(trees),
        "lines": lines,
        "import cycles": sum(len(c) > 1 for c in networkx.strongly_connected_components(graph)),
        "modules with one importer": len(lone),
        "classes with exactly one concrete subclass": len(lone_subclasses(trees)),
        "class names used more than once": sum(count > 1 for count in classes.values()),
        f"folders with more than {FOLDER_LIMIT} modules": sum(
            count > FOLDER_LIMIT for count in folders.values()
        ),
    }


LAYOUT = PACKAGE.parent / "docs" / "layout.md"
LISTING = "## Every file\n"  # start of the list in docs/layout.md, which continues to the end
# Folders in the order in which a model passes through them.
FOLDERS = (
    "",
    *("plan", "hardware", "layout", "policy", "capture", "ir", "ops", "passes", "passes/patterns"),
    *("analysis/memory", "analysis/time", "analysis/recompute", "codegen", "kernels", "model"),
    *(
        "runtime",
        "runtime/tensors",
        "runtime/store",
        "runtime/tiers",
        "runtime/wire",
        "runtime/regions",
    ),
    *(
        "runtime/cuda_graph",
        "comm",
        "nvme",
        "optim",
        "snapshot",
        "snapshot/sources",
        "integrations",
        "compat",
    ),
    *("tools", "tools/cli", "tools/views", "tools/predict", "tools/search", "tools/record"),
    *("tools/calibrate", "tools/trial", "tools/demo"),
)


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def listing() -> str:
    """Return the list of all modules with the first lines of their docstrings, folder by folder."""
    folders = [name for name in FOLDERS if (PACKAGE / name).is_dir()]
    found = {p.parent for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}
    missing = found - {PACKAGE / name for name in folders}
    assert not missing, f"FOLDERS of benchmarks/structure.py lacks {missing}"
    parts = [f"{LISTING}\n<!-- written by `python -m benchmarks.structure --write-layout` -->\n"]
    for name in folders:
        about = first_line(PACKAGE / name / "__init__.py")
        files = sorted(p for p in (PACKAGE / name).glob("*.py") if p.name != "__init__.py")
        rows = "".join(f"| `{p.name}` | {first_line(p)} |\n" for p in files)
        title = f"zerofx/{name}/" if name else "zerofx/"
        parts.append(f"### {title}\n\n{about}\n\n| file | what it is |\n|---|---|\n{rows}")
    return "\n".join(parts)


def write_layout() -> None:
    """Write the list of files in docs/layout.md."""
    text = LAYOUT.read_text(encoding="utf-8")
    LAYOUT.write_text(text[: text.index(LISTING)] + listing(), encoding="utf-8")


COLUMNS = [Column("what", "what"), Column("count", "count")]


def main() -> None:
    """Count, show and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write-layout", action="store_true", help="only write docs/layout.md")
    options = parser.parse_args()
    if options.write_layout:
        return write_layout()
    with Group("walks", "benchmarks.structure:Job", {}, RANKS, {}) as group:
        group.ready()
        with tempfile.TemporaryDirectory() as folder:
            found = group.call("walks", folder=folder)[0]
    rows: list[dict[str, Any]] = [
        {"what": f"files: {name}", "count": len(files), "files": files}
        for name, files in found.items()
    ]
    rows += [{"what": what, "count": count} for what, count in (imported() | shape()).items()]
    finish("structure", COLUMNS, rows, options)


if __name__ == "__main__":
    sys.exit(main())
