"""Recordings as text and as files, and those of another program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from record_cases import ATEN, train
from stack import Stack

import zerofx
from zerofx.errors import RecordingError
from zerofx.tools.views.recording import load_recording


def test_text_and_file(tmp_path: Path) -> None:
    _, model, recording = train(3, True)
    text = str(recording)
    assert "measured on rank 0 (cpu), medians of 2 steps" in text and " region " in text
    lane = next(line for line in text.splitlines() if line.startswith("compute "))
    assert "#" in lane
    for name in ("run.json", "run.json.gz"):
        assert load_recording(recording.save(tmp_path / name)).programs == recording.programs
    assert recording.of(model.programs[0]) == recording.programs
    (tmp_path / "bad.json").write_text(json.dumps({"recording": [{"format": 99}]}))
    with pytest.raises(RecordingError, match=r"bad.json is no recording.*format 99: .* reads 2"):
        load_recording(tmp_path / "bad.json")
    with pytest.raises(RecordingError, match=r"absent.json: No such file"):
        load_recording(tmp_path / "absent.json")


def test_files_that_are_no_recordings_are_named(tmp_path: Path) -> None:
    _, model, recording = train(3, True)
    saved = recording.save(tmp_path / "run.json.gz")
    trace = model.programs[0].look(recording).trace(tmp_path / "trace.json.gz")
    whole = saved.read_bytes()
    spoilt = {
        "cut.json.gz": (whole[: len(whole) // 2], "end-of-stream"),
        "bytes.json.gz": (whole[:40] + bytes(40) + whole[80:], ""),
        "list.json": (b"[1, 2]", "a JSON list without them"),
        "text.json": (b"step 1: 20 ms", "Expecting value"),
        "fields.json": (b'{"recording": [{"format": 2}]}', "model"),
        "trace.json.gz": (
            trace.read_bytes(),
            "a trace for Perfetto, which cannot be read back",
        ),
    }
    for name, (data, why) in spoilt.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(RecordingError) as error:
            load_recording(saved, path)
        text = str(error.value)
        assert f"{path} is no recording that `record(...).save` wrote" in text and why in text


def test_a_recording_of_another_program_is_refused() -> None:
    _, _, recording = train(2, True)
    other = zerofx.compile(Stack(width=32), {**ATEN, "stage": 1})
    other(torch.randn(4, 32))
    with pytest.raises(RecordingError) as error:
        recording.of(other.programs[0])
    text = str(error.value)
    assert "inputs.x is f32[8, 16] there and f32[4, 32] here" in text
    assert "plan.stage is 3 there and 1 here" in text and "parameters is 1428 there" in text
