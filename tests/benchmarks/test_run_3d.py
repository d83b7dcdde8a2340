"""The script for a day on many GPUs runs here on gloo ranks with tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.parallel.run_3d import (
    LLAMA_32B,
    RECOMPUTED,
    arguments,
    kept_bytes,
    parity_layouts,
    predicted_gib,
    run_all,
    speed_layouts,
)
from ridgeline.parallel.layout import check_layout
from ridgeline.parallel.verify import workload
from ridgeline.train.presets import PRESETS
from tests.parallel.harness import run_ranks


def _run(rank: int, out: str) -> list[str]:
    flags = ["--device", "cpu", "--tiny", "--steps", "1", "--out", out]
    flags += ["--commit", "abc", "--only", "DP2 (ZeRO-3)", "PP2 (1f1b)"]
    return run_all(arguments(flags), torch.device("cpu"))


@pytest.mark.dist
def test_every_part_runs_and_writes_its_rows(tmp_path):
    results = run_ranks(2, _run, str(tmp_path), timeout_s=400)
    assert results == [[]] * 2
    path = tmp_path / "cpux2" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    parity = [row for row in rows if "parity" in row]
    speed = [row for row in rows if "median_us" in row]
    checkpoint = [row for row in rows if "checkpoint" in row]
    verified = [row["verify"] for row in rows if "verify" in row]
    assert len(verified) == 2 and all(one["ok"] and one["error"] < 1e-5 for one in verified)
    assert [min(row["links_gbps"].values()) > 0 for row in rows if "links_gbps" in row] == [True]
    assert len(parity) == 1 and parity[0]["parity"]["ok"]
    assert len(speed) == 2 + 2 and len(checkpoint) == 1
    assert checkpoint[0]["checkpoint"]["equal"]
    for row in speed:
        assert row["tokens_per_s_per_gpu"] > 0 and row["step_ms"]["compute"] > 0
        assert 0 < row["mfu_causal"] < row["mfu_noncausal"] < 1
    assert {(row["run"], row["commit"]) for row in rows} == {(rows[0]["run"], "abc")}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_listed_layout_can_run(ranks):
    for layout in parity_layouts(ranks) + speed_layouts(ranks, True):
        for shape in (PRESETS["llama-8b"], LLAMA_32B):
            work = workload(shape, 8192, layout.num_microbatches or 1)
            assert check_layout(layout, work, world_size=ranks) == []


def test_what_is_predicted_to_fit():
    shape = PRESETS["llama-8b"]
    four = [predicted_gib(layout, shape, 8192, "float32") for layout in speed_layouts(4, True)]
    assert all(20 < gib < 126 for gib in four)
    two = [predicted_gib(layout, shape, 8192, "float32") for layout in speed_layouts(2, True)]
    assert all(60 < gib < 126 for gib in two)
    (one,) = speed_layouts(1, True)
    full = replace(one, activation_checkpointing="full")
    assert predicted_gib(full, shape, 8192, "float32") > 128  # the script leaves it out
    assert predicted_gib(one, shape, 8192, "bfloat16") < 126  # and recomputes nothing here
    kept = [kept_bytes(shape, replace(one, activation_checkpointing=kind)) for kind in RECOMPUTED]
    assert kept == sorted(kept, reverse=True) and kept[-1] == 2


def test_a_hang_ends_the_process_with_its_stacks(tmp_path):
    script = (
        "import time, types\n"
        "from benchmarks.parallel.run_3d import Run\n"
        "run = Run.__new__(Run)\n"
        "run.args, run.cuda = types.SimpleNamespace(hang_s=0.2), True\n"
        "run.phase()\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "Timeout" in done.stderr
