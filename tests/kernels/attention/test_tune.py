"""The tuner's tensors pose the problem, its candidates compile without a GPU; on a GPU it runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.arch import detect, pretend
from ridgeline.kernels.attention import config
from ridgeline.kernels.attention.problem import AttentionProblem

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ridgeline.kernels.attention import triton as kernels
from ridgeline.kernels.attention import tune
from ridgeline.kernels.attention.triton_plan import problem_of

ROOT = Path(__file__).parents[3]
BASE = AttentionProblem(
    batch=2, seqlen_q=96, seqlen_k=128, heads=4, kv_heads=2, head_dim=64, head_dim_v=64, causal=True
)
OPTIONS = {
    "plain": {},
    "window": {"window_left": 20, "window_right": 3, "causal": False},
    "features": {"softcap": 5.0, "sinks": True, "alibi": True, "dropout": True},
    "bias": {"bias": True, "head_dim_v": 32},
    "varlen": {"varlen": True, "dtype": "float16"},
    "decode": {"seqlen_q": 1, "kv_cache": True},
    "paged": {"seqlen_q": 2, "page_size": 16, "kv_cache": True},
    "backward": {"direction": "bwd", "dtype": "float32"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_tensors_pose_the_problem(name):
    problem = replace(BASE, **OPTIONS[name])
    seen = problem_of(tune.problem_inputs(problem, "cpu"), problem.direction)
    neutral = {"seqused": problem.kv_cache, "kv_cache": problem.kv_cache}
    assert replace(seen, **neutral) == replace(problem, **neutral)
    for kernel in config.kernels_of(problem):
        assert config.tuning_key(seen, kernel) == config.tuning_key(problem, kernel)


def test_the_shipped_tile_is_the_first_candidate():
    for options in OPTIONS.values():
        problem = replace(BASE, **options)
        for kernel in config.kernels_of(problem):
            found = tune.configs_of(problem, pretend("sm90"), kernel)
            assert found[0] == tune.shipped_config(problem, pretend("sm90"), kernel)
            assert len(set(found)) == len(found) > 3


@pytest.mark.parametrize("name", ["paged", "backward"])
def test_candidates_compile_without_a_gpu(name):
    problem = replace(BASE, **OPTIONS[name])
    kernel = config.kernels_of(problem)[-1]
    tune._compile(problem, kernel, 90, tune.configs_of(problem, pretend("sm90"), kernel)[1])


@pytest.mark.parametrize("dtype, most", [("bfloat16", 80), ("float32", 130)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_candidates_are_few_and_the_nearest_come_first(dim, dtype, most):
    for direction in ("fwd", "bwd"):
        problem = replace(BASE, head_dim=dim, head_dim_v=dim, dtype=dtype, direction=direction)
        for kernel in config.kernels_of(replace(problem, seqlen_q=4096)):
            found = tune.configs_of(problem, pretend("sm90"), kernel)
            changes = [tune._changes(found[0], other) for other in found]
            assert len(found) <= most, (kernel, len(found))
            assert changes == sorted(changes) and changes.count(0) == 1


def _sleeps(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_compiling_ends_with_the_time():
    """What is not compiled by then is left, its process ended: this one sleeps for an hour."""
    began = time.monotonic()
    assert list(tune.compiled(_sleeps, [0.0], 1, began + 3600)) == [0.0]
    assert list(tune.compiled(_sleeps, [3600.0], 1, time.monotonic() + 1)) == []
    assert time.monotonic() < began + 1800
    assert list(tune.compiled(_sleeps, [3600.0], 0, began - 1)) == []


BACKWARD = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from ridgeline.core.progress import task
from ridgeline.kernels.attention import config, triton, tune
from ridgeline.kernels.attention.problem import AttentionProblem

every = tune.configs_of
tune.configs_of = lambda *args: every(*args)[:1] + every(*args)[-2:]
launches = tune.Bench.launches
tune.Bench.launches = lambda bench, tile: [] if tile == silent else launches(bench, tile)
problem = AttentionProblem(
    batch=1, seqlen_q=20, seqlen_k=40, heads=2, kv_heads=1, head_dim=24, head_dim_v=16,
    dtype="float16", causal=True, direction="bwd",
)
arch = triton.arch_of(torch.device("cpu"))
found = []
for kernel in ("dkdv", "dq"):
    silent = every(problem, arch, kernel)[-1]
    timer = lambda runs, repetitions: [run() or 10.0 / (1 + n) for n, run in enumerate(runs)]
    with task("tune", 3, "tiles") as advance:
        outcome = tune.tune_kernel(problem, arch, kernel, timer, advance=advance)
    tuned = {outcome.key: outcome.best}
    used = getattr(config.backward_config(problem, arch, tuned), kernel) == outcome.best
    found.append([kernel, outcome.tried, outcome.failed, outcome.best != outcome.shipped, used])
print(json.dumps(found))
"""


def test_backward_tiles_that_write_nothing_are_not_taken():
    """In the interpreter, with head dims that are padded in memory for the tensor descriptors."""
    done = subprocess.run(
        [sys.executable, "-c", BACKWARD],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [["dkdv", 3, 1, True, True], ["dq", 3, 1, True, True]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "varlen", "paged", "backward"])
def test_gpu_tuning_finds_no_slower_tile(name, monkeypatch):
    """The shipped tile and the two nearest to it: some ten seconds of compiling."""
    every = tune.configs_of
    monkeypatch.setattr(tune, "configs_of", lambda *args: every(*args)[:3])
    problem = replace(BASE, **{"seqlen_k": 1024, **OPTIONS[name], "dtype": "bfloat16"})
    arch = detect("cuda")
    for kernel in config.kernels_of(problem):
        steps = []
        outcome = tune.tune_kernel(
            problem, arch, kernel, tune.device_timer(arch), workers=2, seconds=40.0,
            advance=lambda amount=1, *, note="": steps.append(amount),  # noqa: B023
        )  # fmt: skip
        assert sum(steps) == outcome.tried + outcome.left == 3
        assert 0 < outcome.best_us <= outcome.shipped_us
        assert outcome.failed < outcome.tried
        x = tune.problem_inputs(problem, "cuda")
        tuned, _ = config.read_tuned({outcome.key: tune.entry(outcome)})
        assert tuned == {outcome.key: outcome.best}
        assert config.tuning_key(problem_of(x, problem.direction), kernel) in tuned
        assert kernels.forward(x.q, x.k, x.v, x.options, x.extras)[0].isfinite().all()
