"""Which private names of torch the package uses, read from its syntax trees.

A name is written as it is reached:

- `torch._C._will_engine_execute_node`, from an import, an alias, or what zerofx.compat passes on.
  Operators (`torch.ops.aten._to_copy`) are data of the graphs and do not count.
- `._version`, an attribute of any other expression: one that torch's objects have, or that no class
  of zerofx defines. Strings count too (`getattr(target, "_schema")`).
- `._apply`, a method that a class of zerofx overrides, or that torch looks for in its instances.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from zerofx.process import paused_collector

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "zerofx"

# Attributes that are not torch's, although the rules below take them for it.
NOT_TORCH = {
    "_bit_generator": "numpy",
    "_compiler_ctx": "lightning",
    "_current_frames": "Python",
    "_getframe": "Python",
    "_replace": "Python",
    "_exit": "Python",
    "_experts_implementation": "transformers",
    "_get_grad": "the getter of a property",
    "_init_weights": "transformers",
    "_is_accelerate_prepared": "accelerate",
    "_load_best_model": "transformers",
    "_load_from_checkpoint": "transformers",
    "_load_optimizer_and_scheduler": "transformers",
    "_save_optimizer_and_scheduler": "transformers",
    "_wrap_model": "transformers",
    "_optimizers": "accelerate",
    "_values": "a slot of Spill",
    "_grad": "a plain attribute of ShardedTensor, which hides that of Tensor",
}
_READERS = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}


@dataclass(frozen=True, order=True)
class Use:
    """One use of a private name. An "override" and what compat "passes on" may stand anywhere."""

    path: Path
    line: int
    name: str
    kind: Literal["reach", "passed on", "override"] = "reach"

    def __str__(self) -> str:
        where = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path.name
        return f"{where}:{self.line} {self.name}"


def is_private(part: str) -> bool:
    is_dunder = part.startswith("__") and part.endswith("__")
    return part.startswith("_") and part.isidentifier() and len(part) > 1 and not is_dunder


def _has_private_part(name: str) -> bool:
    return any(map(is_private, name.split(".")))


@cache
def attributes_of_torch() -> frozenset[str]:
    """Return the private attributes of the kinds of torch objects that zerofx handles."""
    add, lstm = torch.ops.aten.add, torch.nn.LSTM(1, 1)
    things: list[Any] = [lstm, lstm.state_dict(), add, add.Tensor, add.Tensor._schema]
    things += [torch.Tensor, DTensor, torch.zeros(1).untyped_storage(), torch.optim.Optimizer]
    things += [
        torch.nn.MultiheadAttention(1, 1),
        fx.Graph(),
        fx.Node,
        fx.GraphModule,
        torch.distributed.ProcessGroup,
    ]
    names = {name for thing in things for name in dir(thing)}
    names |= {n for n in dir(torch) if n.startswith(("_foreach_", "_fused_"))}
    names |= {n for n in dir(torch.nn.modules.module) if n.startswith("_global_")}
    return frozenset(filter(is_private, names)) - NOT_TORCH.keys()


@dataclass
class Defined:
    """What the classes of a package define: by class its private names, and its bases."""

    names: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)  # a dotted torch name, or a class here
    everywhere: set[str] = field(default_factory=set)  # functions of modules among them
    loaded: set[str] = field(default_factory=set)

    def of(self, name: str) -> set[str]:
        """Return the private names that a class and its bases in the package define."""
        found = set(self.names.get(name, ()))
        return found.union(*(self.of(b) for b in self.bases.get(name, ()) if b != name))

    def torch_bases(self, name: str) -> list[type]:
        """Return the classes of torch that a class derives from."""
        found: list[type] = []
        for base in self.bases.get(name, ()):
            if base.startswith("torch."):
                found.append(resolved(base))
            elif base != name:
                found += self.torch_bases(base)
        return found


def resolved(name: str) -> Any:
    """Return the object of a dotted name, whose first parts are modules."""
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


# -- one file -------------------------------------------------------------------------------------
@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> list[tuple[Any, str]]:
    """Return (node, the innermost class around it or "") for a file, outer nodes first."""
    found: list[tuple[Any, str]] = [(tree_of(path), "")]
    for node, inside in found:  # which grows meanwhile
        around = node.name if isinstance(node, ast.ClassDef) else inside
        for name in node._fields:
            value = None if name == "ctx" else getattr(node, name)
            if isinstance(value, list):
                found += [(v, around) for v in value if isinstance(v, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append((value, around))
    return found


@cache
def roots_of(path: Path) -> dict[str, tuple[str, bool]]:
    """Return local name -> (the dotted name of torch that it is, whether compat passes it on)."""
    roots: dict[str, tuple[str, bool]] = {}
    for node, _ in nodes_of(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    roots[alias.asname or "torch"] = alias.name if alias.asname else "torch", False
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                roots.update(_imported(node.module, alias))
    for node, _ in nodes_of(path):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            name, passed_on = dotted(node.value, roots)
            if name and isinstance(targets[0], ast.Name) and _has_private_part(name):
                roots[targets[0].id] = name, passed_on
    return roots


def _imported(module: str, alias: ast.alias) -> dict[str, tuple[str, bool]]:
    local = alias.asname or alias.name
    if module.split(".")[0] == "torch":
        return {local: (f"{module}.{alias.name}", False)}
    source = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    if module.startswith("zerofx.compat.") and source.exists():
        name, _ = roots_of(source).get(alias.name, ("", False))
        return {local: (name, True)} if name else {}
    return {}


def dotted(node: ast.expr, roots: dict[str, tuple[str, bool]]) -> tuple[str, bool]:
    """Return the dotted torch name that an expression is, "" if it is none."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in roots:
        return "", False
    name, passed_on = roots[node.id]
    return ".".join([name, *parts]), passed_on


def defined_in(paths: list[Path]) -> Defined:
    """Return what classes and modules define themselves."""
    found = Defined()
    for path in paths:
        found.everywhere |= {n.name for n in tree_of(path).body if isinstance(n, ast.FunctionDef)}
        for node, inside in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases = {dotted(b, roots_of(path))[0] or ast.unparse(b) for b in node.bases}
                found.bases.setdefault(node.name, set()).update(bases)
                found.names.setdefault(node.name, set()).update(_names_in(node))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.loaded.add(node.attr)
            elif inside:
                found.names[inside].update(filter(is_private, [_set_by(node)]))
    found.everywhere |= set().union(*found.names.values())
    return found


def _names_in(node: ast.ClassDef) -> set[str]:
    """Return the private names that a class body binds."""
    names: list[str] = []
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.append(statement.name)
        elif isinstance(statement, ast.Assign):
            names += [t.id for t in statement.targets if isinstance(t, ast.Name)]
            if names[-1:] == ["__slots__"]:
                names += ast.literal_eval(statement.value)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.append(statement.target.id)
    return set(filter(is_private, names))


def _set_by(node: ast.AST) -> str:
    """Return the name that a node sets on `self`, "" if it sets none."""
    if isinstance(node, ast.Attribute):
        return node.attr if _is_self(node.value) else ""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        key = node.slice  # self.__dict__["_name"] = ...
        return str(key.value) if isinstance(key, ast.Constant) else ""
    return ""


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def uses_in(path: Path, own: Defined) -> list[Use]:
    """Return the private torch names that a file uses, in the order of its lines."""
    return sorted(set(_Reader(path, own).read()))


class _Reader:
    """Goes through one file, outer expressions first."""

    def __init__(self, path: Path, own: Defined) -> None:
        self.path, self.own, self.roots = path, own, roots_of(path)
        self._seen: set[int] = set()  # parts of names that were read as a whole

    def read(self) -> Iterator[Use]:
        readers: dict[type[ast.AST], Callable[[Any, str], Iterator[Use]]] = {
            ast.ClassDef: self._overrides,
            ast.Import: self._import,
            ast.ImportFrom: self._import,
            ast.Constant: self._string,
            ast.JoinedStr: self._built,
            ast.Call: self._read_by_name,
            ast.Attribute: self._attribute,
        }
        for node, inside in nodes_of(self.path):
            reader = readers.get(type(node))
            if reader is not None:
                yield from reader(node, inside)

    def _attribute(self, node: ast.Attribute, inside: str) -> Iterator[Use]:
        if id(node) in self._seen:
            return
        name, passed_on = dotted(node, self.roots)
        if name:
            self._seen.update(map(id, ast.walk(node)))
            if _has_private_part(name) and not name.startswith("torch.ops."):
                yield Use(self.path, node.lineno, name, "passed on" if passed_on else "reach")
        elif self._is_torchs(node.attr, node.value, inside):
            yield Use(self.path, node.lineno, f".{node.attr}")

    def _is_torchs(self, attr: str, of: ast.expr, inside: str) -> bool:
        if not is_private(attr) or attr in NOT_TORCH or self._is_operator(of):
            return False
        if _is_self(of) and inside:
            is_ours = attr in self.own.of(inside) or not self.own.torch_bases(inside)
            return not is_ours and attr in attributes_of_torch()
        return attr in attributes_of_torch() or attr not in self.own.everywhere

    def _is_operator(self, of: ast.expr) -> bool:
        return isinstance(of, ast.Name) and of.id in ("aten", "_aten")

    def _import(self, node: ast.Import | ast.ImportFrom, inside: str) -> Iterator[Use]:
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = base + alias.name
            if name.startswith("torch.") and _has_private_part(name):
                yield Use(self.path, node.lineno, name)

    def _string(self, node: ast.Constant, inside: str) -> Iterator[Use]:
        text = node.value
        if not isinstance(text, str):
            return
        if text.startswith("torch.") and all(p.isidentifier() for p in text.split(".")):
            if _has_private_part(text):
                yield Use(self.path, node.lineno, text)
        elif text.split(".")[0] in attributes_of_torch():
            yield Use(self.path, node.lineno, f".{text.split('.')[0]}")

    def _built(self, node: ast.JoinedStr, inside: str) -> Iterator[Use]:
        """Read a name that is put together: `f"_foreach_{name}"` counts as `._foreach_*`."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            begin, names = first.value, attributes_of_torch()
            if len(begin) > 1 and begin[0] == "_" and any(n.startswith(begin) for n in names):
                yield Use(self.path, node.lineno, f".{begin}*")

    def _read_by_name(self, node: ast.Call, inside: str) -> Iterator[Use]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name not in _READERS:
            return
        for arg in node.args:
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                attr = arg.value.split(".")[0]
                if self._is_torchs(attr, node.args[0], inside):
                    yield Use(self.path, node.lineno, f".{attr}")

    def _overrides(self, node: ast.ClassDef, inside: str) -> Iterator[Use]:
        bases = self.own.torch_bases(node.name)
        if not bases:
            return
        known = {n for base in bases for n in dir(base)}
        for name in self.own.names[node.name]:
            if name in NOT_TORCH:
                continue
            # what nobody here reads is there for torch to find
            if name in known or name not in self.own.loaded:
                yield Use(self.path, node.lineno, f".{name}", "override")


@cache
@paused_collector()  # it would look at all of torch again and again while trees are built
def uses_of_package() -> tuple[Use, ...]:
    """Return every use of a private torch name under zerofx/."""
    paths = sorted(PACKAGE.rglob("*.py"))
    own = defined_in(paths)
    return tuple(use for path in paths for use in uses_in(path, own))
