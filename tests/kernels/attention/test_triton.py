"""The Triton implementation: values in its CPU interpreter, and the whole grid on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import cases

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
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {line["test"]: line["error"] for line in lines}


@pytest.mark.parametrize("kind, least", [("fwd", 30), ("bwd", 29), ("decode", 11), ("mods", 8)])
def test_interpreted_values(interpreted, kind, least):
    mine = {name: error for name, error in interpreted.items() if name.startswith(kind)}
    assert len(mine) >= least
    wrong = [f"{name}: {error}" for name, error in mine.items() if error]
    assert not wrong, f"{len(wrong)} of {len(mine)}:\n" + "\n".join(wrong[:10])


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_gpu_forward(case):
    cases.check_forward("triton", case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [c for c in cases.CASES if not c.forward_only], ids=lambda case: case.name
)
def test_gpu_backward(case):
    cases.check_backward("triton", case, "cuda")


LENGTHS = [
    (1, 1), (1, 1023), (113, 203), (128, 217), (108, 256), (256, 512), (512, 256), (1024, 1024),
    (1023, 1024), (239, 1), (799, 3), (3, 799), (64, 2048), (2048, 64), (127, 129), (129, 127),
    (640, 128), (1000, 1000), (63, 4097), (333, 777),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_gpu_lengths(dim, mask):
    for seqlen_q, seqlen_k in LENGTHS:
        case = cases.Case(
            name=f"{dim}-{mask}-{seqlen_q}-{seqlen_k}", seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            dim=dim, dim_v=dim, dtype="bfloat16", causal=mask == "causal",
            window=(100, 0) if mask == "window" else (None, None),
        )  # fmt: skip
        cases.check_forward("triton", case, "cuda")
        cases.check_backward("triton", case, "cuda")


@pytest.mark.gpu
def test_gpu_repeats_bitwise_200_times():
    case = cases.Case(
        name="race", seqlen_q=640, seqlen_k=640, dim=128, dim_v=128, dtype="bfloat16", causal=True
    )
    built = cases.build(case, "cuda")
    a, module = built.arguments, cases.module_of("triton")

    def once():
        out, lse = module.forward(a.q, a.k, a.v, a.options(), a.extras())
        grads = module.backward(built.dout, None, a.q, a.k, a.v, out, lse, a.options(), a.extras())
        return out, lse, grads.dq, grads.dk, grads.dv

    first = once()
    for _ in range(199):
        for one, other in zip(first, once(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
def test_gpu_more_than_two_to_the_31_elements():
    heads, seqlen, dim = 2, 2**23 + 64, 128
    k = torch.zeros(1, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16)
    k[:, -64:] = torch.randn(1, 64, heads, dim, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 128, heads, dim, device="cuda", dtype=torch.bfloat16)
    assert k.numel() > 2**31
    a = cases.Arguments(q=q, k=k, v=k, softmax_scale=dim**-0.5, window_left=63 + 127)
    out, lse = cases.module_of("triton").forward(q, k, k, a.options(), a.extras())
    tail = k[:, -512:]
    b = cases.Arguments(q=q, k=tail, v=tail, softmax_scale=dim**-0.5, window_left=63 + 127)
    expected, expected_lse = cases.attention_ref(q, tail, tail, b.options(), b.extras())
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-4)
