"""What a person may type wrongly: each ends with one text: what, where, and the way out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from zerofx.errors import PlanError, TargetError, ZerofxError
from zerofx.tools.cli import main
from zerofx.tools.demo.gpt import GPT, GPTConfig
from zerofx.tools.targets import Target, resolve

MODEL = """
import json
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.fc, self.fails = nn.Linear(4, 4), fails

    def forward(self, x, y):
        if self.fails:
            raise LookupError("no such head")
        return (self.fc(x) - y).square().mean()


def build():
    return Net(), (torch.zeros(2, 4), torch.zeros(2, 4)), {}


def of_one_argument():
    return Net(), (torch.zeros(2, 4),), {}


def of_another_name():
    return Net(), (torch.zeros(2, 4),), {"labels": torch.zeros(2, 4)}


def of_other_columns():
    return Net(), (torch.zeros(2, 5), torch.zeros(2, 4)), {}


def that_fails():
    return Net(fails=True), (torch.zeros(2, 4), torch.zeros(2, 4)), {}


def that_raises():
    return json.loads("{")


def that_needs(width, device):
    return Net(), (), {}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a command that is refused says, which is no traceback."""
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    assert ended.value.code == 1
    out = capsys.readouterr()
    assert not out.out and "Traceback" not in out.err
    return out.err


def line_of(words: str) -> int:
    return next(n for n, line in enumerate(MODEL.splitlines(), 1) if words in line)


@pytest.mark.parametrize(
    ("name", "words", "at"),
    [
        ("of_one_argument", "example call with 1 argument. Net.forward takes (x, y): missing", ""),
        ("of_another_name", "call with 1 argument, labels=. Net.forward takes (x, y): ", ""),
        ("of_other_columns", "must have same reduction dim, but got [2, 5] X [4, 4]", ""),
        ("that_fails", "its forward raised LookupError at {}: no such head", "raise LookupError"),
        ("that_raises", "the function raised JSONDecodeError at {}: ", "json.loads"),
        ("Net", "is the class Net. Name a function without arguments that returns the model", ""),
        ("Net", "such as `def build(): return Net(...), (x,), {{}}`. The page docs/tutorial", ""),
        ("that_needs", "with the arguments width. Only an argument named device is", ""),
    ],
)
@pytest.mark.parametrize("command", [["memory"], ["predict", "--hardware", "dgx-h100"]])
def test_models_that_cannot_be_built_or_called(
    name: str, words: str, at: str, command: list[str], model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = said(capsys, command[0], f"{model}:{name}", *command[1:])
    assert words.format(f"{model}:{line_of(at)}") in text and len(text.splitlines()) == 1


PARSER = "import argparse\np = argparse.ArgumentParser()\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def build(:\n", "has a syntax error at {}:1: invalid syntax"),
        ("import nowhere_at_all\n", "needs the module 'nowhere_at_all', which is not installed"),
        ("\nsize = 1 / 0\n", "raised ZeroDivisionError at {}:2: division by zero"),
        ("raise SystemError\n", "raised SystemError at {}:1: "),
        ("import sys\nsys.exit(3)\n", "ended the process (exit status 3) at {}:2. Any message"),
        (f"{PARSER}p.add_argument('data')\np.parse_args()\n", "(exit status 2) at {}:4. Any"),
        (
            f"{PARSER}\ndef build():\n    p.exit(1)\n",
            "the function ended the process (exit status 1)",
        ),
    ],
)
def test_files_that_do_not_import(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "as_a_module.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for spec in (f"{path}:build", "as_a_module:build"):
        with pytest.raises(TargetError) as error:
            resolve(spec)
        assert words.format(path) in str(error.value) and repr(spec) in str(error.value)


def test_a_file_is_imported_without_the_arguments_of_zerofx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in most research code: arguments are parsed when the file is imported, or in build."""
    path = tmp_path / "parses.py"
    path.write_text(
        f"import sys, torch\n{PARSER}p.add_argument('--width', type=int, default=4)\n"
        "width = p.parse_args().width\nnames = sys.argv\n"
        "def build():\n"
        "    p.parse_args()\n"
        "    return torch.nn.Linear(width, 4), (torch.zeros(2, width),), {}\n"
    )
    monkeypatch.setattr(sys, "argv", given := ["zerofx", "schedule", "x.py:build", "--world", "2"])
    assert resolve(f"{path}:build").module.in_features == 4
    assert sys.modules["zerofx_target_parses"].names == [str(path)]
    assert sys.argv is given


def gpt() -> Target:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=1, width=64))
        tokens = torch.zeros(2, 64, dtype=torch.long)
    return Target("gpt", model, (tokens, tokens), {})


@pytest.mark.parametrize("ranks", [0, -8, 2.0, True])
def test_worlds_that_are_none(ranks: Any) -> None:
    program = zerofx.capture(nn.Linear(2, 2), (torch.zeros(2, 2),))
    message = f"world_size = {ranks!r}: allowed are whole numbers from 1"
    for call in (
        lambda: zerofx.predict(program, hardware="dgx-h100", world_size=ranks),
        lambda: zerofx.search(gpt(), hardware="dgx-h100", world_size=ranks),
        lambda: zerofx.rewrite(program, None, ranks),
    ):
        with pytest.raises(PlanError) as error:
            call()
        assert message in str(error.value)
    with pytest.raises(PlanError, match="accumulation = 0: allowed are whole numbers from 1"):
        zerofx.predict(program, hardware="dgx-h100", accumulation=0)


def test_more_ranks_than_a_machine_without_a_network_has(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("predict", "search"):
        where = ["--hardware", "cpu-box", "--world", "4"]
        text = said(capsys, command, f"{model}:build", *where)
        assert "one node of 2 devices without a network. The world is 4 ranks. Give at" in text
    program = zerofx.capture(nn.Linear(4, 4), (torch.zeros(2, 4),))
    for given, world in ((program, 4), (zerofx.rewrite(program, None, 4), 1)):
        with pytest.raises(PlanError, match="The world is 4 ranks"):
            zerofx.predict(given, hardware="cpu-box", world_size=world)
    with pytest.raises(PlanError, match="Capture a model first"):
        zerofx.predict(nn.Linear(4, 4), hardware="cpu-box")  # type: ignore[arg-type]


def test_an_axis_that_does_not_divide_the_world(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--hardware", "dgx-h100", "--world", "6", "--set", "shard_axis_size=4"]
    text = said(capsys, "predict", f"{model}:build", *where)
    assert "shard_axis_size = 4 does not divide the world of 6 ranks. Use a divisor" in text


def test_hardware_files(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every mistake names the file and the field; test_hardware.py has them all."""
    path = tmp_path / "ours.yaml"
    for content, words in (
        ("base: dgx-h100\nmemory_bytes_per_sec: 3", "field 'memory_bytes_per_sec'. Did you mean"),
        ("base: dgx-h100\nmemory_bytes_per_s: -3", "= -3: allowed are numbers above 0"),
        ("base: dgx-h100\ndevice_memory_bytes: 80 potatoes", "bytes = '80 potatoes'"),
        ("launch_us: 3", "leaves out name, device, device_type"),
    ):
        path.write_text(content + "\n")
        text = said(capsys, "predict", f"{model}:build", "--hardware", str(path))
        assert words in text and str(path) in text
    text = said(capsys, "search", f"{model}:build", "--hardware", "dgxh100")
    assert "unknown hardware 'dgxh100'. Did you mean 'dgx-h100'? Give cpu-box, " in text


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"stage": 3}, TypeError, "Call zerofx.compile(model, Plan(stage=3))"),
        ({"stgae": 3}, TypeError, "Did you mean 'stage'?"),
        ({"optimiser": None}, TypeError, "Did you mean 'optimizer'?"),
        ({"model": nn.Linear}, TypeError, "Call zerofx.compile(Linear(...))"),
        ({"model": "net"}, TypeError, "model is of type str, not an nn.Module"),
        ({"plan": 3}, ValueError, "Did you mean Plan(stage=3)?"),
        ({"plan": zerofx.Plan}, ValueError, "write Plan()"),
        ({"plan": "gone.yaml"}, ValueError, "Give an existing file"),
        ({"plan": "zero3"}, ValueError, "must end in .yaml, .yml or .json"),
        ({"plan": "an optimizer"}, ValueError, "Pass an optimizer as optimizer="),
        ({"optimizer": "an optimizer"}, ValueError, "none of the parameters of Sequential"),
        ({"optimizer": ["an optimizer"]}, TypeError, "optimizer[0] is of type str"),
        ({"optimizer": torch.optim.AdamW}, TypeError, "optimizer is the class AdamW"),
        ({"device": "gpu"}, ValueError, "device = 'gpu' is not a device of torch"),
        ({"device": "cuda:99"}, ValueError, "device = 'cuda:99' does not exist"),
        ({"device": 3.5}, ValueError, "device = 3.5 is not a device of torch"),
        ({"mesh": [0, 1]}, ValueError, "mesh is a list, not a DeviceMesh"),
        ({"machine": 3}, ValueError, "machine is of type int"),
        ({"machine": "h100"}, ValueError, "unknown machine 'h100'"),
        ({"weights": 3}, TypeError, 'zerofx.compile(model, weights="folder")'),
        ({"weights": "."}, ZerofxError, "no *.safetensors file is there. Give"),
        ({"plan": {"shard_axis_size": 2}}, ValueError, "Launch it with torchrun"),
    ],
)
def test_wrong_arguments_of_compile_leave_the_model_as_it_was(
    options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    model = net()
    of_another = torch.optim.SGD(net().parameters(), lr=0.1)
    given = {k: of_another if v == "an optimizer" else v for k, v in options.items()}
    with pytest.raises(ZerofxError) as caught:
        zerofx.compile(**{"model": model, **given})
    assert message in str(caught.value) and isinstance(caught.value, kind)
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_swapped_arguments_name_the_right_call(tmp_path: Path) -> None:
    model = zerofx.compile(net(), zerofx.Plan(kernels="aten"))
    for call, function in (
        ("zerofx.save(folder, model, optimizer)", lambda: zerofx.save(model, tmp_path)),
        ("zerofx.load(folder, model, optimizer)", lambda: zerofx.load(model, tmp_path)),
        ("zerofx.export(target, model)", lambda: zerofx.export(model, tmp_path)),
        ("zerofx.load_weights(model, source)", lambda: zerofx.load_weights(tmp_path, model)),
        ("extra", lambda: zerofx.save(tmp_path / "s", model, {"step": 1})),
        ("program.emit(directory)", lambda: zerofx.load_program(model)),
        ("program.emit(directory)", lambda: model.adopt(3)),
        ("zerofx.rewrite(zerofx.capture(model", lambda: zerofx.rewrite(model)),
    ):
        with pytest.raises(TypeError) as caught:
            function()
        assert call in str(caught.value) and isinstance(caught.value, ZerofxError)
