"""Every example runs, and prints what its docstring says it prints."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
NEEDS = {
    "images": "sklearn",
    "mid_epoch": "torchdata",
    "ray_train": "ray",
}  # packages of their users only


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"needs the package {NEEDS[path.stem]}")
    text = path.read_text()
    assert len(text.splitlines()) <= 60, "an example is one screen"
    tree = ast.parse(text)
    if any("zerofx.integrations" in ast.unparse(node) for node in tree.body[1:]):
        pytest.importorskip("accelerate")
    doc = ast.get_docstring(tree) or ""
    blocks = [b.splitlines() for b in doc.split("$ ")[1:]]
    assert blocks, "the docstring has the command and its output"
    for command, *output in blocks:
        expected = [line for line in output if line.strip()]
        assert expected, f"no output after {command!r}"
        program, *arguments = shlex.split(command)
        launcher = {
            "python": [sys.executable],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        }[program]
        places = [a.replace("examples/", f"{ROOT}/examples/") for a in arguments]
        done = subprocess.run(
            [*launcher, *places], capture_output=True, text=True, timeout=280, cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        said = [line for line in done.stdout.splitlines() if "(raylet)" not in line]
        assert [line for line in said if line.strip()] == expected
