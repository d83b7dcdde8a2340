"""Hopper kernels compiled without a GPU: names, cache, and what the machine code holds."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_config as cfg
from ridgeline.kernels.attention.cute import library
from ridgeline.kernels.attention.problem import AttentionProblem


def _problem(head_dim: int, **changes: object) -> AttentionProblem:
    fields = dict(batch=1, seqlen_q=4096, seqlen_k=4096, heads=4, kv_heads=4)
    return AttentionProblem(**fields, head_dim=head_dim, head_dim_v=head_dim, **changes)


SHIPPED = [
    _problem(64, causal=True),
    _problem(128),
    _problem(128, causal=True, varlen=True),
    _problem(256, causal=True, dtype="float16"),
]


def _disassembler() -> str | None:
    if found := shutil.which("cuobjdump"):
        return found
    triton = pytest.importorskip("triton", reason="no cuobjdump, and no Triton that brings one")
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def _machine_code(problem: AttentionProblem, folder: Path) -> tuple[str, str]:
    """(resource usage, SASS) of the kernel that serves a problem."""
    traits, config = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
    compiled = library.trace(traits, config, keep_cubin=True)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.artifacts.CUBIN)
    tool = _disassembler()
    usage, sass = (
        subprocess.run([tool, flag, str(cubin)], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    return usage, sass


@pytest.mark.slow
@pytest.mark.parametrize("problem", SHIPPED, ids=lambda p: f"{p.head_dim}-{p.dtype}-{p.causal}")
def test_machine_code(problem: AttentionProblem, tmp_path: Path) -> None:
    usage, sass = _machine_code(problem, tmp_path)
    traits, config = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
    assert int(re.search(r"STACK:(\d+)", usage).group(1)) == 0
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spill"
    steps = 2 + (1 if traits.has_right or True else 0)  # masked and unmasked loop, and the edges
    qk, pv = traits.head_dim // 16, config.block_k // 16
    assert len(re.findall(r"\bHGMMA\b", sass)) == 2 * qk + (steps - 1) * (qk + pv) + pv
    assert len(re.findall(r"\bUSETMAXREG\b", sass)) == 2
    assert re.search(r"\bUTMALDG\b", sass) and re.search(r"\bUTMASTG\b", sass)
    # One wait a product where it must be: more would mean that ptxas serialised the products.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= 3 + 3 * steps
