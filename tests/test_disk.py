"""What a run of the tests leaves on the disk, and what it says when there is too little of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import NEEDED_MB, check_space

LEAVES = """
import multiprocessing, pathlib, tempfile

def test_passes(tmp_path):
    (tmp_path / "large").write_bytes(bytes(10**6))
    pathlib.Path(tempfile.mkdtemp(prefix="torchelastic_")).joinpath("log").write_text("x")
    multiprocessing.util.get_temp_dir()

def test_fails(tmp_path):
    (tmp_path / "seen").write_text("x")
    assert False
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_only_a_failed_tests_folder_is_left(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    place = tmp_path / "tmp"
    place.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", workers, "-p",
         "no:cacheprovider", str(tmp_path / "test_leaves.py"), "-c", "pyproject.toml"],
        cwd=Path(__file__).parents[1], env=environment | {"TMPDIR": str(place)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert [path.name.split("-")[0] for path in place.iterdir()] == ["pytest"]
    files = {path.name for path in place.rglob("*") if path.is_file() and path.name != ".lock"}
    assert files == {"seen"}


def test_too_little_space_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = sum(NEEDED_MB.values())
    folders = {"temporary files": tmp_path, "the user cache": tmp_path / "not" / "made"}
    free = SimpleNamespace(free=needed * 10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    check_space(folders)  # one file system holds both
    free.free -= 1
    with pytest.raises(pytest.UsageError) as caught:
        check_space(folders)
    assert str(caught.value).startswith(
        f"tests: {tmp_path} must have {needed} MB free for the user cache, got {needed - 1} MB; "
    )
