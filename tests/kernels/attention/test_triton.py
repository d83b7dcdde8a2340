"""The Triton implementation: values in its CPU interpreter (on a GPU: test_triton_gpu.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str | None]:
    """{test: error} of every interpreted case, run once in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.attention.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {line["test"]: line["error"] for line in lines}


@pytest.mark.parametrize(
    "kind, least", [("fwd", 34), ("bwd", 33), ("decode", 14), ("mods", 8), ("bad row", 12)]
)
def test_interpreted_values(interpreted, kind, least):
    mine = {name: error for name, error in interpreted.items() if name.startswith(kind)}
    assert len(mine) >= least
    wrong = [f"{name}: {error}" for name, error in mine.items() if error]
    assert not wrong, f"{len(wrong)} of {len(mine)}:\n" + "\n".join(wrong[:10])
