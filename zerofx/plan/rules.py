"""Rules: the plan fields that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerofx.plan.fields import Patterns
from zerofx.plan.sizes import exact_bytes

if TYPE_CHECKING:
    from zerofx.plan.plan import Plan


def contradictions(plan: Plan) -> Iterator[str]:
    """Yield an error text for each pair of fields that contradict each other."""
    if plan.stage == 0 and plan.shard_axis_size is not None:
        yield (
            f"Plan.shard_axis_size = {plan.shard_axis_size} contradicts stage = 0, which shards "
            "nothing. Drop shard_axis_size, or use stage 1, 2 or 3."
        )
    if plan.activations == "auto" and plan.memory_budget is None:
        yield (
            "Plan.activations = 'auto' solves under memory_budget, which is None. Set "
            "memory_budget (\"40GiB\"), or use 'keep', 'recompute' or a fraction."
        )
    if plan.activations == "auto" and plan.offload.activations == "nvme":
        yield (
            "Plan.activations = 'auto' contradicts offload.activations = 'nvme': hardware "
            "descriptions have no NVMe speed, so offload cannot be weighed against recomputation. "
            "Use offload.activations='cpu', or set activations."
        )
    yield from _against_offload(plan)
    yield from _against_tiling(plan)
    yield from _against_parallel(plan)
    if plan.outputs == "loss" and plan.differentiate == "all":
        yield (
            "Plan.outputs = 'loss' contradicts differentiate = 'all', which needs the outputs "
            "that it leaves out. Change one of them."
        )
    if plan.update == "in-backward" and plan.precision.loss_scale is not None:
        yield (
            "Plan.update = 'in-backward' contradicts precision.loss_scale: an overflow is known "
            "only after the last gradient, when the first parameters are already updated. Compute "
            "in bf16 or fp32, or use update='step'."
        )
    if plan.secondary_shard_size is not None and plan.stage < 3:
        yield (
            f"Plan.secondary_shard_size = {plan.secondary_shard_size} needs stage = 3, whose "
            f"backward gathers parameters again; the plan has stage = {plan.stage}. Raise stage, "
            "or drop secondary_shard_size."
        )
    if plan.hierarchical_size is not None and plan.stage == 0:
        yield (
            f"Plan.hierarchical_size = {plan.hierarchical_size} contradicts stage = 0, which "
            "shards nothing. Drop hierarchical_size, or use stage 1, 2 or 3."
        )
    sizes = {plan.secondary_shard_size, plan.hierarchical_size} - {None}
    if len(sizes) > 1:
        yield (
            f"Plan.secondary_shard_size = {plan.secondary_shard_size} contradicts "
            f"hierarchical_size = {plan.hierarchical_size}: both are the ranks per node. Set both "
            "to the same number."
        )
    if (
        plan.hierarchical_size
        and plan.quantized_gradients
        and (plan.quantized_weights or plan.stage < 3)
    ):
        yield (
            f"Plan.hierarchical_size = {plan.hierarchical_size} has no effect: collectives in "
            "8-bit blocks take one step, and none is left. Drop hierarchical_size, or "
            "quantized_gradients."
        )
    yield from _against_quantized(plan)
    yield from _against_islands(plan)
    yield from _against_graphs(plan)


def lets_sizes_vary(plan: Plan) -> bool:
    """Return whether one program of a plan may serve several sizes of its inputs.

    Sizes are fixed if a CUDA graph is replayed, if fused kernels are chosen by size, if activations
    are on NVMe in files of one size, and if zerofx cuts values over a tensor axis or sends them
    from one pipeline stage to the next.
    """
    is_fixed = plan.cuda_graph or plan.numerics == "fast" or plan.offload.activations == "nvme"
    is_fixed |= plan.parallel.is_used and not plan.parallel.brings_slices
    return plan.dynamic != "off" and not is_fixed


def starts_on_aten(plan: Plan, device_type: str) -> bool:
    """Tell whether a program's first calls run on ATen, while its regions are compiled.

    A budget has to count what compiled regions allocate, which is not known before they exist; a
    CUDA graph records the kernels that it replays; processes that compile for a GPU use its memory;
    and the stages of a pipeline take turns by schedules that have no call for a swap.
    """
    is_known_first = plan.memory_budget is not None or plan.cuda_graph or plan.debug
    is_known_first |= plan.parallel.pipeline > 1
    return plan.kernels == "auto" and device_type == "cpu" and not is_known_first


def _against_islands(plan: Plan) -> Iterator[str]:
    if isinstance(plan.islands, str):
        return
    for other in without_islands(plan):
        yield (
            f"Plan.islands = {list(plan.islands)!r} contradicts {other}, for which every "
            "module is part of a program. Change one of them."
        )


def without_islands(plan: Plan) -> list[str]:
    """Return the settings of a plan for which no module can be named to run eagerly."""
    others = {
        "update = 'in-backward'": plan.update == "in-backward",
        "cuda_graph = True": plan.cuda_graph,
        "parallel": plan.parallel.is_used,
    }
    return [other for other, is_set in others.items() if is_set]


def _against_graphs(plan: Plan) -> Iterator[str]:
    if not plan.cuda_graph:
        return
    if plan.debug:
        yield (
            "Plan.cuda_graph = True contradicts debug = True, which stops at every region. "
            "Change one of them."
        )
    if plan.sparse_gradients:
        yield (
            "Plan.cuda_graph = True contradicts sparse_gradients = True, with which the number of "
            "rows sent depends on the batch. Change one of them."
        )
    if plan.precision.loss_scale not in (None, "external"):
        yield (
            "Plan.cuda_graph = True contradicts precision.loss_scale, a factor on the host that a "
            "replayed graph cannot follow. Compute in bf16, or let torch.amp.GradScaler scale the "
            "loss (loss_scale='external')."
        )
    if _offloaded_patterns(plan) or plan.offload.activations != "none":
        yield (
            "Plan.cuda_graph = True contradicts offloaded activations: every replay would use the "
            "same host memory, so activations of two live forwards would overwrite each other. "
            "Keep or recompute them, or use cuda_graph=False."
        )
    if {plan.offload.optimizer, plan.offload.parameters} != {"none"}:
        yield (
            "Plan.cuda_graph = True contradicts offloaded parameters and optimizers: the host "
            "waits for each copy and moves only changed data, which a replay cannot do. Keep them "
            "on the device, or use cuda_graph=False."
        )
    if plan.update == "in-backward":
        yield (
            "Plan.cuda_graph = True contradicts update = 'in-backward': the optimizer reads rates "
            "and step counts on the host, inside the replayed part. Use update='step'."
        )


def _against_quantized(plan: Plan) -> Iterator[str]:
    for name, least in (("quantized_weights", 3), ("quantized_gradients", 1)):
        if not getattr(plan, name):
            continue
        if plan.numerics == "bitwise":
            yield (
                f"Plan.{name} = True rounds values to 8 bits on their way, which numerics = "
                "'bitwise' excludes. Use numerics='fast', or drop it."
            )
        if plan.stage < least:
            what = "gathers parameters in each step" if least == 3 else "shards"
            yield (
                f"Plan.{name} = True needs stage = {least} or above, which {what}. The plan has "
                f"stage = {plan.stage}. Raise stage, or drop {name}."
            )
    if plan.quantized_gradients and plan.sparse_gradients:
        yield (
            "Plan.quantized_gradients = True contradicts sparse_gradients = True: a table's "
            "gradients travel in one form. Change one of them."
        )


def _against_offload(plan: Plan) -> Iterator[str]:
    if plan.stage < 3 and plan.offload.parameters != "none":
        yield (
            f"Plan.offload.parameters = {plan.offload.parameters!r} contradicts stage = "
            f"{plan.stage}: only stage 3 shards parameters. Use stage 3, or drop it."
        )
    if plan.stage == 0 and plan.offload.optimizer != "none":
        yield (
            f"Plan.offload.optimizer = {plan.offload.optimizer!r} contradicts stage = 0: every "
            "host would keep all states. Use stage 1, 2 or 3, or drop it."
        )
    if plan.host_budget is not None and not (plan.offload.is_used or _offloaded_patterns(plan)):
        yield (
            f"Plan.host_budget = {exact_bytes(plan.host_budget)!r} limits the memory of offload, "
            "but nothing is offloaded. Set offload, or drop host_budget."
        )
    if plan.offload.delayed and (plan.update == "step" or plan.offload.optimizer != "cpu"):
        yield (
            f"Plan.offload.delayed = True contradicts update = {plan.update!r} with optimizer = "
            f"{plan.offload.optimizer!r}: only updates that backward starts on the host can run "
            "one step late. Use update='in-backward' and optimizer='cpu', or drop delayed."
        )


def _against_parallel(plan: Plan) -> Iterator[str]:
    if not plan.parallel.is_used:
        return
    if plan.parallel.capacity is not None and plan.numerics == "bitwise":
        yield (
            f"Plan.parallel.capacity = {plan.parallel.capacity:g} drops tokens beyond it, which "
            "numerics = 'bitwise' excludes. Use numerics='fast', or drop capacity."
        )
    axes = plan.parallel.axes
    refused = {
        next(iter(axes)): {
            "tiling of the slices that a model brings": (
                plan.tiling != "off" and plan.parallel.brings_slices
            ),
            "cuda_graph": plan.cuda_graph,
            "sparse_gradients": plan.sparse_gradients,
        }
    }
    if "context" in axes:
        fast = {"numerics = 'fast'": plan.numerics == "fast"}
        refused["context"] = refused.get("context", {}) | fast
    if "pipeline" in axes:
        refused["pipeline"] |= {
            "tiling": plan.tiling != "off",
            "offload of activations": (
                plan.offload.activations != "none" or bool(_offloaded_patterns(plan))
            ),
            "offload to NVMe": "nvme" in plan.offload.tiers.values(),
            "schedule = 'zero-bubble' and offload": (
                plan.parallel.schedule == "zero-bubble" and plan.offload.is_used
            ),
            "host_budget": plan.host_budget is not None,
            "schedule = 'interleaved' and memory_budget": (
                plan.parallel.interleave > 1 and plan.memory_budget is not None
            ),
            "update = 'in-backward'": plan.update == "in-backward",
        }
        if plan.precision.loss_scale == "external" and plan.parallel.schedule != "gpipe":
            yield (
                f"Plan.parallel.schedule = {plan.parallel.schedule!r} contradicts "
                "precision.loss_scale = 'external': a call of the model runs its backwards, before "
                "GradScaler scales the loss. Let zerofx scale it (loss_scale='dynamic'), or use "
                "schedule='gpipe' with a loss outside of forward."
            )
    for axis, others in refused.items():
        for name, is_set in others.items():
            if is_set:
                yield (
                    f"Plan.parallel.{axis} = {axes[axis]} does not support {name} yet. Leave one "
                    "of the two out."
                )


def _against_tiling(plan: Plan) -> Iterator[str]:
    if plan.tiling == "auto" and plan.memory_budget is None:
        yield (
            "Plan.tiling = 'auto' tiles parameters that are large for memory_budget, which is "
            'None. Set memory_budget ("40GiB"), or name the parameters and their tiles.'
        )
    if plan.tiling != "off" and plan.update == "in-backward":
        yield (
            "Plan.tiling contradicts update = 'in-backward': the gradient of a tiled parameter "
            "arrives tile by tile, but its optimizer steps once over all of it. Use update='step'."
        )


def _offloaded_patterns(plan: Plan) -> list[str]:
    if not isinstance(plan.activations, Patterns):
        return []
    return [pattern for pattern, choice in plan.activations.items() if choice == "offload"]
