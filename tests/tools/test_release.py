"""The release: wheel and sdist have every file, and both work in an empty environment.

`ZEROFX_TEST_TORCH="2.11.0 2.13.0"` (as `make release` sets it) names the versions of torch with
which they are tried; by default it is the one in constraints.txt. Archives that work are left in
`ZEROFX_DIST`, if it is set.
"""

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
from zerofx import versions
from zerofx.errors import TorchVersionError

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text("utf-8")
(PINNED,) = re.findall(r"^torch==(\S+)$", CONSTRAINTS, re.MULTILINE)
TORCH = os.environ.get("ZEROFX_TEST_TORCH", PINNED).replace(",", " ").split()
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
    declared = re.search(r"package-data\]\nzerofx = \[(.*?)\]", PYPROJECT, re.DOTALL)
    assert declared is not None
    found = {
        str(path.relative_to(ROOT))
        for pattern in re.findall(r'"(.*?)"', declared[1])
        for path in (ROOT / "zerofx").glob(pattern)
    }
    assert {name for name in shipped() if not name.endswith(".py")} == found


def test_the_version_is_in_one_place() -> None:
    assert 'version = {attr = "zerofx.__version__"}' in PYPROJECT
    assert re.fullmatch(r"\d+\.\d+\.\d+", zerofx.__version__)
    assert not re.search(r'^version = "', PYPROJECT, re.MULTILINE)


def test_the_changelog_begins_with_this_version() -> None:
    """Its first heading is that of changes to come, which names this version, or its release."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    heading, _, rest = text.partition("\n## ")[2].partition("\n")
    if heading == "Unreleased":
        first = " ".join(rest.partition("\n### ")[0].split())
        assert f"will be {zerofx.__version__}" in first
    else:
        assert re.fullmatch(rf"{re.escape(zerofx.__version__)} - \d{{4}}-\d\d-\d\d", heading)


def test_the_range_of_torch_is_the_one_that_the_readme_names() -> None:
    low, beyond = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', PYPROJECT)[0]
    high = int(beyond) - 1
    assert f"torch 2.{low} to 2.{high}" in (ROOT / "README.md").read_text("utf-8")
    assert (f"2.{low}", f"2.{beyond}") == (versions.LEAST, versions.BELOW)
    assert PINNED.startswith(f"2.{high}.")
    tried = re.search(r'ZEROFX_TEST_TORCH="(\S+) (\S+)"', (ROOT / "Makefile").read_text("utf-8"))
    assert tried is not None
    assert tried[1].startswith(f"2.{low}.") and tried[2] == PINNED


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.10.1", "refused"),
        ("1.13.0+cu117", "refused"),
        ("2.9.0.dev20250901+cpu", "refused"),
        ("2.11.0", ""),
        ("2.11.0a0+git123abc", ""),
        ("2.13.0+cpu", ""),
        ("2.14.0", "warned"),
        ("2.14.0.dev20260901+cu128", "warned"),
        ("3.0.0", "warned"),
        ("unknown", ""),
        ("", ""),
    ],
)
def test_a_torch_outside_the_range_is_told(
    torch: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "_installed", lambda: torch)
    if said == "refused":
        with pytest.raises(TorchVersionError, match="pip install 'torch>=") as refused:
            versions.check_torch("0.1.0")
        assert f"torch {torch} is too old for zerofx 0.1.0" in str(refused.value)
        return
    versions.check_torch("0.1.0")
    assert len(caplog.messages) == (said == "warned")
    for message in caplog.messages:
        assert f"torch {torch} is newer than what zerofx 0.1.0 supports" in message
        assert message.endswith(f"pip install 'torch>={versions.LEAST},<{versions.BELOW}'.")


@pytest.mark.parametrize("installed", ["2.10.0", "2.14.0.dev20260901+cpu"])
def test_the_import_checks_torch(installed: str, tmp_path: Path) -> None:
    """Its version is read from its metadata, so that nothing has to be imported."""
    folder = tmp_path / f"torch-{installed}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)

    done = run("-c", "import zerofx, zerofx.errors")
    assert done.stderr.count(f"torch {installed} is ") == 1
    assert (
        (done.returncode != 0) == ("TorchVersionError" in done.stderr) == ("too old" in done.stderr)
    )
    assert ("too old" in done.stderr) == (installed == "2.10.0")
    told = run("-m", "zerofx", "--version")
    assert told.returncode == 0 and f"torch {installed}," in told.stdout


def test_each_integration_has_an_extra() -> None:
    """A package that an integration imports is in the extra of that name."""
    extras = dict(re.findall(r'^(\w+) = \[((?:\s*"[^"]+",?)+)\s*\]', PYPROJECT, re.MULTILINE))
    imported = {
        (name or other).partition(".")[0]
        for path in (ROOT / "zerofx" / "integrations").glob("*.py")
        for name, other in re.findall(
            r"^ *(?:from (\S+) import|import (\S+))", path.read_text("utf-8"), re.MULTILINE
        )
    }
    others = {"accelerate", "lightning", "transformers"}
    assert others <= imported
    for name in others:
        assert f'"{name}>=' in extras[name], name
    known = set(sys.stdlib_module_names) | set(re.findall(r'"([a-z]+)', extras["dependencies"]))
    optional = {
        "torchmetrics",  # Lightning brings it along
        "wandb",  # as DeepSpeed's own monitors, which need it only if they are asked for
    }
    assert imported - known - others - optional - {"zerofx", "yaml"} == set()


def constrained(version: str, folder: Path) -> Path:
    """Write the constraints with another version of torch, and without what that one pins."""
    lines = [
        line for line in CONSTRAINTS.splitlines()
        if version == PINNED or not re.match(r"(torch|triton|setuptools)==", line)
    ]  # fmt: skip
    path = folder / "constraints.txt"
    path.write_text("\n".join([*lines, f"torch=={version}"]) + "\n")
    return path


def test_an_editable_install_is_found_from_the_folder_of_the_clone(tmp_path: Path) -> None:
    """There the clone is a folder of the same name, which Python finds before any finder."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml needs it to build")
    clone, site = tmp_path / "zerofx", tmp_path / "site"
    shutil.copytree(ROOT / "zerofx", clone / "zerofx", ignore=IGNORED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    site.mkdir()
    build = "from setuptools import build_meta; print(build_meta.build_editable('../site'))"
    ran(sys.executable, "-W", "ignore", "-c", build, cwd=clone)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    there = f"import site, sys; sys.path.insert(0, ''); site.addsitedir({str(site)!r})"
    found = "import zerofx; print(zerofx.__file__)"
    said = ran(sys.executable, "-I", "-S", "-c", f"{there}; {found}", cwd=tmp_path)
    assert said.strip() == str(clone / "zerofx" / "__init__.py")


@pytest.mark.slow
@pytest.mark.parametrize("version", TORCH)
def test_wheel_and_sdist_work_alone(version: str, tmp_path: Path) -> None:
    """Build both, install each with a version of torch, and use it."""
    source, dist, venv = tmp_path / "source", tmp_path / "dist", tmp_path / "venv"
    shutil.copytree(ROOT, source, ignore=IGNORED)
    ran(sys.executable, "-m", "venv", venv, cwd=tmp_path)
    python = venv / "bin" / "python"
    pip = python, "-m", "pip", "install", "-q", "--disable-pip-version-check"
    try:
        ran(*pip, "build", "setuptools>=77", cwd=tmp_path)
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
    ran(*pip, "-c", constrained(version, tmp_path), wheel, cwd=tmp_path)
    check_installed(venv, version, tmp_path)
    ran(python, "-m", "pip", "uninstall", "-q", "-y", "zerofx", cwd=tmp_path)
    ran(*pip, "--no-deps", "--no-build-isolation", sdist, cwd=tmp_path)
    check_installed(venv, version, tmp_path)
    if kept := os.environ.get("ZEROFX_DIST"):
        (ROOT / kept).mkdir(exist_ok=True)
        for archive_path in (wheel, sdist):
            shutil.copy(archive_path, ROOT / kept)


def check_installed(venv: Path, version: str, folder: Path) -> None:
    """Check the version, memory, the page and training of an installed zerofx."""
    command, model = venv / "bin" / "zerofx", "model.py:build"
    said = ran(command, "--version", cwd=folder)
    own, torch = re.escape(zerofx.__version__), re.escape(version)
    assert re.match(rf"zerofx {own}, torch {torch}(\+\S+)?, Python 3", said)
    (folder / "model.py").write_text(MODEL)
    text = ran(command, "memory", model, "--world", "2", cwd=folder)
    assert text.startswith("# Sequential: training   stage=3 world=2") and "total" in text
    page = folder / "page.html"
    ran(command, "view", model, "--hardware", "dgx-h100", "--out", page, cwd=folder)
    assert "Content-Security-Policy" in page.read_text()
    where = ran(venv / "bin" / "python", "-c", TRAINS, cwd=folder)
    assert str(venv) in where and "trained" in where
