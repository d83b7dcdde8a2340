"""Debug mode: what an index tensor may not hold is trapped on the device, by name.

On a GPU an assertion ends the process: the interpreter raises at the same place.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from .test_triton import ROOT
from .test_triton_compile import inputs, launches, plan


def traps(**environment) -> dict[str, str | None]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.attention.traps"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (json.loads(line) for line in done.stdout.splitlines())
    return {line["test"]: line["error"] for line in lines}


def test_every_lie_is_named_and_nothing_else():
    found = traps(RIDGELINE_DEBUG="1")
    assert len(found) == 52
    for test, error in found.items():
        _, name, kind = test.split()
        if kind == "true":
            assert error is None, test
        else:
            argument = name.split("-")[0]
            said = "cu_seqlens" if test == "tiles cu_seqlens_q lie" else argument
            assert error and f"attention: {said}" in error.replace(
                "seqused_k or cache_seqlens", argument
            ), f"{test}: {error}"


def test_assertions_are_compiled_in_debug_mode_alone(monkeypatch):
    x = inputs(64, "causal", page=16)
    plain = plan.compile_for(launches(x)[0])
    assert "assertfail" not in plain.asm["ptx"]
    monkeypatch.setenv("RIDGELINE_DEBUG", "1")
    checked = plan.compile_for(launches(x)[0])
    assert "__assertfail" in checked.asm["ptx"]
    assert "block_table" in checked.asm["llir"]


@pytest.mark.gpu
def test_gpu_trap_ends_the_process_with_the_name():
    code = (
        "import torch\n"
        "from ridgeline.kernels.attention import flash_attn_with_kvcache\n"
        "cache = torch.zeros(4, 16, 2, 64, device='cuda', dtype=torch.bfloat16)\n"
        "q = torch.zeros(1, 1, 2, 64, device='cuda', dtype=torch.bfloat16)\n"
        "table = torch.tensor([[0, 77]], device='cuda', dtype=torch.int32)\n"
        "lengths = torch.tensor([20], device='cuda', dtype=torch.int32)\n"
        "flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, block_table=table,\n"
        "                        impl='triton')\n"
        "torch.cuda.synchronize()\n"
    )
    for debug in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("77", "77" if debug == "1" else "3")],
            cwd=ROOT,
            env={**os.environ, "RIDGELINE_DEBUG": debug},
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) == (debug == "0"), done.stderr[-500:]
        assert ("block_table must hold" in done.stderr) == (debug == "1")
