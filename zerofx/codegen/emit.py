"""Emission: a program as a directory of readable source: schedule, regions, plan, fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

from zerofx.codegen.facts import checksum_of, program_facts
from zerofx.codegen.kernels import render_kernels
from zerofx.codegen.moves import NAME, has_moves, render_moves
from zerofx.codegen.placed_calls import NAME as PLACEMENTS
from zerofx.codegen.placed_calls import has_placements, render_placements
from zerofx.codegen.regions import RegionLibrary
from zerofx.codegen.schedule import Function, constants_source
from zerofx.codegen.text import Source, templates
from zerofx.ir.program import BACKWARD, FORWARD, Planned

_TEMPLATES = templates()
_PARAMETERS = {
    FORWARD: "rt, shards, buffers, inputs",
    BACKWARD: "rt, shards, saved, tangents",
}


def render(program: Planned) -> dict[str, str]:
    """Return the emitted files: relative path -> text. They are the same on every rank."""
    library = RegionLibrary(program.sizes.typical)
    functions = [
        {
            "name": name,
            "parameters": _PARAMETERS[name],
            "rows": _rows(Function(program, name, library)),
        }
        for name in (FORWARD, BACKWARD)
        if name in program.graphs
    ]
    codes = list(library.codes.values())
    constants = constants_source(program)
    schedule = _TEMPLATES.get_template("schedule.py.j2").render(
        title=f"{program.model_name}: {_headline(program)}",
        summary=program.history[-1].summary if program.history else "",
        regions=[c.name for c in codes],
        has_constants=bool(constants),
        has_kernels=bool(library.kernels),
        functions=functions,
    )
    files = {"schedule.py": schedule}
    if constants:
        files["constants.py"] = constants
    if library.kernels:
        files["kernels.py"] = render_kernels(library.kernels.values())
    files |= {f"regions/{c.name}.py": c.source for c in codes}
    if has_moves(program):
        files[NAME] = render_moves(program)
    if has_placements(program):
        files[PLACEMENTS] = render_placements(program)
    files["plan.yaml"] = program.plan.to_yaml()
    facts = program_facts(program)
    facts["regions"] = {c.name: c.unit for c in codes}
    facts["files"] = {name: _digest(text) for name, text in sorted(files.items())}
    facts["checksum"] = checksum_of(json.loads(json.dumps(facts)))
    files["fingerprint.json"] = json.dumps(facts, indent=1) + "\n"
    return files


def _rows(function: Function) -> list[Source]:
    return [Source(row) for row in "\n".join(function.lines()).split("\n")]


def _headline(program: Planned) -> str:
    kind = "training" if program.is_training else "inference"
    return f"{kind} at stage {program.plan.stage}, world {program.world_size}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(files: dict[str, str]) -> str:
    """Return the digest of all emitted files: equal on ranks that will run the same program."""
    whole = json.dumps(sorted(files.items())) + torch.__version__
    return _digest(whole)


def write(files: dict[str, str], directory: str | os.PathLike[str]) -> Path:
    """Write the files into `directory`, which appears either complete or not at all."""
    target = Path(directory)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, text in files.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _publish(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        for path in sorted(p for p in staging.rglob("*") if p.is_file()):
            place = target / path.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)


def emit(program: Planned, directory: str | os.PathLike[str]) -> Path:
    """Write a program's emitted module into a directory chosen by the user."""
    return write(render(program), directory)
