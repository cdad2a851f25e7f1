"""Text forms: values and names as written in dumps and in emitted source."""

from __future__ import annotations

import hashlib
import keyword
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def short_dtype(dtype: torch.dtype) -> str:
    """Return `f32` for torch.float32."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def describe(value: Any) -> str:
    """Return `f32[8, 16]` for a fake tensor, or a tuple of these for several."""
    if isinstance(value, torch.Tensor):
        return _typed(value.dtype, tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    return repr(value)


def few(names: Sequence[str], most: int = 3) -> str:
    """Return `a, b, c and 4 more` for many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@lru_cache(maxsize=4096)
def _typed(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{short_dtype(dtype)}[{', '.join(map(str, shape))}]"


_NAME_BYTES = 120  # length of an identifier; region names are also file names, limited to 255


@lru_cache(maxsize=16384)
def identifier(text: str) -> str:
    """Turn a qualified name into a Python identifier.

    It has the form to which Python normalises identifiers (NFKC), so that two identifiers are the
    same variable only if they are equal. A very long name is truncated and ends in a digest of
    itself.
    """
    name = re.sub(r"\W+", "_", unicodedata.normalize("NFKC", text)).strip("_")
    if not name.isascii():  # \w matches characters that identifiers cannot contain, such as U+2460
        name = "".join(c if f"v{c}".isidentifier() else "_" for c in name).strip("_")
    if len(name) > _NAME_BYTES // 4 and len(name.encode()) > _NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        kept = name.encode()[: _NAME_BYTES - 9].decode(errors="ignore")
        name = f"{kept}_{digest}"
    if not name.isidentifier():  # it is empty, or begins with a digit
        name = f"v_{name}" if name else "v"
    return f"{name}_" if keyword.iskeyword(name) else name


_SPECIAL = re.compile(r'[\\"]')
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U(00[01][0-9a-f]{5})|(.))")


@lru_cache(maxsize=16384)
def escaped(text: str) -> str:
    """Return `text` in a form that fits on one line, in a comment or in a docstring.

    Backslashes and double quotes are preceded by a backslash. Every character that is not printable
    (line and page breaks of any kind, NUL, lone surrogates, bidirectional controls) is written as
    `\\x0c`, `\\u2028` or `\\U000e0001`. `unescaped` restores the text.
    """
    return printable(_SPECIAL.sub(r"\\\g<0>", text))


def unescaped(text: str) -> str:
    """Return the original of a text that `escaped` returned."""
    return _ESCAPE.sub(_unescape, text) if "\\" in text else text


def _unescape(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    return found[4] if code is None else chr(int(code, 16))


def printable(text: str) -> str:
    """Return one line of text for display: printable characters only, the rest escaped.

    Unlike `escaped` it does not escape backslashes, so it cannot be undone.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def as_text(lines: Iterable[str]) -> str:
    """Join the lines of a view; each remains one line, whatever characters its names contain."""
    return "\n".join(map(printable, lines))


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


@lru_cache(maxsize=16384)
def without_numbers(text: str) -> str:
    """Return a qualified name with its layer numbers replaced by `*`: `blocks.*.fc1`."""
    return re.sub(r"\d+", "*", text)
