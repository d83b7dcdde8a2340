"""Every kernel of the shipped tile table, compiled for an H200 without one; and the table itself.

A tile that spills, or whose products are not wgmma, is slow and wrong in no other way: only the
machine code shows it.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.arch import pretend
from ridgeline.kernels.attention import config
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionOptions,
    AttentionProblem,
)

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

from ridgeline.kernels.attention import triton as kernels
from ridgeline.kernels.attention import triton_plan as plan

SM90 = pretend("sm90")
MASKS = ("full", "causal", "window")
NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def inputs(dim, mask, seqlen=4096, page=0, dtype=torch.bfloat16, extras=None, heads=2):
    q = torch.empty(1, seqlen if not page else 1, heads * 4 if page else heads, dim, dtype=dtype)
    kv = torch.empty(8, page, heads, dim, dtype=dtype) if page else torch.empty_like(q)
    given = dict(extras or {})
    if page:
        given["page_ids_BU"] = torch.zeros(1, 8192 // page, dtype=torch.int32)
        given["seqused_k"] = torch.zeros(1, dtype=torch.int32)
    options = AttentionOptions(
        softmax_scale=0.1, causal=mask != "full", window_left=1023 if mask == "window" else None
    )
    return plan.inputs_of(q, kv, torch.empty_like(kv), options, AttentionExtras(**given))


def launches(x):
    """Every launch of forward and backward, as the entry points would make them."""
    forward = plan.problem_of(x, "fwd")
    out, lse = kernels.forward_outputs(x)
    if config.takes_decode(forward):
        return kernels.plan_decode(x, out, lse, config.decode_config(forward, SM90))
    found = kernels.plan_forward(x, out, lse, config.forward_tile(forward, SM90))
    backward = config.backward_config(plan.problem_of(x, "bwd"), SM90)
    return found + kernels.BackwardPlan(x, out, None, out, lse, backward).launches()


def resources(compiled, tmp_path):
    """(registers, stack bytes) by cuobjdump, and the disassembly."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    shown = subprocess.run(
        [NVIDIA / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", shown).groups()
    return int(registers), int(stack), compiled.asm["sass"]


# Stack bytes by (head dim, mask, kernel) of the two that spill, each measured at 16k against tiles
# without a spill (H200): head dim 128 causal, dK/dV and dQ in one launch, 5,617 us against 5,920
# (the branch form for dK/dV, 2026-11-30); 256 with a window 1,320 us against 1,654 and 2,078.
SPILLS = {
    (128, "causal", "attention_grads"): 24,
    (256, "window", "attention_dkdv"): 24,
}


def check_table_kernel(launch, tmp_path, dim, mask):
    compiled = plan.compile_for(launch)
    registers, stack, sass = resources(compiled, tmp_path)
    name = launch.kernel.__name__
    assert ".target sm_90a" in compiled.asm["ptx"]
    spilled = SPILLS.get((dim, mask, name), 0)
    if spilled and not triton.__version__.startswith("3.6."):
        spilled = stack  # these bytes are the compiler's; every other tile spills under none
    assert stack == spilled, f"{name} spills {stack} bytes"
    assert bool(re.search(r"\b(LDL|STL)\b", sass)) == bool(spilled)
    assert registers <= 65536 // (32 * compiled.metadata.num_warps)
    assert compiled.metadata.shared <= SM90.smem_bytes
    if name != "attention_rows":
        assert "HGMMA" in sass, f"{name} has no wgmma"
        assert "UTMALDG" in sass, f"{name} has no TMA loads"


def test_held_operands_are_read_from_registers():
    """Of dQ's 24 products of a step and tile, S, dP and dQ, the first 16 read Q and dO."""
    x = inputs(128, "full")
    out, lse = kernels.forward_outputs(x)
    tiles = config.backward_config(plan.problem_of(x, "bwd"), SM90)
    assert tiles.dq.held and tiles.joined
    backward = kernels.BackwardPlan(x, out, None, out, lse, tiles)
    counts = {}
    for held in (True, False):
        [launch] = backward.launch("dq", replace(tiles.dq, held=held))
        sass = plan.compile_for(launch).asm["sass"]
        counts[held] = len(re.findall(r"HGMMA\S* R\d+, R\d+, gdesc", sass))
    assert counts[True] - counts[False] == 16


def test_tiles_that_cannot_be_held_or_joined():
    dq = config.backward_config(problem(128), SM90).dq
    assert config.is_valid(problem(128), SM90, "dq", dq) is None
    for bad, kernel, p, arch in (
        (dq, "dkdv", problem(128), SM90),
        (dq, "dq", problem(128), pretend("sm100")),
        (dq, "dq", problem(128, dtype="float32"), SM90),
        (dq, "dq", problem(256), SM90),
        (replace(dq, block_n=128), "dq", problem(128), SM90),
    ):
        assert "operand in registers" in config.is_valid(p, arch, kernel, bad)
    assert config.can_join(replace(dq, num_stages=2, held=False), dq)
    assert not config.can_join(replace(dq, block_m=128), dq)
    other = replace(dq, block_m=128, num_warps=8)
    tuned = {config.tuning_key(problem(128), "dq"): other}
    found = config.backward_config(problem(128), SM90, tuned)
    assert found.dq == other and not found.joined


@pytest.mark.parametrize("dim, mask", [(64, "causal"), (128, "window")])
def test_table_kernels(dim, mask, tmp_path):
    for launch in launches(inputs(dim, mask)):
        check_table_kernel(launch, tmp_path, dim, mask)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_all_table_kernels(dim, mask, tmp_path):
    for launch in launches(inputs(dim, mask)):
        check_table_kernel(launch, tmp_path, dim, mask)


@pytest.mark.parametrize("page", [16, 256])
def test_decode_kernels(page, tmp_path):
    split, merge = launches(inputs(128, "causal", page=page))
    compiled = plan.compile_for(split)
    registers, stack, sass = resources(compiled, tmp_path)
    assert stack == 0 and "HMMA" in sass
    assert ("UTMALDG" in sass) == (page == 256)
    assert compiled.metadata.shared <= SM90.smem_bytes
    assert resources(plan.compile_for(merge), tmp_path)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 40, 80, 192, 256])
def test_other_dims_compile(dim, dtype):
    for launch in launches(inputs(dim, "causal", seqlen=300, dtype=dtype)):
        assert plan.compile_for(launch).metadata.shared <= SM90.smem_bytes


def problem(dim=64, dim_v=None, **more):
    kind = dict(batch=1, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8, head_dim=dim)
    return AttentionProblem(**{**kind, "head_dim_v": dim_v or dim, **more})


@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89", "sm90", "sm100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dim_has_a_valid_tile(arch, dtype):
    arch = pretend(arch)
    for dim in range(16, 257, 8):
        for dim_v in {dim, 16, 256, 72}:
            for mask in ({}, dict(causal=True), dict(window_left=100)):
                p = problem(dim, dim_v, dtype=dtype, **mask)
                assert config.is_valid(p, arch, "fwd", config.forward_tile(p, arch)) is None
                both = config.backward_config(p, arch)
                assert config.is_valid(p, arch, "dkdv", both.dkdv) is None, (dim, dim_v)
                assert config.is_valid(p, arch, "dq", both.dq) is None, (dim, dim_v)


def test_invalid_tiles_say_why():
    tile = config.TileConfig(block_m=128, block_n=128, num_warps=8, num_stages=2, tma=True)
    p = problem(128)
    assert config.is_valid(p, SM90, "fwd", tile) is None
    assert "need sm90" in config.is_valid(p, pretend("sm80"), "fwd", tile)
    for bad, why in (
        (dict(block_m=96), "power of two"),
        (dict(num_warps=3), "num_warps"),
        (dict(num_stages=5), "shared memory"),
        (dict(num_warps=1, num_stages=1), "registers"),
        (dict(block_m=16), "rows"),
    ):
        kind = dict(block_m=128, block_n=128, num_warps=8, num_stages=2) | bad
        assert why in config.is_valid(p, SM90, "fwd", config.TileConfig(**kind)), bad


@pytest.mark.parametrize("kernel", ["fwd", "dkdv", "dq"])
def test_candidates_are_valid(kernel):
    found = list(config.candidates(problem(64), SM90, kernel))
    assert len(found) >= 12
    assert all(config.is_valid(problem(64), SM90, kernel, tile) is None for tile in found)


@pytest.mark.parametrize(
    "batch, keys", [(1, 8192), (8, 8192), (32, 8192), (128, 2048), (1, 131072)]
)
def test_splits_fill_the_machine(batch, keys):
    p = problem(128, batch=batch, seqlen_q=1, seqlen_k=keys, heads=32, kv_heads=8, kv_cache=True)
    found = config.attention_config(p, SM90)
    programs = batch * 8 * found.num_splits
    assert programs >= SM90.num_units, "a multiprocessor would idle"
    assert found.num_splits <= -(-keys // found.tile.block_n)
    assert config.decode_config(p, SM90, 5).num_splits == 5
