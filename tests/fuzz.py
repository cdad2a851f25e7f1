"""The fuzz matrix: damaged and crafted input of every kind that zerofx reads.

    python tests/fuzz.py 50000 [--seed 1] [--only snapshots]     # make faults

An input is right if zerofx takes it or raises an error of its own within `LIMIT_S`, if no code in
it has run, and if values that are protected by a checksum are the original ones. Everything else is
counted as a fault and printed with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerofx
from zerofx.errors import ZerofxError
from zerofx.snapshot import files as snapshot_files
from zerofx.snapshot.sources.torch_files import Inert, stand_in
from zerofx.tools.cli import main
from zerofx.tools.views.recording import load_recording

HERE = Path(__file__).parent
LIMIT_S = 30.0
HUGE = "@HUGE@"  # stands for a number of 5,000 digits, which json does not write


class Hang(BaseException):
    """An input took more than `LIMIT_S` of CPU time, or ten times that in all."""


class Changed(Exception):
    """An input was taken, and gives other values than were saved, in spite of a checksum."""


class Harm:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


# -- edits ----------------------------------------------------------------------------------------
def hostile(rng: random.Random, harm: Path) -> Any:
    """Return a value that some reader may not expect."""
    code = f"__import__('pathlib').Path({str(harm)!r}).touch()"
    return rng.choice([
        None, True, False, 0, -1, 1, 2, 7, 1 << 31, 1 << 63, 1 << 64, HUGE, 0.5, -1e308, 1e308,
        "", " ", "0", "off", "auto", "../../etc/passwd", "/etc/passwd", "a/../../b", "\0", "nvme",
        "\ud800", "é", "{{ 7 * 7 }}", "<!--<script>", "%s%n", "80 potatoes", "1e999", "x" * 5000,
        "9**9**9**9**9", "float32", "int8",
        code, f"[{code}]", f"s0 + {code}", [], {}, [[]], {"": {}}, [1, 2, 3], ["a"], {"a": 1},
        [[[[[[]]]]]], float("inf"), float("nan"), float("-inf"), -0.0,
    ])  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within containers."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in items:
        yield (*at, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*at, key))


def edited(value: Any, rng: random.Random, harm: Path) -> Any:
    """Return nested plain values with one to three edits."""
    made = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(made))
        if not found:
            break
        *path, key = rng.choice(found)
        holder = made
        for step in path:
            holder = holder[step]
        edit = rng.randrange(6)
        if edit == 0:
            del holder[key]
        elif edit == 1:
            other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        elif edit == 2 and isinstance(holder[key], int):
            holder[key] = holder[key] + rng.choice((-1, 1, 4, -8, 1 << 20))
        elif edit == 3:
            extra = rng.choice(("", "../x", "zz", "__class__", "x" * 300))
            holder[extra] = 1 if isinstance(holder, dict) else holder
            if not isinstance(holder, dict):
                raise AssertionError
        else:
            holder[key] = hostile(rng, harm)
    return made


def edited_value(value: Any, rng: random.Random, harm: Path) -> Any:
    """Return `edited`; an edit that does not apply is drawn again."""
    while True:
        with contextlib.suppress(AssertionError, TypeError):
            return edited(value, rng, harm)


def as_json(value: Any, rng: random.Random) -> bytes:
    text = json.dumps(value).replace(f'"{HUGE}"', "9" * 5000)
    if rng.random() < 0.05 and text.startswith("{"):
        text = text[:-1] + "," + text[1:]  # every name twice
    return text.encode()


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one to three edits."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(found) + 1)
        size = rng.choice((1, 2, 8, 64))
        edit = rng.randrange(6)
        if edit == 0 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif edit == 1:
            del found[at:]
        elif edit == 2:
            found[at:at] = rng.randbytes(size)
        elif edit == 3:
            del found[at : at + size]
        elif edit == 4:
            found[at : at + size] = bytes([rng.choice((0, 255))]) * size
        else:
            other = rng.randrange(len(found) + 1)
            found[at : at + size] = found[other : other + size]
    return bytes(found)


def replaced(path: Path, rng: random.Random) -> None:
    """Put something else than a plain file in a file's place."""
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to(path.name)
    elif kind == 4:
        path.symlink_to("/etc/hostname")
    elif kind == 5:
        path.touch()


def edited_text(text: str, rng: random.Random, harm: Path) -> str:
    """Return source with lines or words exchanged."""
    lines = text.splitlines()
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    edit = rng.randrange(5)
    if edit == 0:
        del lines[at]
    elif edit == 1:
        lines[at], lines[other] = lines[other], lines[at]
    elif edit == 2:
        lines[at:at] = [lines[other]]
    else:
        words = lines[at].split(" ")
        word = rng.randrange(len(words))
        words[word] = rng.choice([*lines[other].split(" "), "", "None", "0", "(", "x", "[]"])
        lines[at] = " ".join(words)
    return "\n".join(lines) + "\n"


# -- areas ----------------------------------------------------------------------------------------
class Net(nn.Module):
    """Two blocks with a buffer: quick to capture, and with every kind of value to save."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.out = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.fc(x)) * self.scale).square().mean()


PLAN = {"kernels": "aten", "stage": 3, "bucket_bytes": 0, "persist_below": 0}
MODEL = (
    "from fuzz import Net\nimport torch\ndef build():\n    return Net(), (torch.zeros(2, 4),), {}\n"
)


@dataclasses.dataclass
class Matrix:
    """The originals, made once, and a folder for the edited copies."""

    home: Path

    def __post_init__(self) -> None:
        self.harm, self.copy = self.home / "harm", self.home / "copy"
        torch.manual_seed(0)
        self.model = zerofx.compile(Net(), PLAN)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        with zerofx.record(self.model, memory=True) as recording:
            for _ in range(3):
                self.model(torch.randn(2, 4)).backward()
                self.optimizer.step()
        self.snapshot, self.emitted = self.home / "snapshot", self.home / "emitted"
        zerofx.save(self.snapshot, self.model, self.optimizer, extra={"step": 3})
        zerofx.export(self.home / "weights", self.model, max_file_bytes=32)
        self.program = self.model.programs[0]
        self.program.emit(self.emitted)
        self.recording = recording.to_dict()
        (self.home / "model.py").write_text(MODEL)
        self.saved = self.values()
        sys.path.append(str(HERE / "support"))
        import foreign_checkpoints as cases

        layers = zerofx.compile(cases.Layers(), PLAN)
        model = zerofx.compile(cases.build(), PLAN)
        own = model, cases.adamw(model), None
        named = layers, torch.optim.AdamW(layers.parameters()), cases.in_megatron
        deepspeed = HERE / "snapshots" / "deepspeed-0.19.5"
        self.foreigners: list[tuple[Path, tuple[Any, ...]]] = [
            *((deepspeed / name, own) for name in ("zero1", "zero3", "universal3")),
            (HERE / "snapshots" / "megatron-core-0.16.1", named),
        ]

    def values(self) -> dict[str, Any]:
        found = {n: v.clone() for n, v in self.model.state_dict().items()}
        for number, param in enumerate(self.model.parameters()):
            held = self.optimizer.state[param].items()
            found |= {f"{number}.{k}": v.detach().clone() for k, v in held}
        return found

    def same(self) -> bool:
        now = self.values()
        return now.keys() == self.saved.keys() and all(
            torch.equal(
                getattr(v, "to_local", lambda v=v: v)(),
                getattr(self.saved[k], "to_local", lambda k=k: self.saved[k])(),
            )
            for k, v in now.items()
        )

    def copied(self, source: Path) -> Path:
        shutil.rmtree(self.copy, ignore_errors=True)
        return Path(shutil.copytree(source, self.copy))

    # -- one input each ---------------------------------------------------------------------------
    def plans(self, rng: random.Random) -> None:
        given = edited_value(self.program.plan.to_dict(), rng, self.harm)
        if rng.random() < 0.3:
            given[rng.choice(list(zerofx.Plan().to_dict()))] = hostile(rng, self.harm)
        kind = rng.randrange(3)
        if kind == 0:
            zerofx.Plan.from_dict(json.loads(json.dumps(given).replace(HUGE, "1")))
            return
        path = self.home / f"plan.{'json' if kind == 1 else 'yaml'}"
        data = as_json(given, rng)
        path.write_bytes(damaged(data, rng) if rng.random() < 0.3 else data)
        zerofx.Plan.load(path)

    def yaml(self, rng: random.Random) -> None:
        path = self.home / "plan.yaml"
        text = self.program.plan.to_yaml()
        kind = rng.randrange(4)
        if kind == 0:
            text = edited_text(text, rng, self.harm)
        elif kind == 1:
            tag = rng.choice(
                ["!!python/object/apply:os.system", "!!int", "!x", "&a", "*a", "<<:", "|"]
            )
            text = text.replace(": ", f": {tag} ", 1)
        elif kind == 2:
            bomb = rng.choice(["[" * 1200, "a: &a [*a]", "{" * 999, "? " * 500, "0x" + "f" * 6000])
            text = f"stage: {bomb}\n"
            if rng.random() < 0.3:
                rows = [
                    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 or ['0'])}]" for i in range(1, 9)
                ]
                text = "a0: &a0 [0]\n" + "\n".join(rows) + "\nstage: *a8\n"
        path.write_bytes(
            damaged(text.encode(), rng) if kind == 3 else text.encode("utf-8", "replace")
        )
        zerofx.Plan.load(path)

    def commands(self, rng: random.Random) -> None:
        verbs = (
            "memory schedule passes dump predict search verify view diff plan-for doctor".split()
        )
        target = rng.choice([f"{self.home}/model.py:build", "hf:x.json", "nowhere:f", ":", "a.py:"])
        if rng.random() < 0.9:
            target = str(hostile(rng, self.harm)).replace("\0", "")[:200]
        options = [
            "--world",
            "--set",
            "--hardware",
            "--json",
            "--out",
            "--pipeline",
            "--batch",
            "--to",
        ]
        argv = [rng.choice(verbs), target.encode("utf-8", "replace").decode()]
        for _ in range(rng.randrange(4)):
            word = str(hostile(rng, self.harm)).replace("\0", "")[:200]
            argv += [rng.choice(options), word.encode("utf-8", "replace").decode()]
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                main(argv)
            except SystemExit as ended:
                if ended.code not in (0, 1, 2, None):
                    raise AssertionError(f"{argv}: ended with {ended.code}") from None
        if "Traceback" in said.getvalue():
            raise AssertionError(f"{argv}: {said.getvalue()[-400:]}")

    def snapshots(self, rng: random.Random) -> None:
        folder = self.copied(self.snapshot)
        kind = rng.randrange(5)
        name = rng.choice(sorted(os.listdir(folder)))
        is_forged = kind >= 3
        if kind == 0:
            (folder / name).write_bytes(damaged((folder / name).read_bytes(), rng))
        elif kind == 1:
            replaced(folder / name, rng)
        elif kind == 2:
            path = folder / "zerofx.json"
            path.write_bytes(
                as_json(edited_value(json.loads(path.read_text()), rng, self.harm), rng)
            )
        else:
            self.forge(folder, rng, kind)
        extra = zerofx.load(folder, self.model, self.optimizer)
        if not is_forged and not (self.same() and extra == {"step": 3}):
            raise Changed(name)

    def forge(self, folder: Path, rng: random.Random, kind: int) -> None:
        """Edit a snapshot, and write its checksums again."""
        manifest = json.loads((folder / "zerofx.json").read_text())
        facts = {k: v for k, v in manifest.items() if k not in ("checksum", "format", "version")}
        index, values = folder / ".metadata", folder / "values.pt"
        what = rng.randrange(6)
        if what == 0:
            path = rng.choice([index, values, folder / "__0_0.distcp"])
            path.write_bytes(damaged(path.read_bytes(), rng))
        elif what == 1:
            harm = Harm(self.harm)
            index.write_bytes(pickle.dumps(harm))
        elif what == 2:
            found = torch.load(values, weights_only=True)
            torch.save(edited_value(found, rng, self.harm), values)
        elif what == 3:
            torch.save({"extra": Harm(self.harm)}, values)
        else:
            index.write_bytes(pickle.dumps(_edited_index(pickle.loads(index.read_bytes()), rng)))
        facts["files"] = {n: snapshot_files.checksum(folder / n) for n in facts["files"]}
        if kind == 4 and what > 3:
            facts = edited_value(facts, rng, self.harm)
        facts = json.loads(json.dumps(facts).replace(HUGE, "1"))
        snapshot_files.write_manifest(folder, facts)

    def emitted_data(self, rng: random.Random) -> None:
        folder = self.copied(self.emitted)
        path = folder / "fingerprint.json"
        if rng.random() < 0.15:
            replaced(rng.choice([p for p in folder.rglob("*") if p.is_file()]), rng)
        elif rng.random() < 0.15:
            path.write_bytes(damaged(path.read_bytes(), rng))
        else:
            facts = edited_value(json.loads(path.read_text()), rng, self.harm)
            path.write_bytes(as_json(facts, rng))
        zerofx.load_program(folder)

    def emitted_code(self, rng: random.Random) -> None:
        """Code that is edited runs, by design: it may only not end in a raw error."""
        folder = self.copied(self.emitted)
        path = rng.choice(sorted(folder.rglob("*.py")))
        path.write_text(edited_text(path.read_text(), rng, self.harm))
        zerofx.load_program(folder)

    def safetensors(self, rng: random.Random) -> None:
        folder = self.copied(self.home / "weights")
        path = rng.choice(sorted(folder.iterdir()))
        data = path.read_bytes()
        kind = rng.randrange(4)
        if kind == 0:
            path.write_bytes(damaged(data, rng))
        elif kind == 1:
            replaced(path, rng)
        elif path.suffix == ".json":
            path.write_bytes(as_json(edited_value(json.loads(data), rng, self.harm), rng))
        else:
            length = int.from_bytes(data[:8], "little")
            header = edited_value(json.loads(data[8 : 8 + length]), rng, self.harm)
            said = as_json(header, rng)
            path.write_bytes(len(said).to_bytes(8, "little") + said + data[8 + length :])
        zerofx.load_weights(self.model, folder, strict=rng.random() < 0.5)

    def foreign(self, rng: random.Random) -> None:
        source, (model, optimizer, names) = rng.choice(self.foreigners)
        folder = self.copied(source)
        path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
        kind = rng.randrange(4)
        content = _content(path) if kind > 1 and path.suffix == ".pt" else None
        if isinstance(content, dict):
            torch.save(edited_value(content, rng, self.harm), path)
        elif kind == 1:
            replaced(path, rng)
        else:
            path.write_bytes(damaged(path.read_bytes(), rng))
        zerofx.load(folder, model, optimizer, names=names)

    def recordings(self, rng: random.Random) -> None:
        path = self.home / "recording.json"
        data = as_json(edited_value(self.recording, rng, self.harm), rng)
        path.write_bytes(damaged(data, rng) if rng.random() < 0.2 else data)
        if rng.random() < 0.02:
            replaced(path, rng)
        try:
            found = load_recording(path)
            str(found)
            if rng.random() < 0.05:
                self.program.view(self.home / "page.html", recording=found, hardware="cpu-box")
        finally:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(True)

    def names(self, rng: random.Random) -> None:
        model, made = nn.Sequential(), hostile(rng, self.harm)
        name = (made if isinstance(made, str) else repr(made)).replace(".", "") or "x"
        name = name[:200] + rng.choice(["", "\n", "'", '"', "\\", "#", "*/", "</script>", "\u202e"])
        model.add_module(name, nn.Linear(2, 2))
        kind = name.replace("\0", "").encode("utf-8", "replace").decode() or "x"
        model.__class__ = type(kind, (nn.Sequential,), {})
        program = zerofx.rewrite(zerofx.capture(model, (torch.zeros(2, 2),)), PLAN, 2)
        shutil.rmtree(self.copy, ignore_errors=True)
        zerofx.load_program(program.emit(self.copy))
        program.view(self.home / "page.html")
        str(program.schedule()), program.dump("nodes")


def _content(path: Path) -> Any:
    """Return what a file of torch.save has, with plain values for objects of other libraries."""

    def plain(value: Any) -> Any:
        if isinstance(value, Inert):
            return value.args[0] if value.args else plain(value.state)
        if isinstance(value, dict):
            return {key: plain(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        return value.detach() if isinstance(value, torch.Tensor) else value

    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    with torch.serialization.safe_globals([(stand_in(name), name) for name in unknown]):
        return plain(torch.load(path, weights_only=True))


def _edited_index(index: Any, rng: random.Random) -> Any:
    """Return the index of a snapshot with chunks or places exchanged, moved or lost."""
    tensors, where = index.state_dict_metadata, index.storage_data
    key, entry = rng.choice(list(tensors.items()))
    place = rng.choice(list(where.values()))
    wrong = rng.choice([-1, 0, 1, 1 << 40, 1 << 70, None, "x", 0.5])
    size = torch.Size([rng.choice([0, 1, 3, 1 << 40])] * rng.randrange(4))
    chunk = rng.choice(entry.chunks or [entry])
    edits: list[Callable[[], Any]] = [
        lambda: setattr(place, rng.choice(["offset", "length"]), wrong),
        lambda: setattr(place, "relative_path", rng.choice(["../x", "", None, "zerofx.json"])),
        lambda: setattr(place, "transform_descriptors", ["zstd"]),
        lambda: object.__setattr__(
            chunk, rng.choice(["offsets", "sizes"]), rng.choice([size, wrong])
        ),
        lambda: setattr(entry, "size", rng.choice([size, wrong])),
        lambda: entry.chunks.append(chunk),
        lambda: setattr(entry, "chunks", rng.choice([[], None, [wrong]])),
        lambda: setattr(entry.properties, "dtype", rng.choice([torch.int8, wrong])),
        lambda: tensors.pop(key),
        lambda: where.pop(rng.choice(list(where))),
        lambda: tensors.update({key: wrong}),
        lambda: tensors.update({rng.choice([wrong, "x"]): entry}),
        lambda: setattr(index, rng.choice(["planner_data", "storage_data"]), wrong),
    ]
    with contextlib.suppress(AttributeError):
        rng.choice(edits)()
    return index


SHARES = {  # of all inputs, about as many as the seconds of one allow
    "plans": 20, "yaml": 10, "commands": 4, "snapshots": 25, "emitted_data": 10, "emitted_code": 5,
    "safetensors": 15, "foreign": 15, "recordings": 10, "names": 1,
}  # fmt: skip


QUICK = (
    "plans", "yaml", "snapshots", "emitted_data", "emitted_code", "safetensors", "foreign",
    "recordings",
)  # fmt: skip
Counts = Counter[tuple[str, str]]


# -- the run --------------------------------------------------------------------------------------
def _stop(*_: Any) -> None:
    raise Hang


def attempt(matrix: Matrix, area: str, seed: str) -> str:
    """Try one input; return its outcome, of which all but "taken" and "refused" are faults."""
    signal.setitimer(signal.ITIMER_REAL, 10 * LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        getattr(matrix, area)(random.Random(seed))
        outcome = "taken"
    except ZerofxError:
        outcome = "refused"
    except Hang:
        outcome = "hang"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = (str(error) or "-").splitlines()[0][:160]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = f"{type(error).__name__} at {where}: {said}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if matrix.harm.exists():
        matrix.harm.unlink()
        outcome = "code ran"
    return outcome


def run(matrix: Matrix, count: int, seed: int, areas: Sequence[str]) -> tuple[Counts, list[str]]:
    """Try `count` inputs; return the number of each (area, outcome), and the faults."""
    counts: Counts = Counter()
    faults: list[str] = []
    rng = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("zerofx").setLevel(logging.CRITICAL)
        before = [(each, signal.signal(each, _stop)) for each in (signal.SIGALRM, signal.SIGPROF)]
        try:
            for number in range(count):
                area = rng.choices(areas, [SHARES[n] for n in areas])[0]
                outcome = attempt(matrix, area, f"{seed}:{number}")
                is_right = outcome in ("taken", "refused")
                counts[area, outcome if is_right else "fault"] += 1
                if not is_right:
                    faults.append(f"{area} {seed}:{number}: {outcome}")
                    sys.stderr.write(faults[-1] + "\n")
        finally:
            for each, handler in before:
                signal.signal(each, handler)
            logging.getLogger("zerofx").setLevel(logging.NOTSET)
    return counts, faults


def table(counts: Counts) -> str:
    lines = [f"{'area':<14}{'inputs':>8}{'taken':>8}{'refused':>9}{'faults':>8}"]
    for area in SHARES:
        taken, refused, fault = (counts[area, kind] for kind in ("taken", "refused", "fault"))
        lines.append(f"{area:<14}{taken + refused + fault:>8}{taken:>8}{refused:>9}{fault:>8}")
    return "\n".join(lines)


def command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SHARES)
    given = parser.parse_args()
    began = time.monotonic()
    areas = [given.only] if given.only else list(SHARES)
    with tempfile.TemporaryDirectory() as home:
        counts, faults = run(Matrix(Path(home)), given.count, given.seed, areas)
    print(table(counts))
    print(f"{given.count} inputs, {len(faults)} faults, {time.monotonic() - began:.0f} s")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(command_line())
