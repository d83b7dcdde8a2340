"""The script for a day on many GPUs runs here on four gloo ranks with tiny shapes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.parallel.run_3d import (
    LLAMA_32B,
    arguments,
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
    flags = ["--device", "cpu", "--tiny", "--steps", "1", "--large", "--out", out]
    flags += ["--only", "DP2 (ZeRO-3) x PP2 (1f1b)", "TP2+SP x PP2 (1f1b)"]
    return run_all(arguments(flags), torch.device("cpu"))


@pytest.mark.dist
def test_every_part_runs_and_writes_its_rows(tmp_path):
    results = run_ranks(4, _run, str(tmp_path), timeout_s=400)
    assert results == [[]] * 4
    path = tmp_path / "cpux4" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    parity = [row for row in rows if "parity" in row]
    speed = [row for row in rows if "median_us" in row]
    checkpoint = [row for row in rows if "checkpoint" in row]
    assert len(parity) == 2 and all(row["parity"]["ok"] for row in parity)
    assert len(speed) == 2 + 2 and len(checkpoint) == 1
    assert all(row["checkpoint"]["equal"] for row in checkpoint)
    for row in speed:
        assert row["tokens_per_s_per_gpu"] > 0 and row["step_ms"]["compute"] > 0
        assert 0 < row["mfu_causal"] < row["mfu_noncausal"] < 1
    assert {row["run"] for row in rows} == {rows[0]["run"]}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_listed_layout_can_run(ranks):
    for layout in parity_layouts(ranks) + speed_layouts(ranks, True):
        for shape in (PRESETS["llama-8b"], LLAMA_32B):
            work = workload(shape, 8192, layout.num_microbatches or 1)
            assert check_layout(layout, work, world_size=ranks) == []


def test_what_is_predicted_to_fit():
    shape = PRESETS["llama-8b"]
    four = [predicted_gib(layout, shape, 8192, "float32") for layout in speed_layouts(4, True)]
    assert all(20 < gib < 128 for gib in four)
    (one,) = speed_layouts(1, True)
    assert predicted_gib(one, shape, 8192, "float32") > 128  # the script leaves it out
    assert predicted_gib(one, shape, 8192, "bfloat16") < 128
