"""The public functions compile, rewrite and load_program, in the order in which compile works."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofx.capture import find_units
from zerofx.capture.call import find_ignored
from zerofx.capture.capture import describe_params, describe_uncalled
from zerofx.capture.formats import compute_dtypes
from zerofx.capture.guard import check_wrappers
from zerofx.comm.agreement import describe_optimizers
from zerofx.comm.grid import check_mesh, slice_axis
from zerofx.comm.groups import StartUp, place
from zerofx.comm.world import World
from zerofx.errors import ArgumentError, OptimizerError, PlanError
from zerofx.hardware import Hardware, hardware_for
from zerofx.ir.program import Loop, Planned, Program
from zerofx.layout.buckets import Layout
from zerofx.layout.placements import Part
from zerofx.layout.slices import HOW_TO_MARK, Marks, marks_of
from zerofx.model.digest import describe_layout, describe_parameters, layout_digest
from zerofx.model.islands import named_islands
from zerofx.model.module import CompiledModule, check_class, keep_class
from zerofx.model.namespace import make_scaler
from zerofx.model.programs import load_directory
from zerofx.passes.cut_stages import with_positions
from zerofx.passes.order import Setting
from zerofx.passes.parts import with_parts
from zerofx.passes.pipeline import run
from zerofx.passes.placement import (
    compute_dtype,
    module_dtypes,
    plan_layout,
    unit_params,
    with_master,
)
from zerofx.passes.tiling import choose_tiles, with_tiles
from zerofx.plan.fields import nearest
from zerofx.plan.parts import MODEL, Parallel
from zerofx.plan.plan import Plan, as_plan
from zerofx.process import keep_heap
from zerofx.runtime.cuda_graph.recorder import check_recordable
from zerofx.runtime.engine import Engine
from zerofx.runtime.store.init import check_copies, check_slices
from zerofx.runtime.store.optimizer import check_before, list_of, swap_optimizer
from zerofx.runtime.store.shards import ShardStore
from zerofx.runtime.store.unmarked import Posted
from zerofx.runtime.tiers.homes import check_folder
from zerofx.snapshot.target import check_call
from zerofx.snapshot.weights import load_weights, names_of

log = logging.getLogger("zerofx")
NO_PARTS: Mapping[str, Part] = MappingProxyType({})
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
    """Shard a model immediately and return it; each input signature compiles at its first call.

    The returned object is `model` itself. Its class becomes a subclass of its own class and
    `CompiledModule`.

    model: any nn.Module, materialised (rank 0's values are used) or on meta (initialised unit by
        unit). Its parameters become shards in place.
    plan: a Plan, a dict of its fields, or the path of a YAML or JSON file. Default: stage 3.
    optimizer: an optimizer built over `model.parameters()`, or a list of several. Its parameters
        are replaced by the shards.
    device: the device of the shards. Default: the GPU of LOCAL_RANK if there is one, else the CPU.
    mesh: a DeviceMesh of the data-parallel ranks: 1-D (shard) or 2-D (replicate, shard), without
        names or with ("replicate", "shard") or ("dp_replicate", "dp_shard"). It sets the plan's
        shard_axis_size. At stage 0 all of its ranks are replicas. Default: all ranks. A model that
        brings its own slices gets the data axis of a mesh that has their axis too; its parameters
        are marked as Megatron-LM's, or DTensors (docs/from-megatron.md).
    hardware: the hardware to plan for (bucket sizes, prefetch, algorithms): a description, the name
        of a preset or a file. Default: the preset of the device type. machine: its former name.
    weights: safetensors files that hold the whole model, in any form that `load_weights` accepts.
        Parameters of a meta model that the files contain are read into their shards and are not
        initialised first.

    Raises:
        ArgumentError: an argument is unknown or has a wrong type; it is also a TypeError.
        PlanError: a plan field is unknown or contradicts another.
        CaptureError: the model is already wrapped, sharded or compiled by something else.
        SnapshotError: the weights are missing, incomplete, or belong to another model.
        ShardError: a parameter cannot be sharded; the model is left unchanged.
        DesyncError: another rank did not arrive within ZEROFX_TIMEOUT_S, or raised; names the rank.

    Example:
        model = zerofx.compile(MyModel(), zerofx.Plan(stage=3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loss = model(x, y)  # the first call captures and schedules the step
        loss.backward()
        optimizer.step()
    """
    with StartUp(mesh) as start:  # if this block raises, the other ranks are told
        built = list_of(optimizer)
        _check_arguments(model, optimizer, weights, unknown)
        check_wrappers(model, takes_dtensors=True)
        check_class(model)
        marks = marks_of(model, mesh is not None)
        world, described, checked = _connect(
            as_plan(plan), device, mesh, _either(hardware, machine), start, marks
        )
        if world.device.type == "cpu" and checked.offload.path is None:
            keep_heap()  # memory may be scarce if a part of the model is on a disk
        parallel = checked.parallel
        if not parallel.brings_slices:
            check_wrappers(model)  # DTensors too
        parts = marks.parts(model, parallel.tensor) if parallel.brings_slices else {}
        if checked.cuda_graph:
            check_recordable(world.size, world.device)
        scaler = make_scaler(checked, world)
        ignored = find_ignored(model, checked.ignored_params)
        named_islands(model, checked.islands)
        position = world.axis("pipeline").rank
        layout = make_layout(model, checked, world.size, described, position, parts)
        digest = f"{describe_optimizers(built)};{describe_layout(layout, checked)}"
        world.publish(layout_digest(layout), describe_parameters(layout))
        world.agree(f"zerofx.compile of {type(model).__name__}", digest)
        if checked.offload.activations == "nvme":
            assert checked.offload.path is not None
            check_folder(world, checked.offload.path)
        in_backward = checked.update == "in-backward"
        for each in built:
            check_before(each, layout, in_backward)
        given = () if weights is None else names_of(world, weights, model)
        if parallel.brings_slices:
            check_slices(world, model, parts, given, ignored)
        elif marks.cuts:
            check_copies(world, model, marks.cuts)
        folder = checked.offload.path
        posted = Posted(world, model, ignored)
        store = ShardStore.build(
            model, layout, world, in_backward=in_backward, folder=folder, given=given,
            ignored=ignored,
        )  # fmt: skip
        store.ledger.layered, store.posted = marks.tensors, posted
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
    """Check the types and names of the arguments of `compile`.

    Raises:
        ArgumentError: names the parameter and the right call.
    """
    for name, value in unknown.items():
        fields = {f.name for f in dataclasses.fields(Plan)}
        if name in fields:
            raise ArgumentError(
                f"zerofx.compile has no parameter {name!r}, which is a field of the plan. Call "
                f"zerofx.compile(model, Plan({name}={value!r}))."
            )
        parameters = [each for each in inspect.signature(compile).parameters if each != "unknown"]
        raise ArgumentError(
            f"zerofx.compile has no parameter {name!r}{nearest(name, [*parameters, *fields])}"
        )
    if isinstance(model, type):
        raise ArgumentError(
            f"model is the class {model.__name__}, not a module. Call zerofx.compile("
            f"{model.__name__}(...))."
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is of type {type(model).__name__}, not an nn.Module. Pass the module itself."
        )
    if weights is not None:
        check_call('zerofx.compile(model, weights="folder")', weights)
    is_list = isinstance(optimizer, (list, tuple))
    for number, each in enumerate(list_of(optimizer)):
        _check_optimizer(model, each, f"optimizer[{number}]" if is_list else "optimizer")


def _check_optimizer(model: nn.Module, optimizer: Any, name: str) -> None:
    """Check that `optimizer`, the argument called `name`, holds parameters of the model.

    Raises:
        ArgumentError: it is not an optimizer.
        OptimizerError: it holds no parameter of the model.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise ArgumentError(
            f"{name} is {'the class ' if isinstance(optimizer, type) else 'of type '}{kind}, "
            "not an optimizer over model.parameters() or a list of optimizers. Leave optimizer "
            "out, and build optimizers over the parameters of the compiled model."
        )
    held = {id(param) for param in model.parameters()}
    given = [param for group in optimizer.param_groups for param in group["params"]]
    if held and not any(id(param) in held for param in given):
        raise OptimizerError(
            f"{name} {type(optimizer).__name__} holds none of the parameters of "
            f"{type(model).__name__}, so its steps would not train the model. It holds "
            f"{len(given)} parameters. The model has {len(held)} others. Build it over the "
            "parameters of the model that is compiled."
        )


def _connect(
    plan: Plan,
    device: torch.device | str | None,
    mesh: DeviceMesh | None,
    hardware: Hardware | str | os.PathLike[str] | None,
    start: StartUp,
    marks: Marks,
) -> tuple[World, Hardware, Plan]:
    """Return the world, the hardware, and the plan with the shard axis size of the mesh."""
    if mesh is not None:
        check_mesh(mesh)
    here = place(device, mesh)
    described = hardware_for(here, hardware)

    def algorithm(kind: str, nbytes: int, ranks: int) -> str:
        collective = "gather" if kind == "all_gather" else "reduce"
        return described.algorithm(collective, "gloo", nbytes, ranks)  # type: ignore[arg-type]

    is_stage_0 = plan.stage == 0
    slices = slice_axis(mesh, marks)
    if slices is not None and (plan.parallel.brings_slices or not plan.parallel.is_used):
        own = Parallel(tensor=slices.size, placements=MODEL)
        plan = replace(plan, parallel=own)
    parallel = plan.parallel
    if parallel.brings_slices and slices is None:
        raise PlanError(
            "Plan.parallel.placements is 'model', but no parameter is marked as a slice over an "
            f'axis outside of mesh. {HOW_TO_MARK}, and pass mesh=mesh["dp"].'
        )
    if mesh is not None and parallel.is_used and not parallel.brings_slices:
        axis, size = next(reversed(parallel.axes.items()))
        raise PlanError(
            f"mesh is given, but Plan.parallel.{axis} is {size}. zerofx builds "
            "the mesh of all ranks itself if it cuts or divides layers. Leave mesh out."
        )
    world = World.connect(
        here, mesh, plan.shard_axis_size, algorithm, start, is_stage_0, parallel.tensor,
        parallel.pipeline, parallel.context, slices, plan.node_size,
    )  # fmt: skip
    shards = world.axis("shard")
    if plan.ranks_per_node and shards.elsewhere and plan.node_size(shards.size) == 1:
        log.warning(
            "The plan has %d ranks per node (secondary_shard_size or hierarchical_size), which "
            "makes one node, or one for each, of the %d ranks that share a bucket. They are on "
            "several hosts, and the setting changes nothing. Set it to the number of ranks per "
            "host.", plan.ranks_per_node, shards.size,
        )  # fmt: skip
    axes = world.shard_size, world.replicate_size
    if not is_stage_0 and axes != plan.axis_sizes(world.size):  # the mesh overrides the plan
        plan = replace(plan, shard_axis_size=world.shard_size)
    return world, described, plan


def _either(hardware: Any, machine: Any) -> Any:
    """Return the hardware, which may be given under either of the parameter's two names.

    Raises:
        ArgumentError: both names are given.
    """
    if hardware is not None and machine is not None:
        raise ArgumentError(
            "hardware and machine are two names of one parameter. Both were given. Give hardware."
        )
    return machine if hardware is None else hardware


def make_layout(
    model: nn.Module, plan: Plan, world_size: int, hardware: Hardware, position: int = 0,
    parts: Mapping[str, Part] = NO_PARTS,
) -> Layout:  # fmt: skip
    """Return the bucket layout of a model's parameters, which is decided before any capture.

    position: the pipeline stage of the calling rank, counted from 0. parts: the slices that the
        model brings, by name.
    """
    units = find_units(model, plan.units)
    precision = plan.precision
    computes = compute_dtypes(model, compute_dtype(precision), module_dtypes(precision))
    ignored = find_ignored(model, plan.ignored_params)
    is_cut = plan.parallel.tensor > 1 and not plan.parallel.brings_slices
    describe = describe_uncalled if is_cut else describe_params
    params = describe(model, units, computes, parts=parts)
    held = [param for name, param in params.items() if name not in ignored]
    described = with_master(held, plan.precision)
    described = with_parts(described, plan.parallel)
    described = with_tiles(described, choose_tiles(described, plan, world_size))
    described = with_positions(described, plan.parallel)
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
    """Run a plan's passes on a captured program for any world size, without a process group.

    accumulation, no_sync: the number of backwards per step, and whether all but the last run under
        no_sync. The memory budget is solved, and memory is counted, for this loop.
    hardware: the hardware to plan for: a description, the name of a preset or a file. Default:
        cpu-box. machine: the former name of this parameter.
    position: the pipeline stage whose program is returned, counted from 0. In a pipeline, the
        captured call must be that of one micro-batch.

    Returns:
        A new Program with communication and one history entry per pass. `program` is unchanged.

    Raises:
        ArgumentError: program is not a Program.
        PlanError: the plan does not fit the program or the world, or has no such stage.
        BudgetError: the plan's memory budget cannot be met; names the smallest one that can.

    Example:
        program = zerofx.rewrite(zerofx.capture(model, args), {"stage": 3}, world_size=8)
        print(program.memory())
    """
    if not isinstance(program, Program):
        raise ArgumentError(
            f"program is of type {type(program).__name__}, not a Program. Call zerofx.rewrite("
            "zerofx.capture(model, args, kwargs), plan)."
        )
    checked = as_plan(plan if plan is not None else program.planned().plan)
    described = hardware_for("cpu", _either(hardware, machine))
    if position not in range(checked.parallel.num_stages):
        raise PlanError(
            f"position is {position}, but the plan has {checked.parallel.num_stages} pipeline "
            f"stages (Plan.parallel.pipeline is {checked.parallel.pipeline}). Give a stage from 0 "
            f"to {checked.parallel.num_stages - 1}."
        )
    loop = Loop(accumulation, no_sync)
    return run(program, Setting(checked, world_size, described, loop=loop, position=position))


def load_program(directory: str | os.PathLike[str], *, allow_changed_math: bool = False) -> Planned:
    """Parse an emitted directory back into a Program, even after a hand edit, and verify it.

    The files are Python and are executed: load only files that you trust. `CompiledModule.adopt`
    runs the result in place of the compiled program.

    allow_changed_math: accept regions that were edited to compute something other than the captured
        model. Order, gradients and slots are still checked.

    Raises:
        ProgramError: a file is missing, truncated or foreign, or the schedule is wrong (for
            example, it reads a released parameter). Shows the lines of schedule.py around the
            fault.

    Example:
        model.programs[0].emit("emitted")  # then edit emitted/schedule.py
        model.adopt(zerofx.load_program("emitted"))
    """
    return load_directory(directory, allow_changed_math)
