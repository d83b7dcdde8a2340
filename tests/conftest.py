"""Shared by all tests: one thread (two workers share two cores), one seed, an empty cache, and one
temporary folder a run, removed at its end with all that any process has put there."""

from __future__ import annotations

import os
import shutil
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch

from ridgeline.core import env

torch.set_num_threads(1)

NEEDED_MB = {"temporary files": 200, "the user cache": 500}
"""With room to spare: a worker's files come to 80 MB at the most, SmolLM2 fetched and converted and
compiled kernels to 490 MB in an empty cache."""


def pytest_configure(config: pytest.Config) -> None:
    """In the process that was started (pytest-xdist's workers are its children)."""
    if hasattr(config, "workerinput"):
        return
    check_space({"temporary files": Path(tempfile.gettempdir()), "the user cache": env.cache_dir()})
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where it always is
    folder = tempfile.mkdtemp(prefix="ridgeline-")
    # At the very end, after multiprocessing has removed its own folder in it (priority -100).
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)
    # torchrun, multiprocessing, inductor, the CuTe DSL and browsers leave their folders behind.
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def check_space(folders: dict[str, Path]) -> None:
    """Whether the file systems hold what the tests write. Raises: pytest.UsageError, one line."""
    needed: dict[int, int] = {}
    for name, folder in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        device = there.stat().st_dev
        needed[device] = needed.get(device, 0) + NEEDED_MB[name]
        free = shutil.disk_usage(there).free // 10**6
        if free < needed[device]:
            raise pytest.UsageError(
                f"tests: {there} must have {needed[device]} MB free for {name}, got {free} MB; "
                "make room, or set TMPDIR and RIDGELINE_CACHE to folders of a larger disk"
            )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user cache: nothing a test writes stays, nothing kept changes a test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RIDGELINE_CACHE", str(folder))
    return folder
