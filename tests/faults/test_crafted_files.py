"""Crafted files: each is refused by the name of the file and the field, and nothing in it runs."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties

import zerofx
from zerofx import schema
from zerofx.comm.meeting import timeout_s
from zerofx.errors import PlanError, ProgramError, RecordingError, SnapshotError
from zerofx.ir.sizes import evaluate
from zerofx.runtime.regions.cache import compile_all
from zerofx.snapshot import dcp
from zerofx.snapshot import files as snapshot_files
from zerofx.tools.views.recording import load_recording


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> fuzz.Matrix:
    return fuzz.Matrix(tmp_path_factory.mktemp("originals"))


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """What waits for a pipe's writer ends the test."""
    before = signal.signal(signal.SIGALRM, fuzz._stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_sample_of_the_fuzz_matrix(matrix: fuzz.Matrix) -> None:
    counts, faults = fuzz.run(matrix, 80, 4, fuzz.QUICK)
    assert faults == []
    assert sum(counts.values()) == 80
    assert {area for area, _ in counts} == set(fuzz.QUICK)


# -- snapshots ------------------------------------------------------------------------------------
def first_cut(index: Any, ndim: int) -> tuple[str, Any]:
    """Return a tensor of the index that has some elements."""
    found = index.state_dict_metadata.items()
    return next((k, e) for k, e in found if len(e.size) == ndim and e.size.numel() > 3)


def overlapping(index: Any) -> None:
    _, entry = first_cut(index, 2)
    rows, columns = entry.size
    half = torch.Size([rows, columns])
    entry.size = torch.Size([rows, 2 * columns])
    at = torch.Size([0, 0])
    entry.chunks = [ChunkStorageMetadata(at, half), ChunkStorageMetadata(at, half)]


def outside(index: Any) -> None:
    _, entry = first_cut(index, 1)
    entry.chunks = [ChunkStorageMetadata(torch.Size([1]), entry.size)]


def without_place(index: Any) -> None:
    index.storage_data.pop(next(iter(index.storage_data)))


def in_one_place(index: Any) -> None:
    one, other, *_ = index.storage_data.values()
    other.offset, other.relative_path = one.offset, one.relative_path


def transformed(index: Any) -> None:
    next(iter(index.storage_data.values())).transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (overlapping, "its chunks overlap, and leave elements out"),
        (outside, "exceeds"),
        (without_place, "lacks the place of its chunk"),
        (in_one_place, "overlap at"),
        (transformed, "was transformed"),
        (lambda index: index.state_dict_metadata.update(x=3), "x is not a tensor"),
        (lambda index: setattr(index, "storage_data", None), "does not list tensors"),
    ],
)
def test_an_index(matrix: fuzz.Matrix, edit: Callable[[Any], None], text: str) -> None:
    folder = matrix.copied(matrix.snapshot)
    index = pickle.loads((folder / ".metadata").read_bytes())
    dcp.check_index(index)
    edit(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    rewrite(folder)
    with pytest.raises(SnapshotError, match=text) as caught:
        zerofx.load(folder, matrix.model, matrix.optimizer)
    assert str(folder / ".metadata") in str(caught.value)


def rewrite(folder: Path, **facts: Any) -> None:
    """Write the manifest again with right checksums, as a forger would."""
    manifest = json.loads((folder / "zerofx.json").read_text())
    manifest = {k: v for k, v in manifest.items() if k not in ("checksum", "format", "version")}
    sums = {name: snapshot_files.checksum(folder / name) for name in manifest["files"]}
    snapshot_files.write_manifest(folder, {**manifest, "files": sums, **facts})


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"world_size": 0}, "world_size is 0, but should be a whole number from 1"),
        ({"world_size": True}, "world_size is True"),
        ({"files": {"../x": [1, "0" * 64]}}, "should be the name of a file in the same folder"),
        ({"files": {"x": [1, "0"]}}, r"files.x\[1\] is '0'"),
        ({"files": {}}, "files..metadata is missing"),
        ({"parameters": [1]}, r"parameters is \[1\], but should be a mapping"),
    ],
)
def test_a_manifest(matrix: fuzz.Matrix, facts: dict[str, Any], text: str) -> None:
    folder = matrix.copied(matrix.snapshot)
    rewrite(folder, **facts)
    with pytest.raises(SnapshotError, match=text) as caught:
        zerofx.load(folder, matrix.model)
    assert str(folder / "zerofx.json") in str(caught.value)


def test_values_of_another_form(matrix: fuzz.Matrix) -> None:
    folder = matrix.copied(matrix.snapshot)
    values = torch.load(folder / "values.pt", weights_only=True)
    values["optimizer"]["groups"][0]["params"] = 3
    torch.save(values, folder / "values.pt")
    rewrite(folder)
    with pytest.raises(SnapshotError, match=r"values.pt: optimizer.groups\[0\].params is 3"):
        zerofx.load(folder, matrix.model, matrix.optimizer)


# -- safetensors ----------------------------------------------------------------------------------
def entry(begin: int, end: int, **changes: Any) -> dict[str, Any]:
    made = {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
    return {**made, **changes}


class PickledByOlderPython(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, given: Any) -> Any:
        return (getattr, (type(given), given.name)) if isinstance(given, Enum) else NotImplemented


def test_an_index_of_an_older_python() -> None:
    file = io.BytesIO()
    properties = TensorProperties(dtype=torch.bfloat16)
    PickledByOlderPython(file).dump(properties)
    assert b"getattr" in file.getvalue()
    assert dcp.IndexUnpickler(io.BytesIO(file.getvalue())).load() == properties
    asked = pickle.dumps(Sly())
    with pytest.raises(pickle.UnpicklingError, match="asks for the attribute '__init__'"):
        dcp.IndexUnpickler(io.BytesIO(asked)).load()


class Sly:
    def __reduce__(self) -> Any:
        return getattr, (TensorProperties, "__init__")


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, "b begins at offset .*, and a ends at"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, "b begins at offset .*, and a ends at"),
        ({"a": entry(0, 8)}, "the tensors end at offset .*, the file at"),
        ({"a": entry(0, 12, shape=[True] * 3)}, r"a.shape\[0\] is True"),
        ({"a": entry(0, 12, shape=[-1, -3])}, r"a.shape\[0\] is -1"),
        ({"a": entry(0, 12, shape=[1 << 63, 0])}, r"a.shape\[0\] is 9223372036854775808"),
        ({"a": entry(0, 12, data_offsets=["0", "12"])}, r"a.data_offsets\[0\] is '0'"),
        ({"a": entry(0, 12, shape=[3] + [1] * 99)}, "a list of 0 to 64 items"),
        ({"__metadata__": 3, "a": entry(0, 12)}, "__metadata__ is 3"),
    ],
)
def test_a_safetensors_header(
    matrix: fuzz.Matrix, tmp_path: Path, header: dict[str, Any], text: str
) -> None:
    said = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(said).to_bytes(8, "little") + said + bytes(12))
    with pytest.raises(SnapshotError, match=text) as caught:
        zerofx.load_weights(matrix.model, path, strict=False)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "where",
    ["../outside.safetensors", "/etc/passwd", "..", "a/b.safetensors", 3, "\ud800.safetensors"],
)
def test_an_index_that_leads_out_of_its_folder(
    matrix: fuzz.Matrix, tmp_path: Path, where: Any
) -> None:
    path = tmp_path / "m.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": where}}))
    with pytest.raises(SnapshotError, match=r"weight_map.w is .* the name of a file in the same"):
        zerofx.load_weights(matrix.model, path)


# -- emitted directories --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda facts: facts["files"].update({"../x": "0" * 16}), "a path within the same folder"),
        (lambda facts: facts.update(world_size=-2), "world_size is -2"),
        (lambda facts: facts["layout"]["buckets"][0].update(dtype="exit"), "dtype is 'exit'"),
        (lambda facts: facts["layout"]["buckets"][0].update(numel=1), "does not fit into the buck"),
        (lambda facts: facts["placeholders"].pop("backward"), "placeholders.backward is missing"),
        (lambda facts: facts["calling"].update(in_leaves=0), "is leaf 0 of 0"),
        (lambda facts: facts.update(buffers="scale"), "buffers is 'scale'"),
        (lambda facts: facts.update(signature="another"), None),
    ],
)
def test_a_fingerprint(
    matrix: fuzz.Matrix, edit: Callable[[dict[str, Any]], Any], text: str | None
) -> None:
    folder = matrix.copied(matrix.emitted)
    path = folder / "fingerprint.json"
    facts = json.loads(path.read_text())
    edit(facts)
    path.write_text(json.dumps(facts))
    if text is None:
        assert "edited: fingerprint.json" in zerofx.load_program(folder).history[0].summary
        return
    with pytest.raises(ProgramError, match=text) as caught:
        zerofx.load_program(folder)
    assert str(path) in str(caught.value)


def test_files_that_do_not_fit_together(matrix: fuzz.Matrix) -> None:
    """Each has the right form, and reading ends in an error that says which ones were edited."""
    folder = matrix.copied(matrix.emitted)
    path = folder / "fingerprint.json"
    facts = json.loads(path.read_text())
    facts["outputs"]["forward"][0][2] = 77
    facts["calling"]["tensor_leaves"] = [5, 6, 7]
    path.write_text(json.dumps(facts))
    with pytest.raises(ProgramError):
        zerofx.load_program(folder)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')", "().__class__", "math.__loader__", "open(0)", "exit()",
        "9**9**9**9", "math.factorial(10**9)", "[0] * 9", "(lambda: 0)()", "'a' * 10**9", "(", "",
        "s0 << 10**9", "min(key=exit)", "f'{exit()}'", "(" * 500,
    ],
)  # fmt: skip
def test_expressions_of_sizes_only_compute(text: str) -> None:
    with pytest.raises(ProgramError, match="not an expression of sizes"):
        evaluate(text, {"s0": 3})
    assert evaluate("max(2 * s0 // 3, 1) + math.ceil(s0 / 2) - s0**2", {"s0": 3}) == -5


# -- recordings, plans ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps_us": []}, "steps_us is"),
        ({"typical": 99}, "are not of the 1 steps"),
        ({"world": "1"}, "world is '1'"),
        ({"functions_us": {"forward": "<script>"}}, "functions_us.forward is '<script>'"),
        ({"memory": {"peak_bytes": -1}}, "memory.held is missing|peak_bytes is -1"),
        ({"spans": [{"name": 3}]}, r"spans\[0\].* is missing"),
    ],
)
def test_a_recording(
    matrix: fuzz.Matrix, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"recording": [{**matrix.recording["recording"][0], **change}]}))
    with pytest.raises(RecordingError, match=text) as caught:
        load_recording(path)
    assert str(path) in str(caught.value)


def test_what_is_no_plain_file(matrix: fuzz.Matrix, tmp_path: Path) -> None:
    """A pipe without a writer, or a device without an end, is not waited for."""
    pipe, device = tmp_path / "pipe.json", tmp_path / "device.json"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with pytest.raises(RecordingError, match="not a regular file"):
            load_recording(path)
        with pytest.raises(PlanError, match="not a regular file"):
            zerofx.Plan.load(path)
        for name in ("fingerprint.json", "schedule.py"):
            folder = matrix.copied(matrix.emitted)
            (folder / name).unlink()
            os.rename(path, folder / name)
            with pytest.raises(ProgramError, match="not a regular file"):
                zerofx.load_program(folder)
            os.rename(folder / name, path)


def test_what_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json.gz"
    path.write_bytes(gzip.compress(bytes(100_000)))
    monkeypatch.setattr("zerofx.tools.views.recording.MOST_BYTES", 10_000)
    with pytest.raises(RecordingError, match="more than 10000 bytes"):
        load_recording(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[" * 100_000, "nested too deep"),
        ('{"a": NaN}', "a number NaN"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_json(text: str | bytes, what: str) -> None:
    with pytest.raises(schema.FormError, match=what):
        schema.parse_json(text)


LAUGHS = "\n".join(["a0: &a0 [0]", *(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 9))])


@pytest.mark.parametrize(
    "text",
    ["stage: " + "[" * 1100, "stage: &a [*a]", "stage: 0x" + "f" * 5000, LAUGHS],
    ids=["deep", "itself", "huge", "laughs"],
)
def test_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        zerofx.Plan.load(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "x", "", "9" * 5000, "٣٤x", "1e9999"])
def test_numbers_in_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_TIMEOUT_S", text)
    with pytest.raises(PlanError, match="ZEROFX_TIMEOUT_S is"):
        timeout_s()
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, text)
        with pytest.raises(PlanError, match=f"{name} is"):
            compile_all({})
        monkeypatch.delenv(name)
