"""What failed ranks said last, without what their launcher adds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from zerofx.errors import last_words

SCRIPT = """
import sys
print("a warning of no interest", file=sys.stderr)
raise ValueError("rank's own reason, 3 of 4")
"""


def test_a_rank_under_torchrun_is_heard(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode != 0 and "ChildFailedError" in ended.stderr
    said = last_words(ended.stderr, 5)
    assert said.splitlines()[-1] == "  ValueError: rank's own reason, 3 of 4"
    assert "elastic" not in said


def test_what_needs_no_launcher_is_left_as_it_is() -> None:
    assert last_words("one\ntwo\nthree\n", 2) == "  two\n  three"
    assert last_words("", 3) == ""


def test_its_log_goes_by_whatever_path_it_was_started() -> None:
    logged = "E1122 22:42:25.151000 1458 {}torch/distributed/elastic/multiprocessing/api.py:1] x"
    for path in ("", ".venv/lib/python3.11/site-packages/", "/opt/lib/"):
        said = f"Traceback (most recent call last)\nmine\n{logged.format(path)}\n"
        assert last_words(said, 5).splitlines()[-1] == "  mine"
