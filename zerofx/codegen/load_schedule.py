"""Read schedule.py: its two functions run on fake tensors and become graphs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.codegen.load_calls import Calls, Shards
from zerofx.codegen.load_files import Emitted, read_params
from zerofx.codegen.load_record import Recorder
from zerofx.codegen.load_sources import Files
from zerofx.compat.graphs import FakeTensorMode
from zerofx.compat.tracing import new_fake_mode
from zerofx.errors import ProgramError
from zerofx.ir.meta import OutputInfo, Phase, Role, info
from zerofx.ir.program import BACKWARD, FORWARD, ParamInfo
from zerofx.ir.verify_fault import file_lines
from zerofx.layout.buckets import Layout
from zerofx.runtime.regions.load import import_file, read_by
from zerofx.runtime.standalone import layout_from_facts


@dataclass
class Reading:
    """Runs the schedule's functions, forward first: what it saves is what backward takes."""

    emitted: Emitted
    mode: FakeTensorMode = field(default_factory=new_fake_mode)
    outputs: dict[str, tuple[OutputInfo, ...]] = field(default_factory=dict)
    saved: list[tuple[OutputInfo, Tensor, fx.Node]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory, self.facts = self.emitted.directory, self.emitted.facts
        self.layout: Layout = layout_from_facts(self.facts["layout"])
        self.params: dict[str, ParamInfo] = read_params(self.facts)
        rows = self.facts["placeholders"][FORWARD]
        self.device: str = rows[0][4][3] if rows else "cpu"

    def import_schedule(self) -> ModuleType:
        self.files = Files(self.directory)
        with read_by(self.files), self._explained():
            return import_file(self.directory / "schedule.py", "zerofx_schedule")

    # -- the two functions ------------------------------------------------------------------------
    def forward(self, function: Callable[..., Any]) -> fx.GraphModule:
        with self._recording(FORWARD) as (recorder, calls, given):
            leaves = given[Role.INPUT]
            inputs = [leaves.get(i) for i in range(self.facts["calling"]["in_leaves"])]
            returned = function(calls, recorder.shards, given[Role.BUFFER], inputs)
            outs, updates, saved = self._lists(recorder, returned)
            specs = self._specs(FORWARD)
            results = self._match(recorder, specs, Role.OUTPUT, outs)
            roles = (Role.BUFFER_UPDATE, Role.INPUT_UPDATE)
            results += self._match(recorder, specs, roles, updates)
            order = {s: i for i, s in enumerate(specs)}
            results.sort(key=lambda result: order[result[0]])
            self.saved = self._saved(recorder, specs, saved)
            results += [(spec, node) for spec, _, node in self.saved]
            return self._finish(recorder, FORWARD, results, function)

    def backward(self, function: Callable[..., Any]) -> fx.GraphModule:
        with self._recording(BACKWARD) as (recorder, calls, given):
            returned = function(
                calls,
                recorder.shards,
                [v for _, v in sorted(given[Role.SAVED].items())],
                given[Role.TANGENT],
            )
            specs = self._specs(BACKWARD)
            results = self._match(recorder, specs, Role.INPUT_GRAD, returned)
            for spec in specs:
                if spec.role is Role.SHARD_GRAD:
                    results.append((spec, calls.stored.get(spec.index)))
            return self._finish(recorder, BACKWARD, results, function)

    @contextmanager
    def _recording(self, name: str) -> Iterator[tuple[Recorder, Calls, dict[Role, dict]]]:
        phase = Phase.BACKWARD if name == BACKWARD else Phase.FORWARD
        recorder = Recorder(self.directory, phase, self.files.paths)
        recorder.shards = Shards(recorder, self.layout, self.device)
        calls = Calls(recorder, self.layout, self.params, self.device)
        calls.numbers = {k: info(node).index for k, (_, _, node) in enumerate(self.saved)}
        self.files.recorder = recorder
        with self._explained(), _plain_modes(self.device), self.mode, recorder:
            yield recorder, calls, self._placeholders(recorder, name)

    def _placeholders(self, recorder: Recorder, name: str) -> dict[Role, dict]:
        """Make what the function is given: saved values as forward left them, the rest as told."""
        kinds = (Role.INPUT, Role.BUFFER, Role.TANGENT, Role.SAVED)
        given: dict[Role, dict] = {role: {} for role in kinds}
        left = dict(enumerate(self.saved))
        for text, label, index, unit, spec in self.facts["placeholders"][name]:
            role = Role(text)
            fields = {"name": label, "index": index, "unit": unit}
            if role is Role.SAVED:
                if index not in left:
                    continue
                _, val, node = left.pop(index)
                spec, fields = _spec(val), fields | _origin(node)
            made = recorder.placeholder(role, recorder.fake(*spec), **fields)
            if role is Role.SHARD:
                recorder.shards.add(index, made)
            else:
                given[role][label if role is Role.BUFFER else index] = made
        if name == BACKWARD:
            for k, (said, val, node) in left.items():
                fields = {"name": said.name, "index": k, **_origin(node)}
                fake = recorder.fake(*_spec(val))
                given[Role.SAVED][k] = recorder.placeholder(Role.SAVED, fake, **fields)
        return given

    # -- what they return -------------------------------------------------------------------------
    def _specs(self, name: str) -> list[OutputInfo]:
        return [OutputInfo(Role(r), n, i) for r, n, i in self.facts["outputs"][name]]

    def _lists(self, recorder: Recorder, returned: Any) -> tuple[list, list, list]:
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise recorder.refuse("forward returns three lists: outputs, updates, saved values")
        return returned  # type: ignore[return-value]

    def _match(
        self, recorder: Recorder, specs: list[OutputInfo], roles: Any, values: list[Any]
    ) -> list[tuple[OutputInfo, fx.Node | None]]:
        """Pair what was returned with what it stands for, by position."""
        wanted = roles if isinstance(roles, tuple) else (roles,)
        mine = [s for role in wanted for s in specs if s.role is role]
        what = " and ".join(f"{r.value}s" for r in wanted)
        if len(mine) != len(values):
            raise recorder.refuse(f"{len(values)} {what} are returned; the program has {len(mine)}")
        return [
            (spec, None if v is None else recorder.node(v, f"{spec.role.value} {spec.name}"))
            for spec, v in zip(mine, values, strict=True)
        ]

    def _saved(
        self, recorder: Recorder, specs: list[OutputInfo], values: list[Any]
    ) -> list[tuple[OutputInfo, Tensor, fx.Node]]:
        names = [s.name for s in specs if s.role is Role.SAVED]
        found = []
        for k, v in enumerate(values):
            node = recorder.node(v, f"saved value {k}")
            name = names[k] if len(names) == len(values) else info(node).name or node.name
            found.append((OutputInfo(Role.SAVED, name, k), v, node))
        return found

    def _finish(
        self,
        recorder: Recorder,
        name: str,
        results: list[tuple[OutputInfo, Any]],
        function: Any,
    ) -> fx.GraphModule:
        self.outputs[name] = tuple(spec for spec, _ in results)
        last = max(line for _, _, line in function.__code__.co_lines() if line)
        return recorder.finish(tuple(node for _, node in results), last)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the files raise into an error with their lines around it."""
        try:
            yield
        except ProgramError:
            raise
        except Exception as error:
            files = {str(self.directory / "schedule.py"), *self.files.paths}
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
            if not frames:
                raise
            at = frames[-1]
            lines = "\n".join(file_lines(at.filename, at.lineno or 1))
            raise ProgramError(
                f"{Path(at.filename).name}:{at.lineno}: {_said(error)}; a schedule is a straight "
                f"line of calls on values that it does not look at\n{lines}"
            ) from error


@contextmanager
def _plain_modes(device: str) -> Iterator[None]:
    """Read the files as they will run: without the caller's autocast, grad and inference modes."""
    with torch.inference_mode(False), torch.no_grad():
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                yield
        else:
            yield


def _spec(val: Tensor) -> tuple[str, list[int], list[int], str]:
    dtype = str(val.dtype).removeprefix("torch.")
    return dtype, list(val.shape), list(val.stride()), val.device.type


def _origin(node: fx.Node) -> dict[str, str]:
    """Return where a saved value was computed."""
    return {"line": info(node).line, "module": info(node).module}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
