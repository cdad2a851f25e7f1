"""Turn the arguments of a command line into a plan, hardware and a program, and print views."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import RANKS, done
from zerofx.tools.cli.fit import columns, fitted

if TYPE_CHECKING:  # torch takes seconds to import; `--help` should not
    from zerofx.hardware import Hardware
    from zerofx.ir.program import Captured, Planned
    from zerofx.plan.plan import Plan

YAML = (".yaml", ".yml")


def plan_of(file: Path | None, stage: int | None, fields: list[str] | None) -> Plan:
    """Return the plan of a file, or the default one, with `--set` and `--stage` applied."""
    from zerofx.plan.plan import Plan

    plan = with_fields(Plan.load(file) if file else Plan(), "--set", fields)
    return plan if stage is None else with_fields(plan, "--stage", [f"stage={stage}"])


def with_fields(plan: Plan, option: str, fields: list[str] | None) -> Plan:
    """Return a copy of the plan with fields replaced that are given as `key=value`.

    Raises:
        PlanError: a text has no equals sign, or a field is unknown or out of range.
    """
    from zerofx.plan.fields import read_value
    from zerofx.plan.plan import Plan

    given = plan.to_dict()
    for text in fields or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"{option} {text} has no value. Write key=value, for example stage=2.")
        given[key.strip()] = read_value(value, f"{option} {text}")
    return Plan.from_dict(given)


def hardware_of(named: Hardware | str | None) -> Hardware:
    """Return the hardware of that name or file, or the default one."""
    from zerofx.hardware import DEFAULT, Hardware, load_hardware

    return named if isinstance(named, Hardware) else load_hardware(named or DEFAULT)


def captured(model: str, plan: Plan, batch: int, seq: int) -> Captured:
    """Capture the named model as the plan needs it."""
    from zerofx.capture import capture
    from zerofx.passes.placement import capture_options
    from zerofx.tools.targets import own_errors, resolve

    target, options = resolve(model, batch, seq), capture_options(plan)
    if plan.parallel.pipeline > 1:
        options["outputs"] = "loss"
    with own_errors(model, "its forward"):
        return capture(target.module, target.args, target.kwargs, **options)


def program_of(
    model: str, world: int | None, plan: Plan, hardware: Hardware | str | None, batch: int,
    seq: int, until: str | None = None, loop: dict[str, Any] | None = None, pipeline: str = "",
    position: int = 0,
) -> Planned:  # fmt: skip
    """Capture the named model and run the plan's passes on it, for `world` ranks.

    position: of the pipeline stage whose program is returned; the call is that of a micro-batch.

    Raises:
        PlanError: `pipeline` was given for an emitted program.
    """
    from zerofx.ir.program import Loop
    from zerofx.passes.order import Setting
    from zerofx.passes.pipeline import run

    if Path(model).is_dir():
        if pipeline:
            raise PlanError(
                f"{model} is an emitted program, whose passes have run. Leave out --pipeline."
            )
        return emitted(model, world, plan, until, hardware)
    start = captured(model, plan, batch, seq)
    described = hardware_of(hardware)
    setting = Setting(
        plan, world or ranks_of(plan), described, loop=Loop(**loop or {}), pipeline=pipeline,
        position=position,
    )  # fmt: skip
    return run(start, setting, until)


def programs_of(
    model: str, world: int | None, plan: Plan, hardware: Hardware | str | None, batch: int, seq: int
) -> tuple[Planned, ...]:
    """Return the programs of all pipeline stages of the named model; one without a pipeline."""
    from zerofx.passes.order import Setting
    from zerofx.tools.predict import stage_programs

    if plan.parallel.pipeline == 1 or Path(model).is_dir():
        return (program_of(model, world, plan, hardware, batch, seq),)
    start = captured(model, plan, batch, seq)
    setting = Setting(plan, world or ranks_of(plan), hardware_of(hardware))
    return tuple(stage_programs(start, setting))


def ranks_of(plan: Plan) -> int:
    """Return the default world size: two, or the number of ranks that share one model."""
    return plan.parallel.num_shared if plan.parallel.is_used else RANKS


def emitted(
    directory: str, world: int | None, plan: Plan, until: str | None,
    hardware: Hardware | str | None,
) -> Planned:  # fmt: skip
    """Load an emitted program, whose plan and world are fixed.

    hardware: replaces the program's own.

    Raises:
        PlanError: an option asks for another plan or world.
    """
    from zerofx.api import load_program
    from zerofx.plan.plan import Plan

    program = load_program(directory)
    if plan != Plan() or until or world not in (None, program.world_size):
        raise PlanError(
            f"{directory} is an emitted program for world {program.world_size}. Its plan is in "
            "plan.yaml. Leave out --plan, --stage, --set, --pass and --world."
        )
    return program if hardware is None else replace(program, hardware=hardware_of(hardware))


def refuse_machine(machine: str | None, hardware: str) -> None:
    """Refuse --machine next to --hardware."""
    if machine is not None:
        raise PlanError(
            f"--machine {machine} and --hardware {hardware} both name the hardware. "
            "Leave out --machine."
        )


def refuse_directory(model: str) -> None:
    """Refuse an emitted program for a command that trains its model."""
    if Path(model).is_dir():
        raise PlanError(
            f"{model} is an emitted program, without its model. Name the model to use --run."
        )


def check_output(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse an output file that cannot be written, before the work for it begins.

    A file that is not there is made and removed again, since permissions alone do not tell whether
    a file system can be written to.

    Raises:
        PlanError: naming the option, the path and the cause.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise PlanError(
            f"{option} {path} has the wrong ending. Give a name that ends in "
            f"{' or '.join(suffixes)}."
        )
    if path.is_dir():
        raise PlanError(f"{option} {path} is a directory. Give the path of a file.")
    if not path.parent.is_dir():
        raise PlanError(
            f"{option} {path} cannot be written: the directory {path.parent} does not exist. "
            "Create it first."
        )
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise PlanError(
            f"{option} {path} cannot be written: {error.strerror}. Choose another path."
        ) from error


def show(view: Any, as_json: bool) -> None:
    """Print a view as JSON, or as text that fits the terminal."""
    if not as_json:
        from zerofx.tools.room import limited

        with limited(columns()):
            text = str(view)
        if getattr(view, "keeps_lines", False):
            done()
            typer.echo(text)
        else:
            print_text(text)
        return
    text = json.dumps(view.to_dict(), indent=1)
    done()
    typer.echo(text)


def print_text(text: str) -> None:
    """Print text that fits the terminal."""
    done()
    typer.echo(fitted(text, columns()))
