"""The plan: every choice of a run in one frozen, self-validating value.

A plan is stored in one form however it was written (`"40GiB"` becomes an int, `"bf16"` a
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
    read_ignored,
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
    memory_budget: peak device bytes a rank ("40GiB") of a training step with one backward, AdamW's
        states included and a thousandth left to the loop. What is left is spent on keeping
        parameters gathered from forward to backward; a prefetch of "auto" gives way before a budget
        is refused. None is strict ZeRO, nothing extra is kept.
    host_budget: the same for the host memory that offload uses.
    activations: "keep", "recompute", "auto" (solved under the budget), a fraction of the kept
        bytes, or {name pattern: "keep" / "recompute" / "offload"}. What is offloaded waits in host
        memory, or in files, from its last use in forward to its first in backward.
    tiling: "off", "auto", or {name pattern: number of tiles}.
    offload: Offload(parameters, optimizer, activations, path, ...) or a dict of its fields.
        activations="cpu" offloads all activations that are saved and for which no pattern speaks,
        but for small ones and for those that backward needs at once; with "nvme" they, and what
        patterns offload, pass through the host to files under `path`.
    prefetch: how many units ahead a gather is launched, or "auto" (the machine's).
    persist_below: parameters of fewer bytes stay gathered; None takes the machine's value.
    bucket_bytes: smaller units share a collective up to this; None takes the machine's value,
        under a memory budget at most the largest unit's.
    units: "auto", or name patterns of the modules whose parameters travel together.
    ignored_params: name patterns of parameters that are left to the user, as fully_shard's
        ignored_params are: not sharded and not moved, and their gradients are each rank's own.
    shard_axis_size: shard within groups of this many ranks, replicate across; None is all ranks.
    parallel: over how many ranks the layers themselves are cut; see `Parallel`.
    differentiate: "loss", or "all" float outputs. With "all", an output that is left out of the
        loss gives its parameters zero gradients, where eager leaves None.
    outputs: "all", or "loss": other outputs are not computed for the caller.
    update: "step", or "in-backward": the optimizer runs per bucket inside backward.
    sparse_gradients: whether the gradient of a table that is only looked up (nn.Embedding or
        nn.EmbeddingBag, alone in its bucket, not tied) travels by rows where that sends less. The
        values are those of a dense reduction.
    buffers: "rank0" (running statistics follow rank 0, as DDP's do) or "local".
    numerics: "bitwise", or "fast": passes may change rounding. The loss head is then computed by
        chunks, never holding all logits, and on a GPU norms, gated activations and rotary
        embeddings are fused by kernels of our own.
    kernels: "inductor" (each structure compiled once) or "aten" (regions run op by op).
    cuda_graph: whether each forward and backward is replayed as one CUDA graph (one process).
    max_programs: how many programs are ready to run at a time. A further one takes the place of the
        least recently used, with one warning.
    dynamic: "auto": a dimension of the arguments that has had two values is free in the programs
        compiled from then on, and one of them serves all its values. So is one that is declared
        with its largest size, from the first call on: {"ids.shape[1]": 512}. "off": one program
        per input signature, as always with cuda_graph=True, numerics="fast" or activations on NVMe.
    islands: "auto": a forward of which no static graph can be made runs eagerly, its parameters
        gathered around it, while the modules that it calls have programs of their own; or "refuse",
        which raises a CaptureError.
    debug: region by region on ATen, so that prints, breakpoints and the NaN finder work.

    Raises:
        PlanError: a field is unknown, out of range, or contradicts another; the message names
            the field, its value, what is allowed, and the fix.
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
    ignored_params: tuple[str, ...] = spec_field((), read_ignored)
    shard_axis_size: int | None = spec_field(None, optional(whole(1)))
    parallel: Parallel = spec_field(None, Parallel.read)
    differentiate: str = spec_field("loss", one_of("loss", "all"))
    outputs: str = spec_field("all", one_of("all", "loss"))
    update: str = spec_field("step", one_of("step", "in-backward"))
    sparse_gradients: bool = spec_field(False, flag)
    buffers: str = spec_field("rank0", one_of("rank0", "local"))
    numerics: str = spec_field("bitwise", one_of("bitwise", "fast"))
    kernels: str = spec_field("inductor", one_of("inductor", "aten"))
    cuda_graph: bool = spec_field(False, flag)
    max_programs: int = spec_field(16, whole(1))
    dynamic: str | Patterns = spec_field("auto", read_dynamic)
    islands: str = spec_field("auto", one_of("auto", "refuse"))
    debug: bool = spec_field(False, flag)

    if TYPE_CHECKING:  # what may be written is wider than what is stored; dataclasses cannot say so

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
            parallel: Parallel | Mapping[str, Any] | str | None = ...,
            differentiate: str = ...,
            outputs: str = ...,
            update: str = ...,
            sparse_gradients: bool = ...,
            buffers: str = ...,
            numerics: str = ...,
            kernels: str = ...,
            cuda_graph: bool = ...,
            max_programs: int = ...,
            dynamic: str | Mapping[str, int] = ...,
            islands: str = ...,
            debug: bool = ...,
        ) -> None: ...

    def __new__(cls, *args: Any, **fields: Any) -> Plan:
        """Refuse unknown names before the generated `__init__` turns them into a TypeError."""
        if args:
            raise PlanError(f"Plan takes its fields by name: Plan(stage={args[0]!r})")
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
        """Return (ranks a bucket is sharded over, copies of each shard) in a world.

        Raises:
            PlanError: what ranks share, or shard_axis_size, does not divide world_size; the
                message names both.
        """
        shared = self.parallel.num_shared
        if world_size % shared:
            axes = self.parallel.axes
            said = " x ".join(f"parallel.{axis} = {size}" for axis, size in axes.items())
            raise PlanError(
                f"Plan.{said} does not divide the world of {world_size} ranks; use a divisor, or "
                "start another number of ranks"
            )
        world_size //= self.parallel.num_dividing
        shard_size = 1 if self.stage == 0 else self.shard_axis_size or world_size
        if world_size % shard_size:
            raise PlanError(
                f"Plan.shard_axis_size = {shard_size} does not divide the world of {world_size} "
                "ranks; use a divisor, or None to shard over the whole world"
            )
        return shard_size, world_size // shard_size

    def to_dict(self) -> dict[str, Any]:
        """Return every field in plain values that YAML, JSON and `from_dict` take back."""
        return {f.name: _plain(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_yaml(self) -> str:
        """Return the plan as YAML text, one field a line, in the order of the class."""
        return write_yaml(self.to_dict())

    def to_json(self) -> str:
        """Return the plan as JSON text; equal plans give equal text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Build a plan from a mapping of fields; missing ones take their defaults."""
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
        """Build the plan that a DeepSpeed configuration means: a path, or what is in the file.

        Warns of unknown keys, and of ignored ones that matter. What became of every key:
        `print(zerofx.plan.ds_config.read_ds_config(source))`, or `zerofx plan-for --from`.

        auto: what "auto" stands for: transformers' TrainingArguments, or a mapping of its names.
        hidden_size: the model's, for bucket sizes that are "auto"; else they are the hardware's.
        num_training_steps: for schedulers that are "auto"; `max_steps` by default.

        Raises:
            PlanError: names every key that is refused, its value, and what to do.
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
    """Return the plan that `zerofx.compile` was given: None, a Plan, a mapping, or a file.

    Raises:
        PlanError: of another type, or refused by `Plan`.
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
        hint = f"; did you mean Plan(stage={plan})?"
    elif hasattr(plan, "param_groups"):
        hint = "; an optimizer is passed as optimizer="
    elif plan is Plan:
        hint = "; this is the class: write Plan()"
    raise PlanError(
        f"plan is of type {type(plan).__name__}; give a Plan, a dict, a YAML or JSON path, or "
        f"None{hint}"
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
# `__new__` takes any names; help() and notebooks should show the fields all the same.
_init = inspect.signature(Plan.__init__)
Plan.__signature__ = _init.replace(  # type: ignore[attr-defined]
    parameters=list(_init.parameters.values())[1:]
)
