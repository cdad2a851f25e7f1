"""The plan's structured fields: `Precision`, `Offload`, and the readers of the pattern fields."""

from __future__ import annotations

import dataclasses
import math
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
_STYLE = re.compile(r"whole|experts|(colwise|rowwise)(/[1-9]\d*)?")


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The factor of the loss in fp16, which keeps small gradients from rounding to zero.

    dynamic: let the scale grow in steps without an overflow, and lower it after one.
    initial: the scale at the start; the only scale if not dynamic.
    growth_interval: the number of steps without an overflow after which the scale grows.
    growth: the factor by which it grows.
    backoff: the factor by which an overflow lowers it, between 0 and 1.
    minimum: the scale below which it does not fall.
    hysteresis: the number of overflows that it takes, after a growth, to lower the scale.
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
                f"{self.minimum}. Raise initial, or lower minimum."
            )

    @classmethod
    def read(cls, where: str, value: Any) -> LossScale | str | None:
        """Accept None, "external", "dynamic", a fixed factor, a mapping, or a LossScale."""
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
    """The number formats of a step: "fp32", "bf16" or "fp16".

    compute: of forward and backward, and of the gathered parameters.
    reduce: in which gradients are summed over the ranks.
    master: of the shards that the optimizer updates, and of its states.
    modules: {name pattern: format} of modules that compute in a format of their own, such as
        {"blocks.*.norm": "fp32", "head": "fp32"}. Their parameters are gathered in it. Every module
        with parameters then receives its floating-point inputs in its own format; its outputs are
        passed on unchanged.
    loss_scale: required for fp16 compute: `"dynamic"`, a fixed factor, a LossScale, a dict of its
        fields, or `"external"` if `torch.amp.GradScaler` scales the loss.

    Example:
        precision = zerofx.Precision(compute="bf16", modules={"head": "fp32"})
        plan = zerofx.Plan(precision=precision)
    """

    compute: str = spec_field("fp32", _dtype)
    reduce: str = spec_field("fp32", _dtype)
    master: str = spec_field("fp32", _dtype)
    loss_scale: LossScale | str | None = spec_field(None, LossScale.read)
    modules: Patterns | None = spec_field(None, optional(patterns(_dtype)))

    # bf16 reduces in fp32, because a sum over ranks in 8 bits of mantissa loses the small terms;
    # fp16 has 11 bits and a loss scale, and halves the traffic as in the ZeRO paper.
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
                f"{self.compute!r}: only fp16 underflows. Drop loss_scale, or compute in fp16."
            )
        if self.loss_scale is None and self._has_fp16:
            raise PlanError(
                "Plan.precision.loss_scale = None contradicts compute in 'fp16', whose gradients "
                "underflow. Use loss_scale='dynamic', a fixed factor, or 'external' if "
                "torch.amp.GradScaler scales the loss."
            )
        if self.master not in ("fp32", self.compute):
            raise PlanError(
                f"Plan.precision.master = {self.master!r} contradicts compute = {self.compute!r}: "
                f"master weights are in fp32 or the compute format. Use one of these."
            )

    @classmethod
    def read(cls, where: str, value: Any) -> Precision:
        """Accept a name, a mapping of fields, or a Precision."""
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
        """Return the name of this precision if it has one, else its fields."""
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
    """What is moved off the device between uses, and to which tier: `"none"`, `"cpu"`, `"nvme"`.

    parameters: the tier of the parameter shards, which are copied to the device before each use.
    optimizer: the tier of the optimizer's states; the host then updates the parameters.
    activations: the tier of the values that forward saves for backward.
    path: folder on the NVMe device; required by tier "nvme" and allowed for no other tier.
    delayed: apply the host optimizer's result one step late, during the next step's compute. This
        changes the mathematics: gradients are those of the parameters before the last update, and
        evaluation uses these parameters too, while state_dict and save have the newest.
        model.parameters(), state_dict, load_state_dict, save, load, deepcopy and refresh() wait for
        pending updates; parameters obtained before may still be under update.
    device_fraction: the fraction of the optimizer states that stays on the device.

    Example:
        plan = zerofx.Plan(offload=zerofx.Offload(optimizer="cpu", parameters="cpu"))
        assert plan == zerofx.Plan(offload={"optimizer": "cpu", "parameters": "cpu"})
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
                f"Plan.offload.path = {self.path!r} contradicts the tiers {self.tiers}: only tier "
                "'nvme' needs a path. Set path, or change the tier."
            )
        for name in ("delayed", "device_fraction"):
            if getattr(self, name) and self.optimizer == "none":
                raise PlanError(
                    f"Plan.offload.{name} = {getattr(self, name)!r} contradicts optimizer = "
                    f"'none': it applies to the offloaded optimizer only. Set optimizer to 'cpu' "
                    f"or 'nvme', or drop {name}."
                )

    @property
    def tiers(self) -> dict[str, str]:
        """Map each kind of data that can be offloaded to its tier."""
        return {k: getattr(self, k) for k in ("parameters", "optimizer", "activations")}

    @property
    def is_used(self) -> bool:
        """Whether anything is offloaded."""
        return set(self.tiers.values()) != {"none"}

    @classmethod
    def read(cls, where: str, value: Any) -> Offload:
        """Accept None or "none", a mapping of fields, or an Offload."""
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
        allowed = "are 'colwise', 'rowwise', 'experts', 'whole', or 'colwise/3' for groups"
        raise refuse(where, value, allowed)
    return value


MODEL = "model"  # of placements: the model itself computes with slices, and exchanges values


def _placements(where: str, value: Any) -> str | Patterns:
    if isinstance(value, Mapping):
        return patterns(_style)(where, value)
    return one_of("auto", MODEL)(where, value)


def _capacity(where: str, value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise refuse(where, value, "are None and numbers above 0", "for example 1.25")
    return float(value)


def _micro_batches(where: str, value: Any) -> str | int:
    return value if value == "auto" else whole(1)(where, value)


def _cuts(where: str, value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value if value == "auto" else (text(where, value),)
    if not isinstance(value, Sequence) or not value:
        raise refuse(where, value, "are 'auto' or a list of module names")
    return tuple(text(where, name) for name in value)


def read_names(where: str, value: Any) -> tuple[str, ...]:
    """Accept one name pattern of parameters, or a list of them, which may be empty."""
    if isinstance(value, str):
        return (text(where, value),)
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise PlanError(
            f"{where} is a {type(value).__name__}: allowed is a list of name patterns. For a set "
            "of parameters, give [n for n, p in model.named_parameters() if p in the_set]."
        )
    return tuple(text(where, pattern) for pattern in value)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The number of ranks that share layers (tensor) or hold different layers (pipeline).

    tensor: ranks that share each layer (tensor parallelism); they need the same samples.
    sequence: whether each of them holds part of the sequence between layers (sequence parallelism).
    experts: whether each of them holds some experts of a mixture whole (expert parallelism), rather
        than some hidden units of every expert.
    capacity: with `experts`, sends each token only to the ranks of its experts. An expert takes up
        to capacity * k / experts of a rank's tokens if each has k experts, and drops further ones
        in the order of the sequence. experts / k drops none. None sends whole tokens to all ranks.
    context: ranks that share each sequence: every value between layers is cut along it. The states
        of the ZeRO stage are sharded over these ranks too. They need the same samples.
    attention: "heads": each rank of the context axis computes attention for a part of the heads.
        "ring": each keeps its queries, and keys and values travel around the ranks.
    placements: "auto" uses the plan of a transformers model, or recognises layers by name. Or
        {name pattern of modules: "colwise", "rowwise", "whole"}; other modules are as with "auto".
        "experts", of a parameter [experts, out, in], divides whole experts.
        "colwise/3" is a layer whose outputs are three groups, such as queries, keys and values.
        "model": the model brings its own slices and collectives, and no value is cut here.
        zerofx.compile sets it, with `tensor`, for such a model on a slice of a mesh.
    pipeline: pipeline stages; each has some layers of the model and some of the ranks (pipeline
        parallelism). Ranks that differ only along this axis need the same samples.
    schedule: "1f1b" begins the backward of a micro-batch as early as possible, so that few are in
        flight at a time; "gpipe" runs all forwards, then all backwards; "interleaved" is 1f1b with
        several stages on each rank, which wait less for each other and send more; "zero-bubble" is
        1f1b with each backward in two parts: the gradients of weights, for which no other stage
        waits, are computed where a rank would be idle.
    interleave: with "interleaved", the pipeline stages on each rank: of 4 ranks the second has
        stages 1, 5, 9, ... micro_batches must then be a multiple of pipeline.
    micro_batches: the number of pieces into which the batch of a training step is cut, along
        dimension 0 of its inputs. "auto": the largest divisor up to four per pipeline stage.
    accumulate: "whole" sums the gradients of a stage's own parameters on each rank and reduces
        them once, with those of the last micro-batch. "sharded" holds no whole gradients at stages
        2 and 3, and reduces those of every micro-batch into the shards.
    cuts: "auto" balances the stages by the elements of their weights; or the names of the modules
        that begin the second, third, ... stage.
    shared: name patterns of parameters that every pipeline stage holds, such as a table that the
        model's own forward reads at its beginning and at its end, or the weights of modules that
        are registered after those that need their results. Their gradients are summed over stages.

    Source: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, for the sequence; Jacobs et
    al. 2023, "DeepSpeed Ulysses", and Liu et al. 2023, "Ring Attention", for the context; Huang et
    al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream", and 2021, for "1f1b"; Qi et al. 2023,
    "Zero Bubble Pipeline Parallelism", for "zero-bubble".
    """

    tensor: int = spec_field(1, whole(1))
    sequence: bool = spec_field(False, flag)
    experts: bool = spec_field(False, flag)
    capacity: float | None = spec_field(None, _capacity)
    context: int = spec_field(1, whole(1))
    attention: str = spec_field("heads", one_of("heads", "ring"))
    placements: str | Patterns = spec_field("auto", _placements)
    pipeline: int = spec_field(1, whole(1))
    schedule: str = spec_field("1f1b", one_of("1f1b", "gpipe", "interleaved", "zero-bubble"))
    interleave: int = spec_field(1, whole(1))
    micro_batches: str | int = spec_field("auto", _micro_batches)
    accumulate: str = spec_field("whole", one_of("whole", "sharded"))
    cuts: str | tuple[str, ...] = spec_field("auto", _cuts)
    shared: tuple[str, ...] = spec_field((), read_names)

    def __post_init__(self) -> None:
        read_fields(self, "Plan.parallel")
        given = {"cuts": "auto", "micro_batches": "auto", "shared": ()}
        given = {name: usual for name, usual in given.items() if getattr(self, name) != usual}
        if self.pipeline == 1 and given:
            name = next(iter(given))
            raise PlanError(
                f"Plan.parallel.{name} = {getattr(self, name)!r} contradicts pipeline = 1: it "
                f"applies to pipeline stages only. Set pipeline, or drop {name}."
            )
        self._check_schedule()
        if self.cuts != "auto" and len(self.cuts) != self.num_stages - 1:
            times = f" x {self.interleave} interleaved" if self.interleave > 1 else ""
            raise PlanError(
                f"Plan.parallel.cuts has {len(self.cuts)} modules, but pipeline is "
                f"{self.pipeline}{times}. Name the first module of every pipeline stage except the "
                f"first: {self.num_stages - 1} in all."
            )
        if self.sequence and self.tensor == 1:
            raise PlanError(
                "Plan.parallel.sequence = True contradicts tensor = 1: it cuts the sequence over "
                "the ranks of the tensor axis. Set tensor, or drop sequence."
            )
        if self.experts and (self.tensor == 1 or self.placements == MODEL):
            other = "placements = 'model'" if self.tensor > 1 else "tensor = 1"
            raise PlanError(
                f"Plan.parallel.experts = True contradicts {other}: zerofx divides experts among "
                "the ranks of the tensor axis. Set tensor alone, or drop experts."
            )
        if self.capacity is not None and not self.experts:
            raise PlanError(
                f"Plan.parallel.capacity = {self.capacity:g} contradicts experts = False: it "
                "limits the tokens of experts that are whole on a rank. Set experts, or drop it."
            )
        if self.capacity is not None and self.context > 1:
            raise PlanError(
                f"Plan.parallel.capacity = {self.capacity:g} contradicts context = {self.context}: "
                "slots of experts are divided over the tensor axis alone so far. Drop one of them."
            )
        if self.attention == "ring" and self.context == 1:
            raise PlanError(
                "Plan.parallel.attention = 'ring' contradicts context = 1: keys and values travel "
                "around the ranks of the context axis. Set context, or drop attention."
            )
        if self.attention == "ring" and self.sequence:
            raise PlanError(
                "Plan.parallel.attention = 'ring' does not support sequence = True yet: "
                "what the tensor axis cuts along the sequence would not be in the order that "
                "balances a ring. Leave one of the two out."
            )
        if self.context > 1 and self.tensor == 1 and self.placements != "auto":
            raise PlanError(
                f"Plan.parallel.placements contradicts context = {self.context}: it is about "
                "layers that are cut over the tensor axis. Set tensor, or drop it."
            )
        others = [n for n in ("pipeline", "context") if getattr(self, n) > 1]
        others += ["sequence"] if self.sequence else []
        if self.placements == MODEL and others:
            name = others[0]
            raise PlanError(
                f"Plan.parallel.placements = 'model' contradicts {name} = {getattr(self, name)}: "
                f"the model itself exchanges values. Drop {name}."
            )

    def _check_schedule(self) -> None:
        is_interleaved = self.schedule == "interleaved"
        if is_interleaved != (self.interleave > 1):
            raise PlanError(
                f"Plan.parallel.interleave = {self.interleave} contradicts schedule = "
                f"{self.schedule!r}: 'interleaved' has two stages or more on each rank, and the "
                "others have one. Set both, or neither."
            )
        if is_interleaved and self.pipeline == 1:
            raise PlanError(
                "Plan.parallel.schedule = 'interleaved' contradicts pipeline = 1: one rank has all "
                "stages. Set pipeline, or drop schedule and interleave."
            )
        if self.schedule == "zero-bubble" and self.pipeline == 1:
            raise PlanError(
                "Plan.parallel.schedule = 'zero-bubble' contradicts pipeline = 1: one rank waits "
                "for no other. Set pipeline, or drop schedule."
            )
        num = 0 if self.micro_batches == "auto" else int(self.micro_batches)
        if is_interleaved and num % self.pipeline:
            raise PlanError(
                f"Plan.parallel.micro_batches = {num} is no multiple of pipeline = "
                f"{self.pipeline}, by which 'interleaved' goes through a rank's stages. Choose a "
                "multiple, or schedule = '1f1b'."
            )

    @classmethod
    def read(cls, where: str, value: Any) -> Parallel:
        """Accept None or "none", a mapping of fields, or a Parallel."""
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
        """Whether ranks share layers or hold different layers."""
        return self.num_shared > 1

    @property
    def splits_backward(self) -> bool:
        """Whether each backward is in two parts: gradients of inputs, and those of weights."""
        return self.schedule == "zero-bubble"

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
        """The number of ranks that have the same samples."""
        return self.num_dividing * self.context

    @property
    def num_dividing(self) -> int:
        """The number of ranks that the model itself is divided among, before it is sharded."""
        return self.tensor * self.pipeline

    @property
    def axes(self) -> dict[str, int]:
        """The axes along which ranks have the same samples, with several ranks each."""
        sizes = {axis: getattr(self, axis) for axis in ("pipeline", "context", "tensor")}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def brings_slices(self) -> bool:
        """Whether the model itself computes with slices of its parameters."""
        return self.placements == MODEL

    @property
    def value_axes(self) -> dict[str, int]:
        """The axes over which zerofx cuts the values of a graph, in the order in which it does."""
        sizes = {"tensor": 1 if self.brings_slices else self.tensor, "context": self.context}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def is_zigzag(self) -> bool:
        """Whether values are cut over the context axis in zigzag order: it balances a ring."""
        return self.context > 1 and self.attention == "ring"

    @property
    def value_ranks(self) -> int:
        """Over how many ranks zerofx cuts the values of a graph."""
        return math.prod(self.value_axes.values())


def read_activations(where: str, value: Any) -> str | float | Patterns:
    """Accept `"keep"`, `"recompute"`, `"auto"`, a fraction, or a choice by name pattern."""
    if isinstance(value, Mapping):
        return patterns(one_of("keep", "recompute", "offload"))(where, value)
    if isinstance(value, str):
        return one_of("keep", "recompute", "auto")(where, value)
    if isinstance(value, (int, float)):
        return real(0, 1)(where, value)
    allowed = "are 'keep', 'recompute', 'auto', a fraction from 0 to 1, or {name pattern: choice}"
    raise refuse(where, value, allowed)


def read_tiling(where: str, value: Any) -> str | Patterns:
    """Accept `"off"`, `"auto"`, or a number of tiles by name pattern."""
    if isinstance(value, Mapping):
        return patterns(whole(1))(where, value)
    return one_of("off", "auto")(where, value)


def read_dynamic(where: str, value: Any) -> str | Patterns:
    """Accept `"auto"`, `"off"`, or the largest sizes of dimensions: `{"ids.shape[1]": 512}`."""
    if not isinstance(value, Mapping):
        return one_of("auto", "off")(where, value)
    for name, size in value.items():
        if not isinstance(name, str) or not re.fullmatch(r".+\.shape\[\d+\]", name):
            raise refuse(where, name, "are dimensions of arguments, as in {'ids.shape[1]': 512}")
        whole(2)(f"{where}[{name!r}]", size)
    return Patterns(value)


def read_islands(where: str, value: Any) -> str | tuple[str, ...]:
    """Accept `"auto"`, `"refuse"`, or a list of module name patterns; "" is the model itself."""
    if isinstance(value, str):
        return one_of("auto", "refuse")(where, value)  # type: ignore[no-any-return]
    is_list = isinstance(value, Sequence) and len(value) > 0
    if not is_list or not all(isinstance(name, str) for name in value):
        raise refuse(where, value, "are 'auto', 'refuse' or a list of module name patterns")
    return tuple(value)


def read_units(where: str, value: Any) -> str | tuple[str, ...]:
    """Accept `"auto"`, one name pattern, or a list of them."""
    if isinstance(value, str):
        return value if value == "auto" else (text(where, value),)
    if not isinstance(value, Sequence) or not value:
        raise refuse(where, value, "are 'auto' or a non-empty list of module name patterns")
    return tuple(text(where, pattern) for pattern in value)
