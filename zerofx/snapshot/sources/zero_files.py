"""DeepSpeed's folders: those of ZeRO stages 0 to 3, and universal ones.

    latest                                         the name of the folder below
    global_step3/mp_rank_00_model_states.pt        stages 0 to 2: weights, buffers, names, shapes
    global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt   stage 3: the same without weights
    global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt   a rank's fp32 weights and states

Trained weights are in flat tensors without names, one per group of parameters and rank. At stages 1
and 2, the concatenated tensors of all ranks are the concatenated parameters of the group. At stage
3, each rank's tensor has its share of every parameter of the group in turn: n / N elements, rounded
up. `param_shapes` has names and shapes in this order.

A universal folder (`ds_to_universal`) has `zero/<name>/{fp32,exp_avg,exp_avg_sq,step}.pt`, and the
files of model states.

Source: deepspeed 0.19.5, utils/zero_to_fp32.py, checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofx import schema
from zerofx.errors import SnapshotError
from zerofx.snapshot.sources.source import Entry, Joined, OpenCheckpoint, StoredTensor
from zerofx.snapshot.sources.torch_files import (
    Inert,
    TorchFile,
    checked,
    plain,
    read_torch_file,
    tensor,
)

OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
UNIVERSAL = "zero"  # the folder of parameters in a universal folder
_FP32 = "fp32.pt"
_SLICED = re.compile(r"layer_.*|expp_rank_.*|.*_expert_.*|mp_rank_\d+_\d+_.*")
_PIECE = re.compile(r"(.*)_(?:optim|model)_states|fp32|exp_avg|exp_avg_sq|step")
# The keys of model states that do not come from the script's arguments to save_checkpoint.
_STRUCTURE = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
     "frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names",
     "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
     "universal_checkpoint_info"}
)  # fmt: skip

Shapes = Mapping[str, Sequence[int]]
_SIZES = schema.sequence(schema.integer(), most=64)
_SHAPES = schema.mapping(schema.text(), _SIZES)
_TENSORS = schema.mapping(schema.text(), tensor)
_MODEL_FORM = schema.record(
    {
        "module": schema.mapping(schema.text(), schema.anything),
        "param_shapes": schema.optional(schema.sequence(_SHAPES)),
    },
    buffer_names=schema.optional(schema.sequence(schema.text())),
    frozen_param_shapes=schema.optional(_SHAPES),
    frozen_param_fragments=schema.optional(_TENSORS),
    shared_params=schema.optional(schema.mapping(schema.text(), schema.text())),
    ds_version=schema.anything,
    global_steps=schema.integer(),
)
_STATES = schema.mapping(schema.anything, schema.mapping(schema.text(), schema.anything))
_GROUPS = schema.sequence(
    schema.record({"params": schema.sequence(schema.integer())}),
)
_BASE = schema.record({"state": _STATES, "param_groups": _GROUPS})
_FLATS = schema.sequence(tensor)
_OPTIM_FORM = schema.record(
    {
        "optimizer_state_dict": schema.either(
            schema.record(
                {
                    "fp32_flat_groups": _FLATS,
                    "partition_count": schema.integer(1, 1 << 20),
                    "optimizer_state_dict": _BASE,
                }
            ),
            schema.record(
                {
                    "single_partition_of_fp32_groups": _FLATS,
                    "partition_count": schema.sequence(schema.integer(1, 1 << 20), least=1),
                    "base_optimizer_state": schema.either(
                        schema.sequence(schema.mapping(schema.text(), schema.anything)), _BASE
                    ),
                }
            ),
        )
    }
)
_PARAM = schema.either(tensor, schema.record({"param": tensor}))
_PIECE_FORM = schema.either(schema.number(), _PARAM)
_UNIVERSAL_OPTIM = schema.record({"param_groups": _GROUPS}, optimizer_state_dict=_BASE)


def is_zero_folder(names: Sequence[str]) -> bool:
    """Return whether a folder with files of these names was written by DeepSpeed."""
    return any(OPTIM.fullmatch(n) or MODEL.fullmatch(n) or _SLICED.fullmatch(n) for n in names
               if n.endswith("_states.pt"))  # fmt: skip


@dataclass(frozen=True)
class _RankFiles:
    """The content written by one rank: flat weights and states per group, and group options."""

    path: Path
    stage: int
    ranks: int
    flats: list[Entry]
    states: list[Mapping[str, Any]]
    options: list[Mapping[str, Any]]


@dataclass
class _Group:
    """One group of parameters: flat weights, states, and single numbers, of all ranks."""

    flats: list[Entry]
    states: dict[str, list[Entry]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class _EngineFolder(OpenCheckpoint, ABC):
    """A folder with files of model states, which both kinds of folders have."""

    def _is_part(self, name: str) -> bool:
        return name.endswith("_states.pt")

    def _read(self, path: Path) -> TorchFile:
        """Read a file, which must have been saved under its name."""
        found = read_torch_file(self._held, str(path))
        if found.saved_as != path.stem and _PIECE.fullmatch(found.saved_as):
            raise SnapshotError(
                f"{path} was saved as {found.saved_as}{path.suffix}: files of the checkpoint were "
                "swapped or renamed. Copy the folder again."
            )
        return found

    # -- model states -----------------------------------------------------------------------------
    def _models(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return the model states of all ranks; below stage 3, only of rank 0."""
        sliced = [n for n in self._listed if _SLICED.fullmatch(n)]
        found = {m.groups(): n for n in self._listed if (m := MODEL.fullmatch(n))}
        models = sorted({int(mp) for _, mp in found})
        if sliced or len(models) > 1:
            raise SnapshotError(
                f"{self._source} has pipeline stages, tensor-parallel slices or experts "
                f"({(sliced or sorted(found.values()))[-1]}), and only data-parallel checkpoints "
                "are read. Convert it with DeepSpeed's ds_to_universal, and give that folder."
            )
        names = [found[key] for key in sorted(found, key=lambda k: int(k[0] or 0))]
        if not names:
            raise SnapshotError(
                f"{self._source}: *_model_states.pt is missing, which has names and shapes."
            )
        paths = [self._source / name for name in names]
        return [(p, checked(self._read(p), _MODEL_FORM, p, "file of model states")) for p in paths]

    def _take_extra(self, first: Mapping[str, Any]) -> None:
        """Keep the engine's counters and the values that the script gave to save_checkpoint."""
        parts = {k: v for k, v in first.items() if k not in _STRUCTURE and not isinstance(v, Inert)}
        self.extra = plain(parts)

    def _buffers(
        self, path: Path, first: Mapping[str, Any], is_whole: bool
    ) -> dict[str, StoredTensor]:
        """Return the module's tensors by name: all of them, or only its buffers.

        is_whole: the module has weights; at stage 3 it has placeholders in their place.
        """
        module = first["module"]
        buffers = set(first.get("buffer_names") or ())
        kept = {n: v for n, v in module.items() if is_whole or n in buffers}
        return {n: v for n, v in kept.items() if isinstance(v, Entry)}

    def _frozen(self, models: Sequence[tuple[Path, dict[str, Any]]]) -> dict[str, StoredTensor]:
        """Return the frozen parameters of stage 3, of which every rank has a share."""
        shapes = models[0][1].get("frozen_param_shapes") or {}
        found: dict[str, StoredTensor] = {}
        for name, shape in shapes.items():
            shares = []
            for path, state in models:
                if name not in (state.get("frozen_param_fragments") or {}):
                    raise SnapshotError(f"{path} lacks its share of {name}.")
                shares.append(state["frozen_param_fragments"][name])
            found[name] = _of_shares(name, [(share, 0) for share in shares], shape)
        return found


class ZeroSource(_EngineFolder):
    """A folder of DeepSpeed's engine, at ZeRO stages 0 to 3, of any number of ranks."""

    def _found(self) -> dict[str, StoredTensor]:
        models = self._models()
        path, first = models[0]
        self._take_extra(first)
        optim = {int(m[1]): n for n in self._listed if (m := OPTIM.fullmatch(n))}
        shapes, version = first["param_shapes"], first.get("ds_version")
        if shapes is None:
            return self._unsharded(path, first, bool(optim))
        ranks = [self._rank(self._source / optim[r]) for r in sorted(optim)]
        self._check_ranks(ranks, sorted(optim), models, path)
        stage = ranks[0].stage
        self.found = f"DeepSpeed {version} checkpoint, ZeRO-{stage}, {len(ranks)} ranks"
        entries = self._buffers(path, first, stage < 3)
        groups = self._groups(ranks)
        if stage == 3:
            entries |= self._frozen(models)
            entries |= self._shares(groups, shapes, path)
        else:
            entries |= self._partitions(groups, shapes, path)
        for alias, name in (first.get("shared_params") or {}).items():
            if name in entries:
                entries[alias] = entries[name]
        return entries

    def _unsharded(
        self, path: Path, first: dict[str, Any], has_optim: bool
    ) -> dict[str, StoredTensor]:
        """Return the weights of a model that was trained without ZeRO."""
        if has_optim:
            raise SnapshotError(f"{path} has no param_shapes, and there are *_optim_states.pt.")
        self.found = f"DeepSpeed {first.get('ds_version')} checkpoint without ZeRO"
        self.optimizer.why_not = (
            "its states are by number, without names of parameters. Load them with "
            f'zerofx.load_full_optimizer_state_dict(model, optimizer, torch.load("{path}", '
            'weights_only=False)["optimizer"])'
        )
        return self._buffers(path, first, True)

    def _rank(self, path: Path) -> _RankFiles:
        found = checked(self._read(path), _OPTIM_FORM, path, "file of optimizer states")
        inner = found["optimizer_state_dict"]
        if "fp32_flat_groups" in inner:
            stage, flats, base = 3, inner["fp32_flat_groups"], inner["optimizer_state_dict"]
            count = inner["partition_count"]
        else:
            flats, base = inner["single_partition_of_fp32_groups"], inner["base_optimizer_state"]
            said = inner.get("zero_stage", 1)  # missing in files of BF16_Optimizer
            stage = said.args[0] if isinstance(said, Inert) and said.args else said
            stage = stage if stage in (1, 2) else 1
            count = max(inner["partition_count"])
            if len(set(inner["partition_count"])) > 1:
                raise SnapshotError(
                    f"{path}: groups are split over {inner['partition_count']} ranks, as experts "
                    "are. Only data-parallel checkpoints are read."
                )
        states: list[Mapping[str, Any]] = [{} for _ in flats]
        options: list[Mapping[str, Any]] = [{} for _ in flats]
        if isinstance(base, list):  # "elastic_checkpoint"
            states[: len(base)] = base
        else:
            for group in base["param_groups"]:
                for number in group["params"]:
                    if number >= len(flats):
                        raise SnapshotError(f"{path}: there is no group {number} of parameters.")
                    options[number] = plain({k: v for k, v in group.items() if k != "params"})
                    states[number] = base["state"].get(number, {})
        return _RankFiles(path, stage, count, flats, states, options)

    def _check_ranks(
        self,
        ranks: Sequence[_RankFiles],
        numbers: Sequence[int],
        models: Sequence[tuple[Path, dict[str, Any]]],
        path: Path,
    ) -> None:
        """Check that the files of all ranks exist, and belong to one checkpoint."""
        if not ranks:
            raise SnapshotError(
                f"{self._source}: *_optim_states.pt is missing, which has the weights in fp32. "
                f"Copy the whole folder, or give {path.name}, which has at stages 1 and 2 the "
                "weights that were computed with."
            )
        count = ranks[0].ranks
        if list(numbers) != list(range(count)):
            lacking = sorted(set(range(count)) - set(numbers))
            what = f"lacks rank {lacking[0]}" if lacking else "has files of another checkpoint"
            raise SnapshotError(
                f"{self._source} {what}: {len(ranks)} of {count} files *_optim_states.pt are there."
            )
        if ranks[0].stage == 3 and len(models) != count:
            raise SnapshotError(
                f"{self._source}: {len(models)} of {count} files *_model_states.pt are there."
            )
        for rank in ranks:
            if (rank.ranks, rank.stage, len(rank.flats)) != (count, ranks[0].stage,
                                                             len(ranks[0].flats)):  # fmt: skip
                raise SnapshotError(f"{rank.path} is of another checkpoint than rank 0's.")
        for other, state in models[1:]:
            if state.get("global_steps") != models[0][1].get("global_steps"):
                raise SnapshotError(
                    f"{other} is of step {state.get('global_steps')}, and rank 0's of step "
                    f"{models[0][1].get('global_steps')}. Copy all files of one checkpoint."
                )

    def _groups(self, ranks: Sequence[_RankFiles]) -> list[_Group]:
        """Return the groups with the data of all ranks."""
        groups = []
        for number, flat in enumerate(ranks[0].flats):
            group = _Group([rank.flats[number] for rank in ranks])
            group.options = ranks[0].options[number]
            for key in ranks[0].states[number]:
                held = [rank.states[number].get(key) for rank in ranks]
                kind = held[0]
                if isinstance(kind, Entry) and math.prod(kind.shape) > 1 < math.prod(flat.shape):
                    group.states[key] = self._state(ranks, number, key, held)
                else:
                    group.values[key] = _same(ranks, key, held)
            if "step" in group.options and "step" not in group.values:
                group.values["step"] = group.options["step"]
            groups.append(group)
        return groups

    def _state(
        self, ranks: Sequence[_RankFiles], number: int, key: str, held: Sequence[Any]
    ) -> list[Entry]:
        for rank, state in zip(ranks, held, strict=True):
            flat = rank.flats[number]
            if not isinstance(state, Entry) or math.prod(state.shape) < math.prod(flat.shape):
                raise SnapshotError(
                    f"{rank.path}: {key} of group {number} does not have the "
                    f"{math.prod(flat.shape)} elements of the weights."
                )
        return list(held)

    def _partitions(
        self,
        groups: Sequence[_Group],
        shapes: Sequence[Shapes],
        path: Path,
    ) -> dict[str, StoredTensor]:
        """Return parameters that are stored consecutively across the ranks' partitions.

        `param_slice_mappings` has the same data, but is wrong with `round_robin_gradients`.
        """
        if len(groups) != len(shapes):
            raise SnapshotError(
                f"{path} has {len(shapes)} groups of parameters, not {len(groups)}."
            )
        found: dict[str, StoredTensor] = {}
        for number, (group, named) in enumerate(zip(groups, shapes, strict=True)):
            there = sum(math.prod(flat.shape) for flat in group.flats)
            needed = sum(math.prod(shape) for shape in named.values())
            if not needed <= there <= _aligned(needed, len(group.flats)):
                raise SnapshotError(_other_size(path, needed, there, number))
            at = 0
            for name, shape in named.items():
                end = at + math.prod(shape)
                pieces = list(_across(group.flats, at, end))
                found[name] = Joined.of([(group.flats[r], a, b) for r, a, b in pieces], shape)
                self._take_states(group, name, pieces, shape)
                at = end
        return found

    def _shares(
        self, groups: Sequence[_Group], shapes: Sequence[Shapes], path: Path
    ) -> dict[str, StoredTensor]:
        """Return parameters of which every rank has an equal share."""
        count = len(groups[0].flats) if groups else 1
        sizes = [[math.prod(flat.shape) for flat in group.flats] for group in groups]
        named = {name: shape for group in shapes for name, shape in group.items()}
        there = sum(map(sum, sizes))
        needed = sum(-(-math.prod(shape) // count) for shape in named.values()) * count
        if there != needed or any(len(set(each)) > 1 for each in sizes):
            raise SnapshotError(_other_size(path, needed, there))
        found: dict[str, StoredTensor] = {}
        number = at = 0
        for name, shape in named.items():
            share = -(-math.prod(shape) // count)
            while at >= sizes[number][0] and number + 1 < len(groups):
                number, at = number + 1, at - sizes[number][0]
            if share > sizes[number][0] - at:
                raise SnapshotError(f"{path}: {name} goes beyond its group {number}.")
            group = groups[number]
            found[name] = _of_shares(name, [(flat, at) for flat in group.flats], shape)
            pieces = [(r, at, at + share) for r in range(count)]
            self._take_states(group, name, pieces, shape)
            at += share
        return found

    def _take_states(
        self,
        group: _Group,
        name: str,
        pieces: Sequence[tuple[int, int, int]],
        shape: Sequence[int],
    ) -> None:
        self.optimizer.tensors[name] = {
            key: Joined.of([(held[r], a, b) for r, a, b in pieces], shape)
            for key, held in group.states.items()
        }
        self.optimizer.values[name] = group.values
        self.optimizer.options[name] = group.options


class UniversalSource(_EngineFolder):
    """A folder of DeepSpeed's ds_to_universal, with a subfolder for each parameter."""

    def _found(self) -> dict[str, StoredTensor]:
        models = [(path, state) for path, state in self._models_of_any() if state["param_shapes"]]
        path, first = models[0] if models else (self._source, {"module": {}, "param_shapes": []})
        self._take_extra(first)
        self.found = f"DeepSpeed {first.get('ds_version', '')} universal checkpoint"
        shapes = {name: s for group in first["param_shapes"] for name, s in group.items()}
        root = self._source / UNIVERSAL
        is_sharded = any(MODEL.fullmatch(n) and n.startswith("zero_") for n in self._listed)
        entries = self._buffers(path, first, not is_sharded)
        entries |= self._frozen(models) if is_sharded else {}
        options = self._options(root, first["param_shapes"])
        names = sorted(n for n in os.listdir(root) if (root / n).is_dir())
        for name in names:
            entries[name] = self._param(root / name / _FP32, shapes.get(name))
            self._states_of(root / name, name, entries[name].shape)
            self.optimizer.options[name] = options.get(name, {})
            if "step" not in self.optimizer.values[name]:
                self._take_step(name, options.get(name, {}))
        self._check_alike(root)
        lacking = sorted(shapes.keys() - entries.keys())
        if lacking:
            raise SnapshotError(f"{root / lacking[0]} is missing.")
        for alias, name in (first.get("shared_params") or {}).items():
            if name in entries:
                entries[alias] = entries[name]
        return entries

    def _models_of_any(self) -> list[tuple[Path, dict[str, Any]]]:
        """Return the model states of rank 0 of any slice: universal folders have no slices."""
        paths = [self._source / n for n in sorted(self._listed) if MODEL.fullmatch(n)]
        return [(p, checked(self._read(p), _MODEL_FORM, p, "file of model states")) for p in paths]

    def _param(self, path: Path, shape: Sequence[int] | None) -> StoredTensor:
        content = checked(self._read(path), _PARAM, path, "file of a universal checkpoint")
        found = content["param"] if isinstance(content, dict) else content
        if shape is None or tuple(shape) == found.shape or isinstance(content, dict):
            return found  # type: ignore[no-any-return]
        if math.prod(found.shape) != math.prod(shape):
            raise SnapshotError(f"{path} has {math.prod(found.shape)} elements, not {list(shape)}.")
        return Joined.of([(found, 0, math.prod(shape))], shape)

    def _states_of(self, folder: Path, name: str, shape: Sequence[int]) -> None:
        tensors: dict[str, StoredTensor] = {}
        values: dict[str, Any] = {}
        for file in sorted(n for n in os.listdir(folder) if n.endswith(".pt") and n != _FP32):
            key, path = file.removesuffix(".pt"), folder / file
            content = checked(self._read(path), _PIECE_FORM, path, "file of a universal checkpoint")
            content = content["param"] if isinstance(content, dict) else content
            if isinstance(content, Entry) and content.shape:
                if math.prod(content.shape) != math.prod(shape):
                    raise SnapshotError(f"{path} is of {list(content.shape)}, not {list(shape)}.")
                tensors[key] = Joined.of([(content, 0, math.prod(shape))], shape)
            else:
                values[key] = plain(content)
        self.optimizer.tensors[name], self.optimizer.values[name] = tensors, values

    def _check_alike(self, root: Path) -> None:
        """Check that all parameters have the same states."""
        kinds = {key for held in self.optimizer.tensors.values() for key in held}
        for name, held in self.optimizer.tensors.items():
            for key in sorted(kinds - held.keys()):
                raise SnapshotError(f"{root / name / key}.pt is missing.")

    def _options(self, root: Path, shapes: Sequence[Shapes]) -> dict[str, Mapping[str, Any]]:
        """Return each parameter's options, including the steps of stage 3."""
        path = root / "optimizer_state.pt"
        if not path.is_file():
            return {}
        content = checked(self._read(path), _UNIVERSAL_OPTIM, path, "file of optimizer states")
        states = content.get("optimizer_state_dict", {}).get("state", {})
        found: dict[str, Mapping[str, Any]] = {}
        for group in content["param_groups"]:
            kept = plain({k: v for k, v in group.items() if k != "params"})
            for number in group["params"]:
                step = plain(states.get(number, {}).get("step"))
                for name in shapes[number] if number < len(shapes) else ():
                    found[name] = kept if step is None else {**kept, "step": step}
        return found

    def _take_step(self, name: str, options: Mapping[str, Any]) -> None:
        if "step" in options:
            self.optimizer.values[name]["step"] = options["step"]


def _of_shares(name: str, shares: Sequence[tuple[Entry, int]], shape: Sequence[int]) -> Joined:
    """Return a parameter of which each rank has an equal share; the last shares are padded."""
    numel, count = math.prod(shape), len(shares)
    share = -(-numel // count)
    parts: list[tuple[StoredTensor, int, int]] = []
    for rank, (flat, at) in enumerate(shares):
        own = max(0, min(share, numel - rank * share))
        if math.prod(flat.shape) < at + own:
            raise SnapshotError(f"{flat.path}: {name} has {math.prod(flat.shape) - at} of {own}.")
        parts.append((flat, at, at + own))
    return Joined.of(parts, shape)


def _across(flats: Sequence[Entry], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first, last) of elements start:stop of consecutive flat tensors."""
    base, is_found = 0, False
    for rank, flat in enumerate(flats):
        size = math.prod(flat.shape)
        first, last = max(start, base), min(stop, base + size)
        if first < last:
            yield rank, first - base, last - base
            is_found = True
        base += size
    if not is_found:
        yield 0, 0, 0  # a parameter without elements


def _aligned(numel: int, ranks: int) -> int:
    """Return the largest size to which DeepSpeed pads: a multiple of 2 per rank."""
    unit = 2 * ranks
    return -(-numel // unit) * unit


def _same(ranks: Sequence[_RankFiles], key: str, held: Sequence[Any]) -> Any:
    """Return a value that must be equal on all ranks."""
    values = [plain(value) for value in held]
    for rank, value in zip(ranks, values, strict=True):
        if isinstance(value, Tensor) and isinstance(values[0], Tensor):
            is_same = torch.equal(value, values[0])
        else:
            is_same = type(value) is type(values[0]) and value == values[0]
        if not is_same:
            raise SnapshotError(
                f"{rank.path} has {key} {value}, and {ranks[0].path.name} has {values[0]}: the "
                "files are of several checkpoints."
            )
    return values[0]


def _other_size(path: Path, needed: int, there: int, number: int | None = None) -> str:
    where = "" if number is None else f" of group {number}"
    return (
        f"{path.parent}: {path.name} names {needed} elements{where}, and the files "
        f"*_optim_states.pt have {there}. Either they are of another checkpoint, or the rest was "
        "offloaded to NVMe and is not in the folder."
    )
