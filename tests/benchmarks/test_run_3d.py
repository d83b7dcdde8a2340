"""The script for a day on many GPUs runs here on gloo ranks with tiny shapes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.parallel.run_3d import (
    LLAMA_32B,
    RECOMPUTED,
    Run,
    Trace,
    arguments,
    compared_layouts,
    judged,
    kept_bytes,
    parity_layouts,
    predicted_gib,
    run_all,
    speed_layouts,
    stage_transfers,
)
from ridgeline.kernels.attention.dispatch import attention_op, backward_op
from ridgeline.parallel import context
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
    assert parity[0]["parity"]["gradients"] == 38 and parity[0]["parity"]["attention"] == "cpu"
    assert {one["attention"] for one in verified} == {"cpu"}
    assert len(speed) == 2 + 2 and len(checkpoint) == 1
    assert checkpoint[0]["checkpoint"]["equal"]
    for row in speed:
        assert row["tokens_per_s_per_gpu"] > 0 and row["step_ms"]["compute"] > 0
        assert 0 < row["mfu_causal"] < row["mfu_noncausal"] < 1
    assert {(row["run"], row["commit"]) for row in rows} == {(rows[0]["run"], "abc")}


def _parity_of_a_ring_with_softmaxes_of_its_own(rank: int, out: str) -> list[str]:
    """The fault that the losses of a bf16 run hid: backward made a softmax of each share."""

    def own_softmax(dout: Any, dlse: Any, out: Any, lse: Any, *values: Any) -> Any:
        return backward_op(dout, dlse, *attention_op(*values), *values)

    context.backward_op = own_softmax
    flags = ["--device", "cpu", "--tiny", "--out", out, "--parts", "parity", "--only", "CP2"]
    return run_all(arguments(flags), torch.device("cpu"))


@pytest.mark.dist
def test_parity_sees_a_wrong_gradient(tmp_path):
    results = run_ranks(2, _parity_of_a_ring_with_softmaxes_of_its_own, str(tmp_path))
    assert results == [["parity CP2"]] * 2
    (line,) = (tmp_path / "cpux2" / "train.jsonl").read_text().splitlines()
    told = json.loads(line)["parity"]
    assert not told["ok"] and told["gradient_error"] > 10 * told["gradient_control"]
    assert told["error"] < 3 * told["control"] + 1e-3  # losses alone would have passed


def _through_host_memory(rank: int, out: str) -> list[str]:
    """As ranks that share a GPU talk: transfers staged, collectives by gloo anyway."""
    staged = stage_transfers("CPU")
    flags = ["--device", "cpu", "--tiny", "--out", out, "--parts", "verify"]
    args = arguments([*flags, "--only", "TP2+SP", "CP2", "PP2 (1f1b)"])
    failed = run_all(args, torch.device("cpu"))
    assert staged.m is not None  # kept until here
    return failed


@pytest.mark.dist
def test_ranks_that_share_a_gpu_send_through_host_memory(tmp_path):
    assert run_ranks(2, _through_host_memory, str(tmp_path)) == [[]] * 2
    rows = (tmp_path / "cpux2" / "train.jsonl").read_text().splitlines()
    assert [json.loads(row)["verify"]["error"] < 1e-5 for row in rows] == [True] * 3


def test_what_ranks_that_share_a_gpu_cannot_measure_is_refused(capsys):
    with pytest.raises(SystemExit):
        arguments(["--share-gpu", "--parts", "parity", "speed"])
    assert "--share-gpu takes --parts verify and parity" in capsys.readouterr().err
    args = arguments(["--share-gpu", "--parts", "parity", "--async-tp"])
    (plain, overlapped) = compared_layouts(args, 2)
    assert plain.dp_shard == 2 and overlapped.async_tp and overlapped.compile_blocks


def test_parity_is_judged_by_its_controls():
    ones = {"a": torch.ones(100), "b": torch.ones(3)}
    exact = Trace(losses=[5.0], norms=[2.0], exact_norms=[], gradients=ones)
    noisy = {"a": torch.full((100,), 1.01), "b": torch.full((3,), 1.02)}
    reference = Trace(
        losses=[5.0, 4.0], norms=[2.001, 1.501], exact_norms=[2.0, 1.5], gradients=noisy
    )
    control = replace(reference, losses=[5.0, 4.0001])
    assert judged(reference, reference, [control], exact)["ok"]
    wrong = {
        "losses": [5.0, 4.01],
        "norms": [2.02, 1.501],
        "exact_norms": [2.0, 1.51],  # a later step's gradient is not what it should be
        "gradients": noisy | {"a": torch.full((100,), 1.03)},
    }
    for name, value in wrong.items():
        told = judged(replace(reference, **{name: value}), reference, [control], exact)
        assert not told["ok"], name
    assert told["gradient"] == "a" and told["gradients"] == 2
    # runs part, each near to fp32 where it is: told, not judged
    parted = replace(reference, norms=[2.001, 1.9], exact_norms=[2.0, 1.899])
    told = judged(parted, reference, [control], exact)
    assert told["ok"] and told["norm_apart"] > 0.2 and told["norm_error"] < 1e-3
    missing = {"a": torch.full((100,), float("nan")), "b": noisy["b"]}
    told = judged(replace(reference, gradients=missing), reference, [control], exact)
    assert not told["ok"] and told["gradient"] == "a"


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


def _hang(rank: int, said: str) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    run = Run.__new__(Run)
    run.args, run.cuda = SimpleNamespace(hang_s=0.2), True
    run.phase()
    time.sleep(60)


def test_a_hang_ends_the_process_with_its_stacks(tmp_path):
    said = tmp_path / "said"
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, _hang, str(said))
    assert "Timeout" in said.read_text() and "in _hang" in said.read_text()
