"""The Hopper forward over caches: tiles, budgets, who takes a problem, parts of the keys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core import registry
from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_cached_config as cfg
from ridgeline.kernels.attention import cute_sm90_verified as verified
from ridgeline.kernels.attention import impls  # noqa: F401  registers
from ridgeline.kernels.attention.cute import cache
from ridgeline.kernels.attention.cute_sm90_choice import forward_kernel
from ridgeline.kernels.attention.cute_sm90_config import (
    consumer_registers,
    forward_config,
    forward_traits,
)
from ridgeline.kernels.attention.problem import AttentionProblem

from . import cases

H200 = KNOWN["sm90"]
DECODE = AttentionProblem(
    batch=32, seqlen_q=1, seqlen_k=8192, heads=32, kv_heads=8, head_dim=128, head_dim_v=128,
    kv_cache=True, seqused=True,
)  # fmt: skip
PREFILL = replace(DECODE, seqlen_q=512, causal=True)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")


@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 96, 112, 128, 160, 192, 200, 256])
@pytest.mark.parametrize("problem", [DECODE, PREFILL], ids=["few", "many"])
@pytest.mark.parametrize("page_size", [None, 8, 16, 64, 256])
@pytest.mark.usefixtures("unverified")
def test_every_head_dim_gets_a_valid_tile(head_dim: int, problem, page_size) -> None:
    problem = replace(problem, head_dim=head_dim, head_dim_v=head_dim, page_size=page_size)
    assert cfg.refuses(problem, H200) is None
    traits, config = cfg.cached_traits(problem, H200), cfg.cached_config(problem, H200)
    assert cfg.why_invalid(config, traits) is None
    used = cfg.shared_memory_bytes(config, traits) + cfg.RESERVED_BYTES
    assert used * config.blocks_per_sm <= 228 * 1024
    moved = cfg.moved_registers(config)
    if moved is None:
        assert config.num_warpgroups == config.blocks_per_sm == 1
        assert consumer_registers(config, traits) <= cfg.MOST_REGISTERS
    else:
        assert all(count % 8 == 0 for count in moved)
        threads = 128 * config.blocks_per_sm
        assert threads * (moved[0] + config.num_warpgroups * moved[1]) <= 65536
        # setmaxnreg must take from the producer and give to the consumers.
        launched = 65536 // (threads * (1 + config.num_warpgroups)) // 8 * 8
        assert moved[0] <= launched <= moved[1]
    if page_size is not None:
        assert traits.page_rows == min(page_size, config.block_k)
        assert config.block_k % traits.page_rows == 0


def test_few_queries_share_a_multiprocessor() -> None:
    few, many = cfg.cached_config(DECODE, H200), cfg.cached_config(PREFILL, H200)
    assert (few.num_warpgroups, few.blocks_per_sm, few.block_k) == (1, 2, 64)
    assert (many.num_warpgroups, many.blocks_per_sm, many.block_k) == (2, 1, 128)
    assert cfg.few_queries(replace(DECODE, seqlen_q=16))
    assert not cfg.few_queries(replace(DECODE, seqlen_q=17))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": 3}, "power of two"),
        ({"block_k": 32}, "boxes of 64"),
        ({"block_k": 256}, "shared memory"),
        ({"blocks_per_sm": 3}, "64k registers"),
    ],
)
def test_invalid_tiles_say_why(change: dict, why: str) -> None:
    traits = cfg.cached_traits(replace(DECODE, page_size=64), H200)
    good = cfg.cached_config(DECODE, H200)
    assert cfg.why_invalid(good, traits) is None
    assert why in (cfg.why_invalid(replace(good, **change), traits) or "")
    assert "has_left" in (cfg.why_invalid(good, replace(traits, leftpad=True)) or "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout": True}, "dropout"),
        ({"alibi": True}, "ALiBi"),
        ({"bias": True}, "bias"),
        ({"mods": True}, "score or mask"),
        ({"head_dim": 264, "head_dim_v": 264}, "multiples of 8 up to 256"),
        ({"page_size": 24}, "powers of two"),
        ({"page_size": 4}, "powers of two"),
        ({"seqlen_k": 0}, "empty"),
    ],
)
@pytest.mark.usefixtures("unverified")
def test_refusals_name_the_reason(change: dict, why: str) -> None:
    assert cfg.forward_refuses(PREFILL, H200) is None
    assert why in (cfg.forward_refuses(replace(PREFILL, **change), H200) or "")


CACHES = [
    PREFILL,
    DECODE,
    replace(DECODE, seqused=False, leftpad=True),
    replace(DECODE, seqused=False, kv_batch_idx=True),
    replace(DECODE, seqused=False, page_size=16),
]


@pytest.mark.parametrize("problem", CACHES)
def test_what_has_not_run_is_refused_unless_asked_for(problem, monkeypatch) -> None:
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    why = cfg.forward_refuses(problem, H200)
    packed = cfg.few_queries(problem)
    if verified.why_unverified(problem, packed) is not None:  # until rows are confirmed
        assert "not verified on hardware yet" in (why or "")
    else:
        assert why is None
    cases.pretend_packages(monkeypatch, ("cutlass", "tvm_ffi"))
    assert registry.select(problem, H200).name == ("triton" if why else "cute_sm90")
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")
    assert cfg.forward_refuses(problem, H200) is None and cfg.takes(problem)


def test_few_queries_wait_for_their_row(monkeypatch) -> None:
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    dense = replace(DECODE, seqused=False, kv_cache=False)
    assert cfg.takes(dense) and cfg.forward_refuses(dense, H200) is None
    rows = tuple(replace(row, run=None if row.packed else row.run) for row in verified.FEATURES)
    monkeypatch.setattr(verified, "FEATURES", rows)
    assert not cfg.takes(dense) and cfg.forward_refuses(dense, H200) is None
    assert "not verified" in (cfg.forward_refuses(DECODE, H200) or "")


def test_dense_problems_keep_the_other_kernel(monkeypatch) -> None:
    monkeypatch.delenv("RIDGELINE_UNVERIFIED", raising=False)
    for change in ({}, {"seqlen_q": 17}, {"varlen": True}):
        problem = replace(PREFILL, seqused=False, kv_cache=False, **change)
        assert not cfg.takes(problem)
        assert cfg.forward_key(problem, H200) == (
            forward_traits(problem),
            forward_config(problem, H200),
        )
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")
    assert not cfg.takes(replace(PREFILL, seqused=False, direction="bwd", seqlen_q=1))
    assert cfg.takes(replace(PREFILL, seqused=False, seqlen_q=1))
    assert not cfg.takes(replace(PREFILL, seqused=False))


def test_parts_fill_the_gpu_and_no_more() -> None:
    one = replace(DECODE, batch=1, seqlen_k=131072)
    tiles = one.kv_heads
    slots = 2 * H200.num_units
    assert slots // tiles * 0.7 <= cfg.splits(one, H200) <= 4 * slots // tiles
    assert cfg.splits(replace(DECODE, batch=128, seqlen_k=2048), H200) <= 2
    assert cfg.splits(replace(one, seqlen_k=64), H200) == 1
    assert cfg.splits(replace(PREFILL, batch=1), H200) == 1
    window = replace(one, causal=True, window_left=100)
    assert cfg.splits(window, H200) <= 3
    assert cfg.cached_traits(one, H200).split and not cfg.cached_traits(one, H200, 1).split


def test_names_tell_kernels_apart() -> None:
    changes = [
        {}, {"seqused": False}, {"leftpad": True}, {"kv_batch_idx": True}, {"page_size": 16},
        {"page_size": 64}, {"softcap": 3.0}, {"sinks": True}, {"varlen": True}, {"causal": True},
        {"batch": 1}, {"seqlen_q": 512}, {"dtype": "float16"}, {"head_dim": 64},
    ]  # fmt: skip
    names = set()
    for change in changes:
        problem = replace(DECODE, **change)
        key = cfg.cached_traits(problem, H200), cfg.cached_config(problem, H200)
        names.add(cache.kernel_name(*key))
    names.add(cache.kernel_name(forward_traits(PREFILL), forward_config(PREFILL, H200)))
    assert len(names) == len(changes) + 1


@pytest.mark.usefixtures("unverified")
def test_without_its_kernel_dense_calls_keep_the_other(monkeypatch) -> None:
    dense = replace(DECODE, seqused=False, kv_cache=False)
    plain = forward_traits(dense), forward_config(dense, H200)
    here = replace(H200, pretended=False)
    monkeypatch.setattr(
        cache,
        "why_missing",
        lambda traits, c: "no" if isinstance(traits, cfg.CachedTraits) else None,
    )
    assert forward_kernel(dense, here) == plain
    assert isinstance(forward_kernel(DECODE, here)[0], cfg.CachedTraits)  # the other cannot
    monkeypatch.setattr(cache, "why_missing", lambda traits, config: None)
    assert isinstance(forward_kernel(dense, here)[0], cfg.CachedTraits)
