"""A file of tests in a process of its own, under Triton's interpreter, which is chosen when Triton
is imported."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def passed(file: str, timeout_s: int = 600) -> int:
    """How many tests of a file (relative to tests/) pass, which all have to.

    Skips the caller where there is no Triton, and on a GPU, where the file's tests run themselves.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip(f"{file} runs on the GPU itself")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(ROOT / "tests" / file)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout[-3000:]
    return int(found[1])
