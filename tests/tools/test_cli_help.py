"""The command line for a newcomer: help, examples, widths, outputs that cannot be written."""

from __future__ import annotations

import platform
import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from stack import stack

import zerofx
from zerofx.capture import capture
from zerofx.tools import cli
from zerofx.tools.cli import fit
from zerofx.tools.cli.app import EXAMPLES, app
from zerofx.tools.room import limited, room, shortened
from zerofx.tools.words import counted

GROUP: Any = typer.main.get_command(app)
STACK = str(Path(__file__).parents[1] / "support" / "stack.py") + ":stack"
PLAN = ["--set", "bucket_bytes=0", "--set", "persist_below=0", "--set", "kernels=aten"]
CHEAP = ("zerofx passes", "zerofx schedule zerofx.tools.demo.targets:byte_gpt --world 4")


def ended(argv: list[str]) -> int:
    """Run the command line; return its exit status."""
    with pytest.raises(SystemExit) as found:
        cli.main(argv)
    return int(found.value.code or 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    # as installed: torch.__version__ of a wheel for CUDA has more behind it
    said = f"zerofx {zerofx.__version__}, torch {metadata.version('torch')}, Python "
    assert capsys.readouterr().out == f"{said}{platform.python_version()}\n"


@pytest.mark.parametrize("name", GROUP.commands)
def test_help_has_defaults_and_examples(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option with a default shows it, and the examples of each command parse."""
    assert 1 <= len(EXAMPLES[name]) <= 2
    if name != "demo":  # whose own parser prints its help
        for columns in (60, 80, 120):
            monkeypatch.setenv("COLUMNS", str(columns))
            assert ended([name, "--help"]) == 0
            text = capsys.readouterr().out
            assert max(map(len, text.splitlines())) <= columns
        assert "Example" in text
        for option in GROUP.commands[name].params:
            if option.default not in (None, False, True):
                assert re.search(rf"\[default:\s+{re.escape(str(option.default))}\]", text)
        is_planned = any(
            option.name in ("world", "worlds") for option in GROUP.commands[name].params
        )
        assert not is_planned or "[default: 2]" in text
    for line in EXAMPLES[name]:
        program, own, *argv = shlex.split(line)
        assert (program, own) == ("zerofx", name)
        GROUP.commands[name].make_context(name, list(argv))


@pytest.mark.parametrize("line", CHEAP)
def test_cheap_examples_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(line in examples for examples in EXAMPLES.values())
    assert ended(shlex.split(line)[1:]) == 0 and capsys.readouterr().out


@pytest.mark.parametrize("columns", [60, 80])
def test_tables_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (["schedule"], ["memory"], ["view"], ["passes"], ["diff", "--to", "stage=2"]):
        assert ended([command[0], STACK, *command[1:], *PLAN]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= columns, command
    assert ended(["passes"]) == 0  # specs, which can be read back, stay whole
    comments = [line for line in capsys.readouterr().out.splitlines() if "#" in line]
    assert len(comments) > 20 and max(map(len, comments)) <= columns
    monkeypatch.setenv("COLUMNS", "")  # a pipe: whole lines
    assert ended(["schedule", STACK, *PLAN]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80


def test_views_do_not_depend_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    program = zerofx.rewrite(capture(*stack()), {"kernels": "aten"}, 4)
    whole = str(program.memory()), str(program.schedule())
    monkeypatch.setenv("COLUMNS", "60")
    assert (str(program.memory()), str(program.schedule())) == whole
    with limited(60):
        narrow = str(program.memory())
    assert max(map(len, narrow.splitlines())) < max(map(len, whole[0].splitlines()))
    assert str(program.memory()) == whole[0]


def test_lines_are_wrapped_between_columns() -> None:
    text = "  12 MiB  activations   blocks.0.mlp.up        modeling.py:10"
    assert fit.fitted(text, None) == text
    lines = fit.fitted(text, 45).splitlines()
    assert lines == ["  12 MiB  activations   blocks.0.mlp.up", "      modeling.py:10"]
    assert max(map(len, fit.fitted("x" * 200, 60).splitlines())) == 60
    assert shortened("abcdefghij", 7) == "abc…hij"[:4] + "hij" and shortened("abc", 3) == "abc"
    assert room(96) == 96
    with limited(40):
        assert (room(96, 20), room(96, 40, 12), room(8)) == (20, 12, 8)


def test_numbers_agree_with_their_nouns() -> None:
    assert counted(1, "bucket") == "1 bucket" and counted(3, "unit") == "3 units"
    assert counted(2400, "copy", "copies") == "2,400 copies" and counted(0, "plan") == "0 plans"


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["view", "nowhere:x", "--out"], "--out"),
        (["view", "nowhere:x", "--trace"], "--trace"),
        (["plan-for", "8x H100", "--target", "nowhere:x", "--out"], "--out"),
        (["doctor", "--calibrate", "--out"], "--out"),
    ],
)
def test_outputs_are_checked_before_the_work(
    argv: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The model does not exist: an error about the output came first."""
    (tmp_path / "folder.yaml").mkdir()
    real = Path.open

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "read-only.yaml":  # root may write anywhere
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    for name, words in (
        ("gone/x.yaml", f"the directory {tmp_path}/gone does not exist. Create it first."),
        ("folder.yaml", "is a directory. Give the path of a file."),
        ("read-only.yaml", "cannot be written: Permission denied. Choose another path."),
    ):
        assert ended([*argv, str(tmp_path / name)]) == 1
        text = capsys.readouterr().err
        assert f"{option} {tmp_path / name}" in text and words in text, text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder.yaml"]


def test_names_that_are_suggested_can_be_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nets.py"
    path.write_text(
        "from pathlib import Path\nfrom torch import nn\n"
        "class Net(nn.Module):\n    pass\n"
        "def needs(width):\n    return width\n"
        "def _own():\n    return 0\n"
        "def small(device='cpu'):\n    return nn.Linear(2, 2), (), {}\n"
    )
    assert ended(["memory", f"{path}:smal"]) == 1
    text = capsys.readouterr().err
    assert "Its functions are small. Did you mean 'small'?" in text
