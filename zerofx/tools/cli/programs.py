"""From the words of a command line to a plan, a machine, a program, and a view printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import RANKS, done

if TYPE_CHECKING:  # torch takes seconds to import; `--help` should not
    from zerofx.hardware import Hardware
    from zerofx.ir.program import Captured, Planned
    from zerofx.plan.plan import Plan


def plan_of(file: Path | None, stage: int | None, fields: list[str] | None) -> Plan:
    from zerofx.plan.plan import Plan

    plan = with_fields(Plan.load(file) if file else Plan(), "--set", fields)
    return plan if stage is None else with_fields(plan, "--stage", [f"stage={stage}"])


def with_fields(plan: Plan, option: str, fields: list[str] | None) -> Plan:
    """Return the plan with fields given as `key=value` in their place."""
    from zerofx.plan.fields import read_value
    from zerofx.plan.plan import Plan

    given = plan.to_dict()
    for text in fields or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"{option} {text}: write key=value, for example stage=2")
        given[key.strip()] = read_value(value, f"{option} {text}")
    return Plan.from_dict(given)


def hardware_of(named: Hardware | str | None) -> Hardware:
    """Return the hardware that was named, else the default."""
    from zerofx.hardware import DEFAULT, Hardware, load_hardware

    return named if isinstance(named, Hardware) else load_hardware(named or DEFAULT)


def captured(model: str, plan: Plan, batch: int, seq: int) -> Captured:
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
    """Capture the model that was named and run the plan's passes on it, for `world` ranks.

    position: of the pipeline stage whose program is wanted; the call is that of a micro-batch.
    """
    from zerofx.ir.program import Loop
    from zerofx.passes.order import Setting
    from zerofx.passes.pipeline import run

    if Path(model).is_dir():
        if pipeline:
            raise PlanError(f"{model} is an emitted program: its passes ran; leave out --pipeline")
        return emitted(model, world, plan, until, hardware)
    start = captured(model, plan, batch, seq)
    described = hardware_of(hardware)
    setting = Setting(
        plan, world or ranks_of(plan), described, loop=Loop(**loop or {}), pipeline=pipeline,
        position=position,
    )  # fmt: skip
    return run(start, setting, until)


def ranks_of(plan: Plan) -> int:
    """Return for how many ranks a plan is shown by default: two, or those that share a model."""
    return plan.parallel.num_shared if plan.parallel.is_used else RANKS


def emitted(
    directory: str, world: int | None, plan: Plan, until: str | None,
    hardware: Hardware | str | None,
) -> Planned:  # fmt: skip
    """Load an emitted program, whose plan and world are settled; hardware: instead of its own."""
    from zerofx.api import load_program
    from zerofx.plan.plan import Plan

    program = load_program(directory)
    if plan != Plan() or until or world not in (None, program.world_size):
        raise PlanError(
            f"{directory} is an emitted program for world {program.world_size}: its plan is in "
            "plan.yaml; leave out --plan, --stage, --set, --pass and --world"
        )
    return program if hardware is None else replace(program, hardware=hardware_of(hardware))


def refuse_machine(machine: str | None, hardware: str) -> None:
    if machine is not None:
        raise PlanError(f"--machine {machine}: --hardware {hardware} says what machine it is")


def refuse_directory(model: str) -> None:
    if Path(model).is_dir():
        raise PlanError(f"{model} is an emitted program, without a model; --run needs the model")


def show(view: Any, as_json: bool) -> None:
    text = json.dumps(view.to_dict(), indent=1) if as_json else str(view)
    done()
    typer.echo(text)
