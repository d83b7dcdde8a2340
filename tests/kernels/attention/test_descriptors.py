"""No kernel reads shared memory through a descriptor that ptxas has lost the base of.

Seen on an H200 as wrong values or an illegal access: head dims 40 and 24 in 16 bits, without TMA.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from . import cases

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from . import descriptors, machine_code
from .test_triton_compile import SM90, config, kernels, launches, plan

KINDS = {
    "dense": {},
    "leftpad": dict(layout="leftpad"),
    "paged": dict(layout="paged"),
    "packed": dict(layout="varlen"),
    "sliced": dict(strides="sliced"),
    "bias": dict(bias="full"),
    "decode of 64 rows": dict(seqlen_q=16, kv_heads=1),
    "decode of 64 rows, paged": dict(seqlen_q=16, kv_heads=1, layout="paged"),
}
DIMS = [(40, 24), (24, 40), (64, 32), (16, 16), (16, 64), (32, 128)]


def compiled(dims, kind):
    """Every kernel of a call that has products, compiled as the entry points would (but for the
    padding in memory: what a cache cannot have, no call may need)."""
    sizes = dict(seqlen_q=200, seqlen_k=200, batch=3, dtype="bfloat16", causal=True)
    case = cases.Case(name="", dim=dims[0], dim_v=dims[1], **{**sizes, **KINDS[kind]})
    a = cases.build(case).arguments
    x = plan.inputs_of(a.q, a.k, a.v, a.options(), a.extras())
    without = ("list_tiles", "attention_rows", "attention_merge")
    problem = plan.problem_of(x, "fwd")
    if x.paged and not config.takes_decode(problem):  # forward only
        results = kernels.forward_outputs(x)
        found = kernels.plan_forward(x, *results, config.forward_tile(problem, SM90))
    else:
        found = launches(x)
    for launch in found:
        if launch.kernel.__name__ not in without:
            yield launch.kernel.__name__, plan.compile_for(launch)


def check(dims, kind):
    for name, kernel in compiled(dims, kind):
        shared = descriptors.shared_by_modes(kernel.asm["ptx"])
        assert not shared, f"{name}: one place in shared memory, several modes: {shared}"
        code = machine_code.disassembly(kernel.asm["cubin"])
        assert not descriptors.lost_bases(code), name
        assert not machine_code.overwritten_operands(code), name


@pytest.mark.parametrize("dims, kind", [((40, 24), "paged"), ((16, 64), "bias")])
def test_every_descriptor_has_its_base(dims, kind):
    check(dims, kind)


@pytest.mark.slow
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_descriptor_of_every_kind_has_its_base(dims, kind):
    check(dims, kind)


def test_two_modes_are_seen(monkeypatch):
    """What the tiles' columns avoid: K in one mode and V in another, in the same place."""
    narrow = (64, 32)
    monkeypatch.setattr(plan, "block_dims", lambda problem: narrow)
    monkeypatch.setattr(config, "block_dims", lambda problem: narrow)
    kernel = dict(compiled((40, 24), "paged"))["attention_fwd"]
    [modes] = descriptors.shared_by_modes(kernel.asm["ptx"]).values()
    assert len(modes) == 2
    if plan.triton.__version__.startswith("3.6."):  # its ptxas 12.8
        code = machine_code.disassembly(kernel.asm["cubin"])
        assert len(descriptors.lost_bases(code)) == 7


LOST = """
    /*0010*/ UMOV UR24, 0x400 ;
    /*0020*/ ULEA UR24, UR4, UR24, 0x18 ;
    /*0030*/ UIMAD UR22, UR12, UR16, URZ ;
    /*0040*/ UIADD3 UR22, UP1, {source}, 0x40, URZ ;
    /*0050*/ USHF.R.U32.HI UR50, URZ, 0x4, UR24 ;
    /*0060*/ HGMMA.64x32x16.F32.BF16 R88, R24, gdesc[UR48].tnspB, R88 ;
    /*0070*/ HGMMA.64x32x16.F32.BF16 R88, R28, gdesc[UR20].tnspB, R88 ;
"""


@pytest.mark.parametrize("source, count", [("UR22", 1), ("UR24", 0)])
def test_a_lost_base_is_seen(source, count):
    code = machine_code.instructions(LOST.format(source=source))
    assert len(descriptors.lost_bases(code)) == count


@pytest.mark.parametrize("dtype, full", [("bfloat16", 64), ("float32", 32)])
def test_tiles_of_keys_and_values_share_a_mode(dtype, full):
    problem = cases.build(cases.Case(name="", dtype=dtype)).arguments.problem("fwd")
    for dim in range(16, 257, 8):
        for dim_v in range(16, 257, 8):
            dims = config.block_dims(replace(problem, head_dim=dim, head_dim_v=dim_v))
            assert dims[0] >= dim and dims[1] >= dim_v
            assert dims[0] == dims[1] or min(dims) >= full
