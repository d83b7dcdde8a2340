"""`explain` says what the registry decides."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ridgeline.cli import main as cli
from ridgeline.cli.explain import explain
from ridgeline.cli.problems import AttentionQuery, W4A16Query, typical
from ridgeline.core import registry
from ridgeline.core.arch import pretend
from ridgeline.core.roofline import floor, ridge
from ridgeline.kernels.attention.problem import AttentionProblem
from ridgeline.kernels.w4a16.problem import W4A16Problem

PREFILL = "attention --seqlen 8192 --heads 16 --kv-heads 4 --head-dim 128 --causal --arch sm90"


def _json(capsys, words: str) -> dict:
    assert cli.main(["explain", *words.split(), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_attention_equals_the_registry(capsys):
    said = _json(capsys, PREFILL)
    problem = AttentionProblem(
        batch=1, seqlen_q=8192, seqlen_k=8192, heads=16, kv_heads=4, head_dim=128,
        head_dim_v=128, causal=True,
    )  # fmt: skip
    arch = pretend("sm90")
    decision = registry.explain(problem, arch)
    assert said["chosen"] == decision.chosen.name
    assert {impl["name"]: impl["refusal"] for impl in said["impls"]} == decision.refusals
    assert said["flops"] == 2 * 16 * (8192 * 8193 / 2) * 256
    assert said["bytes"] == problem.cost().bytes
    assert said["floor_us"] == floor(problem.cost(), arch.ceilings, "bfloat16").us
    assert said["ridge"] == ridge(arch.ceilings, "bfloat16")
    assert said["bound"] == "compute"


def test_the_tile_is_the_configs(capsys):
    said = _json(capsys, f"{PREFILL} --impl triton")
    problem = AttentionProblem(**said["problem"])
    config = registry.explain(problem, pretend("sm90"), "triton").config
    assert config is not None and said["config"] == asdict(config)
    assert cli.main(["explain", *f"{PREFILL} --impl triton".split()]) == 0
    assert (
        f"tile       block_m {config.block_m}, block_n {config.block_n}" in capsys.readouterr().out
    )


def test_w4a16_equals_the_registry(capsys):
    said = _json(capsys, "w4a16 --m 1 --n 28672 --k 8192 --arch sm90 --no-symmetric")
    problem = W4A16Problem(m=1, n=28672, k=8192, group_size=128, symmetric=False)
    decision = registry.explain(problem, pretend("sm90"))
    assert said["chosen"] == decision.chosen.name
    assert said["bytes"] == problem.cost().bytes
    assert (said["bound"], said["floor_us"]) == ("memory", decision.floor.us)


def test_the_text_names_every_implementation_and_the_floor(capsys):
    assert cli.main(["explain", *PREFILL.split()]) == 0
    said = capsys.readouterr().out
    for impl in registry.impls("attention"):
        assert f"\n{impl.name} " in said
    assert "floor      348 us, compute-bound" in said
    assert "written for cpu, not sm90" in said


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (
            "attention --seqlen 8 --heads 3 --kv-heads 2",
            2,
            "--heads must be a multiple of --kv",
        ),
        ("attention --seqlen 0", 2, "seqlen must be at least 1, got 0"),
        ("attention --seqlen 8 --arch sm12", 2, "arch: --arch must be one of cpu, sm80"),
        ("attention --seqlen 8 --impl nothing --arch cpu", 2, "impl must be one of"),
        ("attention --seqlen 8 --impl cpu --arch sm90", 2, "implementation cpu refuses"),
        ("gemm --m 1", 2, "the next word must be one of attention, w4a16, got 'gemm'"),
        ("", 2, "the next word must be one of attention, w4a16, got nothing"),
        ("w4a16 --m 1 --n 8 --k 8 --dtype int3", 2, "int3"),
    ],
)
def test_bad_input(capsys, words, code, part):
    assert cli.main(["explain", *words.split()]) == code
    said = capsys.readouterr()
    assert part in said.err and said.out == ""


def test_every_op_can_be_explained_on_every_architecture():
    for name in ("cpu", "sm80", "sm90", "sm100"):
        found = explain(AttentionQuery(seqlen=128, arch=name))
        assert found["arch"] == name and found["floor_us"] > 0
        assert explain(W4A16Query(m=1, n=64, k=128, arch=name))["chosen"]


def test_the_typical_problem_of_an_op_is_that_ops():
    for op in ("attention", "w4a16"):
        assert typical(op, "float16").op == op
        assert typical(op, "float16").dtype == "float16"


def test_help_lists_ops_and_flags(capsys):
    assert cli.main(["explain", "--help"]) == 0
    assert "attention" in capsys.readouterr().out
    assert cli.main(["explain", "w4a16", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--group-size" in said and "Rows of activations (tokens), at least 1." in said
