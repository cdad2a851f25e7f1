"""The plan: every choice of a run in one frozen, self-validating value.

A plan is stored in one canonical form however it was written (`"40GiB"` becomes an int, `"bf16"` a
`Precision`, a dict of patterns a `Patterns`), so that equal plans compare and hash equal.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofx.errors import PlanError
from zerofx.plan.fields import (
    Patterns,
    check_names,
    either,
    flag,
    load_mapping,
    one_of,
    optional,
    read_fields,
    read_mapping,
    size,
    spec_field,
    whole,
    write_yaml,
)
from zerofx.plan.parts import (
    Offload,
    Parallel,
    Precision,
    read_activations,
    read_dynamic,
    read_islands,
    read_names,
    read_tiling,
    read_units,
)
from zerofx.plan.rules import contradictions
from zerofx.plan.sizes import exact_bytes

_SIZES = ("memory_budget", "host_budget", "persist_below", "bucket_bytes")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """How a model is sharded, scheduled and run. Fields are given by name; all have defaults.

    stage: 0 replicates (bucketed all-reduce); 1 shards optimizer states, 2 + gradients,
        3 + parameters.
    precision: "fp32", "bf16", "fp16" or Precision(compute, reduce, master, loss_scale).
    memory_budget: peak device bytes per rank ("40GiB") of a training step with one backward. It
        includes AdamW's states and reserves a thousandth for the training loop. Spare memory is
        spent on keeping parameters gathered from forward to backward. A prefetch of "auto" is
        shortened before a budget is refused. None is strict ZeRO: nothing extra is kept.
    host_budget: the same for the host memory that offload uses.
    activations: "keep", "recompute", "auto" (solved under the budget), the fraction of bytes to
        keep, or {name pattern: "keep" / "recompute" / "offload"}. Offloaded activations are in host
        memory, or in files, from their last use in forward to their first use in backward.
    tiling: "off", "auto", or {name pattern: number of tiles}.
    offload: Offload(parameters, optimizer, activations, path, ...) or a dict of its fields.
        activations="cpu" offloads all saved activations that no pattern covers, except small ones
        and those that backward needs immediately. With "nvme", these and the activations that
        patterns offload pass through the host to files under `path`.
    prefetch: how many units ahead a gather is launched, or "auto" (the hardware's value).
    persist_below: parameters of fewer bytes stay gathered; None uses the hardware's value.
    bucket_bytes: smaller units share a collective up to this size. None uses the hardware's value,
        which a memory budget limits to the size of the largest unit.
    units: "auto", or name patterns of the modules whose parameters travel together.
    ignored_params: name patterns of parameters that are left to the user, as with fully_shard's
        ignored_params: they are not sharded or moved, and each rank keeps its own gradients.
    shard_axis_size: shard within groups of this many ranks, replicate across; None is all ranks.
    secondary_shard_size: the ranks per node over which a second copy of the gathered parameters is
        sharded from forward to backward (stage 3). Backward gathers from it, within the node, so
        that only forward gathers across nodes. Neighbours along the shard axis form a node. The
        copy takes 1 / secondary_shard_size of the parameters in their compute format. Values do
        not change. If all ranks that share a bucket are in one node, there is no second copy.
    hierarchical_size: the ranks per node, if gathers and reductions over the shard axis are to run
        in two steps: a gather across nodes, then within each; a reduction within each node, then
        across. Across nodes they send 1 / hierarchical_size of the bytes. A sum is that of nodes,
        each the sum of its ranks, in rank order, so its rounding differs from that of one step.
    parallel: over how many ranks the layers themselves are cut; see `Parallel`.
    differentiate: "loss", or "all" float outputs. With "all", parameters of an output that is not
        part of the loss get zero gradients, where eager PyTorch leaves None.
    outputs: "all", or "loss": other outputs are not computed for the caller.
    update: "step", or "in-backward": the optimizer runs per bucket inside backward.
    sparse_gradients: whether the gradient of a table that is only looked up (nn.Embedding or
        nn.EmbeddingBag, alone in its bucket, not tied) is sent as rows if that sends fewer bytes.
        The values are those of a dense reduction.
    quantized_weights, quantized_gradients: whether gathers of parameters (stage 3), and reductions
        of gradients, over the shard axis carry 8-bit blocks: about a quarter of fp32's bytes, for
        slow networks. Each needs numerics="fast". Shards, states and sums keep their format.
    buffers: "rank0" (running statistics follow rank 0, as in DDP) or "local".
    numerics: "bitwise", or "fast": passes may change rounding. The loss head is then computed in
        chunks and never holds all logits, and on a GPU norms, gated activations and rotary
        embeddings use the fused kernels of zerofx.
    kernels: "auto": the first steps run on ATen while other processes compile each structure of
        regions once, and one call, the same on all ranks, swaps in all of them together. The next
        calls time both forms, and each region keeps the faster one, which the cache remembers. Runs
        are repeatable to the bit up to the swap. On a GPU, in pipelines, under a memory_budget and
        with cuda_graph it waits as "inductor" does, which compiles before the first step. "aten"
        compiles nothing: regions run op by op. `model.zerofx.kernels` says which form runs.
    cuda_graph: whether each forward and backward is replayed as one CUDA graph (one process).
    max_programs: how many programs are kept ready to run. A further one replaces the least
        recently used one, with one warning.
    dynamic: "auto": once a dimension of the arguments has had two values, programs compiled from
        then on leave it free, and one program serves all its values. A dimension declared with its
        largest size is free from the first call: {"ids.shape[1]": 512}. "off": one program per
        input signature, as always with cuda_graph=True, numerics="fast", activations on NVMe, or
        axes in `parallel` (unless the model brings its own slices).
    islands: "auto": a forward that cannot be captured as a static graph runs eagerly, its
        parameters gathered around it, while the modules that it calls have programs of their own.
        "refuse": raise a CaptureError instead. A list of module name patterns ("" is the model
        itself) is "auto", and lets these modules and those that contain them run eagerly too: for
        loops with so many iterations that a graph of them is too large to compile.
    debug: run region by region on ATen, so that prints, breakpoints and the NaN finder work.

    Raises:
        PlanError: a field is unknown, out of range, or contradicts another; the message names
            the field, its value, the allowed values, and the fix.

    Example:
        plan = zerofx.Plan(stage=3, activations="auto", memory_budget="40GiB")
        Path("plan.yaml").write_text(plan.to_yaml())
        assert zerofx.Plan.load("plan.yaml") == plan
    """

    stage: int = spec_field(3, one_of(0, 1, 2, 3))
    precision: Precision = spec_field("fp32", Precision.read)
    memory_budget: int | None = spec_field(None, optional(size(1)))
    host_budget: int | None = spec_field(None, optional(size(1)))
    activations: str | float | Patterns = spec_field("keep", read_activations)
    tiling: str | Patterns = spec_field("off", read_tiling)
    offload: Offload = spec_field(None, Offload.read)
    prefetch: str | int = spec_field("auto", either("auto", whole(0)))
    persist_below: int | None = spec_field(None, optional(size(0)))
    bucket_bytes: int | None = spec_field(None, optional(size(0)))
    units: str | tuple[str, ...] = spec_field("auto", read_units)
    ignored_params: tuple[str, ...] = spec_field((), read_names)
    shard_axis_size: int | None = spec_field(None, optional(whole(1)))
    secondary_shard_size: int | None = spec_field(None, optional(whole(2)))
    hierarchical_size: int | None = spec_field(None, optional(whole(2)))
    parallel: Parallel = spec_field(None, Parallel.read)
    differentiate: str = spec_field("loss", one_of("loss", "all"))
    outputs: str = spec_field("all", one_of("all", "loss"))
    update: str = spec_field("step", one_of("step", "in-backward"))
    sparse_gradients: bool = spec_field(False, flag)
    quantized_weights: bool = spec_field(False, flag)
    quantized_gradients: bool = spec_field(False, flag)
    buffers: str = spec_field("rank0", one_of("rank0", "local"))
    numerics: str = spec_field("bitwise", one_of("bitwise", "fast"))
    kernels: str = spec_field("auto", one_of("auto", "inductor", "aten"))
    cuda_graph: bool = spec_field(False, flag)
    max_programs: int = spec_field(16, whole(1))
    dynamic: str | Patterns = spec_field("auto", read_dynamic)
    islands: str | tuple[str, ...] = spec_field("auto", read_islands)
    debug: bool = spec_field(False, flag)

    if TYPE_CHECKING:  # it accepts more types than it stores: dataclasses cannot say so

        def __init__(
            self,
            *,
            stage: int = ...,
            precision: str | Precision | Mapping[str, Any] = ...,
            memory_budget: int | str | None = ...,
            host_budget: int | str | None = ...,
            activations: str | float | Mapping[str, str] = ...,
            tiling: str | Mapping[str, int] = ...,
            offload: Offload | Mapping[str, Any] | str | None = ...,
            prefetch: str | int = ...,
            persist_below: int | str | None = ...,
            bucket_bytes: int | str | None = ...,
            units: str | Sequence[str] = ...,
            ignored_params: str | Sequence[str] = ...,
            shard_axis_size: int | None = ...,
            secondary_shard_size: int | None = ...,
            hierarchical_size: int | None = ...,
            parallel: Parallel | Mapping[str, Any] | str | None = ...,
            differentiate: str = ...,
            outputs: str = ...,
            update: str = ...,
            sparse_gradients: bool = ...,
            quantized_weights: bool = ...,
            quantized_gradients: bool = ...,
            buffers: str = ...,
            numerics: str = ...,
            kernels: str = ...,
            cuda_graph: bool = ...,
            max_programs: int = ...,
            dynamic: str | Mapping[str, int] = ...,
            islands: str | Sequence[str] = ...,
            debug: bool = ...,
        ) -> None: ...

    def __new__(cls, *args: Any, **fields: Any) -> Plan:
        """Refuse unknown names here: the generated `__init__` would raise a plain TypeError."""
        if args:
            raise PlanError(f"Plan takes its fields by name. Write Plan(stage={args[0]!r}).")
        check_names("plan", fields, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        read_fields(self, "Plan")
        for contradiction in contradictions(self):
            raise PlanError(contradiction)

    def __repr__(self) -> str:
        shown = {k: v for k, v in self.to_dict().items() if k == "stage" or v != _DEFAULTS[k]}
        return f"Plan({', '.join(f'{k}={v!r}' for k, v in shown.items())})"

    def axis_sizes(self, world_size: int) -> tuple[int, int]:
        """Return (ranks that share a bucket, copies of each shard) for a world size.

        Raises:
            PlanError: the parallel axes, or shard_axis_size, do not divide world_size, or
                secondary_shard_size (or hierarchical_size) does not divide the ranks that share a
                bucket; the message names both.
        """
        shared = self.parallel.num_shared
        if world_size % shared:
            axes = self.parallel.axes
            said = " x ".join(f"parallel.{axis} = {size}" for axis, size in axes.items())
            raise PlanError(
                f"Plan.{said} does not divide the world of {world_size} ranks. Use a divisor, or "
                "start another number of ranks."
            )
        world_size //= self.parallel.num_dividing
        shard_size = 1 if self.stage == 0 else self.shard_axis_size or world_size
        if world_size % shard_size:
            raise PlanError(
                f"Plan.shard_axis_size = {shard_size} does not divide the world of {world_size} "
                "ranks. Use a divisor, or None to shard over all ranks."
            )
        self.node_size(shard_size)
        return shard_size, world_size // shard_size

    def node_size(self, shard_size: int) -> int:
        """Return the ranks of the shard axis per node; 1 if the plan makes no difference there.

        Of a node's ranks, `parallel.tensor` share each layer, and the others are along the shard
        axis.

        shard_size: the ranks that share a bucket. If they are all in one node, nodes make none.

        Raises:
            PlanError: secondary_shard_size or hierarchical_size is not a multiple of
                parallel.tensor, or does not divide the ranks; the message names both numbers.
        """
        size, tensor = self.ranks_per_node, self.parallel.tensor
        if size is None:
            return 1
        name = "secondary_shard_size" if self.secondary_shard_size else "hierarchical_size"
        if size > 1 and size % tensor:
            raise PlanError(
                f"Plan.{name} = {size} is no multiple of parallel.tensor = {tensor}, whose ranks "
                "share each layer within a node. Use the number of ranks per node."
            )
        if size >= shard_size * tensor:
            return 1
        if shard_size * tensor % size:
            raise PlanError(
                f"Plan.{name} = {size} does not divide the {shard_size * tensor} ranks that "
                "share buckets and layers. Use the number of ranks per node."
            )
        return max(size // tensor, 1)

    @property
    def ranks_per_node(self) -> int | None:
        """The size of secondary_shard_size or hierarchical_size; None if neither is used."""
        return self.secondary_shard_size or self.hierarchical_size

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value that YAML, JSON and `from_dict` read back."""
        return {f.name: _plain(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_yaml(self) -> str:
        """Return the plan as YAML text, one field per line, in the order of the class."""
        return write_yaml(self.to_dict())

    def to_json(self) -> str:
        """Return the plan as JSON text; equal plans give equal text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Build a plan from a mapping of fields; missing fields take their defaults."""
        check_names("plan", fields, cls.__dataclass_fields__)
        return cls(**fields)

    @classmethod
    def from_yaml(cls, source: str) -> Plan:
        """Build a plan from YAML text."""
        return cls.from_dict(read_mapping(source, "plan"))

    @classmethod
    def from_json(cls, source: str) -> Plan:
        """Build a plan from JSON text."""
        return cls.from_dict(read_mapping(source, "plan", is_json=True))

    @classmethod
    def from_ds_config(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any],
        *,
        auto: Any = None,
        hidden_size: int | None = None,
        num_training_steps: int | None = None,
    ) -> Plan:
        """Build the plan that corresponds to a DeepSpeed configuration, given as a path or mapping.

        Warns of unknown keys, and of ignored keys that matter. For the verdict on every key, print
        `read_ds_config(source)` of zerofx.plan.ds_config, or run `zerofx plan-for --from`.

        auto: the source of "auto" values: transformers' TrainingArguments, or a mapping with the
            same names.
        hidden_size: the model's, for "auto" bucket sizes. Default: the hardware's bucket sizes.
        num_training_steps: for "auto" values of schedulers. Default: `max_steps`.

        Raises:
            PlanError: names every refused key, its value, and the fix.
        """
        from zerofx.plan.ds_config import read_ds_config

        found = read_ds_config(
            source, auto=auto, hidden_size=hidden_size, num_training_steps=num_training_steps
        )
        found.warn()
        return found.plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a `.yaml`, `.yml` or `.json` file."""
        return cls.from_dict(load_mapping(Path(path), "plan"))


def as_plan(plan: Plan | Mapping[str, Any] | str | os.PathLike[str] | None) -> Plan:
    """Return the argument `plan` of `zerofx.compile` (None, Plan, mapping or file) as a Plan.

    Raises:
        PlanError: the argument has another type, or `Plan` refuses it.
    """
    if plan is None:
        return Plan()
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan.from_dict(plan)
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    hint = ""
    if isinstance(plan, int) and not isinstance(plan, bool):
        hint = f" Did you mean Plan(stage={plan})?"
    elif hasattr(plan, "param_groups"):
        hint = " Pass an optimizer as optimizer=."
    elif plan is Plan:
        hint = " This is the class: write Plan()."
    raise PlanError(
        f"plan is of type {type(plan).__name__}. Give a Plan, a dict, a YAML or JSON path, or "
        f"None.{hint}"
    )


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (Precision, Offload, Parallel)):
        return value.to_plain()
    if name in _SIZES and value is not None:
        return exact_bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


_DEFAULTS = Plan().to_dict()
# `__new__` accepts any names; help() and notebooks should still show the fields.
_init = inspect.signature(Plan.__init__)
Plan.__signature__ = _init.replace(  # type: ignore[attr-defined]
    parameters=list(_init.parameters.values())[1:]
)
