"""Parse an emitted directory back into a Program, also after a hand edit, and verify it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from zerofx.codegen.facts import read_hardware, read_reference
from zerofx.codegen.load_files import Emitted, read_calling, read_directory
from zerofx.codegen.load_schedule import Reading
from zerofx.errors import ProgramError
from zerofx.ir.facts import Fact
from zerofx.ir.program import BACKWARD, FORWARD, Entry, Planned, Unproved
from zerofx.ir.verify import verify
from zerofx.plan.plan import Plan


def load(directory: str | os.PathLike[str], allow_changed_math: bool = False) -> Planned:
    """Run the directory's schedule on fake tensors, record it as a Program, and verify that.

    The files are Python and are executed: load only what you trust. Any edit is accepted that
    leaves a right schedule: launches and waits moved, names, comments, statements split or moved
    into helpers. Trees and constants of the call are not in the files; `CompiledModule.adopt`
    takes them from the model.

    allow_changed_math: accept regions that compute something else than was captured. Order and
        gradients are checked as ever.

    Raises:
        ProgramError: a file is missing or broken, or the schedule is wrong; with the lines of
            schedule.py around the fault.
    """
    emitted = read_directory(Path(directory).resolve())
    reading = Reading(emitted)
    module = reading.import_schedule()
    facts = emitted.facts
    graphs = {FORWARD: reading.forward(_function(emitted, module, FORWARD))}
    if facts["training"]:
        graphs[BACKWARD] = reading.backward(_function(emitted, module, BACKWARD))
    edited = f"edited: {', '.join(emitted.edited) or 'nothing'}"
    num_nodes = sum(len(gm.graph.nodes) for gm in graphs.values())
    program = Planned(
        graphs=graphs,
        outputs=reading.outputs,
        calling=read_calling(facts),
        params=reading.params,
        buffers=tuple(facts["buffers"]),
        model_name=facts["model"],
        is_training=facts["training"],
        world_size=facts["world_size"],
        hardware=read_hardware(facts.get("hardware")),
        plan=Plan.load(Path(directory) / "plan.yaml"),
        layout=reading.layout,
        facts=frozenset(Fact),
        history=[Entry("load", edited, num_nodes)],
        slot_bytes=tuple(facts["slots"]),
        reference=Unproved.GIVEN_UP if allow_changed_math else read_reference(facts["reference"]),
        signature=facts["signature"],
        directory=emitted.directory,
    )
    _verify(program, emitted)
    return program


def _verify(program: Planned, emitted: Emitted) -> None:
    try:
        verify(program)
    except ProgramError as error:
        what, _, lines = str(error).partition("\n")
        if emitted.edited:
            what += f"; edited: {', '.join(emitted.edited)}"
        raise ProgramError(f"{emitted.directory}: {what}\n{lines}") from None


def _function(emitted: Emitted, module: ModuleType, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise ProgramError(
            f"{emitted.directory / 'schedule.py'} has no function {name}: it is truncated; "
            "restore it, or write the directory anew with program.emit(directory)"
        )
    return function
