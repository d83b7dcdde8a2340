"""The packed layout: its formula, its inverse, and act-order on uneven shards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16 import layout

GROUPS = [32, 64, 128, 256, None]


def make(n, k, group, *, asymmetric=False, act_order=False, dtype=torch.float16, seed=0):
    """A random weight; group None is whole-channel."""
    gen = torch.Generator().manual_seed(seed)
    group = group or k
    R = -(-k // group)
    owner = (torch.randperm(k, generator=gen) // group).int() if act_order else None
    zero = torch.randint(0, 16, (n, R), generator=gen, dtype=torch.uint8)
    return QuantizedWeight(
        code_NK=torch.randint(0, 16, (n, k), generator=gen, dtype=torch.uint8),
        scale_NR=(torch.rand(n, R, generator=gen) * 0.02 + 0.001).to(dtype),
        zero_NR=zero if asymmetric else None,
        bits=4,
        group_size=group,
        group_of_K=owner,
    )


def same(a, b):
    """Bit-exact equality of two weights."""
    assert a.group_size == b.group_size and a.shape_nk == b.shape_nk
    assert torch.equal(a.code_NK, b.code_NK)
    assert a.scale_NR.dtype == b.scale_NR.dtype and torch.equal(a.scale_NR, b.scale_NR)
    assert (a.zero_NR is None) == (b.zero_NR is None)
    assert a.zero_NR is None or torch.equal(a.zero_NR, b.zero_NR)
    assert torch.equal(a.groups_K(), b.groups_K())


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 80),
    k=st.integers(1, 300),
    group=st.sampled_from(GROUPS),
    asymmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 99),
)
def test_unpack_inverts_pack(n, k, group, asymmetric, act_order, seed):
    weight = make(n, k, group, asymmetric=asymmetric, act_order=act_order, seed=seed)
    packed = layout.pack(weight)
    assert packed.n_padded % 32 == 0 and packed.k_padded % layout.K_ALIGN == 0
    same(layout.unpack(packed), weight)


def test_word_formula():
    weight = make(40, 200, 64)
    word = layout.pack(weight).word_TCrli.long() & 0xFFFFFFFF
    for n, k in [(0, 0), (9, 1), (39, 199), (17, 74), (8, 8), (31, 63), (32, 64)]:
        T, rt, hr, g = n // 32, n // 16 % 2, n // 8 % 2, n % 8
        C, i, hk, t, e = k // 64, k // 16 % 4, k // 8 % 2, k // 2 % 4, k % 2
        found = word[T, C, rt, 4 * g + t, i] >> (8 * hk + 4 * hr + 16 * e) & 15
        assert found == weight.code_NK[n, k]


def test_operand_registers_are_the_matrix():
    """What a lane gets by shift and mask is its part of mma.sync's 16 x 16 operand (PTX ISA)."""
    weight = make(32, 128, 128)
    word = layout.pack(weight).word_TCrli.long() & 0xFFFFFFFF
    rebuilt = torch.full((32, 128), 99)
    for C in range(2):
        for rt in range(2):
            for lane in range(32):
                for i in range(4):
                    for register in range(4):
                        pair = word[0, C, rt, lane, i] >> (4 * register) & 0x000F000F
                        row = rt * 16 + lane // 4 + 8 * (register % 2)
                        col = C * 64 + i * 16 + lane % 4 * 2 + 8 * (register // 2)
                        rebuilt[row, col] = pair & 15
                        rebuilt[row, col + 1] = pair >> 16
    assert torch.equal(rebuilt, weight.code_NK.long())


def test_scales_lie_in_lane_order():
    weight = make(64, 256, 128, asymmetric=True)
    packed = layout.pack(weight)
    for n, r in [(0, 0), (8, 1), (27, 0), (63, 1)]:
        place = n // 32, r, n % 8, n // 16 % 2 * 2 + n // 8 % 2
        assert packed.scale_TRgj[place] == weight.scale_NR[n, r]
        assert packed.zero_TRgj[place] == weight.zero_NR[n, r]


def test_act_order_becomes_a_gather_of_inputs():
    weight = make(32, 256, 64, act_order=True)
    packed = layout.pack(weight)
    assert packed.packed_group == 64 and packed.k_padded == 256
    act = torch.randn(3, 256)
    gathered = layout.gather_inputs(act, packed)
    slots = weight.groups_K()[packed.source_K.long()]
    assert torch.equal(slots, torch.arange(256) // 64)
    assert torch.equal(gathered, act[:, packed.source_K.long()])


def test_act_order_shard_with_uneven_groups():
    """A tensor-parallel rank's half of K: groups of every size, some of them absent."""
    whole = make(24, 512, 128, act_order=True, asymmetric=True, seed=3)
    keep = torch.arange(512) % 3 != 0
    keep &= whole.groups_K() != 2
    shard = QuantizedWeight(
        code_NK=whole.code_NK[:, keep],
        scale_NR=whole.scale_NR,
        zero_NR=whole.zero_NR,
        bits=4,
        group_size=128,
        group_of_K=whole.group_of_K[keep],
    )
    packed = layout.pack(shard)
    same(layout.unpack(packed), shard)
    act = torch.randn(2, int(keep.sum()))
    gathered = layout.gather_inputs(act, packed)
    slot_group = packed.group_of_R.repeat_interleave(packed.packed_group)[: packed.k_padded].long()
    code = layout._unpack_codes(packed.word_TCrli)[:24].float()
    dense = (code - shard.zero_NR.float()[:, slot_group]) * shard.scale_NR.float()[:, slot_group]
    torch.testing.assert_close(gathered @ dense.T, act @ shard.dequantize().T)


def test_tensors_round_trip():
    packed = layout.pack(make(40, 136, None, asymmetric=True))
    again = layout.from_tensors(layout.to_tensors(packed), n=40, k=136)
    assert again.packed_group == packed.packed_group and again.per_channel
    assert torch.equal(again.word_TCrli, packed.word_TCrli)
    assert torch.equal(again.zero_TRgj, packed.zero_TRgj) and again.source_K is None


def test_refusals_name_the_argument():
    weight = make(32, 96, 48)
    with pytest.raises(NotImplementedError, match="w4a16: group_size must be a multiple of 32"):
        layout.pack(weight)
    eight = QuantizedWeight(
        code_NK=weight.code_NK, scale_NR=weight.scale_NR, zero_NR=None, bits=8, group_size=48
    )
    with pytest.raises(NotImplementedError, match="w4a16: bits must be 4, got 8"):
        layout.pack(eight)


@pytest.mark.parametrize("n", [32, 24, 2])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_interleaved_rows_are_gates_and_their_ups(n, asymmetric):
    weight = make(n, 256, 64, asymmetric=asymmetric, act_order=False, dtype=torch.bfloat16)
    got = layout.interleave(weight).dequantize(torch.float32)
    want = weight.dequantize(torch.float32)
    half = n // 2
    assert got.shape[0] == 2 * (half + -half % 8)
    for row in range(got.shape[0]):
        at = row // 16 * 8 + row % 8
        source = at + half * (row // 8 % 2)
        expected = want[source] if at < half else torch.zeros(256)
        assert torch.equal(got[row], expected)
