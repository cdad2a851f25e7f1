"""load_weights: from files of many formats directly into the shards, wherever they live.

`load` of a checkpoint of another library takes the same steps, also for optimizer states.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from zerofx.comm.world import World
from zerofx.errors import ArgumentError, SnapshotError, as_sentence
from zerofx.layout.tiles import Range
from zerofx.model.module import CompiledModule
from zerofx.runtime.tensors.piece import is_cut, piece_of
from zerofx.snapshot import state, whole_states
from zerofx.snapshot.held import Replaced, is_stale, read_settled
from zerofx.snapshot.sources.recognise import open_source
from zerofx.snapshot.sources.source import OpenCheckpoint, StoredTensor, describe, slice_of
from zerofx.snapshot.state import buffers_of, few
from zerofx.snapshot.target import check_call, place

log = logging.getLogger("zerofx")

Name = str | tuple[str, int]
Names = Mapping[str, Name] | Callable[[str], Name | None] | None
_AT_ONCE_BYTES = 8 << 20  # short ranges of a tensor are read together, up to this size
_GAP_BYTES = 64 << 10  # gaps between such ranges are read rather than skipped, up to this size
_ADAPTER = "adapter_model"  # the name of PEFT's files
_SAVED_MODULES = "modules_to_save"
# Options that affect how an optimizer computes, not the result: those of the given one are kept.
_OWN_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "step"})
# Options that distinguish kinds of optimizers, and so their states.
_TELLING = ("betas", "momentum")


class Keys(NamedTuple):
    """The keys that a load left alone, as returned by torch's load_state_dict."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: CompiledModule,
    source: str | os.PathLike[str],
    *,
    strict: bool = True,
    names: Names = None,
) -> Keys:
    """Load parameters and buffers from a checkpoint; a collective call, all ranks make it.

    Every rank reads only what it owns, in parts of a few MiB and directly into its final memory: no
    host ever holds the model, or a whole tensor. Values are cast to the model's formats. Everything
    is checked on all ranks before anything is changed. No file is executed.

    source: safetensors (a file, an index, or the directory of a Hugging Face model or of
        `zerofx.export`), a PEFT adapter, a torch.save file, or a folder of DeepSpeed (ZeRO or
        universal), torch.distributed.checkpoint (FSDP2), or Megatron (torch_dist). The format is
        detected. All ranks must be able to read it. See docs/checkpoints.md.
    strict: the files must have exactly the names of the model. For a shared parameter, one of its
        names is enough.
    names: a mapping or function from the model's names to those in the files, if they differ. A
        pair (name, i) is slice i of a tensor of stacked layers. None leaves a tensor alone.

    Returns:
        `missing_keys` and `unexpected_keys`, as `nn.Module.load_state_dict` returns them.

    Raises:
        SnapshotError: names or shapes differ, or a file is damaged; names file and tensor.
        DesyncError: a rank did not make this call; names it.

    Example:
        torch.save(MyModel().state_dict(), "model.pt")  # or a file that another job saved
        keys = zerofx.load_weights(model, "model.pt")  # on all ranks
        assert not keys.missing_keys
    """
    check_call("zerofx.load_weights(model, source)", source)
    if not isinstance(model, CompiledModule):
        raise SnapshotError(
            f"{source}: load_weights needs a model that zerofx.compile returned, but this is a "
            f"plain {type(model).__name__}. Use safetensors.torch.load_model."
        )
    check_names(names)
    path = Path(os.path.abspath(source))
    job = Fill(model, path, names, strict=strict)
    world, what = model._zerofx.engine.world, f"zerofx.load_weights from {path}"
    world.agree("zerofx.load_weights", f"source={path.name};strict={strict}")
    read_settled(world, what, job)
    return job.keys


def check_names(names: object) -> None:
    """Check that `names` maps names of the model to those in the files.

    Raises:
        ArgumentError: it is something else.
    """
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise ArgumentError(
            f"names is of type {type(names).__name__}. Give a mapping from the model's names to "
            "those in the files, or a function that returns them."
        )


def names_of(world: World, source: str | os.PathLike[str], model: nn.Module) -> list[str]:
    """Return the names of all tensors that a checkpoint has for a model; a collective call.

    Raises:
        SnapshotError: some rank finds none, or a file is damaged.
    """
    path = Path(os.path.abspath(source))
    job = _Look(path, _all_names(model))
    read_settled(world, f"a look at {path}", job)
    return job.names


def _all_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers, including all names of shared ones."""
    both = model.named_parameters, model.named_buffers
    return [name for each in both for name, _ in each(remove_duplicate=False)]


class _Files:
    """The files at a path, open on this rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: OpenCheckpoint | None = None

    def _open(self, wanted: Collection[str]) -> list[tuple[str, str]]:
        """Open the files; return their content, which must be equal on all ranks."""
        self._opened = open_source(place(self._path), wanted)
        entries = self._source.entries
        return [
            (name, f"{e.path.name}:{getattr(e, 'offset', 0)} {describe(e)}")
            for name, e in entries.items()
        ]

    def close(self) -> None:
        """Close the files."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _source(self) -> OpenCheckpoint:
        assert self._opened is not None
        return self._opened


class _Look(_Files):
    """A read of the names of the tensors only."""

    names: list[str]

    def __init__(self, path: Path, wanted: Collection[str]) -> None:
        super().__init__(path)
        self._wanted = wanted

    def open(self) -> list[tuple[str, str]]:
        """Open the files; return their content, which must be equal on all ranks."""
        return self._open(self._wanted)

    def check(self) -> None:
        """Keep the names that the files had when every rank had opened them."""
        self._source.check_current()
        self.names = list(self._source.entries)

    def fill(self) -> None:
        """Do nothing: a look reads no values."""


class Fill(_Files):
    """One rank's part of a load: check, which changes nothing, and fill.

    optimizers: those whose states are loaded too.
    """

    def __init__(
        self,
        model: CompiledModule,
        path: Path,
        names: Names,
        *,
        strict: bool = True,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        super().__init__(path)
        self._model, self._strict, self._names = model, strict, names
        self._store = model._zerofx.engine.store
        self._found: dict[str, StoredTensor] = {}  # by canonical name
        self._states = [_States(model, each) for each in optimizers]
        self.keys = Keys([], [])
        self.extra: dict[str, Any] = {}

    # -- names ------------------------------------------------------------------------------------
    def _in_files(self, name: str, adapter: str | None) -> Name | None:
        """Return the name in the files of a name of the model; None if it is not there."""
        if callable(self._names):
            return self._names(name)
        if self._names is not None:
            return self._names.get(name, name)
        return name if adapter is None else _in_adapter(name, adapter)

    def _adapter(self) -> str | None:
        """Return the adapter of the model to which the files belong; None if to no adapter."""
        if not self._is_adapter or self._names is not None:
            return None
        adapters = getattr(self._model, "peft_config", None)
        if not isinstance(adapters, dict) or not adapters:
            raise SnapshotError(
                f"{self._path} is a PEFT adapter, but {type(self._model).__name__} has none. Add "
                "the adapters before zerofx.compile: peft.get_peft_model(model, config)."
            )
        if len(adapters) > 1 and "default" not in adapters:
            raise SnapshotError(
                f"{self._path} is a PEFT adapter, but the model has {', '.join(adapters)}. Choose "
                "one by names=, a function from the model's names to those in the files."
            )
        return "default" if "default" in adapters else str(next(iter(adapters)))

    def open(self) -> list[tuple[str, str]]:
        """Open the files; return their content, which must be equal on all ranks."""
        self._is_adapter = _is_adapter(self._path)
        adapter = self._adapter()
        self._wanted: dict[str, tuple[str, int | None]] = {}
        for name in _all_names(self._model):
            found = self._in_files(name, adapter)
            if found:
                self._wanted[name] = found if isinstance(found, tuple) else (found, None)
        return self._open({name for name, _ in self._wanted.values()})

    # -- check ------------------------------------------------------------------------------------
    def check(self) -> None:
        """Find every parameter and buffer in the files.

        Files that are still in place now were so when the last rank had opened its own, so all
        ranks have the same files. The result of `open` alone is equal for all exports of a model.
        """
        self._source.check_current()
        self._found.clear()
        self._store.settle()
        self._store.check_bindings()
        held = {**self._store.params, **buffers_of(self._model)}
        known = {id(tensor): name for name, tensor in held.items()}
        names = {
            alias: known[id(tensor)]
            for each in (self._model.named_parameters, self._model.named_buffers)
            for alias, tensor in each(remove_duplicate=False)
            if id(tensor) in known and alias in self._wanted
        }
        entries = self._source.entries
        for alias, name in names.items():
            key, index = self._wanted[alias]
            if key in entries and name not in self._found:
                entry = entries[key]
                self._found[name] = entry if index is None else slice_of(entry, index)
        used = {self._wanted[alias][0] for alias in names}
        expected = set(names.values()) if self._is_adapter else held
        missing = [name for name in held if name in expected and name not in self._found]
        self.keys = Keys(missing, [name for name in entries if name not in used])
        differ = [
            f"{name} is {describe(entry)} in {entry.path.name} and {list(held[name].shape)} in "
            "the model"
            for name, entry in self._found.items()
            if tuple(entry.shape) != tuple(held[name].shape)
        ]
        hint = ""
        if self._strict and (self.keys.missing_keys or self.keys.unexpected_keys):
            hint = " zerofx.load_weights(..., strict=False) ignores such names."
            differ += [f"{name} is only in the model" for name in self.keys.missing_keys]
            differ += [f"{name} is only in the files" for name in self.keys.unexpected_keys]
        if differ:
            what = f"{self._path}: the files are of another model"
            raise SnapshotError(f"{what} ({self._source.found}): {few(differ)}.{hint}")
        for name, entry in self._found.items():
            for near in _neighbours(self._ranges(name, entry), entry.dtype.itemsize):
                entry.check(near[0][0], near[-1][1])
        canonical = {self._wanted[alias]: name for alias, name in names.items()}
        for each in self._states:
            each.check(self._path, self._source, canonical)
        self.extra = self._source.extra
        log.info("zerofx: %s is a %s", self._path, self._source.found)

    def _ranges(self, name: str, entry: StoredTensor) -> Iterable[Range]:
        """Return the flat elements of a tensor that this rank reads."""
        if name in self._store.params:
            return self._store.pieces[name].ranges
        return [(0, math.prod(entry.shape))]

    # -- fill -------------------------------------------------------------------------------------
    @torch.no_grad()
    def fill(self) -> None:
        """Read what this rank owns, and drop gradients that no_sync has accumulated before."""
        try:
            for name, entry in self._found.items():
                if name in self._store.params:
                    local = self._store.local_view(name)
                    _fill(local, self._store.pieces[name].ranges, entry)
                    self._store.homes.release(local)
            for name, buffer in buffers_of(self._model).items():
                if name in self._found:
                    flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
                    _fill(flat, [(0, buffer.numel())], self._found[name])
                    buffer.copy_(flat.view(buffer.shape))
            for each in self._states:
                each.fill()
            self._source.check_unwritten()
            if not self.keys.missing_keys:
                self._store.ledger.half_made = None
        except (OSError, SnapshotError) as error:
            if is_stale(error):
                raise Replaced(f"{self._path}: {error}") from error
            raise SnapshotError(
                f"{as_sentence(error)} Reading failed after all checks had passed, so the model is "
                "loaded in part. Load weights again before going on."
            ) from error
        finally:
            self._store.ledger.note_write()
            self._store.homes.rest()
            self._model._zerofx.engine.gradients.drop_unsynced()


def _fill(local: Tensor, ranges: Iterable[Range], entry: StoredTensor) -> None:
    """Fill a flat tensor with consecutive ranges of an entry."""
    at = 0
    for near in _neighbours(ranges, entry.dtype.itemsize):
        starts = [start for start, _ in near]
        places = [*accumulate((stop - start for start, stop in near), initial=at)]
        for first, part in entry.read(starts[0], near[-1][1]):
            last = first + len(part)
            number = max(bisect_right(starts, first) - 1, 0)
            while number < len(near) and starts[number] < last:
                low, high = max(starts[number], first), min(near[number][1], last)
                begin = places[number] + low - starts[number]
                if low < high:
                    local[begin : begin + high - low].copy_(part[low - first : high - first])
                number += 1
        at = places[-1]


def _neighbours(ranges: Iterable[Range], itemsize: int) -> Iterator[list[Range]]:
    """Group ranges that are read at once, including the gaps between them.

    If a parameter is cut over the tensor axis, a rank may have a part of every row.
    """
    near: list[Range] = []
    for start, stop in ranges:
        if near:
            gap, total = start - near[-1][1], stop - near[0][0]
            is_near = 0 <= gap * itemsize <= _GAP_BYTES and total * itemsize <= _AT_ONCE_BYTES
            if not is_near:
                yield near
                near = []
        near.append((start, stop))
    if near:
        yield near


class _States:
    """The states of one optimizer, found in a checkpoint of another library and filled."""

    def __init__(self, model: CompiledModule, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._store = model._zerofx.engine.store
        self._saved: dict[str, Any] = {}
        self._found: dict[str, dict[str, StoredTensor]] = {}  # by canonical name

    def check(
        self, path: Path, source: OpenCheckpoint, names: Mapping[tuple[str, int | None], str]
    ) -> None:
        """Find the states of every parameter that the optimizer has.

        names: from (name in the files, slice) to the name in the model.

        Raises:
            SnapshotError: there are none, or they belong to another kind of optimizer.
        """
        saved, optimizer = source.optimizer, self._optimizer
        kind = type(optimizer).__name__
        what = f"{path} ({source.found})"
        groups = state.group_names(self._store, optimizer)
        mine = {name for members in groups for name in members}
        self._found, others, options = {}, {}, {}
        for (key, index), name in names.items():
            if name not in mine:
                continue
            tensors = saved.tensors.get(key, {})
            if tensors:
                self._found[name] = {
                    k: v if index is None else slice_of(v, index) for k, v in tensors.items()
                }
            if saved.values.get(key):
                others[name] = {k: _as_state(v) for k, v in saved.values[key].items()}
            if key in saved.options:
                options[name] = saved.options[key]
        if not self._found and not others:
            why = saved.why_not or "it has none"
            raise SnapshotError(
                f"{what} has no states for {kind}: {why}. Leave the optimizer out to load the "
                "weights: zerofx.load_weights(model, path)."
            )
        for name, tensors in self._found.items():
            self._check_one(what, name, tensors)
        self._check_alike(what, {n: {*self._found.get(n, ()), *others.get(n, ())}
                                 for n in mine & (self._found.keys() | others.keys())})  # fmt: skip
        self._saved = {
            "type": kind,
            "groups": [
                {**self._options(what, number, members, options), "params": members}
                for number, members in enumerate(groups)
            ],
            "pieces": {name: list(tensors) for name, tensors in self._found.items()},
            "others": others,
        }
        state.optimizer_targets(self._store, optimizer, self._saved, for_plan=True)

    def _check_alike(self, what: str, keys: Mapping[str, set[str]]) -> None:
        """Check that all parameters have the same states, including step counts."""
        kinds = {key for held in keys.values() for key in held}
        if "exp_avg_sq" in kinds:  # every optimizer with this state counts steps
            kinds.add("step")
        for name, held in sorted(keys.items()):
            for key in sorted(kinds - held):
                raise SnapshotError(
                    f"{what}: {name} has no {key}, but other states of the optimizer are "
                    f"{', '.join(sorted(kinds))}."
                )

    def _check_one(self, what: str, name: str, tensors: Mapping[str, StoredTensor]) -> None:
        param = self._store.params[name]
        here = self._optimizer.state.get(param) or {}
        shaped = {k for k, v in here.items() if isinstance(v, Tensor) and v.shape == param.shape
                  and v.ndim}  # fmt: skip
        if shaped and param.ndim and shaped != tensors.keys():
            raise SnapshotError(
                f"{what}: {name} has the states {', '.join(sorted(tensors))}, but "
                f"{type(self._optimizer).__name__} has {', '.join(sorted(shaped))}. Give the kind "
                "of optimizer that was saved."
            )
        for key, entry in tensors.items():
            if math.prod(entry.shape) != math.prod(param.shape):
                raise SnapshotError(
                    f"{what}: {key} of {name} is {describe(entry)}, but the parameter is "
                    f"{list(param.shape)}."
                )
            for near in _neighbours(self._store.pieces[name].ranges, entry.dtype.itemsize):
                entry.check(near[0][0], near[-1][1])

    def _options(
        self,
        what: str,
        number: int,
        members: Iterable[str],
        options: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return a group's options: the saved ones, and the given ones that were not saved.

        Raises:
            SnapshotError: its parameters were saved with different options, or with those of
                another kind of optimizer.
        """
        given = {k: v for k, v in self._optimizer.param_groups[number].items() if k != "params"}
        found: dict[str, Any] = {}
        told_by = ""
        for name in members:
            if not options.get(name):
                continue
            kept = {k: v for k, v in options[name].items() if k in given and k not in _OWN_OPTIONS}
            kind = type(self._optimizer).__name__
            for key in _TELLING:
                if (key in options[name]) != (key in given):
                    has = "has" if key in options[name] else "lacks"
                    raise SnapshotError(
                        f"{what} {has} {key} for {name}, so its optimizer was not {kind}. Give the "
                        "kind of optimizer that was saved."
                    )
            if told_by and kept != found:
                other = next(k for k in kept if kept[k] != found.get(k))
                raise SnapshotError(
                    f"{what}: {told_by} and {name} were saved with {other} = {found.get(other)} "
                    f"and {kept[other]}, and are both in group {number} of {kind}. Build the "
                    "optimizer with the groups that it had."
                )
            found, told_by = kept, name
        return {**given, **found}

    def fill(self) -> None:
        """Read the states that this rank owns, and give them to the optimizer."""
        store, optimizer = self._store, self._optimizer
        state.make_far_states(store, optimizer, self._saved["pieces"])
        targets = state.optimizer_targets(store, optimizer, self._saved)
        for name, tensors in targets.items():
            for key, target in tensors.items():
                entry = self._found[name][key]
                piece = piece_of(target)
                if piece is not None and is_cut(target):
                    local, ranges = piece.local(target), piece.ranges
                else:
                    local, ranges = target.detach(), ((0, target.numel()),)
                _fill(local.view(-1), ranges, entry)
                store.homes.release(local)
        names = [group["params"] for group in self._saved["groups"]]
        whole_states.check_kept_whole(optimizer, self._saved)
        state.load_optimizer(store, optimizer, names, self._saved, targets)


def _as_state(value: Any) -> Any:
    """Return a number in the form of optimizers: a tensor of its own, which steps increment."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(float(value))
    return value.clone() if isinstance(value, Tensor) else value


# -- PEFT ------------------------------------------------------------------------------------------
def _is_adapter(path: Path) -> bool:
    """Return whether a path holds an adapter and no whole model."""
    if path.is_dir():
        return any(path.glob(f"{_ADAPTER}.*")) and not any(path.glob("model*.safetensors"))
    return path.name.startswith(f"{_ADAPTER}.")


def _in_adapter(name: str, adapter: str) -> str | None:
    """Return PEFT's name of a parameter in an adapter file; None if it is of the base model."""
    words = name.split(".")
    if adapter not in words:
        return None
    at = words.index(adapter)
    if at and words[at - 1] == _SAVED_MODULES:
        return ".".join(words[: at - 1] + words[at + 1 :])
    return ".".join(words[:at] + words[at + 1 :])
