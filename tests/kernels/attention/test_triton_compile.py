"""Every kernel of the shipped tile table, compiled for an H200 without one; and the table itself.

A tile that spills, or whose products are not wgmma, is slow and wrong in no other way: only the
machine code shows it.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

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

from . import descriptors, machine_code

SM90 = pretend("sm90")
MASKS = ("full", "causal", "window")


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


# Stack bytes by (head dim, mask, kernel) of the two that spill, each measured at 16k against tiles
# without a spill (H200): head dim 128 causal, dK/dV and dQ in one launch, 5,617 us against 5,920
# (the branch form for dK/dV, 2026-11-30); 256 with a window 1,320 us against 1,654 and 2,078.
SPILLS = {
    (128, "causal", "attention_grads"): 24,
    (256, "window", "attention_dkdv"): 24,
}


def check_table_kernel(launch, dim, mask):
    """The kernel's machine code is what its tile was measured with."""
    compiled = plan.compile_for(launch)
    cubin = compiled.asm["cubin"]
    registers, stack = machine_code.resources(cubin)
    code = machine_code.disassembly(cubin)
    used = {one.name.split(".")[0] for one in code}
    name = launch.kernel.__name__
    assert ".target sm_90a" in compiled.asm["ptx"]
    spilled = SPILLS.get((dim, mask, name), 0)
    if stack <= 32 and not triton.__version__.startswith("3.6."):
        spilled = stack  # the tiles were chosen with 3.6; 3.7.1 spills 8 bytes in one more
    assert stack == spilled, f"{name} spills {stack} bytes"
    assert bool({"LDL", "STL"} & used) == bool(spilled)
    assert registers <= 65536 // (32 * compiled.metadata.num_warps)
    assert compiled.metadata.shared <= SM90.smem_bytes
    if name != "attention_rows":
        assert "HGMMA" in used, f"{name} has no wgmma"
        assert "UTMALDG" in used, f"{name} has no TMA loads"
        assert not machine_code.overwritten_operands(code), name
        assert not descriptors.shared_by_modes(compiled.asm["ptx"]), name
        assert not descriptors.lost_bases(code), name


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
        code = machine_code.disassembly(plan.compile_for(launch).asm["cubin"])
        products = (one.operands for one in code if one.name.startswith("HGMMA"))
        counts[held] = sum(bool(re.match(r"R\d+, R\d+, gdesc", ops)) for ops in products)
    assert counts[True] - counts[False] == 16


def test_an_overwritten_operand_is_seen():
    """What `is_valid` refuses: the products of a step begin and end with results of one width."""
    x = inputs(64, "causal", seqlen=512)
    tile = config.TileConfig(
        block_m=64, block_n=64, num_warps=4, num_stages=2, tma=True, branch=True, held=True
    )
    assert "less keys" in config.is_valid(plan.problem_of(x, "bwd"), SM90, "dq", tile)
    out, lse = kernels.forward_outputs(x)
    tiles = config.backward_config(plan.problem_of(x, "bwd"), SM90)
    [launch] = kernels.BackwardPlan(x, out, None, out, lse, tiles).launch("dq", tile)
    code = machine_code.disassembly(plan.compile_for(launch).asm["cubin"])
    found = machine_code.overwritten_operands(code)
    if triton.__version__.startswith("3.6."):  # its ptxas 12.8; 13.0 does the same
        assert len(found) == 4  # the 64 columns of Q


LOOP = """
    /*0010*/ F2FP.BF16.F32.PACK_AB R24, R1, R2 ;
    /*0020*/ HGMMA.64x64x16.F32.BF16 R56, R24, gdesc[UR8], RZ, !UPT ;
    /*0030*/ F2FP.BF16.F32.PACK_AB {target}, R56, R57 ;
    /*0040*/ HGMMA.64x64x16.F32.BF16 R88, {target}, gdesc[UR8].tnspB, R88 ;
    /*0050*/ @!P0 BRA {to} ;
    /*0060*/ EXIT ;
"""


@pytest.mark.parametrize(
    "target, to, count", [("R24", "0x20", 1), ("R28", "0x20", 0), ("R24", "0x10", 0)]
)
def test_a_loop_that_writes_its_operand(target, to, count):
    code = machine_code.instructions(LOOP.format(target=target, to=to))
    assert len(code) == 6 and code[4].guarded and not code[5].guarded
    assert len(machine_code.overwritten_operands(code)) == count


def test_tiles_that_cannot_be_held_or_joined():
    dq = config.backward_config(problem(128), SM90).dq
    assert config.is_valid(problem(128), SM90, "dq", dq) is None
    for bad, kernel, p, arch in (
        (dq, "dkdv", problem(128), SM90),
        (dq, "dq", problem(128), pretend("sm100")),
        (dq, "dq", problem(128, dtype="float32"), SM90),
        (dq, "dq", problem(256), SM90),
        (replace(dq, block_n=128), "dq", problem(128), SM90),
        (dq, "dq", problem(64, 128), SM90),
        (dq, "dq", problem(128, 40), SM90),
        (dq, "fwd", problem(128, 64), SM90),
    ):
        assert "operand in registers" in config.is_valid(p, arch, kernel, bad)
    assert config.can_join(replace(dq, num_stages=2, held=False), dq)
    assert not config.can_join(replace(dq, block_m=128), dq)
    other = replace(dq, block_m=128, num_warps=8)
    tuned = {config.tuning_key(problem(128), "dq"): other}
    found = config.backward_config(problem(128), SM90, tuned)
    assert found.dq == other and not found.joined


TABLE = [(dim, mask, direction) for dim in (64, 128, 256) for mask in MASKS for direction in "fb"]


@pytest.mark.parametrize("dim, mask, direction", TABLE)
def test_table_kernels(dim, mask, direction):
    found = launches(inputs(dim, mask))
    assert found[0].kernel.__name__ == "attention_fwd" and len(found) >= 3
    for launch in found[:1] if direction == "f" else found[1:]:
        check_table_kernel(launch, dim, mask)


@pytest.mark.parametrize("page", [16, 256])
def test_decode_kernels(page):
    split, merge = launches(inputs(128, "causal", page=page))
    compiled = plan.compile_for(split)
    registers, stack = machine_code.resources(compiled.asm["cubin"])
    used = {one.name.split(".")[0] for one in machine_code.disassembly(compiled.asm["cubin"])}
    assert stack == 0 and "HMMA" in used
    assert ("UTMALDG" in used) == (page == 256)
    assert compiled.metadata.shared <= SM90.smem_bytes
    assert machine_code.resources(plan.compile_for(merge).asm["cubin"])[1] == 0


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


@pytest.mark.parametrize("kernel", ["fwd", "dq"])
def test_no_choice_holds_what_the_compiler_overwrites(kernel):
    """Neither the table nor the tuner holds Q in tiles whose products give results of one width."""
    held, dims = 0, (16, 40, 64, 72, 96, 128, 136, 256)
    for dim in dims:
        for dim_v in dims:
            for mask in ({}, dict(causal=True), dict(window_left=100)):
                p = problem(dim, dim_v, dtype="bfloat16", **mask)
                result = config.block_dims(p)[kernel == "fwd"]
                both = config.backward_config(p, SM90)
                shipped = config.forward_tile(p, SM90) if kernel == "fwd" else both.dq
                if both.joined:
                    assert config.can_join(both.dkdv, both.dq)
                for tile in (shipped, *config.candidates(p, SM90, kernel)):
                    held += tile.held
                    assert not tile.held or tile.block_n != result, (dim, dim_v, tile)
    assert held


def test_what_cannot_be_held_keeps_its_tile():
    wide, narrow = problem(128, causal=True), problem(32, 128, causal=True)
    held, plain = (config.backward_config(p, SM90) for p in (wide, narrow))
    assert held.dq.held and not plain.dq.held
    assert replace(held.dq, held=False) == plain.dq and plain.joined
    assert config.config_source(replace(narrow, direction="bwd"), SM90, {}) == "table"


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


@pytest.mark.parametrize("dim, forward, backward", [(128, 16, 4), (64, 32, 8)])
def test_heads_of_packed_calls_go_in_groups(dim, forward, backward):
    """As many as fit the L2 cache; fewer in backward (triton_plan.py has the times)."""
    lengths = torch.tensor([0, 5000, 5082, 8082], dtype=torch.int32)
    starts = {f"cu_seqlens_{side}": lengths for side in "qk"}
    extras = AttentionExtras(**starts, max_seqlen_q=5000, max_seqlen_k=5000)
    q = torch.empty(8082, 2048 // dim, dim, dtype=torch.bfloat16)
    x = plan.inputs_of(q, q, q, AttentionOptions(softmax_scale=0.1, causal=True), extras)
    out, lse = kernels.forward_outputs(x)
    tile = config.forward_tile(plan.problem_of(x, "fwd"), SM90)
    assert kernels.plan_forward(x, out, lse, tile)[-1].args[8].head_group == forward
    tiles = config.backward_config(plan.problem_of(x, "bwd"), SM90)
    launches = kernels.BackwardPlan(x, out, None, out, lse, tiles).launches()
    calls = [arg for one in launches for arg in one.args if isinstance(arg, plan.Call)]
    assert len(calls) == 3 and {call.head_group for call in calls} == {backward}
