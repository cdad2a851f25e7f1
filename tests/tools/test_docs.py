"""The documentation: what it shows is what happens, its links lead somewhere, its English is plain.

`ZEROFX_UPDATE_GOLDENS=1 pytest tests/tools/test_docs.py` writes what commands print now into
README.md and docs/tutorial.md, where lines that are left out (`...`) stay left out, and draws
docs/step.svg.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch import nn

import zerofx
from benchmarks import figures
from benchmarks.figures import Claim, claims
from zerofx.plan.parts import LossScale, Parallel
from zerofx.tools.cli import app, main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
UPDATES = bool(os.environ.get("ZEROFX_UPDATE_GOLDENS"))
LEFT_OUT = "..."


# -- Snippets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that its title names, and its text."""

    language: str
    title: str
    text: str


def blocks(text: str) -> list[Block]:
    found = re.finditer(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S)
    return [Block(m[1], m[2] or "", m[3]) for m in found]


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Return each command of a console block, with the output that the page shows."""
    parts = re.split(r"^\$ ", block.text, flags=re.M)[1:]
    return [(head, rest.splitlines()) for head, _, rest in (p.partition("\n") for p in parts)]


def shows(said: list[str], shown: list[str]) -> bool:
    """Tell whether the lines that are shown are those that were said, but for lines left out."""
    rows = [re.escape(row) + r"\n" if row != LEFT_OUT else r"(?:.*\n)*?" for row in shown]
    if shown and shown[-1] == LEFT_OUT and len(shown) > 1:  # the last line may be the start of one
        rows[-2:] = [re.escape(shown[-2]) + r".*\n", r"(?:.*\n)*"]
    return re.fullmatch("".join(rows), "".join(f"{row}\n" for row in said)) is not None


def current(said: list[str], shown: list[str]) -> list[str]:
    """Return what a page has to show now: for each line shown, the one most like it."""
    lines, first = [], 0
    for row in shown:
        if row == LEFT_OUT:
            lines.append(row)
            continue
        ratio = [difflib.SequenceMatcher(None, row, other).ratio() for other in said[first:]]
        first += ratio.index(max(ratio)) + 1
        lines.append(said[first - 1])
    return lines


def check(page: Path, command: str, shown: list[str], said: str) -> None:
    lines = [row.rstrip() for row in said.splitlines()]
    if UPDATES and not shows(lines, shown):
        before = "\n".join([f"$ {command}", *shown])
        after = "\n".join([f"$ {command}", *current(lines, shown)])
        text = page.read_text(encoding="utf-8")
        assert text.count(before) == 1
        page.write_text(text.replace(before, after), encoding="utf-8")
        return
    assert shows(lines, shown), f"{page.name} shows something else for `{command}`:\n{said}"


def run_cli(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[int | str | None, str, str]:
    """Run the command line in this process; return its status and what it printed and logged."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, *capsys.readouterr()


def test_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands, run in this process."""
    monkeypatch.chdir(tmp_path)
    consoles = [b for b in blocks(README.read_text("utf-8")) if b.language == "console"]
    found = [command for block in consoles for command in commands(block)]
    assert len(found) == 3
    for command, shown in found:
        program, *rest = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
        if program == "zerofx":
            status, said, _ = run_cli(rest, capsys)
            assert not status
        elif program == "python":
            monkeypatch.setattr(sys, "argv", rest)
            runpy.run_path(rest[0], run_name="__main__")
            said = capsys.readouterr().out
        else:
            assert program == "cat"
            said = Path(rest[0]).read_text("utf-8")
        check(README, command, shown, said)


class MyModel(nn.Module):
    """What stands for the reader's own model in README.md."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.fc(x) - y).square().mean()


def test_ten_lines_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = (b.text for b in blocks(README.read_text("utf-8")) if b.language == "python")
    model = MyModel()
    before = model.fc.weight.detach().clone()
    dataset = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    # nothing is compiled here: that Inductor trains alike is for the tests of training
    exec(
        code.replace("stage=3", "stage=3, kernels='aten'"),
        {"MyModel": lambda: model, "dataset": dataset},
    )
    assert not torch.equal(model.state_dict()["fc.weight"], before)
    assert (tmp_path / "run" / "step100").is_dir()


@pytest.mark.parametrize("way", [0, 1], ids=["eager modules", "inside forward"])
def test_gradient_penalties_of_the_page_on_ddp(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways have the gradients of plain PyTorch."""
    _, _, section = (ROOT / "docs/from-ddp.md").read_text("utf-8").partition("## Gradient penal")
    code = [b.text for b in blocks(section) if "create_graph" in b.text][way]
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    class Scores(nn.Module):
        """What stands for the reader's own module: the code may have more of it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    wanted, (real, fake) = Scores(), torch.randn(2, 5, 4)
    monkeypatch.setattr(torch, "rand", lambda *sizes, **_: torch.full(sizes, 0.25))
    alpha = torch.rand(5, 1)
    mix = (alpha * real + (1 - alpha) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(wanted(mix).sum(), mix, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    (wanted(fake).mean() - wanted(real).mean() + 10 * penalty).backward()
    names: dict[str, Any] = {"Critic": Scores, "Scores": Scores, "torch": torch, "zerofx": zerofx}
    names |= {"alpha": alpha, "real": real, "fake": fake}
    shown = code.replace("(nn.Module)", "(Scores)").replace("stage=3", "stage=3, kernels='aten'")
    exec(shown, names)
    for name, param in wanted.named_parameters():
        got = names["critic"].get_parameter(name).grad
        torch.testing.assert_close(got, param.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_collectives_of_the_page_on_ddp_are_left_out_in_one_process() -> None:
    """Its scripts run with plain `python` too, where there may be no process group."""
    lines = (ROOT / "docs/from-ddp.md").read_text("utf-8").splitlines()
    calls = [i for i, row in enumerate(lines) if re.match(r" *dist\.(all_reduce|barrier)\(", row)]
    assert len(calls) == 2
    assert all(lines[i - 1].startswith("if dist.is_initialized():") for i in calls)


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_the_picture_is_the_step_that_is_shown() -> None:
    """It is drawn from the program that the README prints, and the README quotes its model."""
    drawn = runpy.run_path(str(ROOT / "docs" / "reference" / "picture.py"))
    file, now = drawn["FILE"], drawn["picture"]()
    if UPDATES:
        file.write_text(now, encoding="utf-8")
    assert file.read_text("utf-8") == now, "run python docs/reference/picture.py"
    source = " ".join((ROOT / "examples" / "blocks.py").read_text("utf-8").split())
    text = README.read_text("utf-8")
    assert f"]({file.relative_to(ROOT).as_posix()})" in text
    for quoted in ("for block in self.blocks: x = block(x)", "F.cross_entropy(self.head(x), y)"):
        assert quoted in source and quoted in text


@pytest.mark.slow
def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files and commands in their order, in one folder, as a reader runs them."""
    monkeypatch.chdir(tmp_path)
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
        "ls": ["ls"],
    }
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    patience = float(os.environ.get("ZEROFX_TEST_PATIENCE", "1"))
    num_run = 0
    for block in blocks(TUTORIAL.read_text("utf-8")):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        for command, shown in commands(block):
            program, *rest = shlex.split(command)
            if program == "zerofx":
                is_refused = bool(shown) and shown[0].startswith("BudgetError")
                status, said, error = run_cli(rest, capsys)
                assert bool(status) == is_refused, error
                check(TUTORIAL, command, shown, error if is_refused else said)
            else:
                done = subprocess.run(
                    [*programs[program], *rest], env=env, capture_output=True, text=True,
                    timeout=90 * patience, check=False,
                )  # fmt: skip
                assert done.returncode == 0, done.stderr[-3000:]
                check(TUTORIAL, command, shown, done.stdout)
            num_run += 1
    assert num_run == 9


def test_figures_in_the_prose_of_the_tutorial_are_those_that_it_shows() -> None:
    text = TUTORIAL.read_text("utf-8")
    shown = "\n".join(block.text for block in blocks(text)).replace(" ", "")
    said = re.findall(r"\d[\d.]* MiB", without_blocks(text))
    assert said and not [figure for figure in said if figure.replace(" ", "") not in shown]


def test_code_in_the_docs_is_python() -> None:
    """Every block that is called Python can be parsed, with `...` for what is left out."""
    num = 0
    for page in PAGES:
        for block in blocks(page.read_text("utf-8")):
            if block.language == "python":
                ast.parse(textwrap.dedent(block.text), f"{page.name}: {block.text[:60]}")
                num += 1
    assert num > 20


# -- Commands and figures --------------------------------------------------------------------------

COMMANDS: Any = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def written(text: str) -> Iterator[list[str]]:
    """Yield the commands of a page, in console blocks and in code within a line, as words."""
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_blocks(text))]
    lines = [line for b in blocks(text) if b.language in ("", "console", "bash")
             for line in b.text.replace("\\\n", " ").splitlines()]  # fmt: skip
    for line in (*inline, *lines):
        try:
            words = shlex.split(line.removeprefix("$ ").strip(), comments=True)
        except ValueError:  # prose of a block, or the first line of a text in quotes
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if len(words) > 1 and words[0] in ("zerofx", "python", "torchrun", "make", "pytest"):
            yield words


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def of_zerofx(words: list[str]) -> str:
    """Return what is wrong with a command of zerofx; arguments may be left out in prose."""
    name, *argv = words
    if name == "--version":
        return ""
    if name not in COMMANDS.commands:
        return f"no command {name}"
    command = COMMANDS.commands[name]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}
    if name != "demo" and given - known - {"--help"}:  # the demo has a parser of its own
        return f"no option {sorted(given - known)[0]}"
    return ""


def of_python(words: list[str]) -> str:
    """Return what is wrong with a module or a script of this repository, or with its options."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if not module.startswith("benchmarks"):
            return ""
        argv = words[words.index("-m") + 2 :]
        path = ROOT / module.replace(".", "/")
        files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    else:
        found = [n for n, word in enumerate(words) if word.endswith(".py")]
        if not found or not words[found[0]].startswith(("examples/", "tests/", "benchmarks/")):
            return ""  # a script of the reader's
        argv, files = words[found[0] + 1 :], [ROOT / words[found[0]]]
    if not files[0].is_file():
        return f"no file {files[0].relative_to(ROOT)}"
    source = "".join(p.read_text("utf-8") for p in files)
    imported = re.findall(r"^from benchmarks\.(\w+) import", source, re.M)  # they declare some
    shared = [ROOT / "benchmarks" / f"{name}.py" for name in imported]
    source += "".join(p.read_text("utf-8") for p in shared if p.is_file())
    unknown = [w for w in argv if w.startswith("--") and f'"{w.partition("=")[0]}"' not in source]
    return f"no option {unknown[0]}" if unknown else ""


def wrong(words: list[str]) -> str:
    """Return what is wrong with a command of a page, or an empty text."""
    program, *argv = words
    if program == "zerofx":
        return of_zerofx(argv)
    if program in ("python", "torchrun"):
        return of_python(words)
    if program == "make":
        names = [word for word in argv if "=" not in word]
        return "" if TARGETS.issuperset(names) else f"no target {' '.join(names)}"
    gone = [w for w in argv if w.startswith("tests") and not (ROOT / w.partition("::")[0]).exists()]
    return f"no tests {gone[0]}" if gone else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_can_be_run(page: Path) -> None:
    """Their programs, files, targets and options are there."""
    faults = [f"{shlex.join(w)}: {f}" for w in written(page.read_text("utf-8")) if (f := wrong(w))]
    assert not faults


def test_a_command_that_cannot_be_run_is_found() -> None:
    page = "`zerofx memroy` `zerofx memory m:f --wrld 2` `make tset` `python examples/gone.py`\n"
    page += (
        "```console\n$ python -m benchmarks.memory \\\n    --size 4\n$ pytest tests/gone.py\n```\n"
    )
    assert [wrong(words) for words in written(page)] == [
        "no command memroy", "no option --wrld", "no target tset", "no file examples/gone.py",
        "no option --size", "no tests tests/gone.py",
    ]  # fmt: skip


def test_every_table_of_figures_names_its_command() -> None:
    """Each section of the measurements, and each row of the README, says how to repeat it."""
    _, *sections = re.split(r"^## ", (ROOT / "docs/measured.md").read_text("utf-8"), flags=re.M)
    for section in sections:
        named = re.search(r"-m\s+benchmarks|`make |tests/\w+|zerofx ", section)
        assert named, section.splitlines()[0]
    _, _, rest = README.read_text("utf-8").partition("\n## How fast\n")
    rows = re.findall(r"^\| .*\d.* \|$", rest.partition("\n## ")[0], re.M)
    assert len(rows) > 4
    for row in rows:
        assert re.search(r"\| `python -m benchmarks\.\w+` \|$", row), row


def test_figures_are_those_of_the_files_they_come_from() -> None:
    found = list(claims())
    pages = {"README.md", "docs/measured.md", "docs/slow-networks.md"}
    assert {claim.page for claim in found} == pages
    assert not [fault for claim in found if (fault := claim.fault())]
    other = dataclasses.replace(found[0], figures=(*found[0].figures[:-1], "7.77"))
    assert "7.77" in other.fault()


def test_figures_are_entered_where_as_many_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("## Other\n| 4 x 32 | 1, 2 |\n\n## Here\n| 4 x 32 | 1, 2 |\n| 8 | 3 |\n")
    claim = Claim("page.md", "Here", "| 4 x 32 |", ("0.51", "1,024.5"), "a file")
    assert "0.51, 1,024.5" in claim.fault()
    claim.write()
    expected = "## Other\n| 4 x 32 | 1, 2 |\n\n## Here\n| 4 x 32 | 0.51, 1,024.5 |\n| 8 | 3 |\n"
    assert page.read_text() == expected and not claim.fault()
    more = dataclasses.replace(claim, figures=("0.51", "7", "8"))
    more.write()
    assert page.read_text() == expected and more.fault()
    assert "has nothing" in dataclasses.replace(claim, begin="| 5 |").fault()


def test_files_of_results_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"benchmarks/results/([\w./*-]+\.json)", page.read_text("utf-8")):
            assert list((ROOT / "benchmarks" / "results").glob(name)), f"{page.name}: {name}"


# -- Links -----------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]+`", "", without_blocks(text))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs both make them."""
    found: Counter[str] = Counter()
    names = set()
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        name = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", plain))
        names.add(f"{name}_{found[name]}" if found[name] else name)
        found[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        is_there = place.exists() and place.is_relative_to(ROOT)
        if is_there and anchor and place.suffix == ".md":
            is_there = anchor in anchors(place)
        if not is_there:
            broken.append(target)
    assert not broken


def test_every_page_is_reached_from_the_readme() -> None:
    """By links, over any number of pages: a page that no link reaches would not be read."""
    seen: set[Path] = set()
    todo = [README]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", without_code(page.read_text("utf-8")))
        todo += [(page.parent / target).resolve() for target in links]
    alone = {p for p in PAGES if p.parent != ROOT} - seen
    assert {p.name for p in alone} <= {"index.md"}, "link to it"  # index.md is the site's own


# -- The site --------------------------------------------------------------------------------------


def test_pages_that_are_made_from_code() -> None:
    """Every field of a plan has its meaning, every command and public name its place."""
    pages = runpy.run_path(str(ROOT / "docs" / "reference" / "pages.py"))
    made = {name: make() for name, make in pages["MADE"].items()}
    rows = set(re.findall(r"^\| `(\w+)` \|", made["reference/plan.md"], re.M))
    for kind in (zerofx.Plan, zerofx.Precision, zerofx.Offload, LossScale, Parallel):
        fields = {f.name for f in dataclasses.fields(kind)}
        assert rows.issuperset(fields)
        unsaid = fields - pages["texts"](kind).keys()
        assert not unsaid, f"the docstring of {kind.__name__} says nothing of them"
    for command in ("schedule", "memory", "verify", "doctor"):
        assert f"## zerofx {command}\n" in made["reference/cli.md"]
    for name in set(zerofx.__all__) - pages["ELSEWHERE"]:
        assert f"heading: zerofx.{name}\n" in made["reference/api.md"]

    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    written = {p.relative_to(ROOT / "docs").as_posix() for p in PAGES if p.parent != ROOT}
    assert sorted(listed) == sorted(written | made.keys()), "mkdocs.yml has another list of pages"


# -- English ---------------------------------------------------------------------------------------

# Words that STYLE asks to avoid, over and above those of tests/house/test_house_rules.py.
WORDS = (
    r"anew|nobody|for ever|how-manieth|dearest|foreseen|otherwise than|lent|lends|mend(?:s|ed|ing)?"
)
# How often a file still has one. A number may only shrink; a file that has none leaves the list.
REMAIN: dict[str, int] = {
    "docs/layout.md": 1,
    "zerofx/analysis/memory/host_places.py": 8,
    "zerofx/analysis/memory/memory.py": 3,
    "zerofx/analysis/memory/storage.py": 1,
    "zerofx/analysis/time/steps.py": 2,
    "zerofx/ir/verify.py": 1,
    "zerofx/ir/verify_values.py": 1,
    "zerofx/ops/gathers.py": 2,
    "zerofx/ops/gradients.py": 2,
    "zerofx/runtime/gradients.py": 1,
    "zerofx/runtime/tiers/away_shards.py": 6,
    "zerofx/runtime/tiers/host_tier.py": 10,
    "zerofx/runtime/tiers/nvme_home.py": 1,
}


@cache
def avoided(path: Path) -> list[str]:
    text = path.read_text("utf-8")
    found = re.finditer(rf"(?<![\w.-])(?:{WORDS})(?![\w(-])", text, re.I)
    return [f"{text.count(chr(10), 0, m.start()) + 1}: {m[0]}" for m in found]


def test_words_that_are_avoided() -> None:
    texts = [*PAGES, *sorted((ROOT / "zerofx").rglob("*.py"))]
    found = {p.relative_to(ROOT).as_posix(): avoided(p) for p in texts}
    more = {name: lines for name, lines in found.items() if len(lines) > REMAIN.get(name, 0)}
    assert not more, "write it in plain English"
    assert REMAIN.keys() <= found.keys(), "a file of the list is gone"
