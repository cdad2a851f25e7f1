"""DeepSpeed's ds_config.json: read as a plan, with a verdict on every key in it.

    found = read_ds_config("ds_config.json")
    print(found)             # one row per key: honoured, translated, ignored, refused or unknown
    zerofx.compile(model, found.plan)

A key is *translated* if it becomes a field of the plan. It is *honoured* if the engine of
`zerofx.integrations.deepspeed` acts on it; a hand-written loop must do so itself. It is *ignored*
if nothing in zerofx corresponds to it, and *refused* if training without it would give other
results. Defaults are those of DeepSpeed 0.19. This module does not need torch.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofx.errors import PlanError, as_sentence
from zerofx.plan.ds_keys import (
    ALIASES,
    BY_LOWER_NAME,
    FEATURE,
    KEYS,
    NEEDED,
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    SCHEDULERS,
    SECTIONS,
    TORCH_OPTIMIZERS,
    TORCH_SCHEDULERS,
    anything,
)
from zerofx.plan.fields import Reader, nearest, read_mapping
from zerofx.plan.plan import Plan

Params = Mapping[str, Any]


@dataclass(frozen=True)
class KeyVerdict:
    """The verdict on one key of a ds_config, and the reason."""

    key: str
    value: Any
    verdict: str
    why: str
    is_warned: bool = False

    def __str__(self) -> str:
        return f"{self.key} = {_short(self.value)}: {self.why}"


# -- The result of reading -------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """An optimizer or scheduler; `kind` is its name in `zerofx.integrations.deepspeed`."""

    kind: str
    params: Params


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step of all ranks, samples per forward of one rank, and backwards per step."""

    train: int | None = None
    micro: int | None = None
    accumulation: int | None = None

    def on(self, world_size: int) -> tuple[int, int, int]:
        """Return all three for a number of ranks; missing sizes follow from the others.

        Raises:
            PlanError: the sizes contradict each other, or neither of the first two is given.
        """
        train, micro, accumulation = self.train, self.micro, self.accumulation
        if train is None and micro is None:
            raise PlanError(
                "ds_config: train_batch_size and train_micro_batch_size_per_gpu are missing. Give "
                "one of them."
            )
        if micro is None:
            assert train is not None
            accumulation = accumulation or 1
            micro = train // (world_size * accumulation)
        elif accumulation is None:
            accumulation = 1 if train is None else train // (micro * world_size)
        if train is None:
            train = micro * accumulation * world_size
        if train != micro * accumulation * world_size or micro < 1:
            raise PlanError(
                f"ds_config: train_batch_size = {train} is not train_micro_batch_size_per_gpu = "
                f"{micro} x gradient_accumulation_steps = {accumulation} x {world_size} ranks = "
                f"{micro * accumulation * world_size}. Change one of them, or leave one out."
            )
        return train, micro, accumulation


@dataclass(frozen=True)
class DsConfig:
    """A ds_config as read: the plan, a verdict on each key, and the settings of an engine.

    gradient_clipping: the maximum norm; 0 means off.
    monitors: name -> options, for the monitors that are on.
    autocast: whether the model is called under bf16 autocast.
    is_managed: whether the engine counts backwards; if not, every step() is a boundary.
    """

    plan: Plan
    rows: tuple[KeyVerdict, ...]
    batch: BatchSizes
    gradient_clipping: float
    optimizer: Chosen | None
    scheduler: Chosen | None
    monitors: Mapping[str, Params]
    steps_per_print: int | None
    autocast: bool
    drop_last: bool
    is_managed: bool

    def warn(self) -> None:
        """Warn about unknown keys, and about ignored keys that would change how training runs."""
        rows = [row for row in self.rows if row.verdict == "unknown" or row.is_warned]
        if rows:
            said = "; ".join(f"{row.key}: {row.why}" for row in rows)
            warnings.warn(f"ds_config keys without effect: {as_sentence(said)}", stacklevel=3)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan and the rows as plain values."""
        keys = [
            {"key": r.key, "value": r.value, "verdict": r.verdict, "why": r.why} for r in self.rows
        ]
        return {"plan": self.plan.to_dict(), "keys": keys}

    def __str__(self) -> str:
        return table(self.rows)


def table(rows: tuple[KeyVerdict, ...]) -> str:
    """Return one line per key: the key, its value, the verdict and the reason."""
    cells = [(row.key, _short(row.value), row.verdict, row.why) for row in rows]
    widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(3)]
    lines = (
        "  ".join(text.ljust(width) for text, width in zip(cell, [*widths, 0], strict=True))
        for cell in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 40 else f"{said[:37]}..."


def read_ds_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    auto: Any = None,
    hidden_size: int | None = None,
    num_training_steps: int | None = None,
) -> DsConfig:
    """Read a ds_config as a plan and a verdict on every key.

    source: the path of a JSON file, or its content as a mapping.
    auto: the source of values that are "auto": a `transformers.TrainingArguments`, or an object or
        mapping with the same names. A mapping may also hold keys of the ds_config
        (`{"optimizer.params.lr": 1e-4}`). Without it, "auto" bucket sizes are the hardware's, and
        every other key that is "auto" is refused. As in transformers, values that are not "auto"
        must agree with the arguments.
    hidden_size: the model's hidden size, from which "auto" bucket sizes are computed.
    num_training_steps: the number of steps for schedulers. Default: `max_steps` of the arguments.

    Raises:
        PlanError: names every refused key, its value, and the fix.
    """
    reading = _Reading(_Auto.of(auto, hidden_size, num_training_steps))
    reading.walk(_load(source), "")
    return reading.result()


def _load(source: object) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, os.PathLike)):
        raise PlanError(f"ds_config is of type {type(source).__name__}. Give a path or a mapping.")
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(
            f"ds_config file {path}: {error.strerror}. Give an existing file."
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"ds_config file {path} is not UTF-8 text: {as_sentence(error)}") from error
    return read_mapping(text, f"ds_config file {path}", is_json=True)


# -- "auto", filled in as transformers does --------------------------------------------------------

_MISSING: Any = object()


@dataclass(frozen=True)
class _Auto:
    """The source of "auto" values, which have the names of TrainingArguments."""

    given: Any = None
    extra: Params = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, hidden_size: int | None, num_training_steps: int | None) -> _Auto:
        extra = {"hidden_size": hidden_size, "num_training_steps": num_training_steps}
        return cls(given, {k: v for k, v in extra.items() if v is not None})

    def get(self, name: str) -> Any:
        if name in self.extra:
            return self.extra[name]
        if isinstance(self.given, Mapping):
            return self.given.get(name, _MISSING)
        return _MISSING if self.given is None else getattr(self.given, name, _MISSING)

    def first(self, *names: str) -> Any:
        found = [value for value in map(self.get, names) if value is not _MISSING]
        return found[0] if found else _MISSING

    def any(self, *names: str) -> Any:
        found = [value for value in map(self.get, names) if value is not _MISSING]
        return any(found) if found else _MISSING

    def pair(self, first: str, second: str) -> Any:
        found = [self.get(first), self.get(second)]
        return _MISSING if _MISSING in found else found

    def product(self, *names: str) -> Any:
        found = [self.get(name) for name in names]
        if not all(type(value) is int for value in found):
            return _MISSING
        return math.prod(found)

    def steps(self) -> Any:
        steps = self.first("num_training_steps", "max_steps")
        return steps if isinstance(steps, int) and steps > 0 else _MISSING

    def warmup(self) -> Any:
        compute, steps = self.get("get_warmup_steps"), self.steps()
        if callable(compute) and steps is not _MISSING:
            return max(1, compute(steps))
        given = self.get("warmup_steps")
        return max(1, given) if isinstance(given, int) else given

    def hidden(self, factor: float, power: int) -> Any:
        size = self.get("hidden_size")
        return int(factor * size**power) if type(size) is int and size > 0 else _MISSING


_PER_DEVICE = "per_device_train_batch_size"
_AUTO: dict[str, tuple[str, Callable[[_Auto], Any]]] = {
    "train_micro_batch_size_per_gpu": (_PER_DEVICE, lambda a: a.get(_PER_DEVICE)),
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps", lambda a: a.get("gradient_accumulation_steps"),
    ),
    "train_batch_size": (
        f"world_size, {_PER_DEVICE} and gradient_accumulation_steps",
        lambda a: a.product("world_size", _PER_DEVICE, "gradient_accumulation_steps"),
    ),
    "gradient_clipping": ("max_grad_norm", lambda a: a.get("max_grad_norm")),
    "optimizer.params.lr": ("learning_rate", lambda a: a.get("learning_rate")),
    "optimizer.params.betas": (
        "adam_beta1 and adam_beta2", lambda a: a.pair("adam_beta1", "adam_beta2"),
    ),
    "optimizer.params.eps": ("adam_epsilon", lambda a: a.get("adam_epsilon")),
    "optimizer.params.weight_decay": ("weight_decay", lambda a: a.get("weight_decay")),
    "scheduler.params.warmup_min_lr": (
        "learning_rate", lambda a: _MISSING if a.get("learning_rate") is _MISSING else 0,
    ),
    "scheduler.params.warmup_max_lr": ("learning_rate", lambda a: a.get("learning_rate")),
    "scheduler.params.total_num_steps": ("max_steps or num_training_steps", _Auto.steps),
    "scheduler.params.warmup_num_steps": ("warmup_steps", _Auto.warmup),
    "fp16.enabled": ("fp16", lambda a: a.any("fp16", "fp16_full_eval")),
    "bf16.enabled": ("bf16", lambda a: a.any("bf16", "bf16_full_eval")),
}  # fmt: skip
_SIZES: dict[str, Callable[[_Auto], Any]] = {
    "zero_optimization.reduce_bucket_size": lambda a: a.hidden(1, 2),
    "zero_optimization.stage3_prefetch_bucket_size": lambda a: a.hidden(0.9, 2),
    "zero_optimization.stage3_param_persistence_threshold": lambda a: a.hidden(10, 1),
}
_FILLED_ONLY = {"scheduler.params.warmup_min_lr"}  # transformers does not compare this one


# -- Reading: first key by key, then combinations of keys ------------------------------------------


class _Reading:
    """The state of reading one ds_config: typed values by dotted key, and a verdict on each."""

    def __init__(self, auto: _Auto) -> None:
        self.auto = auto
        self.values: dict[str, Any] = {}
        self.rows: dict[str, KeyVerdict] = {}
        self.raw: dict[str, Any] = {}
        self.written: dict[str, str] = {}  # canonical key -> the key as written in the file
        self.defaults: list[KeyVerdict] = []

    # -- single keys ----------------------------------------------------------------------------
    def walk(self, config: Mapping[str, Any], prefix: str) -> None:
        """Read every key of a section."""
        for name, value in config.items():
            dotted = f"{prefix}{name}"
            key = ALIASES.get(dotted, dotted)
            self.written.setdefault(key, dotted)
            self.raw[key] = value
            if key == "zero_optimization" and isinstance(value, bool):
                self.values["zero_optimization.stage"] = int(value)
                self.say(key, "translated", f"stage={int(value)}; this form is old")
            elif value is None:
                self.say(key, "ignored", "null: treated as missing")
            elif key in SECTIONS:
                self._section(key, value)
            else:
                self._key(key, value)

    def _section(self, key: str, value: Any) -> None:
        if key.endswith(".params"):
            if not isinstance(value, Mapping):
                self.refuse(key, "allowed is a mapping of parameters")
            return  # the parameters are read together with the type
        if not isinstance(value, Mapping):
            self.refuse(key, "allowed is a mapping of its keys")
        elif not value:
            self.say(key, "ignored", "empty")
        else:
            self.walk(value, f"{key}.")

    def _key(self, key: str, value: Any) -> None:
        rule = KEYS.get(key)
        if rule is None:
            self.say(key, "unknown", f"not a key of DeepSpeed{_hint(key)}")
            return
        read = self.resolved(key, value, rule.read)
        if read is _MISSING:
            return
        self.values[key] = read
        if rule == FEATURE or key in ("amp", "comet", "elasticity"):
            is_on = _is_on(read, key)
        else:
            is_on = rule.read is anything or read not in rule.harmless
        if is_on:
            self.rows[key] = KeyVerdict(key, value, rule.verdict, rule.why, rule.is_warned)
        else:
            self.rows[key] = KeyVerdict(key, value, "ignored", "off")

    def resolved(self, key: str, value: Any, read: Reader) -> Any:
        """Return the typed value of a key with "auto" filled in, or refuse it; return _MISSING."""
        known = _MISSING
        if isinstance(self.auto.given, Mapping):
            known = self.auto.given.get(key, _MISSING)
        if known is _MISSING and key in _AUTO:
            known = _AUTO[key][1](self.auto)
        if value == "auto":
            if known is _MISSING:
                return self._without_value(key, read)
            value = known
        try:
            found = read(key, value)
            if known is not _MISSING and key not in _FILLED_ONLY and found != read(key, known):
                source = _AUTO[key][0] if key in _AUTO else "auto"
                self.refuse(
                    key, f'contradicts {source} = {known!r}. Make them equal, or write "auto"'
                )
                return _MISSING
        except PlanError as error:
            self.refuse(key, str(error).removeprefix(f"{key} = {value!r}: "))
            return _MISSING
        return found

    def _without_value(self, key: str, read: Reader) -> Any:
        if key in _SIZES:
            known = _SIZES[key](self.auto)
            if known is _MISSING:
                self.say(
                    key, "translated", "the hardware's value, because hidden_size is not known"
                )
                return _MISSING
            return read(key, known)
        rule = KEYS.get(key)
        if rule is not None and rule.verdict == "ignored":
            self.say(key, "ignored", rule.why)
        elif key in _AUTO:
            self.refuse(
                key, f"its value is {_AUTO[key][0]} of TrainingArguments. Give auto=, or a value"
            )
        else:
            self.refuse(key, "there is no value for it. Give one")
        return _MISSING

    def say(self, key: str, verdict: str, why: str, is_warned: bool = False) -> None:
        self.rows[key] = KeyVerdict(key, self.raw.get(key), verdict, why, is_warned)

    def refuse(self, key: str, why: str) -> None:
        self.say(key, "refused", why)

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    # -- combinations of keys -------------------------------------------------------------------
    def result(self) -> DsConfig:
        """Return the result of all keys together.

        Raises:
            PlanError: keys are refused; names all of them.
        """
        batch = self._batch()
        optimizer, scheduler = self._optimizer(), self._scheduler()
        clipping = self._clipping()
        fields: dict[str, Any] = {"stage": self.get("zero_optimization.stage", 0)}
        fields |= {"precision": self._precision(), **self._sizes(fields["stage"])}
        fields |= self._offload(fields["stage"])
        if self.get("sparse_gradients"):
            fields["sparse_gradients"] = True
        for name in ("quantized_weights", "quantized_gradients"):
            if self.get(f"zero_optimization.zero_{name}"):
                fields |= {name: True, "numerics": "fast"}
        refused = [row for row in self.rows.values() if row.verdict == "refused"]
        if refused:
            raise PlanError(_refusal([self._as_written(row) for row in refused]))
        try:
            plan = Plan(**fields)
        except PlanError as error:
            sources = [r.key for r in self.rows.values() if r.verdict == "translated"]
            raise PlanError(f"ds_config ({', '.join(sources)}): {as_sentence(error)}") from error
        rows = [*map(self._as_written, self.rows.values()), *self.defaults]
        return DsConfig(
            plan=plan,
            rows=tuple(rows),
            batch=batch,
            gradient_clipping=clipping,
            optimizer=optimizer,
            scheduler=scheduler,
            monitors=self._monitors(),
            steps_per_print=self.get("steps_per_print"),
            autocast=self.get("torch_autocast.enabled", False),
            drop_last=self.get("dataloader_drop_last", False),
            is_managed=self.get("managed_gradient_accumulation", True),
        )

    def _as_written(self, row: KeyVerdict) -> KeyVerdict:
        section, _, name = row.key.rpartition(".")
        written = self.written.get(row.key, row.key)
        if section in self.written and self.written[section] != section:
            written = f"{self.written[section]}.{name}"
        return KeyVerdict(written, row.value, row.verdict, row.why, row.is_warned)

    def _batch(self) -> BatchSizes:
        train, micro, accumulation = (
            self.get(key)
            for key in (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            )
        )
        least = (micro or 1) * (accumulation or 1)
        if train is not None and train % least:
            self.refuse(
                "train_batch_size",
                f"not a multiple of train_micro_batch_size_per_gpu x gradient_accumulation_steps "
                f"= {least}. Change one of the three, or leave one out",
            )
        return BatchSizes(train, micro, accumulation)

    def _clipping(self) -> float:
        """Return the clipping norm; older configs have it among the optimizer's parameters."""
        clipping, old = self.get("gradient_clipping"), self.get("optimizer.params.max_grad_norm")
        if old is not None and clipping is not None and old != clipping:
            self.refuse(
                "optimizer.params.max_grad_norm",
                f"contradicts gradient_clipping = {clipping:g}. Remove it",
            )
        if old is not None and clipping is None:
            return float(old)
        if clipping is None and "gradient_clipping" not in self.rows:
            why = "not in the file: 1.0, the default of DeepSpeed 0.19. Write 0 to turn it off"
            self.defaults.append(KeyVerdict("gradient_clipping", None, "honoured", why))
        return 1.0 if clipping is None else float(clipping)

    def _precision(self) -> Any:
        reduce = self.get("communication_data_type") or self.get("data_types.grad_accum_dtype")
        is_bf16, is_fp16 = self.get("bf16.enabled", False), self.get("fp16.enabled", False)
        for name, is_on in (("bf16", is_bf16), ("fp16", is_fp16)):
            for key, row in list(self.rows.items()):
                if key.startswith(f"{name}.") and not is_on and row.verdict == "translated":
                    self.say(key, "ignored", f"{name} is off")
        if is_bf16 and is_fp16:
            for key in ("bf16.enabled", "fp16.enabled"):
                self.refuse(key, "bf16 and fp16 exclude each other. Turn one off")
            return "fp32"
        if is_fp16:
            return {"compute": "fp16", "reduce": reduce or "fp16", "loss_scale": self._loss_scale()}
        found = {"compute": "bf16"} if is_bf16 else {}
        if is_bf16 and self.get("bf16.bf16_master_weights_and_grads", False):
            found |= {"master": "bf16", "reduce": "bf16"}
        elif is_bf16 and self.get("bf16.bf16_optimizer_states", False):
            self.refuse(
                "bf16.bf16_optimizer_states",
                "states have the format of the master weights. Set bf16_master_weights_and_grads "
                "too, or set this to false",
            )
        return found | ({"reduce": reduce} if reduce else {})

    def _loss_scale(self) -> Any:
        if fixed := self.get("fp16.loss_scale", 0.0):
            return fixed
        initial = 2.0 ** self.get("fp16.initial_scale_power", 16)
        minimum = self.get("fp16.min_loss_scale", 1.0)
        if initial < minimum:
            self.refuse(
                next(
                    k for k in ("fp16.initial_scale_power", "fp16.min_loss_scale") if k in self.rows
                ),
                f"fp16.min_loss_scale = {minimum:g} is above the initial scale = {initial:g}. "
                "Lower it, or raise fp16.initial_scale_power",
            )
        return {
            "initial": initial,
            "growth_interval": self.get("fp16.loss_scale_window", 1000),
            "hysteresis": self.get("fp16.hysteresis", 2),
            "minimum": minimum,
        }

    def _sizes(self, stage: int) -> dict[str, Any]:
        """Return the plan's sizes in bytes; DeepSpeed counts elements of the compute dtype."""
        zero = "zero_optimization"
        is_half = self.get("bf16.enabled", False) or self.get("fp16.enabled", False)
        item = 2 if is_half else 4
        found: dict[str, Any] = {}
        bucket = self.get(f"{zero}.reduce_bucket_size")
        ahead = self.get(f"{zero}.stage3_prefetch_bucket_size")
        if stage == 3:
            given = [each for each in (bucket, ahead) if each is not None]
            bucket = min([*given, 50_000_000]) if given else None
        if bucket is not None:
            found["bucket_bytes"] = bucket * item
        for key in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
            if stage < 3 and f"{zero}.{key}" in self.rows:
                self._ignore_if_translated(f"{zero}.{key}", "only stage 3 uses it")
        persist = self.get(f"{zero}.stage3_param_persistence_threshold")
        if persist is not None and stage == 3:
            found["persist_below"] = persist * item
        axis = self.get(f"{zero}.mics_shard_size", -1)
        if axis > 0 and stage:
            found["shard_axis_size"] = axis
        elif f"{zero}.mics_shard_size" in self.rows:
            self._ignore_if_translated(f"{zero}.mics_shard_size", "off" if stage else "stage is 0")
        node = self.get(f"{zero}.zero_hpz_partition_size", 1)
        if node > 1 and stage == 3:
            found["secondary_shard_size"] = node
        elif f"{zero}.zero_hpz_partition_size" in self.rows:
            why = "off" if stage == 3 else "only stage 3 uses it"
            self._ignore_if_translated(f"{zero}.zero_hpz_partition_size", why)
        return found

    def _ignore_if_translated(self, key: str, why: str) -> None:
        if self.rows[key].verdict == "translated":
            self.say(key, "ignored", why)

    def _offload(self, stage: int) -> dict[str, Any]:
        """Return the plan's offload; like DeepSpeed, ignore parts that the stage cannot offload."""
        zero = "zero_optimization"
        found: dict[str, Any] = {}
        for part, old, what, least in (
            ("offload_optimizer", "cpu_offload", "optimizer", 1),
            ("offload_param", "cpu_offload_param", "parameters", 3),
        ):
            mine = [k for k in self.rows if k.startswith(f"{zero}.{part}.") or k == f"{zero}.{old}"]
            is_old = self.get(f"{zero}.{old}", False)
            device = self.get(f"{zero}.{part}.device", "cpu" if is_old else "none")
            if stage < least:
                for key in mine:
                    self._ignore_if_translated(key, f"DeepSpeed ignores it at stage {stage} too")
            elif device != "none":
                found[what] = device
        found |= self._folder([what for what, device in found.items() if device == "nvme"])
        ratio = f"{zero}.offload_optimizer.ratio"
        if ratio in self.values and "optimizer" in found:
            found["device_fraction"] = 1.0 - self.values[ratio]
        elif ratio in self.rows:
            self._ignore_if_translated(ratio, "nothing is offloaded")
        if self.get("activation_checkpointing.cpu_checkpointing", False):
            found["activations"] = "cpu"
        return {"offload": found} if found else {}

    def _folder(self, on_nvme: list[str]) -> dict[str, str]:
        """Return the folder of everything that is on NVMe; there can be only one."""
        paths: dict[str, str] = {}
        for what, part in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
            start = f"zero_optimization.{part}"
            key = f"{start}.nvme_path"
            if what not in on_nvme:
                if key in self.rows:
                    self._ignore_if_translated(key, "nothing in this section is on nvme")
            elif self.get(key):
                paths[key] = self.get(key)
            else:
                self.refuse(key if key in self.rows else f"{start}.device", f"nvme needs {key}")
        if len(set(paths.values())) > 1:
            key = "zero_optimization.offload_param.nvme_path"
            first = next(iter(paths.values()))
            self.refuse(key, f"zerofx has one folder for this tier. Use {first!r} here too")
        return {"path": next(iter(paths.values()))} if paths else {}

    # -- optimizer and scheduler ----------------------------------------------------------------
    def _params(
        self, section: str, kind: str, known: Mapping[str, Reader] | None
    ) -> dict[str, Any]:
        """Read the parameters of a type; those of torch's own classes are kept unchanged."""
        given = (self.raw.get(section) or {}).get("params")
        found: dict[str, Any] = {}
        if not isinstance(given, Mapping):
            return found
        for name, value in given.items():
            key = f"{section}.params.{name}"
            self.raw[key] = value
            if value is None:
                self.say(key, "ignored", "null: treated as missing")
                continue
            reader = anything if known is None else known.get(name)
            if reader is None:
                self.refuse(key, f"{kind} has no such parameter{nearest(str(name), known or ())}")
                continue
            read = self.resolved(key, value, reader)
            if read is not _MISSING:
                found[str(name)] = self.values[key] = read
                self.say(key, "honoured", f"of {kind}")
        self.rows.pop(f"{section}.params", None)
        return found

    def _type(self, section: str) -> str | None:
        """Return the type that a section names, and refuse a section without a type."""
        given = self.raw.get(section)
        if not isinstance(given, Mapping) or not given:
            return None
        kind = self.get(f"{section}.type")
        if kind is None and f"{section}.type" not in self.rows:
            example = "AdamW" if section == "optimizer" else "WarmupLR"
            self.refuse(section, f'it has no type. Give one, such as "type": "{example}"')
        return kind

    def _optimizer(self) -> Chosen | None:
        kind = self._type("optimizer")
        if kind is None:
            return None
        name = kind.lower()
        if name in OPTIMIZERS:
            params = self._params("optimizer", kind, OPTIMIZERS[name])
            params.pop("max_grad_norm", None)
            if "optimizer.params.max_grad_norm" in self.values:
                self.say("optimizer.params.max_grad_norm", "translated", "gradient_clipping")
            if name in ("adam", "adamw"):
                return self._adam(name, params)
            self._off("optimizer", name, params, ("amsgrad", "eps_inside_sqrt"))
            self.say("optimizer.type", "honoured", f"zerofx.optim.{_NAMES[name]}")
            return Chosen(_NAMES[name], {"lr": 1e-3, **params})
        if name in BY_LOWER_NAME:
            self.say("optimizer.type", "honoured", f"torch.optim.{BY_LOWER_NAME[name]}")
            return Chosen(BY_LOWER_NAME[name], self._params("optimizer", kind, None))
        known = [*_NAMES.values(), *TORCH_OPTIMIZERS]
        why = OTHER_OPTIMIZERS.get(name)
        self.refuse(
            "optimizer.type", f"it is not supported{f'. {why}' if why else nearest(kind, known)}"
        )
        return None

    def _adam(self, name: str, params: dict[str, Any]) -> Chosen | None:
        """Return the Adam variant.

        It decays as AdamW does unless `adam_w_mode` is false. Weight decay is 0 by default.
        """
        is_decoupled = params.pop("adam_w_mode", True) or name == "adamw"
        is_torch = params.pop("torch_adam", False)
        params.pop("fp32_optimizer_states", None)
        is_corrected = params.pop("bias_correction", True)
        given = {
            "lr": 1e-3,
            **({} if is_torch and is_decoupled else {"weight_decay": 0.0}),
            **params,
        }
        if is_corrected:
            kind = "AdamW" if is_decoupled else "Adam"
            self.say("optimizer.type", "honoured", f"zerofx.optim.{kind}")
            return Chosen(kind, given)
        key = "optimizer.params.bias_correction"
        if is_torch or given.pop("amsgrad", False) or (not is_decoupled and given["weight_decay"]):
            self.refuse(key, "only AdamW without amsgrad can be used without it. Set it to true")
            return None
        if given.get("eps") == 0.0:
            self.refuse(key, "without it eps must be above 0. Raise optimizer.params.eps")
            return None
        self.say(key, "translated", "zerofx.optim.Lamb with trust ratios of 1 is the same update")
        self.say("optimizer.type", "translated", "zerofx.optim.Lamb with trust ratios of 1")
        return Chosen(
            "Lamb", {**given, "bias_correction": False, "min_coeff": 1.0, "max_coeff": 1.0}
        )

    def _off(self, section: str, kind: str, params: dict[str, Any], names: tuple[str, ...]) -> None:
        for name in names:
            if params.pop(name, False):
                self.refuse(f"{section}.params.{name}", f"{kind} does not have it. Set it to false")

    def _scheduler(self) -> Chosen | None:
        kind = self._type("scheduler")
        if kind is None:
            return None
        if kind in TORCH_SCHEDULERS:
            self.say("scheduler.type", "honoured", f"torch.optim.lr_scheduler.{kind}")
            return Chosen(kind, self._params("scheduler", kind, None))
        if kind not in SCHEDULERS:
            known = [*SCHEDULERS, *TORCH_SCHEDULERS]
            self.refuse("scheduler.type", f"it is not supported{nearest(kind, known)}")
            return None
        params = self._params("scheduler", kind, SCHEDULERS[kind])
        for name in NEEDED.get(kind, ()):
            if f"scheduler.params.{name}" not in self.rows:
                self.refuse("scheduler.type", f"it needs scheduler.params.{name}. Give it")
        if params.get("warmup_num_steps") == 0:
            params["warmup_num_steps"] = 2
            key = "scheduler.params.warmup_num_steps"
            self.say(key, "translated", "treated as 2, as in versions of DeepSpeed that allowed 0")
        if "scheduler.type" in self.rows and self.rows["scheduler.type"].verdict != "refused":
            self.say("scheduler.type", "honoured", f"{kind}, which starts as in DeepSpeed")
        return Chosen(kind, params)

    def _monitors(self) -> dict[str, Params]:
        found: dict[str, Params] = {}
        for monitor in ("tensorboard", "csv_monitor", "wandb"):
            if self.get(f"{monitor}.enabled", False):
                start = f"{monitor}."
                found[monitor] = {
                    key.removeprefix(start): value
                    for key, value in self.values.items()
                    if key.startswith(start) and key != f"{monitor}.enabled"
                }
        return found


# Common misspellings of keys -> the key that is meant.
_MEANT = {
    "max_grad_norm": "gradient_clipping",
    "zero_optimization.cpu_offload_params": "offload_param",
}


def _hint(key: str) -> str:
    """Return `. Did you mean 'x'?` if the key resembles a known key of its section."""
    section = key.rpartition(".")[0]
    known = [k for k in KEYS if k.rpartition(".")[0] == section]
    said = f". Did you mean {_MEANT[key]!r}?" if key in _MEANT else nearest(key, known)
    return said if "Did you mean" in said else ""


_NAMES = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb", "lion": "Lion", "sgd": "SGD"}


def _refusal(rows: list[KeyVerdict]) -> str:
    """Return the error text that names every refused key."""
    if len(rows) == 1:
        return f"ds_config: {as_sentence(rows[0])}"
    return f"ds_config has {len(rows)} keys that are refused:\n" + "\n".join(
        f"  {as_sentence(row)}" for row in rows
    )


def _is_on(value: Any, key: str) -> bool:
    """Return whether a feature is on: from its switches if it has any, else if it is not empty."""
    if key == "tensor_parallel" and isinstance(value, Mapping):
        sizes = [value.get(name, 1) for name in ("autotp_size", "tp_size")]
        return any(size not in (0, 1) for size in sizes)
    switches = list(_switches(value))
    return any(switches) if switches else bool(value)


def _switches(value: Any) -> Iterator[bool]:
    """Yield for each `enabled` within a section whether it is on; odd values count as on."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name == "enabled":
                yield each not in (False, None, 0, "false")
            else:
                yield from _switches(each)
