"""The bar on real weights: GPTQ keeps at most half of plain rounding's perplexity increase."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "benchmarks" / "quant" / "bench_quantize.py"


@pytest.mark.slow
@pytest.mark.weights
def test_symmetric_group_64_keeps_at_most_half_of_the_increase() -> None:
    """32 x 512 calibration tokens, act-order with static groups, text not calibrated on."""
    command = [sys.executable, str(BENCH), "--dry-run", "--windows", "8", "--kl-windows", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    fraction = json.loads(last)["fractions"]["gptq symmetric"]["mean"]
    assert 0.0 < fraction <= 0.5, done.stdout[-1000:]
