"""compile, in reading order: a model becomes shards, then programs at its first calls."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofx.capture import find_units
from zerofx.capture.call import find_ignored
from zerofx.capture.capture import describe_params
from zerofx.capture.formats import compute_dtypes
from zerofx.capture.guard import check_wrappers
from zerofx.comm.grid import check_mesh
from zerofx.comm.groups import StartUp, place
from zerofx.comm.steps import describe
from zerofx.comm.world import World
from zerofx.errors import ArgumentError, OptimizerError, PlanError
from zerofx.hardware import Hardware, hardware_for
from zerofx.ir.program import Loop, Planned, Program
from zerofx.layout.buckets import Layout
from zerofx.model.digest import describe_layout, describe_parameters, layout_digest
from zerofx.model.module import CompiledModule, check_class, keep_class
from zerofx.model.namespace import make_scaler
from zerofx.model.programs import load_directory
from zerofx.passes.cut_stages import with_positions
from zerofx.passes.order import Setting
from zerofx.passes.pipeline import run
from zerofx.passes.place import with_parts
from zerofx.passes.placement import (
    compute_dtype,
    module_dtypes,
    plan_layout,
    unit_params,
    with_master,
)
from zerofx.passes.tiling import choose_tiles, with_tiles
from zerofx.plan.fields import nearest
from zerofx.plan.plan import Plan, as_plan
from zerofx.runtime.cuda_graph.recorder import check_recordable
from zerofx.runtime.engine import Engine
from zerofx.runtime.store.optimizer import check_before, list_of, swap_optimizer
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.tiers.homes import check_folder
from zerofx.snapshot.target import check_call
from zerofx.snapshot.weights import load_weights, names_of

PlanLike = Plan | Mapping[str, Any] | str | os.PathLike[str] | None


def compile(
    model: nn.Module,
    plan: PlanLike = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    machine: Hardware | str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    **unknown: NoReturn,
) -> CompiledModule:
    """Shard a model at once, and return it; each signature compiles at its first call.

    The result is the very model, whose class is now a subclass of its own (`CompiledModule`).

    model: any nn.Module, materialised (rank 0's values are taken) or on meta (initialised unit by
        unit). Its parameters become shards in place.
    plan: a Plan, a dict of its fields, or the path of a YAML or JSON file. Default: stage 3.
    optimizer: one built over `model.parameters()`, or a list of several, has its parameters swapped
        for the shards.
    device: where the shards live. Default: LOCAL_RANK's GPU where there is one, else the CPU.
    mesh: a DeviceMesh of the data-parallel ranks: 1-D (shard) or 2-D (replicate, shard), without
        names or with ("replicate", "shard") or ("dp_replicate", "dp_shard"). It decides the
        plan's shard_axis_size. At stage 0 all of its ranks are replicas. Default: all ranks.
    hardware: what to plan for (bucket sizes, prefetch, algorithms): a description, a preset's name
        or a file. Default: that of the type of device. machine: its name of before.
    weights: safetensors files that have all of the model, as `load_weights` takes them. What of a
        model on meta is in them goes straight to its shards and is not initialised.

    Raises:
        ArgumentError: an argument is unknown, or of a wrong type; it is also a TypeError.
        PlanError: a plan field is unknown or contradictory.
        CaptureError: the model is wrapped, sharded or compiled by something else already.
        SnapshotError: the weights are not there, not whole, or of another model.
        ShardError: a parameter cannot be sharded; the model is left as it was.
        DesyncError: another rank did not come within ZEROFX_TIMEOUT_S, or has raised; names it.
    """
    with StartUp(mesh) as start:  # where this raises, the other ranks are told
        built = list_of(optimizer)
        _check_arguments(model, optimizer, weights, unknown)
        check_wrappers(model)
        check_class(model)
        world, described, checked = _connect(
            as_plan(plan), device, mesh, _either(hardware, machine), start
        )
        if checked.cuda_graph:
            check_recordable(world.size, world.device)
        scaler = make_scaler(checked, world)
        ignored = find_ignored(model, checked.ignored_params)
        position = world.axis("pipeline").rank
        layout = make_layout(model, checked, world.size, described, position)
        digest = f"{describe(built)};{describe_layout(layout, checked)}"
        world.publish(layout_digest(layout), describe_parameters(layout))
        world.agree(f"zerofx.compile of {type(model).__name__}", digest)
        if checked.offload.activations == "nvme":
            assert checked.offload.path is not None
            check_folder(world, checked.offload.path)
        in_backward = checked.update == "in-backward"
        for each in built:
            check_before(each, layout, in_backward)
        given = () if weights is None else names_of(world, weights, model)
        folder = checked.offload.path
        store = ShardStore.build(
            model, layout, world, in_backward=in_backward, folder=folder, given=given,
            ignored=ignored,
        )  # fmt: skip
        for each in built:
            swap_optimizer(each, store.replaced)
        setting = Setting(checked, world.size, described, layout, position=position)
        engine = Engine(store, scaler, checked.debug, delayed=checked.offload.delayed)
        compiled = keep_class(model, setting, engine)
        if weights is not None:
            load_weights(compiled, weights)
        return compiled


def _check_arguments(
    model: object, optimizer: object, weights: object, unknown: Mapping[str, object]
) -> None:
    """Raise unless the arguments of `compile` are what they should be.

    Raises:
        ArgumentError: names the parameter and the right call.
    """
    for name, value in unknown.items():
        fields = {f.name for f in dataclasses.fields(Plan)}
        if name in fields:
            raise ArgumentError(
                f"zerofx.compile has no parameter {name!r}, which is a field of the plan. Call "
                f"zerofx.compile(model, Plan({name}={value!r}))"
            )
        parameters = [each for each in inspect.signature(compile).parameters if each != "unknown"]
        raise ArgumentError(
            f"zerofx.compile has no parameter {name!r}{nearest(name, [*parameters, *fields])}"
        )
    if isinstance(model, type):
        raise ArgumentError(
            f"model is the class {model.__name__}, not a module. Call zerofx.compile("
            f"{model.__name__}(...))"
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is of type {type(model).__name__}, not an nn.Module. Pass the module itself"
        )
    if weights is not None:
        check_call('zerofx.compile(model, weights="folder")', weights)
    is_list = isinstance(optimizer, (list, tuple))
    for number, each in enumerate(list_of(optimizer)):
        _check_optimizer(model, each, f"optimizer[{number}]" if is_list else "optimizer")


def _check_optimizer(model: nn.Module, optimizer: Any, name: str) -> None:
    """Raise unless `optimizer`, the argument called `name`, is one over parameters of the model.

    Raises:
        ArgumentError: it is no optimizer.
        OptimizerError: it has no parameter of the model.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ArgumentError(
            f"{name} is {'the class ' if isinstance(optimizer, type) else 'of type '}{kind}, "
            "not an optimizer over model.parameters(), nor a list of such. Build any optimizers "
            "over the parameters of the model that zerofx.compile returns, and leave optimizer out"
        )
    held = {id(param) for param in model.parameters()}
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if held and not any(id(param) in held for param in given):
        raise OptimizerError(
            f"{name} {type(optimizer).__name__} has none of the parameters of "
            f"{type(model).__name__}, so that its steps would not train the model. It has "
            f"{len(given)} parameters, the model {len(held)} others. Build it over the "
            "model.parameters() of the model that is compiled"
        )


def _connect(
    plan: Plan,
    device: torch.device | str | None,
    mesh: DeviceMesh | None,
    hardware: Hardware | str | os.PathLike[str] | None,
    start: StartUp,
) -> tuple[World, Hardware, Plan]:
    """Return the world, the hardware, and the plan with the shard axis of the mesh."""
    if mesh is not None:
        check_mesh(mesh)
    here = place(device, mesh)
    described = hardware_for(here, hardware)

    def algorithm(kind: str, nbytes: int, ranks: int) -> str:
        collective = "gather" if kind == "all_gather" else "reduce"
        return described.algorithm(collective, "gloo", nbytes, ranks)  # type: ignore[arg-type]

    is_stage_0 = plan.stage == 0
    parallel = plan.parallel
    if mesh is not None and parallel.is_used:
        axis = "tensor" if parallel.tensor > 1 else "pipeline"
        raise PlanError(
            f"mesh was given, and Plan.parallel.{axis} is {getattr(parallel, axis)}: zerofx makes "
            "the mesh of all ranks itself where it divides layers. Leave mesh out"
        )
    world = World.connect(
        here, mesh, plan.shard_axis_size, algorithm, start, is_stage_0, parallel.tensor,
        parallel.pipeline,
    )  # fmt: skip
    axes = world.shard_size, world.replicate_size
    if not is_stage_0 and axes != plan.axis_sizes(world.size):  # the mesh says so
        plan = replace(plan, shard_axis_size=world.shard_size)
    return world, described, plan


def _either(hardware: Any, machine: Any) -> Any:
    """Return the hardware that was given under one of the parameter's two names.

    Raises:
        ArgumentError: under both.
    """
    if hardware is not None and machine is not None:
        raise ArgumentError(
            "hardware and machine are two names of one parameter, and both are given. Give hardware"
        )
    return machine if hardware is None else hardware


def make_layout(
    model: nn.Module, plan: Plan, world_size: int, hardware: Hardware, position: int = 0
) -> Layout:
    """Return how a model's parameters lie in buckets: decided before any capture.

    position: of the pipeline stage whose rank asks.
    """
    units = find_units(model, plan.units)
    precision = plan.precision
    computes = compute_dtypes(model, compute_dtype(precision), module_dtypes(precision))
    ignored = find_ignored(model, plan.ignored_params)
    params = describe_params(model, units, computes)
    held = [param for name, param in params.items() if name not in ignored]
    described = with_master(held, plan.precision)
    described = with_tiles(described, choose_tiles(described, plan, world_size))
    described = with_positions(with_parts(described, plan.parallel), plan.parallel)
    persist = plan.persist_below
    bucket = plan.bucket_bytes
    return plan_layout(
        unit_params(described, plan.precision),
        plan,
        world_size,
        hardware.persist_below_bytes if persist is None else persist,
        hardware.bucket_bytes if bucket is None else bucket,
        position,
    )


def rewrite(
    program: Program,
    plan: PlanLike = None,
    world_size: int = 1,
    machine: Hardware | str | os.PathLike[str] | None = None,
    *,
    accumulation: int = 1,
    no_sync: bool = False,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    position: int = 0,
) -> Planned:
    """Run the passes of a plan on a captured program, for any world size; no process group.

    accumulation, no_sync: backwards a step, and whether all but the last run under no_sync: what a
        memory budget is solved for, and memory is counted for.
    hardware: what to plan for: a description, a preset's name or a file. Default: cpu-box. machine:
        its name of before.
    position: of the pipeline stage whose program is wanted, from 0. The captured call is that of a
        micro-batch then.

    Returns:
        A new Program with communication, its history one entry a pass. The given one is unchanged.
    """
    if not isinstance(program, Program):
        raise ArgumentError(
            f"program is of type {type(program).__name__}, not a Program. Call zerofx.rewrite("
            "zerofx.capture(model, args, kwargs), plan)"
        )
    checked = as_plan(plan if plan is not None else program.planned().plan)
    described = hardware_for("cpu", _either(hardware, machine))
    if position not in range(checked.parallel.num_stages):
        raise PlanError(
            f"position is {position}, and the plan has {checked.parallel.num_stages} pipeline "
            f"stages (Plan.parallel.pipeline is {checked.parallel.pipeline}): they are counted "
            "from 0"
        )
    loop = Loop(accumulation, no_sync)
    return run(program, Setting(checked, world_size, described, loop=loop, position=position))


def load_program(directory: str | os.PathLike[str], *, allow_changed_math: bool = False) -> Planned:
    """Parse an emitted directory back into a Program, also after a hand edit, and verify it.

    The files are Python and are executed: load only what you trust. `CompiledModule.adopt` runs
    the result in place of what was compiled.

    allow_changed_math: accept regions edited to compute something else than was captured; order,
        gradients and slots are checked as ever.

    Raises:
        ProgramError: a file is missing, truncated or foreign, or the schedule is wrong (it reads
            a released parameter, say): with the lines of schedule.py around the fault.
    """
    return load_directory(directory, allow_changed_math)
