"""Tiles of the backward by roles: budgets computed from the config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention import cute_sm90_roles_config as cfg
from ridgeline.kernels.attention.cute_sm90_backward_config import BackwardTraits
from ridgeline.kernels.attention.problem import AttentionProblem

WIDE = BackwardTraits(head_dim=256, head_dim_v=256, dtype="bfloat16")


def test_shared_memory_of_a_known_tile() -> None:
    """Two stages of Q and one of dO are what a pair has room for at head dim 256."""
    kib = 1024
    pair = cfg.RolesConfig(pair=True, do_stages=1)
    k, v, q, do, ds, p = 64 * kib, 32 * kib, 64 * kib, 32 * kib, 24 * kib, 8 * kib
    expected = 1024 + k + v + q + do + ds + p + 1024
    assert cfg.shared_memory_bytes(pair, WIDE) == expected <= 227 * kib
    assert cfg.why_invalid(pair, WIDE) is None
    assert "shared memory" in (cfg.why_invalid(replace(pair, do_stages=2), WIDE) or "")
    single = cfg.shared_memory_bytes(cfg.RolesConfig(), WIDE)
    assert single == 1024 + 32 * kib + v + q + 64 * kib + 16 * kib + p + 1024


@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("pair", [False, True])
def test_registers_are_those_the_block_was_launched_with(head_dim: int, pair: bool) -> None:
    """One more than at launch and setmaxnreg waits forever."""
    config = cfg.RolesConfig(pair=pair, do_stages=1)
    dq, loads, keys = cfg.registers(config)
    assert dq + loads + 2 * keys <= 4 * cfg.LAUNCHED_REGISTERS == 65536 // 128
    assert all(count % 8 == 0 for count in (dq, loads, keys))
    traits = replace(WIDE, head_dim=head_dim, head_dim_v=head_dim)
    assert cfg.why_invalid(config, traits) is None
    assert cfg.accumulator_registers(traits) + cfg.MARGIN_REGISTERS <= keys


@pytest.mark.parametrize(
    ("change", "traits", "why"),
    [
        ({"block_q": 128}, {}, "block_q must be"),
        ({"stages": 3}, {}, "power of two"),
        ({"stages": 4}, {}, "shared memory"),
        ({"dq_registers": 90}, {}, "multiples of 8"),
        ({"dq_registers": 104}, {}, "registers"),
        ({}, {"head_dim": 320}, "at most 256"),
        ({}, {"head_dim": 100}, "multiples of 32"),
    ],
)
def test_invalid_tiles_say_why(change: dict, traits: dict, why: str) -> None:
    good = cfg.RolesConfig(do_stages=1)
    assert cfg.why_invalid(good, WIDE) is None
    assert why in (cfg.why_invalid(replace(good, **change), replace(WIDE, **traits)) or "")


def test_deep_rings_of_q_only_where_they_measured_faster() -> None:
    """Four blocks of Q at (192, 128) leave not a byte."""
    traits = replace(WIDE, head_dim=192, head_dim_v=128, has_right=True)
    best = cfg.candidates(traits)[0]
    assert (best.stages, best.pair) == (4, True)
    assert cfg.shared_memory_bytes(best, traits) == 227 * 1024
    for change in ({"has_right": False}, {"has_left": True}, {"deterministic": True},
                   {"softcap": True}, {"seqused": True}, {"head_dim_v": 192}):  # fmt: skip
        assert cfg.candidates(replace(traits, **change))[0].stages == 2, change


@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (136, 200), (64, 256)])
def test_wide_heads_get_a_pair(dims: tuple[int, int]) -> None:
    problem = AttentionProblem(
        batch=1, seqlen_q=1024, seqlen_k=1024, heads=4, kv_heads=4,
        head_dim=dims[0], head_dim_v=dims[1], direction="bwd", deterministic=True,
    )  # fmt: skip
    config = bwd.backward_config(problem, KNOWN["sm90"])
    assert isinstance(config, cfg.RolesConfig) and config.pair
    assert bwd.keys_per_block(config) == 128
    # A pair takes two multiprocessors.
    most = KNOWN["sm90"].num_units // 2 * 128
    for keys, together in ((most, True), (most + 1, False)):
        there = bwd.run_together(replace(problem, seqlen_k=keys), config, KNOWN["sm90"])
        assert there == together
