"""The rules that keep the package easy to find one's way in, and what still breaks each.

What is listed here was there when the rule was written, with the reason why it stays or what is to
become of it. The lists may only get shorter, and the numbers smaller: the last test names what has
been put right meanwhile, so that its line goes too. benchmarks/structure.py does the counting.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import networkx
import pytest

from benchmarks import structure
from benchmarks.structure import FOLDER_LIMIT, PACKAGE
from zerofx.process import paused_collector

ROOT = PACKAGE.parent
SHORT = 80  # lines, below which a module with a single importer needs a reason

# Class names that are used more than once. Each is to be renamed where its concept is a narrower
# one than the name says, or merged where the concept is the same.
SAME_NAME = {
    "Axis": "a mesh axis as links are measured; the collectives over one",
    "Beside": "calibration's load; work beside a schedule's calls",
    "Block": "two models of the demo and of calibration; a recording's block",
    "Bound": "a program tied to a model; the bound of a search",
    "Call": "a call to capture; a call that runs",
    "Calls": "calibration of calls; what a schedule is given while it is read",
    "Counts": "requests of the NVMe engine; plans of a search",
    "Entry": "three records of three formats",
    "Held": "bytes held at a time; what a module held before a forward",
    "Kernel": "what a region runs as; a Triton kernel",
    "Lane": "three lanes: of a view, of collectives, of copies",
    "Layout": "of parameters in buckets; of values in a file",
    "Measured": "three results of three measurements",
    "Moment": "of a region's allocations; of a request's life",
    "Names": "roles of inputs; names of emitted values",
    "Options": "of the demo; of a kernel",
    "Output": "of a region; of a graph",
    "Place": "four concepts: a line, a range of a bucket, a lane's slot, host memory",
    "Reach": "of a function; of a gradient",
    "Reading": "of a model's attributes; of schedule.py",
    "Recorder": "of emitted calls; of CUDA graphs",
    "Results": "of a traced forward; of a replay",
    "Row": "of a dump; of a recording",
    "Settings": "what a forward reads; what a trial varies",
    "Span": "of a timeline; of nodes",
    "State": "of a model during capture; of an extent in a file",
    "Tile": "of a graph; of a parameter",
    "Traffic": "of a step; of a collective",
    "WayOut": "of a search; of a view",
    "Work": "of a collective; of the NVMe threads",
    "_Buffer": "of the planner; of the colouring",
    "_Walk": "three walks over three things",
}

# Concrete classes with exactly one concrete subclass: composition would say it better.
LONE_SUBCLASS: dict[str, str] = {}

# Folders whose short modules are a list by nature: one module per thing of a kind.
LISTS = {
    "zerofx.tools.calibrate": "one per thing that is measured",
    "zerofx.tools.cli": "one per group of commands",
    "zerofx.compat": "one per subject of private torch",
    "zerofx.passes": "one per pass",
    "zerofx.passes.patterns": "one per pattern",
    "zerofx.kernels": "one per kernel",
}
ONE_IMPORTER = {
    "zerofx.ops.buffers": "a family of ops",
    "zerofx.ops.capacity": "a family of ops",
    "zerofx.ops.slots": "a family of ops",
    "zerofx.analysis.recompute.solve": "an algorithm by itself, with its source",
    "zerofx.optim.lion": "one module per optimizer",
    "zerofx.versions": "its importer is the face, which only names things",
}

# Modules in the folders that hold more than FOLDER_LIMIT.
LARGE_FOLDERS = {
    "zerofx/passes": 40,  # a list by nature
    "zerofx/ops": 17,  # a list by nature
    "zerofx/runtime": 18,
}

# How often texts still use a word that the project avoids, in the package, README.md and docs/.
WORDS = {
    r"anew": 0,
    r"beside": 176,
    r"dearest": 2,
    r"far away": 0,
    r"for ever": 1,
    r"foreseen": 0,
    r"how-manieth": 1,
    r"lent|lends?|lending": 53,
    r"mend(s|ed|ing)?": 0,
    r"nobody": 0,
    r"otherwise than": 0,
    r"stands(?! (for|in|by|on|against)\b)": 22,  # for "is"
    r"way out": 0,
}


@cache
@paused_collector()
def trees() -> dict[str, ast.Module]:
    return structure.modules()


@cache
@paused_collector()
def classes() -> dict[str, list[str]]:
    """Return class name -> the modules that define it."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(module)
    return found


@cache
def repeated() -> dict[str, list[str]]:
    return {name: where for name, where in classes().items() if len(where) > 1}


@cache
def short_with_one_importer() -> dict[str, int]:
    """Return the lines of short modules that one other module imports."""
    graph: networkx.DiGraph = structure.imports(trees())
    paths = {name: ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in trees()}
    lines = {n: len(p.read_text().splitlines()) for n, p in paths.items() if p.exists()}
    return {
        name: count
        for name, count in lines.items()
        if count < SHORT and graph.in_degree(name) == 1 and name.rpartition(".")[0] not in LISTS
    }


@cache
def folders() -> dict[str, int]:
    found = Counter(str(p.parent.relative_to(ROOT)) for p in PACKAGE.rglob("*.py"))
    return {name: count for name, count in found.items() if count > FOLDER_LIMIT}


@cache
def texts() -> dict[Path, str]:
    """Return what the project's prose is in: the package's source, its templates, the docs."""
    paths = [p for kind in ("*.py", "*.j2") for p in PACKAGE.rglob(kind)]
    paths += [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths)}


@cache
def uses(word: str) -> list[str]:
    """Return `file:line` of every use of a word, also across the end of a line."""
    pattern = re.compile(rf"(?<![\w.-])(?:{word.replace(' ', chr(92) + 's+')})(?![\w(-])", re.I)
    return [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path, text in texts().items()
        for match in pattern.finditer(text)
    ]


def test_class_names_are_unique() -> None:
    new = {name: where for name, where in repeated().items() if name not in SAME_NAME}
    assert not new, "one of the two has not been named yet"


def test_no_class_has_exactly_one_subclass() -> None:
    new = set(structure.lone_subclasses(trees())) - LONE_SUBCLASS.keys()
    assert not new, "compose instead, or merge the two"


def test_short_modules_have_more_than_one_importer() -> None:
    new = {n: lines for n, lines in short_with_one_importer().items() if n not in ONE_IMPORTER}
    assert not new, "merge each into its importer, or list it with the reason"


def test_folders_are_small() -> None:
    grown = {n: count for n, count in folders().items() if count > LARGE_FOLDERS.get(n, 0)}
    assert not grown, f"a folder holds at most {FOLDER_LIMIT} modules; these may only lose some"


def test_the_list_of_files_is_current() -> None:
    assert structure.listing() in structure.LAYOUT.read_text(encoding="utf-8"), (
        "run: python -m benchmarks.structure --write-layout"
    )


@pytest.mark.parametrize("word", WORDS)
def test_words_that_prose_avoids(word: str) -> None:
    found = uses(word)
    assert len(found) <= WORDS[word], "write it in plain English: " + ", ".join(found)


def test_ops_are_named_by_the_passes_that_insert_them_only() -> None:
    """All else asks a node's spec: `zerofx.ops` is for what it is made of, and for passes."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in ("ops", "passes"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                if any(name.startswith("zerofx.ops.") or name == "zerofx.ops" for name in names):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "ask spec_of(node) instead"


def test_lists_are_current() -> None:
    """What was put right meanwhile has left the lists."""
    gone = {
        "SAME_NAME": SAME_NAME.keys() - repeated().keys(),
        "LONE_SUBCLASS": LONE_SUBCLASS.keys() - set(structure.lone_subclasses(trees())),
        "ONE_IMPORTER": ONE_IMPORTER.keys() - short_with_one_importer().keys(),
        "LARGE_FOLDERS": {
            f"{name}: {folders().get(name, 0)}"
            for name, count in LARGE_FOLDERS.items()
            if folders().get(name, 0) < count
        },
    }
    stale = {name: sorted(lines) for name, lines in gone.items() if lines}
    assert not stale, "remove these lines, or lower the numbers to the ones here"


def test_every_claim_of_the_security_page_has_its_test() -> None:
    """Each row of a table of claims names tests, and all of them are there."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!what|claim|---)[^|]+\|([^|]+)\|$", page, re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        named, path = re.findall(r"`([^`]*)`", row), ""
        assert named, row
        for name in named:
            path = name.partition("::")[0] or path
            source = (ROOT / path).read_text(encoding="utf-8")
            _, _, test = name.partition("::")
            assert not test or f"def {test}(" in source, name
