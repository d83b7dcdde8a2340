"""When cutting the last tiles of a Hopper forward pays, and what its launch is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_cached_config as cached
from ridgeline.kernels.attention import cute_sm90_config as cfg
from ridgeline.kernels.attention import cute_sm90_tail_config as tails
from ridgeline.kernels.attention.cute.tail import tail
from ridgeline.kernels.attention.cute_sm90_choice import forward_kernel
from ridgeline.kernels.attention.problem import AttentionProblem

H200 = KNOWN["sm90"]
BASE = AttentionProblem(
    batch=1, seqlen_q=16384, seqlen_k=16384, heads=16, kv_heads=16, head_dim=128, head_dim_v=128
)
FREE = tails.Costs(start=0.0, write=0.0, merge=0.0)


def wished(problem: AttentionProblem) -> cfg.ForwardConfig:
    return replace(cfg.forward_config(problem, H200), split_tail=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"causal": True}, "no causal mask"),
        ({"window_left": 9}, "no window"),
        ({"window_right": 9}, "no window"),
        ({"varlen": True}, "dense sequences"),
        ({"seqused": True}, "used whole"),
    ],
)
def test_only_tiles_of_equal_length_are_cut(change: dict, why: str) -> None:
    problem = replace(BASE, **change)
    config = wished(problem)
    assert why in (cfg.why_invalid(config, cfg.forward_traits(problem)) or "")
    assert tails.settled(problem, config, H200) == cfg.forward_config(problem, H200)


def test_a_schedule_of_one_tile_a_block_is_not_cut() -> None:
    config = replace(wished(BASE), persistent=False)
    assert "persistent" in (cfg.why_invalid(config, cfg.forward_traits(BASE)) or "")


def test_the_kernel_of_caches_has_no_tail() -> None:
    problem = replace(BASE, seqlen_q=1, seqused=True)
    traits, config = cached.forward_key(problem, H200)
    assert isinstance(config, cached.CachedConfig) and isinstance(traits, cached.CachedTraits)
    assert "split_tail" in (cached.why_invalid(replace(config, split_tail=True), traits) or "")


@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"sinks": True}, {"kv_heads": 4}])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_softcap_sinks_and_grouped_heads_are_cut_too(change: dict, dims: tuple) -> None:
    problem = replace(BASE, head_dim=dims[0], head_dim_v=dims[1], **change)
    config = wished(problem)
    assert cfg.why_invalid(config, cfg.forward_traits(problem)) is None
    producer, consumer = cfg.registers(config, cfg.forward_traits(problem))
    assert 128 * (producer + config.num_warpgroups * consumer) <= 65536


def test_nothing_is_cut_by_default() -> None:
    for head_dim in (32, 64, 96, 128, 160, 192, 256):
        problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim)
        assert not forward_kernel(problem, H200)[1].split_tail


@pytest.mark.parametrize(
    ("change", "ranges"),
    [
        ({}, 132),  # 68 tiles of 2,048
        ({"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096}, 132),
        ({"batch": 16, "seqlen_q": 1024, "seqlen_k": 1024}, 0),  # 8 key blocks are too few
        ({"heads": 33, "kv_heads": 33, "seqlen_q": 4096}, 0),  # 8 rounds, nothing left
        ({"heads": 1, "kv_heads": 1, "seqlen_q": 8192}, 128),  # 64 tiles: halves
        ({"heads": 1, "kv_heads": 1, "seqlen_q": 17024}, 10),  # 133 tiles: one, in tenths
        ({"seqlen_q": 200, "seqlen_k": 100}, 0),  # one key block
    ],
)
def test_where_cutting_pays(change: dict, ranges: int) -> None:
    problem = replace(BASE, **change)
    config = wished(problem)
    cut = tails.tail_of(problem, config, H200)
    settled = tails.settled(problem, config, H200)
    assert settled.split_tail == (ranges > 0)
    assert replace(settled, split_tail=True) == config
    if ranges:
        assert cut.ranges == ranges


def test_times_of_the_shipped_cell() -> None:
    """2,048 tiles of 128 blocks: 16 rounds, or 15 and 66 blocks, 2 pieces and a merge of 3."""
    cut = tail(2048, 132, 128, 132)
    assert tails.plain_time(2048, 132, 128, FREE) == 16 * 128
    assert tails.split_time(cut, 132, FREE) == 15 * 128 + 66
    cost = tails.Costs(start=1.0, write=10.0, merge=100.0)
    assert tails.plain_time(2048, 132, 128, cost) == 16 * 129
    assert tails.split_time(cut, 132, cost) == 15 * 129 + 66 + 2 * 11 + 300
    even = tail(44, 132, 30, 132)  # thirds: one piece a range
    assert tails.split_time(even, 132, cost) == 10 + 11 + 300


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 400), st.integers(1, 140), st.integers(1, 130), st.floats(0, 9), st.floats(0, 9)
)
def test_the_prediction_is_the_longest_unit(
    num_tiles: int, num_units: int, blocks: int, start: float, write: float
) -> None:
    """Against a list of all units' pieces; a tile's merge comes on top."""
    cost = tails.Costs(start=start, write=write, merge=1.0)
    cut = tails.best_tail(num_tiles, num_units, blocks, cost)
    longest = pieces = 0
    for item in range(cut.whole, cut.items()):
        _, begin, end = cut.span(item)
        held = (end - 1) // blocks - begin // blocks + 1
        whole = end - begin == blocks and begin % blocks == 0
        longest = max(longest, end - begin + held * (start + (0 if whole else write)))
        parts = [cut.parts(item, tile) for tile in range(begin // blocks, (end - 1) // blocks + 1)]
        pieces = max([pieces, *(p.count for p in parts)])
    waves = cut.whole // num_units * (blocks + start)
    got = tails.split_time(cut, num_units, cost)
    exact = waves + longest + (pieces if pieces > 1 else 0)
    assert got >= exact - 1e-6  # never less than what it takes
    assert got <= exact + start + write + 2 + 1e-6  # nor much more
    if tails.pays(cut, num_units, cost):
        assert cut.left and exact < tails.plain_time(num_tiles, num_units, blocks, cost)


def test_costs_of_a_block_are_near_what_was_measured() -> None:
    """1,980 tiles of 128 blocks in 15 rounds take 4.53 M cycles of a multiprocessor (head dim 128,
    ncu, docs/log/attention_hopper.md)."""
    cost = tails.costs(cfg.forward_traits(BASE), cfg.forward_config(BASE, H200))
    block = tails.START_CYCLES / cost.start
    assert abs(15 * 128 * block / 4.53e6 - 1) < 0.1


def test_shapes_of_what_a_launch_needs() -> None:
    config, traits = wished(BASE), cfg.forward_traits(BASE)
    cut = tails.tail_of(BASE, config, H200)
    assert tails.pieces_shape(cut, config, traits) == (200, 2, 17, 512)
    most = tail(263, 132, 500, 132)  # 131 tiles are cut
    for num_warpgroups in (1, 2, 3):
        assert tails.QUEUE_WORDS + most.places() * num_warpgroups <= tails.counter_words(132)


def test_what_would_not_fit_int32_is_not_cut() -> None:
    long = replace(BASE, seqlen_q=1 << 11, seqlen_k=1 << 24)
    assert not tails.settled(long, wished(long), H200).split_tail
    assert tails.settled(replace(long, seqlen_k=1 << 23), wished(long), H200).split_tail
