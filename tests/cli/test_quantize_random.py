"""ridgeline quantize killed anywhere: after any number of Python calls, inside blocks, between
them, or while files are written."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

from ridgeline.cli.quantize import quantize
from ridgeline.core import env
from tests.cli.test_quantize import TEXT, config_of, weights

ROOT = Path(__file__).parents[2]
CHILD = """
import os, signal, sys
from ridgeline.cli import main, quantize_report
from ridgeline.quant import calibrate
quantize_report.page, quantize_report.render = lambda *_: None, lambda _: ""
left, begin = int(sys.argv[1]), calibrate._Run.all_blocks
def count(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
def all_blocks(self, *rest):
    sys.setprofile(count)
    return begin(self, *rest)
calibrate._Run.all_blocks = all_blocks
code = main.main(sys.argv[2:])
sys.setprofile(None)
print("calls left", left)
sys.exit(code)
"""


def test_killed_at_random_points_it_ends_with_the_same_bytes(model_folder, tmp_path):
    """About 200,000 calls are a run; each next one goes on where the last was killed."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    expected = config_of(model_folder, text, tmp_path / "whole")
    quantize(expected)
    words = ["quantize", "--model", str(model_folder), "--text", str(text)]
    words += ["--method", "awq+gptq", "--group-size", "32", "--sequences", "8", "--device", "cpu"]
    words += ["--sequence-tokens", "64", "--batch-sequences", "2", "--held-out-windows", "3"]
    draw, codes = random.Random(0), []
    for limit in (200_000, 100_000, 50_000, 10**9):
        calls = draw.randrange(1, limit) if limit < 10**9 else limit
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(calls), *words, "--out", str(tmp_path / "out")],
            cwd=ROOT, env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
            capture_output=True, text=True,
        )  # fmt: skip
        codes.append(done.returncode)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if done.returncode == 0:
            break
        assert not (tmp_path / "out").exists()
    assert codes[0] == -signal.SIGKILL and codes[-1] == 0
    assert weights(tmp_path / "out") == weights(expected.out)
