"""A printed pipeline is read back and runs; what is wrong in its text is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_cases import captured
from typer.testing import CliRunner

from zerofx.errors import PlanError
from zerofx.hardware import hardware_for
from zerofx.ir.program import Planned
from zerofx.passes.order import Setting, build, parse
from zerofx.passes.pipeline import run
from zerofx.plan.plan import Plan
from zerofx.tools.cli import app

BOTH = {"optimizer": "cpu", "activations": "cpu"}
PLANS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 3, "persist_below": 100, "bucket_bytes": 6000, "prefetch": 2},
    {"stage": 3, "activations": "auto", "memory_budget": 137_000},
    {
        "stage": 2,
        "tiling": {"blocks.*.mlp.up.weight": 2},
        "offload": {"optimizer": "cpu", "activations": "cpu"},
    },
]


def setting_of(plan: dict[str, Any], text: str = "") -> Setting:
    return Setting(Plan(**plan), 2, hardware_for("cpu"), pipeline=text)


def _bodies(program: Planned) -> list[str]:
    return [str(gm.graph) for gm in program.graphs.values()]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_printed_pipeline_runs_and_makes_the_same(plan: dict[str, Any]) -> None:
    made = build(setting_of(plan))
    text = str(made)
    assert build(setting_of(plan, text)) == made
    whole = run(captured("gpt"), setting_of(plan))
    again = run(captured("gpt"), setting_of(plan, text))
    assert _bodies(again) == _bodies(whole)
    assert [e.pass_spec for e in again.history] == [e.pass_spec for e in whole.history]


def test_options_and_passes_follow_the_text() -> None:
    text = str(build(setting_of(PLANS[1])))
    far = text.replace("prefetch-gathers{distance=2}", "prefetch-gathers{distance=0}  # closer")
    left_out = "\n".join(line for line in text.splitlines() if not line.startswith("sync-buffers"))
    nearer, without = (run(captured("gpt"), setting_of(PLANS[1], t)) for t in (far, left_out))
    assert "prefetch-gathers{distance=0}" in [e.pass_spec for e in nearer.history]
    assert _bodies(nearer) == _bodies(run(captured("gpt"), setting_of(PLANS[1] | {"prefetch": 0})))
    assert _bodies(nearer) != _bodies(run(captured("gpt"), setting_of(PLANS[1])))
    assert len(without.history) == len(nearer.history) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("splt", r"no pass is named 'splt'.*split"),
        ("cast{compute=bf16}", r"cast: compute is fp32 by the plan, and bf16 in the pipeline"),
        ("sink-waits{in_flght=2}", r"sink-waits has no option 'in_flght'.*in_flight"),
        ("sink-waits{in_flight=two}", r"sink-waits: in_flight is 'two'. It takes int."),
        ("sink-waits{in_flight}", r"'in_flight' in .* is not of the form name=value"),
        ("sink-waits{in_flight=2", r"has no closing brace"),
        ("release, merge-tied", r"release runs before what it needs: "),
    ],
)
def test_a_wrong_text_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build(setting_of({"stage": 3}, text))


NAMES = st.from_regex(r"[a-z]{1,6}(-[a-z]{1,6})?", fullmatch=True)
VALUES = st.from_regex(r"[a-z0-9.]{1,6}", fullmatch=True) | st.just("{'a': 1, 'b': [2, 3]}")


@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=5))
def test_what_is_written_is_read(passes: list[tuple[str, dict[str, str]]]) -> None:
    specs = [
        name + (f"{{{','.join(f'{k}={v}' for k, v in options.items())}}}" if options else "")
        for name, options in passes
    ]
    assert parse("\n".join(specs)) == passes == parse(", ".join(specs))


def test_from_the_shell(tmp_path: Path) -> None:
    runner = CliRunner()
    printed = runner.invoke(app, ["passes", "--stage", "3"])
    assert printed.exit_code == 0, printed.output
    file = tmp_path / "passes.txt"
    file.write_text(printed.output.replace("in_flight=1", "in_flight=2"))
    again = runner.invoke(app, ["passes", "--stage", "3", "--pipeline", f"@{file}"])
    assert again.exit_code == 0 and "sink-waits{in_flight=2}" in again.output
