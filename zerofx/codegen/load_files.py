"""Read an emitted directory: are all files there, whole, and of this format; which were edited."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerofx.codegen.facts import FORMAT
from zerofx.compat.graphs import pytree
from zerofx.errors import ProgramError
from zerofx.ir.program import Calling, ParamInfo

log = logging.getLogger("zerofx")
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class Emitted:
    """An emitted directory as found: what fingerprint.json says, and which files differ from it."""

    directory: Path
    facts: dict[str, Any]
    edited: tuple[str, ...]


def read_directory(directory: Path) -> Emitted:
    """Return what a directory holds.

    Raises:
        ProgramError: a file is missing, truncated or foreign; the message names it.
    """
    facts = _read_facts(directory)
    edited = []
    for name, digest in facts["files"].items():
        try:
            text = (directory / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise _broken(directory / name, "is missing") from None
        except UnicodeDecodeError:
            raise _broken(directory / name, "is not text") from None
        if hashlib.sha256(text.encode()).hexdigest()[:16] != digest:
            edited.append(name)
    if facts["torch"] != torch.__version__:
        log.warning(
            "%s was emitted with torch %s, this is %s: its regions are compiled anew, and bits "
            "may differ", directory, facts["torch"], torch.__version__,
        )  # fmt: skip
    if "plan.yaml" in edited:
        log.warning("%s: plan.yaml was edited, but the schedule is not made anew", directory)
    return Emitted(directory, facts, tuple(edited))


def _broken(path: Path, what: str) -> ProgramError:
    return ProgramError(
        f"{path} {what}; restore it, or write the directory anew with program.emit(directory)"
    )


def _read_facts(directory: Path) -> dict[str, Any]:
    path = directory / FINGERPRINT
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ProgramError(
            f"{directory} holds no emitted program: {FINGERPRINT} is missing; "
            "write one with program.emit(directory)"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _broken(path, f"is truncated or not JSON ({error})") from None
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != FORMAT:
        raise ProgramError(
            f"{path} is of format {found!r}, this zerofx reads {FORMAT}; emit the program again"
        )
    if missing := sorted(_KEYS - facts.keys()):
        raise _broken(path, f"lacks {', '.join(missing)}")
    return facts


_KEYS = {
    "torch", "model", "training", "world_size", "kernels", "debug", "slots", "layout",
    "placeholders", "outputs", "params", "buffers", "calling", "reference", "signature", "files",
}  # fmt: skip


def read_params(facts: dict[str, Any]) -> dict[str, ParamInfo]:
    """Return the parameters that fingerprint.json describes."""
    return {
        name: ParamInfo(
            name,
            tuple(shape),
            getattr(torch, dtype),
            grad,
            unit,
            tuple(aliases),
            getattr(torch, compute),
        )
        for name, (shape, dtype, grad, unit, aliases, compute) in facts["params"].items()
    }


def read_calling(facts: dict[str, Any]) -> Calling:
    """Return the calling convention over flat leaves: trees and constants are not in the files.

    A CompiledModule that adopts the program puts its own trees back.
    """
    said = facts["calling"]
    return Calling(
        in_spec=pytree.tree_structure([0] * said["in_leaves"]),
        out_spec=pytree.tree_structure([0] * said["out_leaves"]),
        tensor_leaves=tuple(said["tensor_leaves"]),
        output_names=tuple(said["output_names"]),
        loss=said["loss"],
        differentiable=tuple(said["differentiable"]),
        dropped=tuple(said["dropped"]),
    )
