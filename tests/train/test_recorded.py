"""What recording must not break or hide: errors, memory that moves, results that users keep."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tape import Recording, Tape
from test_cuda_graph import Trained, compare, plainly, taped, train
from torch import nn

import zerofx
from zerofx.errors import CaptureError, GradientError, PlanError
from zerofx.plan.plan import Plan
from zerofx.runtime.cuda_graph.recorded import Recorded
from zerofx.runtime.cuda_graph.recorder import CudaRecorder, check_recordable


# -- refused by name --------------------------------------------------------------------------
def test_a_cpu_is_refused() -> None:
    with pytest.raises(PlanError, match=r"needs a CUDA device, but the model is on cpu. Pass dev"):
        zerofx.compile(nn.Linear(2, 2), Plan(cuda_graph=True), device="cpu")


def test_several_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="this world has 2 ranks"):
        check_recordable(2, torch.device("cuda"))


class Failing(Tape):
    """Fails as CUDA does at what cannot be captured."""

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run, tape = taped("chain", {})
    plainly(run, 0)
    monkeypatch.setattr(Tape, "capture", Failing.capture)
    with pytest.raises(CaptureError, match=r"Chain: its forward cannot .* not permitted .*cuda_gr"):
        run.loss(1)
    monkeypatch.undo()
    for step in range(3):
        plainly(run, step)
    assert tape.replayed == 6


# -- errors that a replay must raise as any call does -------------------------------------------
def _recorded(name: str = "gpt") -> tuple[Trained, Tape]:
    run, tape = taped(name, {})
    for step in range(3):
        plainly(run, step)
    assert tape.replayed == 4
    return run, tape


def test_a_step_between_forward_and_backward_raises() -> None:
    run, _ = _recorded()
    loss = run.loss(3)
    with torch.no_grad():
        next(iter(run.model.parameters())).add_(1)
    with pytest.raises(GradientError, match="parameters were changed"):
        loss.backward()


def test_a_second_backward_raises() -> None:
    run, _ = _recorded()
    loss = run.loss(3)
    loss.backward()
    with pytest.raises(GradientError, match="backward ran a second time"):
        loss.backward()


def test_an_input_changed_in_place_raises() -> None:
    run, _ = _recorded()
    (x, y), _ = run.case.batch(3)
    loss = run.model(x, y)
    x.add_(1)
    with pytest.raises(GradientError, match=r"input 0, which backward needs, was changed"):
        loss.backward()


def test_a_step_after_an_exception_is_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def action(run: Trained, step: int) -> None:
        if step == 3:
            loss = run.loss(90)
            with monkeypatch.context() as patch:
                patch.setattr(Recording, "run", _fail)
                patch.setattr(run.model._engine.gradients, "reduce", _fail)
                patch.setattr(run.model._engine, "all_reduce", _fail)
                patch.setattr(run.model._engine, "hand_over", _fail)
                with pytest.raises(KeyboardInterrupt):
                    loss.backward()
        plainly(run, step)

    assert compare("gpt", {}, action).replayed == 12  # two of them before the failure


def _fail(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


# -- memory that moves, and that does not stay ---------------------------------------------------
def test_buffers_put_in_place_of_others() -> None:
    def action(run: Trained, step: int) -> None:
        plainly(run, step)
        if step in (2, 4):
            norm = run.model.get_submodule("norm")
            norm.running_mean = norm.running_mean + 1.0

    assert compare("convnet", {}, action).counts == (4, 4, 6)


def test_slots_that_a_larger_program_moves() -> None:
    """Another plan of buckets for another program: recordings made before are not replayed."""
    run, tape = _recorded()
    engine = run.model._engine
    engine.slots.moves += 1
    before = tape.counts
    plainly(run, 3)
    plainly(run, 4)
    assert tape.counts == (before[0] + 2, before[1] + 2, before[2] + 2)


def test_gradients_kept_in_every_step_are_never_recorded_over() -> None:
    def action(run: Trained, step: int) -> None:
        run.loss(step).backward()
        run.kept += [p.grad for p in run.model.parameters()]
        run.update()

    compare("gpt", {}, action)


def test_a_dropped_model_frees_what_was_recorded() -> None:
    run, tape = _recorded()
    saved = [weakref.ref(m) for r in tape.recordings for m in r.own() if m.find() is not None]
    assert saved
    alive = [ref() for ref in saved]
    del run
    gc.collect()
    assert all(memory.find() is None for memory in alive)


def test_a_copy_trains_by_itself() -> None:
    run, tape = _recorded()
    before = tape.counts
    twin = copy.deepcopy(run.model)
    (x, y), _ = run.case.batch(5)
    twin(x, y).backward()
    assert tape.counts == before
    run.loss(5).backward()
    for mine, theirs in zip(run.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert tape.counts == (before[0], before[1], before[2] + 2)


def test_tensors_on_the_host_are_not_baked_in(caplog: pytest.LogCaptureFixture) -> None:
    run, _ = _recorded()
    recorded = run.model._programs.bound[next(iter(run.model._programs.bound))].executable.forward
    assert isinstance(recorded.__self__, Recorded)
    on_meta = [torch.zeros((), device="meta")]
    with caplog.at_level(logging.WARNING, "zerofx"):
        assert not recorded.__self__._is_on_device(on_meta, {})
        assert not recorded.__self__._is_on_device(on_meta, {})
    assert caplog.text.count("runs without a CUDA graph") == 1


def test_a_replay_runs_no_line_of_the_schedule() -> None:
    run, tape = _recorded()
    engine = run.model._engine
    for name in ("unpack", "grad_buffer", "pack", "all_reduce", "store_grad", "wait"):
        setattr(engine, name, _fail)
    train(run, plainly, steps=2)
    assert tape.replayed == 8


# -- the recorder of CUDA graphs, without a device ----------------------------------------------
class _Fake:
    """Stands for streams, graphs and contexts of torch.cuda; notes what is done to them."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: _Fake) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def replay(self) -> None:
        self.log.append(f"{self.name} replays")

    def __enter__(self) -> None:
        self.log.append(f"in {self.name}")

    def __exit__(self, *error: object) -> None:
        self.log.append(f"out of {self.name}")


def test_calls_of_the_cuda_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups and captures share a stream, captures a pool; streams wait for each other."""
    log: list[str] = []
    asked: list[dict[str, Any]] = []
    cpu = torch.device("cpu")

    def graph(made: _Fake, **options: Any) -> _Fake:
        asked.append(options)
        return _Fake("capture", log)

    fakes = {
        "Stream": lambda device: _Fake("side", log),
        "current_stream": lambda device: _Fake("main", log),
        "stream": lambda stream: stream,
        "device": lambda device: _Fake("device", log),
        "graph_pool_handle": lambda: (0, 7),
        "CUDAGraph": lambda: _Fake("graph", log),
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = CudaRecorder(cpu)
    log.clear()
    assert recorder.warm_up(lambda: log.append("runs") or 5) == 5
    assert log == ["side waits for main", "in side", "runs", "out of side", "main waits for side"]
    log.clear()
    result, replay = recorder.capture(lambda: log.append("runs") or 6)
    replay()
    assert result == 6
    assert log[1:] == ["in capture", "runs", "out of capture", "out of device", "graph replays"]
    pools = {(o["pool"], id(o["stream"]), o["capture_error_mode"]) for o in asked}
    assert len(asked) == 2  # one keeps the pool
    assert len(pools) == 1
    assert asked[0]["capture_error_mode"] == "thread_local"
