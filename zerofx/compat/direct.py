"""Direct form of a compiled region: Inductor's generated call, run without importing Inductor.

Loading Inductor's artifact requires its compiler: half a second of imports, a hash of all of
torch's source, and another test of the C++ compiler's vector instructions and headers. In the end,
only one generated function and a few shared libraries run. If that function uses only known names,
both are stored next to the artifact (`save_direct`) and loaded alone (`load_direct`).
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from zerofx.compat.operators import Alias

_GUARDS: Any = torch._C._dynamo.guards
# Names that a generated call may use besides its kernels: the same objects as in Inductor's module.
_KNOWN: dict[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "device": torch.device,
    "empty_strided": torch.empty_strided,
    "assert_size_stride": _GUARDS.assert_size_stride,
    "assert_alignment": _GUARDS.assert_alignment,
    "empty_strided_cpu": _GUARDS._empty_strided_cpu,
    "reinterpret_tensor": _GUARDS._reinterpret_tensor,
}
# Namespaces of torch.ops; others need Inductor's own modules.
_SPACES = ("aten", "mkldnn", "mkl", "zerofx")
_EXTERN = "extern_kernels"
FORMAT = 1  # of the file; another format is not read, and the artifact is loaded instead


def direct_of(path: str) -> Path:
    """Return the path of the direct form of the artifact at `path`."""
    return Path(path).with_suffix(".json")


def save_direct(source: str, aliases: list[Alias] | None, path: str) -> bool:
    """Store the direct form of the region that Inductor has just compiled next to its artifact.

    source: the module that Inductor generated; it is loaded in this process.
    aliases: the result of `results_in_inputs` for the graph.
    path: of the artifact.

    Returns:
        Whether a direct form exists: no mutated inputs, no constants, and only known names in the
        call.
    """
    module, call = _generated_module(source), _generated_call(source)
    if module is None or aliases is None or call is None:
        return False
    extern = _attributes_of(call, _EXTERN)
    plain = all(getattr(module.extern_kernels, n) is getattr(torch, n, None) for n in extern)
    libraries = _libraries(module, call)
    if libraries is None or not plain or not _is_plain_torch(call):
        return False
    target = direct_of(path)
    kernels: dict[str, tuple[str, str]] = {}
    for k, (name, library) in enumerate(libraries.items()):
        kernels[name] = (f"{target.stem}.{k}.so", _digest(library))
        replace_file(target.with_name(kernels[name][0]), library)
    form = {"call": ast.unparse(call), "kernels": kernels, "extern": extern, "aliases": aliases}
    text = json.dumps(form)
    whole = {"format": FORMAT, "digest": _digest(text.encode()), "form": text}
    replace_file(target, json.dumps(whole, indent=1).encode())
    return True


def load_direct(path: str) -> Callable[[list[torch.Tensor]], Any] | None:
    """Load the direct form of the artifact at `path`; None if there is no complete one."""
    target = direct_of(path)
    try:
        form = _form(target.read_bytes())
        if form is None:
            return None
        kernels = {
            name: _kernel(target.with_name(library), digest)
            for name, (library, digest) in form["kernels"].items()
        }
    # It does not exist; or its libraries are gone or for another system.
    except (OSError, ImportError):
        return None
    if None in kernels.values():
        return None
    names = _KNOWN | kernels
    names[_EXTERN] = SimpleNamespace(**{n: getattr(torch, n) for n in form["extern"]})
    exec(compile(form["call"], str(target), "exec"), names)
    return _boxed(names["call"], form["aliases"])


def _form(file: bytes) -> dict[str, Any] | None:
    """Return the contents of a file of this format, or None if it is damaged."""
    try:
        whole = json.loads(file)
        if whole["format"] != FORMAT or _digest(whole["form"].encode()) != whole["digest"]:
            return None
    except (ValueError, KeyError, TypeError, AttributeError):  # truncated, or of another origin
        return None
    return json.loads(whole["form"])  # type: ignore[no-any-return]


def _boxed(
    call: Callable[[list[torch.Tensor]], Any], aliases: list[Alias]
) -> Callable[[list[torch.Tensor]], Any]:
    """Return `call` with the results that alias an input replaced by views of that tensor."""
    if not aliases:
        return call

    def run(args: list[torch.Tensor]) -> Any:
        # The call frees the other inputs when it is done.
        bases = [args[of] for _, of, _ in aliases]
        made = list(call(args))
        for (at, _, is_input), base in zip(aliases, bases, strict=True):
            out = made[at]
            made[at] = (
                base
                if is_input
                else base.as_strided(out.size(), out.stride(), out.storage_offset())
            )
        return made

    return run


# -- the generated code ---------------------------------------------------------------------------
def _generated_module(source: str) -> ModuleType | None:
    """Return the most recently loaded module that Inductor generated from `source`."""
    from torch._inductor.codecache import PyCodeCache

    for module in reversed(PyCodeCache.modules):
        try:
            text = Path(str(module.__file__)).read_text(encoding="utf-8")
        except FileNotFoundError:  # Inductor's own cache was cleaned up
            continue
        if text == source:
            return module
    return None


def _generated_call(source: str) -> ast.FunctionDef | None:
    """Return a generated module's function `call(args)`, or None if it needs its object."""
    for node in ast.parse(source).body:
        if not (isinstance(node, ast.ClassDef) and node.name == "Runner"):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "call":
                method.args.args = method.args.args[1:]
                return None if "self" in _free_names(method) else method
    return None


def _libraries(module: ModuleType, call: ast.FunctionDef) -> dict[str, bytes] | None:
    """Return the libraries of the kernels that a call uses, or None if it uses unknown names."""
    found: dict[str, bytes] = {}
    for name in _free_names(call):
        made = getattr(module, name, None)
        library = getattr(getattr(made, "__self__", None), "__file__", None)
        if isinstance(made, BuiltinFunctionType) and name not in _KNOWN and library:
            try:
                found[name] = Path(library).read_bytes()
            except FileNotFoundError:  # Inductor's own cache was cleaned up
                return None
        elif name != _EXTERN and (name not in _KNOWN or made is not _KNOWN[name]):
            return None
    return found


def _free_names(call: ast.FunctionDef) -> list[str]:
    """Return the names that a function reads but neither binds nor finds among the builtins."""
    names = [n for n in ast.walk(call) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    bound |= {a.arg for a in call.args.args} | set(vars(builtins))
    return [n for n in dict.fromkeys(n.id for n in names) if n not in bound]


def _attributes_of(call: ast.FunctionDef, name: str) -> list[str]:
    found = [
        n.attr
        for n in ast.walk(call)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == name
    ]
    return list(dict.fromkeys(found))


def _is_plain_torch(call: ast.FunctionDef) -> bool:
    """Return whether a call reads only dtypes and built-in operators from `torch`."""
    spaces = [
        n.attr
        for n in ast.walk(call)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "torch.ops"
    ]
    others = [a for a in _attributes_of(call, "torch") if a != "ops"]
    is_dtype = all(isinstance(getattr(torch, a, None), torch.dtype) for a in others)
    return is_dtype and set(spaces) <= set(_SPACES)


# -- files ----------------------------------------------------------------------------------------
def _digest(of: bytes) -> str:
    return hashlib.blake2b(of, digest_size=16).hexdigest()


def staging_mark() -> str:
    """Return what ends the name of a file that this process writes and then renames."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def replace_file(target: Path, content: bytes) -> None:
    """Write a private file of this user atomically, even if several hosts share a home folder."""
    staging = target.with_name(f".{target.name}.{staging_mark()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(staging, flags, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(staging, target)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def _kernel(library: Path, digest: str) -> Any:
    """Load a kernel's library as Inductor does: as an extension module called `kernel`.

    Returns None if the library does not match this digest.
    """
    if _digest(library.read_bytes()) != digest:
        return None
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        _GUARDS._torchinductor_pyobject_tensor_data_ptr
    )
    name = f"{library.stem}.kernel"
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module.kernel
