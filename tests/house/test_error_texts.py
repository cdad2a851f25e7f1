"""Texts of errors and warnings: `<subject> <problem>. <Both numbers.> <Imperative fix>.`

The texts are read from the source. An end that is a variable, a constant or a call is followed to
the texts that it may have: to its assignments, or to what functions of that name return.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.structure import PACKAGE
from zerofx.process import paused_collector

ROOT = PACKAGE.parent

# Words with which a fix begins: `<subject> <problem>. <Imperative fix>.`
FIXES = (
    "add allow call check choose clone continue do draw drop emit free gather give install keep "
    "load lower make move offload pack pass put raise record reload remove restore run save "
    "see set store switch take try use wait write"
).split()

# Errors whose text is not shown by itself, and ends as what shows it needs.
FRAGMENTS = {
    "AttributeError": "Python's own end without a full stop",
    "EndOfFile": "it carries an offset",
    "FormError": "a reader puts the name of the file before it, and a full stop after it",
    "KeyError": "Python shows its argument, a key",
    "NarrowedError": "a warning has it as its reason",
    "NotTiled": "it carries a node",
    "Replaced": "the load starts again, and may end with it as the reason",
    "SystemExit": "its argument is a status",
    "_NotConstant": "it completes 'a mask ...', a reason",
    "_Unreadable": "it is caught where it is raised",
}
# Ends that cannot be followed, by file and expression, each with the reason.
ELSEWHERE = {
    "nvme/faults.py: self.text": "made by `fault_of`, whose texts are of `Fault`",
    "plan/plan.py: contradiction": "yielded by plan/rules.py, whose texts are checked",
    "integrations/transformers.py: why": "a column of `_REFUSED`",
    "tools/trial/launch.py: found['error']": "the text of an error of a rank",
    "runtime/regions/cache.py: '\\n  '.join(said)": "one line per region",
    "codegen/load.py: lines": "lines of schedule.py",
    "model/budget.py: way_out": "a sentence of each caller",
    "runtime/step.py: self.engine.double_backward()": "sentences of model/islands.py, by a lambda",
    "runtime/pipeline.py: run._engine.double_backward()": "the same sentences",
    "model/namespace.py: text": "of the BudgetError of the neediest stage",
    "model/programs.py: instead": "what `nearest` returned",
    "tools/calibrate/launch.py: said": "the last lines that the ranks wrote",
    "comm/differences.py: next(fits, _RULES['optimizer'] if is_compile else _SAME_CALLS)": (
        "a value of `_RULES`, which holds sentences"
    ),
    "comm/flight_recorder.py: errno.ENOSPC": "the system's number and its own text",
    "comm/meeting.py: self._silent": "the text of the error that was raised before",
}
# Calls whose argument becomes the text of an error: name -> its position, from the end if negative.
TEXTS = {"fault": 3, "fail": -1, "_fail": -1, "like": 1, "warn": 0}
ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)
SENTENCE = "as_sentence"  # ends a text of any origin


@dataclass(frozen=True)
class End:
    """A possible end of a text: the expression, and its value if it is a literal."""

    path: Path
    node: ast.expr
    value: str | None

    @property
    def is_sentence(self) -> bool:
        """Whether a sentence ends here, or leads into lines that are shown below it."""
        return self.value is not None and bool(re.search(r"([.?!][)\"'`]?|[:\n])$", self.value))

    @property
    def key(self) -> str:
        return f"{self.path.relative_to(PACKAGE)}: {ast.unparse(self.node)}"

    def __str__(self) -> str:
        place = f"{self.path.relative_to(ROOT)}:{self.node.end_lineno}"
        return f"{place}: ...{ast.unparse(self.node)[-70:]}"


@cache
@paused_collector()
def sources() -> dict[Path, ast.Module]:
    return {p: ast.parse(p.read_text(encoding="utf-8")) for p in sorted(PACKAGE.rglob("*.py"))}


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


@cache
def error_names() -> frozenset[str]:
    """Return the names of all exception classes, Python's and the package's."""
    names = {
        name for name, kind in vars(builtins).items()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    }  # fmt: skip
    classes = [n for t in sources().values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    size = 0
    while size < len(names):  # once for each level of inheritance
        size = len(names)
        names |= {c.name for c in classes if any(name_of(base) in names for base in c.bases)}
    return frozenset(names - FRAGMENTS.keys())


class Texts(ast.NodeVisitor):
    """Finds the possible ends of all texts of errors and warnings."""

    def __init__(self) -> None:
        self.ends: list[End] = []
        self._path = Path()
        self._scopes: list[ast.AST] = []
        self._functions: dict[str, list[tuple[Path, ast.FunctionDef]]] = defaultdict(list)
        self._constants: dict[str, ast.expr] = {}
        for path, tree in sources().items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and returns_text(node):
                    self._functions[node.name].append((path, node))
            for node in tree.body:
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                    self._constants |= {name_of(each): node.value for each in targets(node)}
        for self._path, tree in sources().items():
            self._scopes = [tree]
            self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scopes.append(node)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_Yield(self, node: ast.Yield) -> None:
        if self._path.name == "rules.py" and node.value is not None:  # what plan fields exclude
            self.ends += filter(None, self._ends(node.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        text = self._text(node)
        if isinstance(text, ast.Constant) and str(text.value).endswith("%s"):  # of a logger
            text = node.args[-1]
        if text is not None and ast.unparse(text) != "AROUND":  # of dump.fault, which shows lines
            self.ends += filter(None, self._ends(text))
        self.generic_visit(node)

    def _text(self, node: ast.Call) -> ast.expr | None:
        name = name_of(node.func)
        owner = name_of(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        at = TEXTS.get(name, 0)
        is_text = name in error_names() or name in TEXTS
        is_text |= name == "refuse" and len(node.args) == 1  # with the lines of schedule.py
        is_text |= owner == "log" and name in ("warning", "error", "exception", "critical")
        return node.args[at] if is_text and len(node.args) > max(at, 0) else None

    def _ends(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> list[End | None]:
        """Return what a text may end with; None if it may be empty."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [self._end(node, node.value)] if node.value else [None]
        if isinstance(node, ast.JoinedStr):
            return self._last(node.values, seen)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._last([node.left, node.right], seen)
        if isinstance(node, ast.FormattedValue) and node.conversion < 0 and not node.format_spec:
            return self._ends(node.value, seen)
        if isinstance(node, ast.IfExp):
            return [*self._ends(node.body, seen), *self._ends(node.orelse, seen)]
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return [end for value in node.values for end in self._ends(value, seen)]
        if isinstance(node, ast.Call) and (name_of(node.func) == SENTENCE or is_lines(node)):
            return [self._end(node, ".")]
        return self._followed(node, seen) or [self._end(node, None)]

    def _last(self, parts: list[ast.expr], seen: frozenset[str]) -> list[End | None]:
        found: list[End | None] = []
        for part in reversed(parts):
            ends = self._ends(part, seen)
            found += filter(None, ends)
            if None not in ends:
                return found
        return [*found, None]

    def _followed(self, node: ast.expr, seen: frozenset[str]) -> list[End | None]:
        """Return the ends of what a variable is set to, or of what a function returns."""
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            if isinstance(node.func, ast.Attribute) and name_of(node.func.value) != "self":
                return []
            known = self._functions.get(name, []) if name not in seen else []
            near = (self._path, self._source_of(name))
            known = [(path, f) for path, f in known if path in near] or known
            return [
                end for path, f in known for n in ast.walk(f)
                if isinstance(n, ast.Return) and n.value is not None
                and not (isinstance(n.value, ast.Constant) and n.value.value is None)
                for end in self._elsewhere(path, f, n.value, seen | {name})
            ]  # fmt: skip
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            table = self._constants.get(node.value.id)
            values = table.values if isinstance(table, ast.Dict) else []
            return [end for value in values for end in self._ends(value, seen)]
        if not isinstance(node, ast.Name) or node.id in seen:
            return []
        function = self._scopes[-1]
        if isinstance(function, ast.FunctionDef) and node.id in parameters(function):
            # the texts of its callers are checked, if it is one of these
            return [self._end(node, ".")] if function.name in (*TEXTS, "refuse") else []
        for scope in reversed(self._scopes[1:]):
            values = [
                n.value for n in ast.walk(scope)
                if isinstance(n, ASSIGNMENTS) and n.value is not None
                and any(isinstance(t, ast.Name) and t.id == node.id for t in targets(n))
            ]  # fmt: skip
            if values:
                return [end for value in values for end in self._ends(value, seen | {node.id})]
        if node.id in self._constants:
            return self._ends(self._constants[node.id], seen | {node.id})
        return []
        return []

    def _source_of(self, name: str) -> Path:
        """Return the file that a name of this one is imported from."""
        for node in sources()[self._path].body:
            if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
                return ROOT.joinpath(*(node.module or "").split(".")).with_suffix(".py")
        return self._path

    def _elsewhere(
        self, path: Path, function: ast.FunctionDef, value: ast.expr, seen: frozenset[str]
    ) -> list[End | None]:
        """Return the ends of what another function returns."""
        before = self._path, self._scopes
        self._path, self._scopes = path, [sources()[path], function]
        found = self._ends(value, seen)
        self._path, self._scopes = before
        return found

    def _end(self, node: ast.expr, value: str | None) -> End:
        return End(self._path, node, value)


def returns_text(function: ast.FunctionDef) -> bool:
    kind = "" if function.returns is None else ast.unparse(function.returns)
    return kind in ("str", "str | None")


def parameters(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in function.args.args]


def is_lines(node: ast.expr) -> bool:
    """Tell whether a text ends with lines: of a schedule, a traceback, another process."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("'\\n'.join", "last_words")


def targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


@cache
@paused_collector()
def ends() -> list[End]:
    return Texts().ends


def test_a_fix_is_a_sentence_of_its_own() -> None:
    """No text that is shown says `problem; do this`."""
    found = []
    for path, tree in sources().items():
        prose = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                told = re.search(rf"; (?:{'|'.join(FIXES)})\b", node.value)
                if told and id(node) not in prose:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {told[0]}")
    assert not found, "end the sentence, and begin the fix with a capital"


def test_a_text_ends_with_a_full_stop() -> None:
    assert len(ends()) > 800
    found = {str(end) for end in ends() if not end.is_sentence and end.key not in ELSEWHERE}
    assert not found, "\n".join(sorted(found))


def test_the_list_of_other_ends_is_current() -> None:
    assert ELSEWHERE.keys() <= {end.key for end in ends() if not end.is_sentence}
