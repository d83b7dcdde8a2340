"""Hopper backward tiles: every head dim that is taken gets a valid one, budgets are computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as cfg
from ridgeline.kernels.attention.problem import AttentionProblem

H200 = KNOWN["sm90"]
BASE = AttentionProblem(
    batch=2,
    seqlen_q=1024,
    seqlen_k=2048,
    heads=8,
    kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    direction="bwd",
)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 96, 112, 128])
@pytest.mark.parametrize("varlen", [False, True])
def test_every_head_dim_gets_a_valid_tile(head_dim: int, varlen: bool) -> None:
    problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim, varlen=varlen)
    assert cfg.refuses(problem, H200) is None
    traits, config = cfg.backward_traits(problem), cfg.backward_config(problem, H200)
    assert cfg.why_invalid(config, traits) is None
    assert traits.head_dim >= head_dim
    assert cfg.shared_memory_bytes(config, traits) <= H200.smem_bytes


@pytest.mark.parametrize("other", [24, 56, 72, 88, 104])
@pytest.mark.parametrize("num_warpgroups", [1, 2])
def test_registers_are_those_the_block_was_launched_with(other: int, num_warpgroups: int) -> None:
    """One more than at launch and setmaxnreg waits forever."""
    config = cfg.BackwardConfig(block_q=64, num_warpgroups=num_warpgroups, other_registers=other)
    mine, keys = cfg.registers(config)
    warpgroups = num_warpgroups + 1
    at_launch = cfg.REGISTER_FILE // (128 * warpgroups) // 8 * 8
    assert mine == other and mine % 8 == 0 and keys % 8 == 0
    assert mine + num_warpgroups * keys <= warpgroups * at_launch


def test_shared_memory_of_a_known_tile() -> None:
    traits = cfg.BackwardTraits(head_dim=128, head_dim_v=128, dtype="bfloat16")
    config = cfg.BackwardConfig(block_q=64, dq_parts=2)
    kib = 1024
    keys, queries, ds = 64 * kib, 2 * 32 * kib, 2 * 16 * kib
    statistics = 2 * 2 * 64 * 4
    expected = cfg.BARRIER_BYTES + keys + queries + ds + statistics
    assert cfg.shared_memory_bytes(config, traits) == expected
    bulk = cfg.shared_memory_bytes(replace(config, dq_bulk=True), traits)
    assert bulk == expected + 16 * kib


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_warpgroups": 3}, "num_warpgroups must be"),
        ({"block_q": 96}, "block_q must be"),
        ({"stages": 3}, "power of two"),
        ({"stages": 8}, "shared memory"),
        ({"block_q": 128, "dq_parts": 2}, "shared memory"),
        ({"dq_parts": 4}, "dq_parts must leave"),
        ({"other_registers": 90}, "multiple of 8"),
        ({"dq_parts": 1}, "registers"),
        ({"pass_unseen": True, "turned_sections": 1}, "pass_unseen needs"),
    ],
)
def test_invalid_tiles_say_why(change: dict, why: str) -> None:
    traits = cfg.BackwardTraits(head_dim=128, head_dim_v=128, dtype="bfloat16")
    good = cfg.BackwardConfig(block_q=64, dq_parts=2)
    assert cfg.why_invalid(good, traits) is None
    assert why in (cfg.why_invalid(replace(good, **change), traits) or "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout": True}, "dropout"),
        ({"leftpad": True}, "leftpad"),
        ({"page_size": 16}, "paged"),
        ({"seqlen_q": 0}, "empty"),
    ],
)
def test_refusals_name_the_reason(change: dict, why: str) -> None:
    assert cfg.refuses(BASE, H200) is None
    assert why in (cfg.refuses(replace(BASE, **change), H200) or "")


def test_a_head_runs_at_once_only_if_it_fits_the_device() -> None:
    ordered = replace(BASE, deterministic=True, seqlen_k=128 * H200.num_units)
    config = cfg.backward_config(ordered, H200)
    assert cfg.run_together(ordered, config, H200)
    assert not cfg.run_together(replace(ordered, seqlen_k=ordered.seqlen_k + 1), config, H200)
    assert not cfg.run_together(replace(ordered, varlen=True), config, H200)
    assert cfg.heads_per_section(replace(BASE, causal=True), H200) > 1


def test_turns_of_heads_interleave_only_where_no_block_can_wait_for_one_not_started() -> None:
    small = replace(BASE, head_dim=64, head_dim_v=64, deterministic=True)
    assert cfg.heads_per_section(replace(small, causal=True), H200) == cfg.ORDERED_HEADS
    assert cfg.heads_per_section(replace(small, window_left=9), H200) == cfg.ORDERED_HEADS
    assert cfg.heads_per_section(small, H200) == 1
    wide = replace(small, head_dim=256, head_dim_v=256, causal=True)
    assert cfg.heads_per_section(wide, H200) == 1


@pytest.mark.parametrize(
    ("change", "helped"),
    [
        ({"causal": True}, True),
        ({}, True),
        ({"varlen": True}, True),
        ({"causal": True, "window_left": 9}, True),
        ({"window_left": 9}, False),
        ({"causal": True, "varlen": True}, True),
        ({"causal": True, "varlen": True, "seqused": True}, True),
        ({"causal": True, "window_left": 9, "varlen": True}, False),
        ({"deterministic": True, "varlen": True}, False),
        ({"deterministic": True, "window_left": 9}, True),
        ({"head_dim": 64, "head_dim_v": 64, "causal": True}, False),
        ({"head_dim": 64, "head_dim_v": 64, "deterministic": True}, True),
        ({"head_dim": 96, "head_dim_v": 96, "deterministic": True}, False),
    ],
)
def test_helpers_where_they_measured_faster(change: dict, helped: bool) -> None:
    change = {"seqlen_k": 8192, **change}
    config = cfg.backward_config(replace(BASE, **change), H200)
    assert isinstance(config, cfg.BackwardConfig) and config.helpers == helped
    assert cfg.why_invalid(config, cfg.backward_traits(replace(BASE, **change))) is None


@pytest.mark.parametrize(
    ("dim", "change", "persistent", "zeros"),
    [
        (128, {"causal": True, "window_left": 9, "seqlen_q": 2048}, True, True),
        (64, {"causal": True, "window_left": 9, "seqlen_q": 2048}, True, True),
        (128, {"causal": True, "window_left": 9}, True, False),
        (128, {"window_left": 9, "window_right": 9}, True, False),
        (96, {"causal": True, "window_left": 9}, False, False),
        (128, {"causal": True, "window_left": 9, "varlen": True}, False, False),
        (128, {"causal": True, "window_left": 9, "seqused": True}, False, False),
        (128, {"causal": True, "window_left": 9, "deterministic": True}, False, False),
        (128, {"causal": True, "deterministic": True}, True, False),
        (64, {"causal": True, "deterministic": True}, False, False),
        (128, {"deterministic": True}, False, False),
        (128, {"causal": True, "seqlen_k": 8192}, False, False),
        (256, {"causal": True, "window_left": 9}, False, False),
    ],
)
def test_persistent_blocks_where_they_measured_faster(
    dim: int, change: dict, persistent: bool, zeros: bool
) -> None:
    problem = replace(BASE, head_dim=dim, head_dim_v=dim, **change)
    config, traits = cfg.backward_config(problem, H200), cfg.backward_traits(problem)
    assert cfg.is_persistent(config) == persistent == cfg.is_overlapped(config)
    window = "window_left" in change and problem.causal and persistent
    assert cfg.is_ordered(config) == window and cfg.is_zeroing(config) == zeros
    if isinstance(config, cfg.BackwardConfig):
        assert cfg.why_invalid(config, traits) is None
        assert config.persistent == (H200.num_units if persistent else 0)


@pytest.mark.parametrize(
    ("dim", "length", "change", "short"),
    [
        (128, 1024, {}, True),
        (128, 1025, {}, False),
        (128, 2048, {"causal": True}, True),
        (128, 2049, {"causal": True}, False),
        (64, 1024, {}, True),
        (64, 2048, {}, False),
        (64, 4096, {"causal": True}, True),
        (64, 4097, {"causal": True}, False),
        (96, 1024, {"causal": True}, False),
        (128, 1024, {"causal": True, "varlen": True}, False),
        (64, 1024, {"causal": True, "seqused": True}, False),
        (64, 1024, {"causal": True, "deterministic": True}, False),
        (128, 1024, {"window_right": 3}, False),
    ],
)
def test_short_sequences_have_persistent_blocks(
    dim: int, length: int, change: dict, short: bool
) -> None:
    lengths = {"seqlen_q": length, "seqlen_k": length}
    problem = replace(BASE, head_dim=dim, head_dim_v=dim, **lengths, **change)
    config = cfg.backward_config(problem, H200)
    assert cfg.is_persistent(config) == short == cfg.persists_when_short(problem)
    assert not cfg.is_overlapped(config) and not cfg.is_ordered(config)
    assert isinstance(config, cfg.BackwardConfig)
    assert cfg.why_invalid(config, cfg.backward_traits(problem)) is None


def test_variants_only_where_they_measured_faster() -> None:
    """turned_sections: deterministic and causal with helpers; pass_unseen: windows at 128."""
    for dim, change, turned, passes in [
        (64, {"causal": True, "deterministic": True}, 1, False),
        (128, {"causal": True, "deterministic": True}, 1, False),
        (128, {"deterministic": True}, 0, False),
        (128, {"causal": True, "window_left": 9, "deterministic": True}, 0, False),
        (128, {"causal": True}, 0, False),
        (128, {"causal": True, "window_left": 9}, 0, True),
        (128, {"causal": True, "window_left": 9, "varlen": True}, 0, False),
        (128, {"window_left": 9}, 0, False),
        (64, {"causal": True, "window_left": 9}, 0, False),
    ]:
        problem = replace(BASE, head_dim=dim, head_dim_v=dim, **change)
        config = cfg.backward_config(problem, H200)
        assert isinstance(config, cfg.BackwardConfig)
        assert (config.turned_sections, config.pass_unseen) == (turned, passes), (dim, change)


def test_registers_add_up_to_what_a_block_is_launched_with() -> None:
    for config in (
        cfg.BackwardConfig(block_q=64, dq_parts=2),
        cfg.BackwardConfig(block_q=64, dq_parts=2, helpers=True, other_registers=72),
        cfg.BackwardConfig(
            block_q=64, dq_parts=2, helpers=True, other_registers=64, results_behind=True
        ),
    ):
        other, keys = cfg.registers(config)
        helpers = cfg.helper_registers(config)
        warpgroups = 4 if config.helpers else 3
        at_launch = cfg.REGISTER_FILE // (128 * warpgroups) // 8 * 8 * warpgroups
        assert at_launch - 16 < other + 2 * keys + helpers <= at_launch


@pytest.mark.parametrize(
    ("change", "problem", "why"),
    [
        ({}, {}, None),
        ({}, {"deterministic": True}, None),
        ({"helpers": False}, {}, "persistent needs helpers"),
        ({}, {"varlen": True}, "persistent needs helpers and dense"),
        ({}, {"seqused": True}, "persistent needs helpers and dense"),
        ({}, {"deterministic": True, "causal": False}, "persistent in turns"),
        ({"stages": 4}, {}, "shared memory"),
        ({"ordered": True}, {}, None),
        ({"ordered": True}, {"window_left": 9}, None),
        ({"ordered": True}, {"causal": False}, None),
        ({"ordered": True}, {"causal": False, "window_left": 9}, "ordered needs a window"),
        ({"ordered": True, "persistent": 0}, {"window_left": 9}, "ordered needs persistent"),
        ({"ordered": True}, {"window_left": 9, "deterministic": True}, "ordered needs persistent"),
        ({"zeros_ahead": True}, {"window_left": 9}, "zeros_ahead needs"),
        ({"zeros_ahead": True, "ordered": True}, {"window_left": 9}, None),
        ({"statistics_ahead": True, "ordered": True}, {}, "need zeros_ahead"),
        ({"results_behind": True, "ordered": True}, {}, "need zeros_ahead"),
        ({"quick_end": True}, {"deterministic": True}, None),
        ({"quick_end": True}, {"head_dim_v": 64}, "quick_end needs one head dim"),
        ({"polynomial_every": -1}, {}, "polynomial_every must"),
    ],
)
def test_persistent_blocks_only_where_they_are_right(
    change: dict, problem: dict, why: str | None
) -> None:
    traits = cfg.backward_traits(replace(BASE, **{"causal": True, **problem}))
    tile = {"helpers": True, "other_registers": 72, "persistent": 132, **change}
    found = cfg.why_invalid(cfg.BackwardConfig(block_q=64, dq_parts=2, **tile), traits)
    assert (found is None) if why is None else (why in (found or ""))


@pytest.mark.parametrize(
    ("change", "possible"),
    [
        ({}, True),
        ({"causal": True}, True),
        ({"causal": True, "window_left": 9}, True),
        ({"window_left": 9}, False),
        ({"window_right": 0}, False),
        ({"causal": True, "seqlen_k": 8192}, False),
        ({"causal": True, "varlen": True}, False),
        ({"causal": True, "seqused": True}, False),
        ({"causal": True, "deterministic": True}, False),
    ],
)
def test_rows_are_prepared_ahead_only_where_the_order_says_who_meets_them(
    change: dict, possible: bool
) -> None:
    problem = replace(BASE, **{"seqlen_q": 4096, "seqlen_k": 4096, **change})
    config = cfg.BackwardConfig(block_q=64, dq_parts=2)
    found = cfg.prepared_ahead(config, problem, H200)
    assert (found is not None) == possible
    if found is not None:
        assert cfg.why_invalid(found, cfg.backward_traits(problem)) is None
        assert sum(cfg.ahead_warps(found)) == 3 and cfg.helper_registers(found) == 32
