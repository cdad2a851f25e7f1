"""Which plan fields exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zerofx.plan.fields import Patterns
from zerofx.plan.sizes import exact_bytes

if TYPE_CHECKING:
    from zerofx.plan.plan import Plan


def contradictions(plan: Plan) -> Iterator[str]:
    """Yield what no release could honour: two fields that exclude each other."""
    if plan.stage == 0 and plan.shard_axis_size is not None:
        yield (
            f"Plan.shard_axis_size = {plan.shard_axis_size} contradicts stage = 0, which shards "
            "nothing; drop shard_axis_size, or use stage 1, 2 or 3"
        )
    if plan.activations == "auto" and plan.memory_budget is None:
        yield (
            "Plan.activations = 'auto' solves under memory_budget, which is None; set "
            "memory_budget (\"40GiB\"), or use 'keep', 'recompute' or a fraction"
        )
    if plan.activations == "auto" and plan.offload.activations == "nvme":
        yield (
            "Plan.activations = 'auto' contradicts offload.activations = 'nvme': what leaves for "
            "NVMe cannot be weighed against what is recomputed, since no machine description says "
            "how fast that is; use offload.activations='cpu', or other activations"
        )
    yield from _against_offload(plan)
    yield from _against_tiling(plan)
    yield from _against_parallel(plan)
    if plan.outputs == "loss" and plan.differentiate == "all":
        yield (
            "Plan.outputs = 'loss' contradicts differentiate = 'all', which needs the outputs "
            "that it leaves out; change one of them"
        )
    if plan.update == "in-backward" and plan.precision.loss_scale is not None:
        yield (
            "Plan.update = 'in-backward' contradicts precision.loss_scale: whether a step "
            "overflowed is known only after the last gradient, when the first parameters are "
            "updated; compute in bf16 or fp32, or use update='step'"
        )
    yield from _against_graphs(plan)


def lets_sizes_vary(plan: Plan) -> bool:
    """Tell whether programs of a plan may serve several sizes of their inputs.

    A CUDA graph replays one call, fused kernels are chosen by size, values that wait on NVMe have
    files of one size, and values are cut over a tensor axis, and sent from one pipeline stage to
    the next, at sizes that are known.
    """
    is_fixed = plan.cuda_graph or plan.numerics == "fast" or plan.offload.activations == "nvme"
    is_fixed |= plan.parallel.is_used
    return plan.dynamic != "off" and not is_fixed


def _against_graphs(plan: Plan) -> Iterator[str]:
    if not plan.cuda_graph:
        return
    if plan.debug:
        yield (
            "Plan.cuda_graph = True contradicts debug = True, which stops at every region; "
            "change one of them"
        )
    if plan.sparse_gradients:
        yield (
            "Plan.cuda_graph = True contradicts sparse_gradients = True, which sends as many "
            "rows as a batch has; change one of them"
        )
    if plan.precision.loss_scale not in (None, "external"):
        yield (
            "Plan.cuda_graph = True contradicts precision.loss_scale, a factor on the host that a "
            "replayed graph cannot follow; compute in bf16, or let torch.amp.GradScaler scale the "
            "loss (loss_scale='external')"
        )
    if _offloaded_patterns(plan) or plan.offload.activations != "none":
        yield (
            "Plan.cuda_graph = True contradicts offloaded activations: a replay would copy to and "
            "from the same host memory in every call, and activations of two live forwards would "
            "overwrite each other; keep or recompute them, or use cuda_graph=False"
        )
    if {plan.offload.optimizer, plan.offload.parameters} != {"none"}:
        yield (
            "Plan.cuda_graph = True contradicts offloaded parameters and optimizers: the host "
            "waits for each copy, and moves only what has changed, which a replay cannot; keep "
            "them on the device, or use cuda_graph=False"
        )
    if plan.update == "in-backward":
        yield (
            "Plan.cuda_graph = True contradicts update = 'in-backward': the optimizer reads rates "
            "and step counts on the host, inside what is replayed; use update='step'"
        )


def _against_offload(plan: Plan) -> Iterator[str]:
    if plan.stage < 3 and plan.offload.parameters != "none":
        yield (
            f"Plan.offload.parameters = {plan.offload.parameters!r} contradicts stage = "
            f"{plan.stage}: only stage 3 shards parameters; use stage 3, or drop it"
        )
    if plan.stage == 0 and plan.offload.optimizer != "none":
        yield (
            f"Plan.offload.optimizer = {plan.offload.optimizer!r} contradicts stage = 0: every "
            "host would keep all states; use stage 1, 2 or 3, or drop it"
        )
    if plan.host_budget is not None and not (plan.offload.is_used or _offloaded_patterns(plan)):
        yield (
            f"Plan.host_budget = {exact_bytes(plan.host_budget)!r} bounds what offload holds, "
            "but nothing is offloaded; set offload, or drop host_budget"
        )
    if plan.offload.delayed and (plan.update == "step" or plan.offload.optimizer != "cpu"):
        yield (
            f"Plan.offload.delayed = True contradicts update = {plan.update!r} with optimizer = "
            f"{plan.offload.optimizer!r}: what runs one step late are updates that backward starts "
            "on the host; use update='in-backward' and optimizer='cpu', or drop delayed"
        )


def _against_parallel(plan: Plan) -> Iterator[str]:
    if not plan.parallel.is_used:
        return
    axis = next(iter(plan.parallel.axes))
    others = {
        "tiling": plan.tiling != "off",
        "cuda_graph": plan.cuda_graph,
        "sparse_gradients": plan.sparse_gradients,
    }
    if axis == "context":
        others |= {"numerics = 'fast'": plan.numerics == "fast"}
    if axis == "pipeline":
        others |= {
            "offload": plan.offload.is_used or bool(_offloaded_patterns(plan)),
            "memory_budget": plan.memory_budget is not None,
            "update = 'in-backward'": plan.update == "in-backward",
            "precision.loss_scale": plan.precision.loss_scale is not None,
            "ignored_params": bool(plan.ignored_params),
        }
    for name, is_set in others.items():
        if is_set:
            yield (
                f"Plan.parallel.{axis} = {getattr(plan.parallel, axis)} does not go with {name} "
                "yet; leave one of the two out"
            )


def _against_tiling(plan: Plan) -> Iterator[str]:
    if plan.tiling == "auto" and plan.memory_budget is None:
        yield (
            "Plan.tiling = 'auto' cuts what is large against memory_budget, which is None; set "
            'memory_budget ("40GiB"), or name the parameters and their tiles'
        )
    if plan.tiling != "off" and plan.update == "in-backward":
        yield (
            "Plan.tiling contradicts update = 'in-backward': the gradient of a tiled parameter "
            "comes tile by tile, and its optimizer steps once over all of it; use update='step'"
        )


def _offloaded_patterns(plan: Plan) -> list[str]:
    if not isinstance(plan.activations, Patterns):
        return []
    return [pattern for pattern, choice in plan.activations.items() if choice == "offload"]
