"""The plan's structured fields: `Precision`, `Offload`, and the readers of the pattern fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zerofx.errors import PlanError
from zerofx.fields import (
    Patterns,
    check_names,
    either,
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
_tier = one_of("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In which number format a step computes, reduces gradients, and keeps the master weights.

    loss_scale: None, `"dynamic"`, or a fixed factor; only fp16 compute needs one.
    """

    compute: str = spec_field("fp32", _dtype)
    reduce: str = spec_field("fp32", _dtype)
    master: str = spec_field("fp32", _dtype)
    loss_scale: str | float | None = spec_field(
        None, optional(either("dynamic", real(0, above=True)))
    )

    # bf16 reduces in fp32, because a sum over ranks in 8 bits of mantissa loses the small terms;
    # fp16 has 11 and its loss scale, and halves the traffic as in the ZeRO paper.
    NAMED: ClassVar[dict[str, dict[str, str]]] = {
        "fp32": {},
        "bf16": {"compute": "bf16"},
        "fp16": {"compute": "fp16", "reduce": "fp16", "loss_scale": "dynamic"},
    }

    def __post_init__(self) -> None:
        read_fields(self, "Plan.precision")
        if self.loss_scale is not None and self.compute != "fp16":
            raise PlanError(
                f"Plan.precision.loss_scale = {self.loss_scale!r} contradicts compute = "
                f"{self.compute!r}: only fp16 underflows; drop loss_scale or compute in fp16"
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

    def to_plain(self) -> Any:
        """Return the name of this precision where it has one, else its fields."""
        fields = dataclasses.asdict(self)
        names = (name for name, named in self.NAMED.items() if Precision(**named) == self)
        return next(names, fields)


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What leaves the device between uses, and to which tier: `"none"`, `"cpu"`, `"nvme"`.

    path: folder on the NVMe device, needed by and only by that tier.
    delayed: apply the host optimizer's result one step late, beside the next step's compute.
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


def read_units(where: str, value: Any) -> str | tuple[str, ...]:
    """Read `"auto"`, one name pattern, or a list of them."""
    if isinstance(value, str):
        return value if value == "auto" else (text(where, value),)
    if not isinstance(value, Sequence) or not value:
        raise refuse(where, value, "are 'auto' or a non-empty list of module name patterns")
    return tuple(text(where, pattern) for pattern in value)
