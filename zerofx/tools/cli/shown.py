"""Show what a plan does to a model: passes, dump, schedule, memory, diff."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zerofx.errors import PlanError
from zerofx.tools.cli.app import (
    RANKS,
    SEE,
    Accumulation,
    Basis,
    Batch,
    HardwareName,
    Json,
    KeepsResults,
    MachineName,
    Model,
    NoSync,
    OptimizerBytes,
    PlanFile,
    Seq,
    Set,
    Stage,
    World,
    command,
)
from zerofx.tools.cli.programs import (
    hardware_of,
    plan_of,
    program_of,
    programs_of,
    refuse_machine,
    show,
    with_fields,
)


@command(SEE, "zerofx passes", "zerofx passes zerofx.tools.demo.targets:byte_gpt --stage 2")
def passes(
    model: Annotated[
        str | None, typer.Argument(help="Model to show the effect of each pass on.")
    ] = None,
    world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    pipeline: Annotated[
        str | None,
        typer.Option(help="Passes to run instead: text as this command prints it, or @FILE."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the passes in order, or show what each of them does to a model."""
    from zerofx.passes.order import Setting, build
    from zerofx.tools.views import passes as view

    chosen, text = plan_of(plan, stage, set_), _text_of(pipeline)
    built = build(Setting(chosen, world or RANKS, hardware_of(hardware), pipeline=text))
    program = None
    if model:
        program = program_of(model, world, chosen, hardware, batch, seq, pipeline=text)
    show(view.PassesView.of(built.passes, program), as_json)


def _text_of(pipeline: str | None) -> str:
    """Return a pipeline's text: the text itself, or the content of the file after an @."""
    if pipeline is None or not pipeline.startswith("@"):
        return pipeline or ""
    try:
        return Path(pipeline[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"--pipeline {pipeline} cannot be read: {error.strerror}. Give the path of a text file."
        ) from None


@command(
    SEE,
    "zerofx dump zerofx.tools.demo.targets:byte_gpt --level units",
    "zerofx dump hf:path/to/config --world 8 --pass shard-parameters",
)
def dump(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    after: Annotated[
        str | None, typer.Option("--pass", help="Show the program after this pass.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="Detail: summary, units, regions, nodes or full.")
    ] = "nodes",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print the program after the last pass, or after a named one; lines are not wrapped."""
    from zerofx.ir.dump import check_level

    check_level(level)
    chosen = plan_of(plan, stage, set_)
    program = program_of(model, world, chosen, hardware, batch, seq, after)
    text = program.dump(level=level)
    if as_json:
        entry = program.history[-1]
        sizes = {"nodes": entry.num_nodes, "peak_bytes": entry.peak_bytes}
        text = json.dumps({"pass": entry.pass_spec, **sizes, "lines": text.splitlines()}, indent=1)
    typer.echo(text)


@command(SEE, "zerofx schedule zerofx.tools.demo.targets:byte_gpt --world 4")
def schedule(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    basis: Basis = "aten", as_json: Json = False,
) -> None:  # fmt: skip
    """Print the order of compute and collectives, and the memory that is resident at each step."""
    program = program_of(model, world, plan_of(plan, stage, set_), hardware, batch, seq)
    show(program.schedule(basis), as_json)


@command(
    SEE,
    "zerofx memory zerofx.tools.demo.targets:byte_gpt --world 8",
    "zerofx memory model.py:build --set memory_budget=22GiB --set activations=auto --why blocks.0",
)
def memory(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    hardware: HardwareName = None, batch: Batch = 1, seq: Seq = 128,
    optimizer_bytes: OptimizerBytes = 8, keeps_results: KeepsResults = False,
    basis: Basis = "aten", accumulation: Accumulation = 1, no_sync: NoSync = False,
    why: Annotated[
        str | None,
        typer.Option(help="Print the decisions on this value, module, bucket or source line."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print the memory of one rank: by category, and the largest tensors at the peak."""
    loop = {"accumulation": accumulation, "no_sync": no_sync}
    program = program_of(model, world, plan_of(plan, stage, set_), hardware, batch, seq, loop=loop)
    options = {"optimizer_bytes": optimizer_bytes, "keeps_results": keeps_results, **loop}
    view = program.memory(basis=basis, **options)
    show(view if why is None else view.why(why), as_json)


@command(
    SEE,
    "zerofx diff zerofx.tools.demo.targets:byte_gpt --to stage=1",
    "zerofx diff zerofx.tools.demo.targets:byte_gpt --to-world 16 --hardware dgx-h100",
)
def diff(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    to: Annotated[
        list[str] | None, typer.Option(help="Field of the second plan as key=value; repeatable.")
    ] = None,
    to_plan: Annotated[Path | None, typer.Option(help="File of the second plan.")] = None,
    to_world: Annotated[
        int | None, typer.Option(min=1, help=r"Ranks of the second. \[default: as the first]")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option("--hardware", help="Compare predicted times too: preset or YAML file."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare a model under two plans: memory, bytes sent, times, and the steps that differ.

    With a pipeline, each stage is compared with the same one of the other plan.
    """
    from zerofx.analysis.time.forecast import Forecast
    from zerofx.tools.predict import predict
    from zerofx.tools.views.diff import DiffView, PipelineDiff

    if not (to or to_plan or to_world):
        raise PlanError(
            "diff has nothing to compare with. Add --to stage=2, --to-plan FILE or --to-world N."
        )
    left = plan_of(plan, stage, set_)
    right = with_fields(plan_of(to_plan, None, None) if to_plan else left, "--to", to)
    each = (left, world), (right, to_world or world)
    if hardware is None:
        one, other = (programs_of(model, n, chosen, machine, batch, seq) for chosen, n in each)
        is_single = len(one) == len(other) == 1
        show(DiffView(one[0], other[0]) if is_single else PipelineDiff(one, other), as_json)
        return
    refuse_machine(machine, hardware)
    before, after = (
        predict(
            model, chosen, hardware=hardware, world_size=ranks or RANKS, batch=batch, seq=seq
        ).forecast
        for chosen, ranks in each
    )
    if isinstance(before, Forecast) and isinstance(after, Forecast):
        show(DiffView.of(before, after), as_json)
    else:
        show(PipelineDiff.of(before, after), as_json)
