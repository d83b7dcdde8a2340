"""`tune`: what it keeps, what `explain` then says, and machines on which it has nothing to time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ridgeline.cli import main as cli
from ridgeline.cli.tune import TuneAttention
from ridgeline.core import tuned
from ridgeline.core.arch import pretend
from ridgeline.kernels.attention import config

ROOT = Path(__file__).parents[2]

INTERPRETED = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from ridgeline.cli.tune import TuneAttention, tune
from ridgeline.core import registry
from ridgeline.kernels.attention import config, triton, tune as sweep
from ridgeline.kernels.attention.ref import attention_ref

every = sweep.configs_of
sweep.configs_of = lambda *args: every(*args)[:1] + every(*args)[-3:]
broken = sweep.Bench.launches
def launches(bench, tile):  # one candidate writes nothing: it must not be taken
    if tile == every(flags.problem(), arch, bench.kernel)[-2]:
        bench.out.zero_()
        return []
    return broken(bench, tile)
sweep.Bench.launches = launches

def timer(runs, repetitions):
    for run in runs:
        run()
    return [100.0, 50.0, 70.0, 70.0][:len(runs)]

arch = triton.arch_of(torch.device("cpu"))
flags = TuneAttention(seqlen=8, seqlen_k=100, head_dim=16, heads=2, kv_heads=1, causal=True,
                      dtype="float32")
result = tune(flags, timer)
x = sweep.problem_inputs(flags.problem(), "cpu")
out, lse = triton.forward(x.q, x.k, x.v, x.options, x.extras)
exact, _ = attention_ref(x.q, x.k, x.v, x.options, x.extras)
result["error"] = (out - exact).abs().max().item()
result["used"] = config.config_source(flags.problem(), arch)
print(json.dumps(result))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_fastest_that_agrees_is_kept_and_used(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    [kernel] = said["kernels"]
    assert (kernel["kernel"], kernel["tried"], kernel["failed"]) == ("decode", 4, 1)
    assert kernel["left"] == 0
    assert (kernel["shipped_us"], kernel["best_us"]) == (100.0, 50.0)
    assert kernel["best"] != kernel["shipped"]
    [versions] = json.loads(Path(said["file"]).read_text()).values()
    kept = versions["attention"][kernel["key"]]
    assert kept == {"config": kernel["best"], "us": 50.0, "shipped_us": 100.0}
    assert said["device"] == "Triton interpreter" and said["used"] == "tuned"
    assert said["error"] < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_one_line(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["tune", "attention", "--seqlen", "1024"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("ridgeline: tune: no CUDA device is usable here")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("attention --seqlen 8 --workers -1", "workers must not be negative, got -1"),
        ("attention --seqlen 8 --seconds 0", "seconds must be positive, got 0"),
        ("attention --seqlen 0", "seqlen must be at least 1, got 0"),
        ("w4a16 --m 1", "the next word must be one of attention, got 'w4a16'"),
    ],
)
def test_bad_input(capsys, words, part):
    assert cli.main(["tune", *words.split()]) == 2
    assert part in capsys.readouterr().err


def test_explain_says_where_the_tile_comes_from(capsys):
    words = "attention --seqlen 1024 --head-dim 64 --arch sm90 --impl triton"
    config.forget_kept()
    assert cli.main(["explain", *words.split()]) == 0
    assert "(from the shipped table)" in capsys.readouterr().out
    problem = TuneAttention(seqlen=1024, head_dim=64).problem()
    tile = config.TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=4)
    entry = {"config": asdict(tile)}
    tuned.save("attention", pretend("sm90"), {config.tuning_key(problem, "fwd"): entry})
    config.forget_kept()
    try:
        assert cli.main(["explain", *words.split()]) == 0
        said = capsys.readouterr().out
        assert "block_m 64, block_n 32, num_warps 4, num_stages 4 (tuned on this machine)" in said
        assert cli.main(["explain", *words.replace("sm90", "sm80").split()]) == 0
        assert "num_stages 2 (fallback)" in capsys.readouterr().out
    finally:
        config.forget_kept()
