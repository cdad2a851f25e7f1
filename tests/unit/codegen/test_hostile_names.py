"""Names are text, never code: whatever a model calls its parts, emitted files parse, run and load.

Sources of names: keys of ModuleDict and ParameterDict, buffers, classes, files and lines of the
user's code, keyword arguments, keys of outputs, strings handed to operators.
"""

from __future__ import annotations

import ast
import copy
import keyword
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zerofx
from zerofx.codegen.emit import render, write
from zerofx.codegen.text import literal, read_comment, read_origin, with_comment, with_origin
from zerofx.ir.meta import info
from zerofx.ir.program import Planned
from zerofx.ir.text import escaped, identifier, printable, unescaped

CANARY = "_zerofx_canary"
CALL = f'__import__("sys").__dict__.__setitem__("{CANARY}", 1)'
BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
PARTS = [
    *BREAKS, "\x00", "\x1b[31m", "\ud800", "\u202e", "\u2066", '"""', "'''", '"', "'", "\\", "\\n",
    "\\x22", "#", "  # ", "  ", " ", "{{ 1 }}", "{% for a in b %}", "{# x", "[/]", "%s", ";", ":",
    ":12", "a.py:3", "\u2460", "\ufb01", "fi", "\u00b2", "\u0661", "\u00aa", "a", "A", "_", "7",
    "class", "None", "rt", "shards", "torch", "aten", "args", "backward", "float", "operator",
    "getattr", "regions", "weight", "import os", "x" * 300, "\u6f22" * 90, CALL,
    f"\n{CALL}\n", f"\x0c{CALL}", f'"""\n{CALL}\n"""', f"\n    {CALL}  # ", f"\r{CALL}\r",
]  # fmt: skip
NAMES = (st.lists(st.sampled_from(PARTS), min_size=1, max_size=4) | st.lists(st.characters())).map(
    "".join
)
KEYS = NAMES.map(lambda text: text.replace(".", "")).filter(bool)


# -- how text is written ---------------------------------------------------------------------------
@given(NAMES)
def test_escaped_text_is_one_printable_line_that_cannot_end_a_docstring(name: str) -> None:
    shown = escaped(name)
    assert shown.isprintable() and unescaped(shown) == name
    (only,) = ast.parse(f'"""{shown}"""\n# {shown}\n').body
    assert isinstance(only, ast.Expr) and isinstance(only.value, ast.Constant)
    assert only.value.value == name
    assert printable(name).isprintable()


@given(NAMES)
def test_an_identifier_is_one_and_python_leaves_it_as_it_is(name: str) -> None:
    made = identifier(name)
    assert made.isidentifier() and not keyword.iskeyword(made)
    assert unicodedata.normalize("NFKC", made) == made and len(made.encode()) <= 121


@given(NAMES, NAMES, st.integers(0, 9999))
def test_comments_are_read_as_they_were_written(unit: str, module: str, number: int) -> None:
    row = with_comment("y = fc(x)", unit, "f32[2]")
    assert ast.dump(ast.parse(row)) == ast.dump(ast.parse("y = fc(x)"))
    assert read_comment(row) == [text for text in (unit, "f32[2]") if text]
    for line in (f"f{unit}:{number}", ""):
        row = with_origin("y = fc(x, '  # b')", "f32[2]", module, line)
        assert ast.dump(ast.parse(row)) == ast.dump(ast.parse("y = fc(x, '  # b')"))
        assert read_origin(row) == (module, line)


class Loud(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return CALL


CONSTANTS = [complex("inf-1j"), complex(0, float("nan")), float("-inf"), "a\n", True, 3, "\ud800"]


@pytest.mark.parametrize("value", CONSTANTS)
def test_constants_are_written_as_python_reads_them(value: Any) -> None:
    assert repr(eval(literal(value, {}))) == repr(value)
    if type(value) is str:
        assert literal(Loud(value), {}) == repr(value)


# -- whole models ----------------------------------------------------------------------------------
FORWARD = """
def forward(self, x, **more):
    h = x
    for key, layer in self.layers.items():
        h = torch.tanh(layer(h))
    for key, weight in self.scales.items():
        h = h * weight
    for key, shift in more.items():
        h = h + shift
    for key in self.offsets:
        h = h + getattr(self, key)
    return {"loss": (h * h).mean(), **{key: h.detach() for key in more}}
"""


def hostile(
    kind: str, keys: list[str], scales: list[str], buffers: list[str], file: str
) -> nn.Module:
    """Return a model whose class, parts and file have these names."""
    space: dict[str, Any] = {"torch": torch}
    exec(compile(FORWARD, file, "exec"), space)

    def build(self: nn.Module) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(0)
        layers = {k: nn.Linear(4, 4) for k in keys}
        self.layers = nn.ModuleDict(layers)  # type: ignore[assignment]
        self.scales = nn.ParameterDict({k: nn.Parameter(torch.randn(4)) for k in scales})
        self.offsets = buffers
        for name in buffers:
            self.register_buffer(name, torch.randn(4))

    made = type(kind, (nn.Module,), {"__init__": build, "forward": space["forward"]})
    return made()


EXPECTED = {
    ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef, ast.If, ast.Delete,
    ast.Return,
}  # fmt: skip


def check_source(name: str, text: str) -> None:
    """Check that emitted Python consists of the statements that zerofx writes, and no others."""
    tree = ast.parse(text)
    assert text.replace("\n", "").isprintable()
    docs = [s for s in tree.body if isinstance(s, ast.Expr)]
    assert docs == tree.body[:1] and isinstance(docs[0].value, ast.Constant), name
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            assert type(node) in EXPECTED, (name, ast.unparse(node))
        if isinstance(node, ast.Name) and node.id.startswith("__"):
            assert node.id in ("__file__", "__name__"), (name, node.id)


def check_program(program: Planned, directory: Path) -> None:
    """Check a program's emitted files, and that they load as the program that was written."""
    files = render(program)
    for name, text in files.items():
        if name.endswith(".py"):
            check_source(name, text)
    loaded = zerofx.load_program(write(files, directory / "program"))
    assert loaded.model_name == program.model_name and list(loaded.params) == list(program.params)
    assert loaded.buffers == program.buffers
    for graph, gm in program.graphs.items():
        assert _origins(loaded.graphs[graph]) <= _origins(gm)
    views = [program.dump(), program.dump("units"), program.schedule(), program.memory()]
    assert all(str(view).replace("\n", "").isprintable() for view in views)


def _origins(gm: Any) -> set[tuple[str, str, str]]:
    computed = [n for n in gm.graph.nodes if info(n).region is not None]
    return {(info(n).unit, info(n).module, info(n).line) for n in computed}


def steps(model: nn.Module, batch: dict[str, Tensor], num: int = 2) -> list[Tensor]:
    """Train a few steps; return the losses and the outputs under their names."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(num):
        out = model(**batch)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [out["loss"].detach(), *(out[k] for k in batch if k != "x")]
    return found


@settings(max_examples=2, phases=[Phase.generate])  # shrinking takes minutes
@given(
    st.sampled_from(['M"""', 'a"""\n' + CALL + '\n"""', "\u2028{{ 1 }}", "\\", "plain"]),
    st.lists(KEYS, min_size=3, max_size=4, unique=True),
    st.lists(KEYS, min_size=2, max_size=3, unique=True),
    st.lists(KEYS, min_size=2, max_size=2, unique=True),
    st.lists(KEYS, min_size=1, max_size=2, unique=True),
    KEYS.map(lambda text: "f" + re.sub(r"[/\x00\ud800-\udfff]", "", text)),
)
def test_training_with_hostile_names_is_plain_training(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    keys: list[str],
    scales: list[str],
    buffers: list[str],
    more: list[str],
    file: str,
) -> None:
    plain = None
    try:
        plain = hostile(kind, keys, scales, buffers, file)
    except (KeyError, AttributeError):  # torch refuses names of its own attributes
        assume(False)
    assert plain is not None
    assume(not {"x", "self", "loss"} & set(more))
    model = zerofx.compile(copy.deepcopy(plain), zerofx.Plan(kernels="aten"))
    batch = {k: torch.randn(2, 4) for k in ["x", *more]}
    expected, found = steps(plain, batch), steps(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    check_program(model.programs[0], tmp_path_factory.mktemp("hostile"))
    assert not hasattr(sys, CANARY)
