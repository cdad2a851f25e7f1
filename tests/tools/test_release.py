"""The release: wheel and sdist have every file, and the wheel works in an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import zerofx

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis"
)
TRAINS = """
import torch, zerofx
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

def losses(model, optimizer):
    found = []
    torch.manual_seed(1)
    for _ in range(4):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found

plain = build()
wanted = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
model = zerofx.compile(build(), {"kernels": "aten"})
assert losses(model, torch.optim.AdamW(model.parameters(), lr=1e-2)) == wanted
assert wanted[-1] < wanted[0]
print(zerofx.__file__, "trained")
"""
MODEL = """
import torch
from torch import nn

def build():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        return model, (torch.zeros(8, 16),), {}
"""


def shipped() -> set[str]:
    """Return the files that an installed zerofx needs: every source and data file."""
    package = ROOT / "zerofx"
    files = (p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(ROOT)) for p in files}


def ran(*argv: str | Path, cwd: Path) -> str:
    """Run a command without this checkout on its path; return what it printed."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COLUMNS")}
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_data_files_are_declared() -> None:
    """Each file of the package is a module, or matches a pattern of package-data."""
    text = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r"package-data\]\nzerofx = \[(.*?)\]", text, re.DOTALL)
    assert declared is not None
    found = {
        str(path.relative_to(ROOT))
        for pattern in re.findall(r'"(.*?)"', declared[1])
        for path in (ROOT / "zerofx").glob(pattern)
    }
    assert {name for name in shipped() if not name.endswith(".py")} == found


def test_the_version_is_in_one_place() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'version = {attr = "zerofx.__version__"}' in text
    assert re.fullmatch(r"\d+\.\d+\.\d+", zerofx.__version__)
    assert not re.search(r'^version = "', text, re.MULTILINE)


@pytest.mark.slow
def test_the_wheel_works_alone(tmp_path: Path) -> None:
    """Build both, install the wheel with torch 2.13, and use it: version, memory, training."""
    source, dist, venv = tmp_path / "source", tmp_path / "dist", tmp_path / "venv"
    shutil.copytree(ROOT, source, ignore=IGNORED)
    ran(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    try:
        ran(python, "-m", "pip", "install", "-q", "build", "setuptools>=77", cwd=tmp_path)
    except AssertionError as error:
        pytest.skip(f"no package index can be reached: {str(error)[-200:]}")
    ran(python, "-m", "build", "--no-isolation", "--outdir", dist, source, cwd=tmp_path)
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as packed:
        assert {n for n in packed.namelist() if n.startswith("zerofx/")} == shipped()
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped() <= inside
    assert {"tests/tools/test_release.py", "constraints.txt", "examples/hello.py"} <= inside
    constraints = ROOT / "constraints.txt"
    ran(python, "-m", "pip", "install", "-q", "-c", constraints, wheel, cwd=tmp_path)
    said = ran(venv / "bin" / "zerofx", "--version", cwd=tmp_path)
    assert re.match(rf"zerofx {re.escape(zerofx.__version__)}, torch 2\.13\.0\S*, Python 3", said)
    (tmp_path / "model.py").write_text(MODEL)
    text = ran(venv / "bin" / "zerofx", "memory", "model.py:build", "--world", "2", cwd=tmp_path)
    assert text.startswith("# Sequential: training   stage=3 world=2") and "total" in text
    page = tmp_path / "page.html"
    ran(venv / "bin" / "zerofx", "view", "model.py:build", "--hardware", "dgx-h100", "--out", page,
        cwd=tmp_path)  # fmt: skip
    assert "Content-Security-Policy" in page.read_text()
    where = ran(python, "-c", TRAINS, cwd=tmp_path)
    assert str(venv) in where and "trained" in where
