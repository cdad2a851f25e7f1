"""The command line: every command, its JSON, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import stack

import zerofx
from zerofx.capture import capture
from zerofx.tools import cli

STACK = str(Path(__file__).parents[1] / "support" / "stack.py") + ":stack"
PLAN = ["--set", "bucket_bytes=0", "--set", "persist_below=0", "--set", "kernels=aten"]


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    """Run the command line in this process; return what it printed (on stderr where it failed)."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(argv))
    out = capsys.readouterr()
    assert ended.value.code == status, out.err
    assert status == 0 or not out.out
    return out.err if status else out.out


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--json"))


def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "prefetch-gathers{distance=1}" in run(capsys, "passes")
    assert "nodes" in run(capsys, "passes", STACK)
    history = run_json(capsys, "passes", STACK, *PLAN)["history"]
    assert history[0]["pass"] == "capture" and history[-1]["comm_bytes"] > 0


def test_dump(capsys: pytest.CaptureFixture[str]) -> None:
    assert "zfx.all_gather" in run(capsys, "dump", STACK, "--world", "4", *PLAN)
    summary = run(capsys, "dump", STACK, "--level", "summary", *PLAN)
    assert len(summary.splitlines()) == 1 and summary.startswith("# 33 assign-slots")
    early = run_json(capsys, "dump", STACK, "--pass", "merge-tied", "--level", "full", *PLAN)
    assert early["pass"] == "merge-tied" and "def joint(" in early["lines"]


def test_schedule_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "<- peak" in run(capsys, "schedule", STACK, "--world", "4", *PLAN)
    twin = run_json(capsys, "schedule", STACK, "--world", "4", *PLAN)
    memory = run_json(capsys, "memory", STACK, "--world", "4", *PLAN)
    assert twin["peak_bytes"] == memory["peak_bytes"]
    none = run_json(
        capsys, "memory", STACK, "--world", "4", *PLAN, "--optimizer-bytes", "0", "--loss-only"
    )
    assert none["peak_bytes"] == memory["peak_bytes"] - memory["at_peak"]["optimizer"]


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "diff", STACK, *PLAN, "--to", "stage=2")
    assert "plan.stage" in text and "+    refresh b0" in text
    twin = run_json(capsys, "diff", STACK, *PLAN, "--to-world", "4")
    assert {row["field"] for row in twin["plan"]} == {"world"}
    twin = run_json(capsys, "diff", STACK, *PLAN, "--stage", "3", "--to", "stage=1")
    assert twin["plan"] == [{"field": "plan.stage", "left": 3, "right": 1}]


def test_plan_files_and_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("stage: 1\nbucket_bytes: 0\nkernels: aten\n")
    assert "stage=1 world=3" in run(capsys, "memory", STACK, "--plan", str(path), "--world", "3")
    assert "stage=2" in run(capsys, "memory", STACK, "--plan", str(path), "--stage", "2")


def test_the_plan_of_a_ds_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, out = tmp_path / "ds_config.json", tmp_path / "plan.yaml"
    config.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "x": 1}')
    ran = ("plan-for", "--from", str(config), "--auto", "bf16=true", "--set", "kernels=aten")
    said = run(capsys, *ran)
    wanted = zerofx.Plan(stage=2, precision="bf16", kernels="aten")
    assert zerofx.Plan.from_yaml(said) == wanted
    assert re.search(r"# x +1 +unknown", said)
    assert "zero_optimization.stage" in run(capsys, *ran, "--out", str(out))
    assert zerofx.Plan.load(out) == wanted
    for wrong, message in (
        (("--from", str(config)), "bf16.enabled = 'auto'"),
        ((*ran[1:], "--target", "x:y"), "Leave out"),
        ((), "--from ds_config.json"),
    ):
        with pytest.raises(SystemExit):
            cli.main(["plan-for", *wrong])
        assert message in capsys.readouterr().err


def test_an_emitted_directory_is_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = {"bucket_bytes": 0, "persist_below": 0, "kernels": "aten"}
    program = zerofx.rewrite(capture(*stack()), plan, 4)
    folder = str(program.emit(tmp_path / "emitted"))
    twin = run_json(capsys, "memory", folder)
    assert twin["peak_bytes"] == program.memory().peak_bytes
    assert "def forward" in run(capsys, "dump", folder, "--level", "regions")
    assert "Its plan is in plan.yaml" in run(capsys, "memory", folder, "--stage", "2", status=1)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["memory", "nowhere:x"], "no module 'nowhere'"),
        (["memory", "nothing"], "Give package.module:function"),
        (["memory", "absent.py:f"], "absent.py does not exist"),
        (["memory", STACK.replace(":stack", ":stock")], "Did you mean 'stack'?"),
        (["memory", STACK.replace(":stack", ":Stack")], "(module, args, kwargs)"),
        (["memory", "hf:absent/config.json"], "hf:absent/config.json does not exist"),
        (["memory", STACK, "--set", "stgae=2"], "Did you mean 'stage'"),
        (["memory", STACK, "--set", "stage"], "Write key=value"),
        (["memory", STACK, "--stage", "4"], "stage"),
        (["memory", STACK, "--machine", "abacus"], "unknown hardware 'abacus'"),
        (["memory", STACK, "--plan", "absent.yaml"], "absent.yaml"),
        (["dump", STACK, "--pass", "prefetch"], "no pass is named 'prefetch'"),
        (["dump", STACK, "--level", "all"], "dump level 'all' is unknown"),
        (["diff", STACK], "Add --to stage=2"),
    ],
)
def test_mistakes_end_with_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    text = run(capsys, *argv, status=1)
    assert words in text and "Traceback" not in text and len(text.splitlines()) == 1


def test_usage_errors_are_typers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such option" in run(capsys, "memory", STACK, "--wrold", "2", status=2)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "units"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 16, "n_layer": 2,
          "n_head": 2, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}, "transformer.h"),
        ({"model_type": "llama", "intermediate_size": 32, "vocab_size": 32, **SMALL},
         "model.layers"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"],
          "intermediate_size": 32, "vocab_size": 32, **SMALL}, "bert.encoder"),
        ({"model_type": "vit", "image_size": 16, "patch_size": 8, "intermediate_size": 32, **SMALL},
         "vit."),
    ],
    ids=lambda v: v["model_type"] if isinstance(v, dict) else "",
)  # fmt: skip
def test_transformers_configs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: dict[str, Any], units: str
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    twin = run_json(capsys, "memory", f"hf:{path}", "--batch", "2", "--seq", "8", *PLAN)
    assert twin["at_peak"]["gradients"] > 0
    assert any(h["module"].startswith(units) for h in twin["held_at_peak"])


def test_doctor_finds_this_installation_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from zerofx.tools import doctor

    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(doctor.CHECKS, "compiler")  # tested slowly, and by every Inductor test
    twin = run_json(capsys, "doctor")
    assert twin["is_well"] and {f["name"] for f in twin["findings"]} == set(doctor.CHECKS)


def test_doctor_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zerofx.tools import doctor

    monkeypatch.setattr(doctor, "CHECKS", {"training": doctor._training})
    monkeypatch.setattr(doctor.torch, "equal", lambda a, b: False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 1
    assert "FAIL  training" in capsys.readouterr().out


def test_demo_passes_its_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--steps" in run(capsys, "demo", "--help")


def test_help_does_not_load_torch() -> None:
    probe = "import sys, zerofx.tools.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zerofx", "memory", "nowhere:x"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("TargetError: ")
    assert done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.slow
def test_175_billion_parameters_on_paper() -> None:
    """96 layers on 512 ranks: under 2 minutes and 2 GB, nothing materialised."""
    probe = (
        "import resource, sys\n"
        "from zerofx.tools.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as e: assert not e.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "sys.stderr.write(f'{used.ru_utime + used.ru_stime} {used.ru_maxrss / 2**20}')\n"
    )
    model = [
        "zerofx.tools.demo.targets:gpt_175b",
        "--world",
        "512",
        "--machine",
        "cuda-nccl",
        "--json",
    ]
    for command in ("memory", "schedule"):
        done = subprocess.run(
            [sys.executable, "-c", probe, command, *model], capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        seconds, gib = map(float, done.stderr.split()[-2:])
        assert seconds < 120 and gib < 2
        twin = json.loads(done.stdout)
        assert twin["peak_bytes"] > 100 * 2**30
