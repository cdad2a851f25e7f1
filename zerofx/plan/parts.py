"""The plan's structured fields: `Precision`, `Offload`, and the readers of the pattern fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zerofx.errors import PlanError
from zerofx.plan.fields import (
    Patterns,
    check_names,
    flag,
    one_of,
    optional,
    patterns,
    read_fields,
    real,
    refuse,
    spec_field,
    text,
    whole,
)

_dtype = one_of("fp32", "bf16", "fp16")
_STYLE = re.compile(r"whole|(colwise|rowwise)(/[1-9]\d*)?")


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """What fp16's loss is multiplied by: so much that small gradients are not rounded to zero.

    dynamic: double (`growth`) after `growth_interval` steps without an overflow, and halve
        (`backoff`), down to `minimum`, at the `hysteresis`-th overflow after a rise.
    initial: the scale at the start; the only one if not dynamic.
    """

    dynamic: bool = spec_field(True, flag)
    initial: float = spec_field(65536.0, real(0, above=True))
    growth_interval: int = spec_field(2000, whole(1))
    growth: float = spec_field(2.0, real(1, above=True))
    backoff: float = spec_field(0.5, real(0, 1, above=True))
    minimum: float = spec_field(1.0, real(0, above=True))
    hysteresis: int = spec_field(1, whole(1))

    def __post_init__(self) -> None:
        read_fields(self, "Plan.precision.loss_scale")
        if self.dynamic and self.initial < self.minimum:
            raise PlanError(
                f"Plan.precision.loss_scale.initial = {self.initial} is below minimum = "
                f"{self.minimum}; raise the one or lower the other"
            )

    @classmethod
    def read(cls, where: str, value: Any) -> LossScale | str | None:
        """Read None, "external", "dynamic", a fixed factor, a mapping of fields, or a LossScale."""
        if value is None or value == "external" or isinstance(value, cls):
            return value
        if value == "dynamic":
            return cls()
        if isinstance(value, Mapping):
            check_names("loss_scale", value, [f.name for f in dataclasses.fields(cls)])
            return cls(**value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return cls(dynamic=False, initial=real(0, above=True)(where, value))
        raise refuse(where, value, "are 'dynamic', a factor, 'external', a mapping or a LossScale")

    def to_plain(self) -> Any:
        """Return "dynamic", the fixed factor, or the fields that were set."""
        if not self.dynamic:
            return self.initial
        fields = dataclasses.fields(self)
        chosen = {
            f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default
        }
        return chosen or "dynamic"


_tier = one_of("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In which number format a step computes, reduces gradients, and keeps the master weights.

    modules: {name pattern: format} of modules that compute in another one, such as
        {"blocks.*.norm": "fp32", "head": "fp32"}: their parameters are gathered in it. Every module
        that has parameters then gets its floating-point inputs in the format of these; what it
        returns is passed on as it is.
    loss_scale: for fp16 compute, which needs one: `"dynamic"`, a fixed factor, a LossScale or a
        dict of its fields; `"external"` where `torch.amp.GradScaler` scales the loss.
    """

    compute: str = spec_field("fp32", _dtype)
    reduce: str = spec_field("fp32", _dtype)
    master: str = spec_field("fp32", _dtype)
    loss_scale: LossScale | str | None = spec_field(None, LossScale.read)
    modules: Patterns | None = spec_field(None, optional(patterns(_dtype)))

    # bf16 reduces in fp32, because a sum over ranks in 8 bits of mantissa loses the small terms;
    # fp16 has 11 and its loss scale, and halves the traffic as in the ZeRO paper.
    NAMED: ClassVar[dict[str, dict[str, Any]]] = {
        "fp32": {},
        "bf16": {"compute": "bf16"},
        "fp16": {"compute": "fp16", "reduce": "fp16", "loss_scale": "dynamic"},
    }

    def __post_init__(self) -> None:
        read_fields(self, "Plan.precision")
        if self.loss_scale is not None and not self._has_fp16:
            raise PlanError(
                f"Plan.precision.loss_scale = {self.loss_scale!r} contradicts compute = "
                f"{self.compute!r}: only fp16 underflows; drop loss_scale or compute in fp16"
            )
        if self.loss_scale is None and self._has_fp16:
            raise PlanError(
                "Plan.precision.loss_scale = None contradicts compute in 'fp16', whose gradients "
                "underflow; use loss_scale='dynamic', a fixed factor, or 'external' where "
                "torch.amp.GradScaler scales the loss"
            )
        if self.master not in ("fp32", self.compute):
            raise PlanError(
                f"Plan.precision.master = {self.master!r} contradicts compute = {self.compute!r}: "
                f"master weights are fp32 or the compute format; use one of these"
            )

    @classmethod
    def read(cls, where: str, value: Any) -> Precision:
        """Read a name, a mapping of fields, or a Precision."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            check_names("precision", value, [f.name for f in dataclasses.fields(cls)])
            return cls(**value)
        if isinstance(value, str):
            return cls(**cls.NAMED[one_of(*cls.NAMED)(where, value)])
        raise refuse(where, value, "are 'fp32', 'bf16', 'fp16', a mapping or a Precision")

    @property
    def _has_fp16(self) -> bool:
        return "fp16" in (self.compute, *(self.modules or {}).values())

    @property
    def is_scaled(self) -> bool:
        """Whether zerofx itself scales the loss."""
        return self.loss_scale not in (None, "external")

    def to_plain(self) -> Any:
        """Return the name of this precision where it has one, else its fields."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if isinstance(self.loss_scale, LossScale):
            fields["loss_scale"] = self.loss_scale.to_plain()
        if self.modules is not None:
            fields["modules"] = dict(self.modules)
        else:
            del fields["modules"]
        names = (name for name, named in self.NAMED.items() if Precision(**named) == self)
        return next(names, fields)


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What leaves the device between uses, and to which tier: `"none"`, `"cpu"`, `"nvme"`.

    path: folder on the NVMe device, needed by and only by that tier.
    delayed: apply the host optimizer's result one step late, beside the next step's compute. This
        changes the mathematics: gradients are those of the parameters before the last update, and
        so is what the model computes in evaluation, while state_dict and save have the newest.
        model.parameters(), state_dict, load_state_dict, save, load, deepcopy and refresh() wait for
        updates under way; parameters that are held from before may be under update.
    device_fraction: the part of the optimizer states that stays on the device.
    """

    parameters: str = spec_field("none", _tier)
    optimizer: str = spec_field("none", _tier)
    activations: str = spec_field("none", _tier)
    path: str | None = spec_field(None, optional(text))
    delayed: bool = spec_field(False, flag)
    device_fraction: float = spec_field(0.0, real(0, 1))

    def __post_init__(self) -> None:
        read_fields(self, "Plan.offload")
        if ("nvme" in self.tiers.values()) != (self.path is not None):
            raise PlanError(
                f"Plan.offload.path = {self.path!r} contradicts the tiers {self.tiers}: tier "
                "'nvme' needs a path and no other tier does; set path, or change the tier"
            )
        for name in ("delayed", "device_fraction"):
            if getattr(self, name) and self.optimizer == "none":
                raise PlanError(
                    f"Plan.offload.{name} = {getattr(self, name)!r} contradicts optimizer = "
                    f"'none': it describes the offloaded optimizer; set optimizer to 'cpu' or "
                    f"'nvme', or drop {name}"
                )

    @property
    def tiers(self) -> dict[str, str]:
        """Map what can be offloaded to its tier."""
        return {k: getattr(self, k) for k in ("parameters", "optimizer", "activations")}

    @property
    def is_used(self) -> bool:
        """Say whether anything is offloaded."""
        return set(self.tiers.values()) != {"none"}

    @classmethod
    def read(cls, where: str, value: Any) -> Offload:
        """Read None or "none", a mapping of fields, or an Offload."""
        if isinstance(value, cls):
            return value
        if value is None or value == "none":
            return cls()
        if isinstance(value, Mapping):
            check_names("offload", value, [f.name for f in dataclasses.fields(cls)])
            return cls(**value)
        raise refuse(
            where, value, "are 'none', a mapping or an Offload", 'for example {"optimizer": "cpu"}'
        )

    def to_plain(self) -> Any:
        """Return "none", or the fields that were set."""
        fields = dataclasses.fields(self)
        chosen = {
            f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default
        }
        return chosen or "none"


def _style(where: str, value: Any) -> str:
    if not isinstance(value, str) or not _STYLE.fullmatch(value):
        raise refuse(where, value, "are 'colwise', 'rowwise' and 'whole', or 'colwise/3' in groups")
    return value


def _placements(where: str, value: Any) -> str | Patterns:
    if isinstance(value, Mapping):
        return patterns(_style)(where, value)
    return one_of("auto")(where, value)


def _micro_batches(where: str, value: Any) -> str | int:
    return value if value == "auto" else whole(1)(where, value)


def _cuts(where: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value if value == "auto" else (text(where, value),)
    if not isinstance(value, Sequence) or not value:
        raise refuse(where, value, "are 'auto' or a list of module names")
    return tuple(text(where, name) for name in value)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Over how many ranks a model's own layers are cut, and over how many they are divided.

    tensor: ranks that share each layer (tensor parallelism); they need the same samples.
    sequence: between layers, each of them has a part of the sequence (sequence parallelism).
    placements: "auto" takes the plan of a transformers model, or knows layers by their names; or
        {name pattern of modules: "colwise", "rowwise", "whole"}, for all others as "auto".
        "colwise/3" is a layer whose outputs are three groups, such as queries, keys and values.
    pipeline: pipeline stages, each some layers of the model and some of the ranks (pipeline
        parallelism); ranks that differ along it alone need the same samples.
    schedule: "1f1b" begins the backward of a micro-batch as soon as it can, so that few are under
        way at a time; "gpipe" runs all forwards, then all backwards; "interleaved" is 1f1b with
        several stages on each rank, which wait less for each other and send more.
    interleave: pipeline stages on each rank, of "interleaved": of 4 ranks the second has stages 1,
        5, 9, ... micro_batches is then a multiple of pipeline.
    micro_batches: into how many pieces the batch of a training step is cut, along dimension 0 of
        its inputs. "auto": as many as divide it, four a pipeline stage at most.
    accumulate: "whole" sums the gradients of a stage's own parameters on each rank and reduces
        them once, with the last micro-batch's; "sharded" holds none at stages 2 and 3, and
        reduces those of every micro-batch into the shards.
    cuts: "auto" balances the stages by the elements of their weights; or the names of the modules
        with which the second, third, ... stage begin.

    Source: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, for the sequence; Huang et
    al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021, for "1f1b".
    """

    tensor: int = spec_field(1, whole(1))
    sequence: bool = spec_field(False, flag)
    placements: str | Patterns = spec_field("auto", _placements)
    pipeline: int = spec_field(1, whole(1))
    schedule: str = spec_field("1f1b", one_of("1f1b", "gpipe", "interleaved"))
    interleave: int = spec_field(1, whole(1))
    micro_batches: str | int = spec_field("auto", _micro_batches)
    accumulate: str = spec_field("whole", one_of("whole", "sharded"))
    cuts: str | tuple[str, ...] = spec_field("auto", _cuts)

    def __post_init__(self) -> None:
        read_fields(self, "Plan.parallel")
        if self.pipeline == 1 and (self.cuts, self.micro_batches) != ("auto", "auto"):
            name = "micro_batches" if self.cuts == "auto" else "cuts"
            raise PlanError(
                f"Plan.parallel.{name} = {getattr(self, name)!r} contradicts pipeline = 1: it is "
                f"about pipeline stages; set pipeline, or drop {name}"
            )
        self._check_schedule()
        if self.cuts != "auto" and len(self.cuts) != self.num_stages - 1:
            times = f" x {self.interleave} interleaved" if self.interleave > 1 else ""
            raise PlanError(
                f"Plan.parallel.cuts has {len(self.cuts)} modules and pipeline is "
                f"{self.pipeline}{times}: name the first module of every pipeline stage but the "
                f"first, {self.num_stages - 1} in all"
            )
        if self.sequence and self.tensor == 1:
            raise PlanError(
                "Plan.parallel.sequence = True contradicts tensor = 1: it cuts the sequence over "
                "the ranks of the tensor axis; set tensor, or drop sequence"
            )

    def _check_schedule(self) -> None:
        is_interleaved = self.schedule == "interleaved"
        if is_interleaved != (self.interleave > 1):
            raise PlanError(
                f"Plan.parallel.interleave = {self.interleave} contradicts schedule = "
                f"{self.schedule!r}: 'interleaved' has two stages or more on each rank, and the "
                "others have one. Set both, or neither"
            )
        if is_interleaved and self.pipeline == 1:
            raise PlanError(
                "Plan.parallel.schedule = 'interleaved' contradicts pipeline = 1: one rank has all "
                "stages. Set pipeline, or drop schedule and interleave"
            )
        num = 0 if self.micro_batches == "auto" else int(self.micro_batches)
        if is_interleaved and num % self.pipeline:
            raise PlanError(
                f"Plan.parallel.micro_batches = {num} is no multiple of pipeline = "
                f"{self.pipeline}, by which 'interleaved' goes through a rank's stages. Choose a "
                "multiple, or schedule = '1f1b'"
            )

    @classmethod
    def read(cls, where: str, value: Any) -> Parallel:
        """Read None or "none", a mapping of fields, or a Parallel."""
        if isinstance(value, cls):
            return value
        if value is None or value == "none":
            return cls()
        if isinstance(value, Mapping):
            check_names("parallel", value, [f.name for f in dataclasses.fields(cls)])
            return cls(**value)
        raise refuse(
            where, value, "are 'none', a mapping or a Parallel", 'for example {"tensor": 2}'
        )

    def to_plain(self) -> Any:
        """Return "none", or the fields that were set."""
        fields = dataclasses.fields(self)
        chosen = {
            f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default
        }
        if isinstance(self.placements, Patterns):
            chosen["placements"] = dict(self.placements)
        if isinstance(self.cuts, tuple):
            chosen["cuts"] = list(self.cuts)
        return chosen or "none"

    @property
    def is_used(self) -> bool:
        """Say whether ranks share layers, or have layers of their own."""
        return self.num_shared > 1

    @property
    def num_stages(self) -> int:
        """How many pipeline stages there are, on all ranks together."""
        return self.pipeline * self.interleave

    def stages_of(self, position: int) -> tuple[int, ...]:
        """Return the pipeline stages of the ranks at a position along the pipeline axis."""
        return tuple(range(position, self.num_stages, self.pipeline))

    def holders(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return the positions of the ranks that have these pipeline stages."""
        return tuple(sorted({stage % self.pipeline for stage in stages}))

    @property
    def num_shared(self) -> int:
        """How many ranks have the same samples, and together the whole model."""
        return self.tensor * self.pipeline


def read_activations(where: str, value: Any) -> str | float | Patterns:
    """Read `"keep"`, `"recompute"`, `"auto"`, a fraction, or a choice by name pattern."""
    if isinstance(value, Mapping):
        return patterns(one_of("keep", "recompute", "offload"))(where, value)
    if isinstance(value, str):
        return one_of("keep", "recompute", "auto")(where, value)
    if isinstance(value, (int, float)):
        return real(0, 1)(where, value)
    allowed = "are 'keep', 'recompute', 'auto', a fraction from 0 to 1, or {name pattern: choice}"
    raise refuse(where, value, allowed)


def read_tiling(where: str, value: Any) -> str | Patterns:
    """Read `"off"`, `"auto"`, or a number of tiles by name pattern."""
    if isinstance(value, Mapping):
        return patterns(whole(1))(where, value)
    return one_of("off", "auto")(where, value)


def read_dynamic(where: str, value: Any) -> str | Patterns:
    """Read `"auto"`, `"off"`, or the largest sizes of dimensions: `{"ids.shape[1]": 512}`."""
    if not isinstance(value, Mapping):
        return one_of("auto", "off")(where, value)
    for name, size in value.items():
        if not isinstance(name, str) or not re.fullmatch(r".+\.shape\[\d+\]", name):
            raise refuse(where, name, "are dimensions of arguments, as in {'ids.shape[1]': 512}")
        whole(2)(f"{where}[{name!r}]", size)
    return Patterns(value)


def read_ignored(where: str, value: Any) -> tuple[str, ...]:
    """Read one name pattern, or a list of them that may be empty."""
    if isinstance(value, str):
        return (text(where, value),)
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise PlanError(
            f"{where} is a {type(value).__name__}: allowed is a list of name patterns. Of a set of "
            "parameters these are [n for n, p in model.named_parameters() if p in the_set]"
        )
    return tuple(text(where, pattern) for pattern in value)


def read_units(where: str, value: Any) -> str | tuple[str, ...]:
    """Read `"auto"`, one name pattern, or a list of them."""
    if isinstance(value, str):
        return value if value == "auto" else (text(where, value),)
    if not isinstance(value, Sequence) or not value:
        raise refuse(where, value, "are 'auto' or a non-empty list of module name patterns")
    return tuple(text(where, pattern) for pattern in value)
