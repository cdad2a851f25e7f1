"""zerofx.record(memory=True): live bytes call by call, beside what was predicted."""

from __future__ import annotations

import gc
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from record_cases import ATEN
from torch.profiler import ProfilerActivity, profile

import zerofx
from zerofx.analysis.time.measured import Measured, MeasuredMemory
from zerofx.errors import RecordingError
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.demo.measure import PeakMemory
from zerofx.tools.record.blocks import NEVER, Block, Levels, most_of, replay
from zerofx.tools.record.memory import CudaMeter, living
from zerofx.tools.views.recording import load_recording

CPU = torch.device("cpu")
CONFIG = GPTConfig(layers=2, width=64, heads=2, seq=32)


def gpt(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return a compiled GPT, and a step of its training."""
    torch.manual_seed(0)
    model = zerofx.compile(GPT(CONFIG), {**ATEN, **fields})
    optimizer = zerofx.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randint(0, 255, (4, CONFIG.seq))

    def step() -> None:
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def recorded(fields: dict[str, Any]) -> tuple[int, dict[str, Any], list[tuple[str, int]]]:
    """Record a training; return PeakMemory's peak, what was recorded, and what was predicted."""
    gc.collect()
    others = sum(living().values())  # of tests before this one
    with PeakMemory(CPU) as meter:
        model, step = gpt(fields)
        for _ in range(2):
            step()
        with meter.step():
            step()
    with zerofx.record(model, memory=True) as recording:
        for _ in range(4):
            step()
    (program,) = model.programs
    steps = program.schedule().schedule.steps
    (measured,) = recording.of(program)
    predicted = [(s.name, s.resident_bytes) for s in steps]
    assert measured.memory is not None
    own = MeasuredMemory(
        measured.memory.peak_bytes - others,
        {name: held - others for name, held in measured.memory.held.items()},
        measured.memory.unsure_bytes,
    )
    return meter.steps[0].low_bytes, replace(measured, memory=own).to_dict(), predicted


@pytest.mark.parametrize(
    "fields",
    [
        {"stage": 3},
        {"stage": 3, "activations": "recompute", "update": "in-backward"},
        {"stage": 3, "update": "in-backward", "offload": {"optimizer": "cpu"}},
    ],
    ids=str,
)
def test_every_call_holds_what_was_predicted(fields: dict[str, Any]) -> None:
    check(*recorded(fields))


@pytest.mark.slow
def test_two_ranks(pool: Any) -> None:
    for found in pool.run(2, recorded, {"stage": 3}):
        check(*found)


def check(peak: int, said: dict[str, Any], predicted: list[tuple[str, int]]) -> None:
    measured = Measured.from_dict(json.loads(json.dumps(said)))
    held = measured.memory
    assert held is not None and len(measured.steps_us) == 2  # of four: one warms, one is metered
    assert held.peak_bytes == pytest.approx(peak, rel=0.01)
    assert held.peak_bytes == pytest.approx(max(n for _, n in predicted), rel=0.02)
    for name, nbytes in predicted:
        assert held.held[name] == pytest.approx(nbytes, rel=0.02), name
    assert max(held.held.values()) <= held.peak_bytes


def test_text_file_and_page(tmp_path: Path) -> None:
    model, step = gpt({"stage": 3})
    with zerofx.record(model, memory=True) as recording:
        for _ in range(3):
            step()
    (program,) = model.programs
    assert "peak memory " in str(recording) and "at backward region" in str(recording)
    path = recording.save(tmp_path / "run.json.gz")
    assert load_recording(path).programs == recording.programs
    look = program.look(recording, "cpu-box")
    text = str(look)
    assert re.search(r"MiB   measured, rank 0 \([0-9.]+ % (more|less) than predicted\)", text)
    _, track = look.to_dict()["tracks"]
    steps = program.schedule().schedule.steps
    held = recording.programs[0].memory.held
    assert track["held"] == [held[s.name] for s in steps] and min(track["held"]) > 0
    counters = look._counters(look.tracks[1])
    assert [n for _, n in counters["memory, measured"]] == track["held"]


def test_refusals() -> None:
    model, step = gpt({"stage": 3})
    with pytest.raises(RecordingError, match=r"profile=True exclude each other.*Record twice"):
        zerofx.record(model, memory=True, profile=True).__enter__()
    with pytest.raises(RecordingError, match=r"warmup=0 exclude each other.*Set warmup=1"):
        zerofx.record(model, memory=True, warmup=0).__enter__()
    with (
        pytest.raises(RecordingError, match=r"2 steps ran .* warmup=1 and one for its memory are"),
        zerofx.record(model, memory=True),
    ):
        step()
        step()


def test_one_profiler_at_a_time() -> None:
    """Else figures of another one's making, or none, would be said to be measured."""
    model, step = gpt({})
    other, _ = gpt({})
    refused = pytest.raises(RecordingError, match="one is running here already")
    for options in ({"memory": True}, {"profile": True}):
        own = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        with own, refused, zerofx.record(model, **options):
            pass
    with zerofx.record(model, memory=True):
        with refused, zerofx.record(other, memory=True):
            pass
        for _ in range(3):
            step()
    lost = pytest.raises((RecordingError, RuntimeError))
    with lost as error, zerofx.record(model, memory=True):
        step()
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            step()
            step()
    # torch 2.11 then complains itself, at the end of the inner one
    said = error.value if isinstance(error.value, RecordingError) else error.value.__context__
    assert "record: memory=True has " in str(said)
    with zerofx.record(model, memory=True) as recording:  # nothing was left behind
        for _ in range(3):
            step()
    assert "measured" in str(recording)


def test_a_metered_step_that_breaks_has_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    model, step = gpt({"stage": 3})
    x = torch.randint(0, 255, (4, CONFIG.seq))
    with zerofx.record(model, memory=True) as recording:
        step()
        loss = model(x, x)  # the metered step
        loss.register_hook(lambda gradient: gradient.no_such_attribute)
        with pytest.raises(AttributeError):
            loss.backward()
        step()
        step()
    (measured,) = recording.programs
    assert measured.memory is None and len(measured.steps_us) == 2
    assert "did not run to its end" in caplog.text


def test_an_exception_ends_the_profiler() -> None:
    model, step = gpt({"stage": 3})
    with pytest.raises(KeyError), zerofx.record(model, memory=True):
        step()
        raise KeyError("mine")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as after:  # none runs
        step()
    assert len(after.events()) > 0


def test_cuda_reads_the_allocators_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call its own peak, gaps count for the step's; nothing is synchronised."""
    peaks = [5]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: max(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.clear())
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    meter = CudaMeter(torch.device("cuda"))
    meter.start()
    meter.begin()
    peaks.append(7)
    for name, held in (("a", 9), ("b", 8)):
        with meter.around(name):
            peaks.append(held)
        peaks.append(11 if name == "a" else 6)
    found = meter.end()
    assert (found.peak_bytes, found.held) == (11, {"a": 9, "b": 8})


# -- the replay ----------------------------------------------------------------------------------
def test_levels_beside_counting() -> None:
    draw = random.Random(0)
    blocks = []
    for k in range(200):
        made = draw.uniform(0, 100)
        gone = NEVER if k % 7 == 0 else made + draw.uniform(0, 30)
        blocks.append(Block(k, draw.randrange(1, 50), made, gone))
    begin = 20.0
    base = sum(b.nbytes for b in blocks if b.made_at < begin <= b.freed_at)
    levels = Levels(blocks, begin, base)
    for _ in range(200):
        start = draw.uniform(begin, 100)
        stop = start + draw.uniform(0, 20)
        times = [start, *(b.made_at for b in blocks if start <= b.made_at <= stop)]
        most = max(sum(b.nbytes for b in blocks if b.made_at <= t < b.freed_at) for t in times)
        assert levels.most(start, stop) == most
        assert most_of(levels, [("a", start, stop), ("a", start, start)]) == {"a": most}


def test_blocks_that_others_free_end_where_their_addresses_are_used_again() -> None:
    first, second, third = replay([(1, 100, 8), (2, 200, 8), (3, 104, 8), (4, 200, -8)])
    assert first.is_ghost and first.freed_at == 3
    assert not second.is_ghost and second.freed_at == 4
    assert third.freed_at == NEVER
