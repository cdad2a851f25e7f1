"""The command line: what a plan does to a model, for any world size, without any ranks.

A MODEL is `package.module:function` or `file.py:function`, which returns (module, args, kwargs);
`hf:path/config.json` for a transformers config (random weights on meta; --batch, --seq); or the
directory of an emitted program, which is verified and shown as it stands.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerofx.errors import PlanError, ZerofxError

if TYPE_CHECKING:  # torch takes seconds to import; `--help` should not
    from zerofx.ir.program import Program
    from zerofx.plan import Plan

app = typer.Typer(
    help="ZeRO as a compiler: see what runs, and what it needs, before it runs.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

RANKS = 2  # to plan for where nothing is said

Model = Annotated[str, typer.Argument(help="package.module:function, file.py:function or hf:path")]
World = Annotated[int | None, typer.Option("--world", min=1, help="ranks to plan for [default: 2]")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="YAML or JSON file of plan fields")]
Stage = Annotated[int | None, typer.Option("--stage", help="ZeRO stage, over the plan's")]
Set = Annotated[list[str] | None, typer.Option("--set", help="plan field: key=value; repeatable")]
MachineName = Annotated[str | None, typer.Option("--machine", help="preset or file: cuda-nccl")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="batch size of an hf: model's call")]
Seq = Annotated[int, typer.Option("--seq", min=1, help="sequence length of an hf: model's call")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def main(argv: list[str] | None = None) -> None:
    """Run the command line; a ZerofxError ends it with its text and status 1."""
    try:
        app(argv, prog_name="zerofx")
    except ZerofxError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        sys.exit(1)


@app.command()
def passes(
    model: Annotated[str | None, typer.Argument(help="a model, to show what each does")] = None,
    world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128, as_json: Json = False,
) -> None:  # fmt: skip
    """List the passes in order, or what each of them does to a model."""
    from zerofx.passes.pipeline import Setting, build
    from zerofx.views import passes as view

    chosen = _plan(plan, stage, set_)
    built = build(Setting(chosen, world or RANKS, _machine(machine)))
    program = _program(model, world, chosen, machine, batch, seq) if model else None
    _show(view.PassesView.of(built, program), as_json)


@app.command()
def dump(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    after: Annotated[str | None, typer.Option("--pass", help="show it after this pass")] = None,
    level: Annotated[str, typer.Option(help="summary, units, regions, nodes or full")] = "nodes",
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print the program: after the last pass, or after the one named."""
    from zerofx.ir.dump import check_level

    check_level(level)
    chosen = _plan(plan, stage, set_)
    program = _program(model, world, chosen, machine, batch, seq, after)
    text = program.dump(level=level)
    if as_json:
        entry = program.history[-1]
        sizes = {"nodes": entry.num_nodes, "peak_bytes": entry.peak_bytes}
        text = json.dumps({"pass": entry.pass_spec, **sizes, "lines": text.splitlines()}, indent=1)
    typer.echo(text)


@app.command()
def schedule(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128, as_json: Json = False,
) -> None:  # fmt: skip
    """Print what runs when: compute, gathers, reduces, and what is resident meanwhile."""
    _show(_program(model, world, _plan(plan, stage, set_), machine, batch, seq).schedule(), as_json)


@app.command()
def memory(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    optimizer_bytes: Annotated[
        int, typer.Option(min=0, help="bytes of optimizer state an element; AdamW in fp32 has 8")
    ] = 8,
    keeps_results: Annotated[
        bool, typer.Option("--keep-results/--loss-only", help="what the loop holds until step()")
    ] = True,
    accumulation: Annotated[int, typer.Option(min=1, help="backwards a step")] = 1,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="all but the last backward run under no_sync")
    ] = False,
    why: Annotated[
        str | None, typer.Option(help="a value, module, bucket or line: what was decided, and why")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print what a rank holds: by category, and the names at the peak."""
    loop = {"accumulation": accumulation, "no_sync": no_sync}
    program = _program(model, world, _plan(plan, stage, set_), machine, batch, seq, loop=loop)
    options = {"optimizer_bytes": optimizer_bytes, "keeps_results": keeps_results, **loop}
    view = program.memory(**options)
    _show(view if why is None else view.why(why), as_json)


@app.command()
def diff(
    model: Model, world: World = None, plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    to: Annotated[list[str] | None, typer.Option(help="field of the second: key=value")] = None,
    to_plan: Annotated[Path | None, typer.Option(help="file of the second plan")] = None,
    to_world: Annotated[int | None, typer.Option(min=1, help="ranks of the second")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare a model under two plans: memory, bytes sent, and the lines that differ."""
    from zerofx.views.diff import DiffView

    if not (to or to_plan or to_world):
        raise PlanError("diff: say what is different: --to stage=2, --to-plan FILE or --to-world N")
    left = _plan(plan, stage, set_)
    right = _with_fields(_plan(to_plan, None, None) if to_plan else left, "--to", to)
    before = _program(model, world, left, machine, batch, seq)
    after = _program(model, to_world or world, right, machine, batch, seq)
    _show(DiffView(before, after), as_json)


@app.command()
def verify(
    model: Model,
    worlds: Annotated[
        list[int] | None, typer.Option("--world", min=1, help="ranks; repeatable [default: 2]")
    ] = None,
    plan: PlanFile = None, stage: Stage = None, set_: Set = None,
    machine: MachineName = None, batch: Batch = 1, seq: Seq = 128,
    is_run: Annotated[
        bool, typer.Option("--run", help="train too, on real ranks, beside plain training")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="of --run")] = 3,
    accumulation: Annotated[int, typer.Option(min=1, help="backwards a step, of --run")] = 1,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="all but the last backward under no_sync, of --run")
    ] = False,
    same_batch: Annotated[
        bool, typer.Option("--same-batch", help="every rank gets the example call as it is")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(help="relative error of a tensor [default: by the precision]")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Prove the program for every rank; with --run, hold real training against plain training."""
    from zerofx.trial.launch import run_trial
    from zerofx.trial.settings import Settings
    from zerofx.views.proof import ProofView

    chosen, found = _plan(plan, stage, set_), []
    each: list[int | None] = [*worlds] if worlds else [None]
    for world in each:
        view: Any = ProofView.of(_program(model, world, chosen, machine, batch, seq))
        found.append(view)
        if is_run:
            _refuse_directory(model)
            settings = Settings(
                model, chosen.to_dict(), view.world, steps, batch, seq, accumulation, no_sync,
                same_batch, tolerance,
            )  # fmt: skip
            found.append(run_trial(settings))
    if as_json:
        typer.echo(json.dumps([view.to_dict() for view in found], indent=1))
    else:
        typer.echo("\n".join(map(str, found)))
    if not all(getattr(view, "is_equal", True) for view in found):
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check that this installation can compile and train; the status is 1 where it cannot."""
    from zerofx.doctor import Diagnosis, checks

    diagnosis = Diagnosis(checks())
    _show(diagnosis, as_json)
    if not diagnosis.is_well:
        raise typer.Exit(1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True,
                      "help_option_names": []}
)  # fmt: skip
def demo(context: typer.Context) -> None:
    """Train a byte-level GPT on this Python's own sources; `zerofx demo --help` lists options."""
    from zerofx.demo.train import main as run

    raise typer.Exit(run(context.args))


# -- shared -----------------------------------------------------------------------------------
def _plan(file: Path | None, stage: int | None, fields: list[str] | None) -> Plan:
    from zerofx.plan import Plan

    plan = _with_fields(Plan.load(file) if file else Plan(), "--set", fields)
    return plan if stage is None else _with_fields(plan, "--stage", [f"stage={stage}"])


def _with_fields(plan: Plan, option: str, fields: list[str] | None) -> Plan:
    """Return the plan with fields given as `key=value` in their place."""
    import yaml

    from zerofx.plan import Plan

    given = plan.to_dict()
    for text in fields or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"{option} {text}: write key=value, for example stage=2")
        given[key.strip()] = yaml.safe_load(value)
    return Plan.from_dict(given)


def _machine(name: str | None) -> Any:
    from zerofx.machine import machine_for

    return machine_for("cpu", name)


def _capture(model: str, plan: Plan, batch: int, seq: int) -> Program:
    from zerofx import reports  # noqa: F401  # gives Program its methods
    from zerofx.capture import capture
    from zerofx.passes.placement import compute_dtype
    from zerofx.targets import resolve

    target = resolve(model, batch, seq)
    return capture(
        target.module, target.args, target.kwargs,
        differentiate=plan.differentiate, outputs=plan.outputs, units=plan.units,
        compute_dtype=compute_dtype(plan.precision),
    )  # fmt: skip


def _program(
    model: str, world: int | None, plan: Plan, machine: str | None, batch: int, seq: int,
    until: str | None = None, loop: dict[str, Any] | None = None,
) -> Program:  # fmt: skip
    """Capture the model that was named and run the plan's passes on it, for `world` ranks."""
    from zerofx.ir.program import Loop
    from zerofx.passes.pipeline import Setting, run

    if Path(model).is_dir():
        return _emitted(model, world, plan, until)
    captured = _capture(model, plan, batch, seq)
    setting = Setting(plan, world or RANKS, _machine(machine), loop=Loop(**loop or {}))
    return run(captured, setting, until)


def _emitted(directory: str, world: int | None, plan: Plan, until: str | None) -> Program:
    """Load an emitted program, whose plan and world are settled."""
    from zerofx import reports  # noqa: F401  # gives Program its methods
    from zerofx.api import load_program
    from zerofx.plan import Plan

    program = load_program(directory)
    if plan != Plan() or until or world not in (None, program.world_size):
        raise PlanError(
            f"{directory} is an emitted program for world {program.world_size}: its plan is in "
            "plan.yaml; leave out --plan, --stage, --set, --pass and --world"
        )
    return program


def _refuse_directory(model: str) -> None:
    if Path(model).is_dir():
        raise PlanError(f"{model} is an emitted program, without a model; --run needs the model")


def _show(view: Any, as_json: bool) -> None:
    typer.echo(json.dumps(view.to_dict(), indent=1) if as_json else str(view))
