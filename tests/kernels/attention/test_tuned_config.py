"""A tuned tile comes before the shipped table, where it can run."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from ridgeline.core import tuned as store
from ridgeline.core.arch import pretend
from ridgeline.kernels.attention import config
from ridgeline.kernels.attention.problem import AttentionProblem

SM90 = pretend("sm90")
TILE = config.TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)


def problem(**more) -> AttentionProblem:
    shape = dict(batch=2, seqlen_q=4096, seqlen_k=4096, heads=8, kv_heads=8)
    return AttentionProblem(**{**shape, "head_dim": 128, "head_dim_v": 128, **more})


def decode(**more) -> AttentionProblem:
    return problem(**{"seqlen_q": 1, "causal": True, "kv_heads": 2, **more})


@pytest.fixture(autouse=True)
def _fresh(cache):
    config.forget_kept()
    yield
    config.forget_kept()


def test_the_argument_comes_before_the_table():
    p = problem()
    shipped = config.forward_tile(p, SM90, {})
    tuned = {config.tuning_key(p, "fwd"): TILE}
    assert config.forward_tile(p, SM90, tuned) == config.attention_config(p, SM90, tuned) == TILE
    assert shipped != TILE == config.forward_tile(replace(p, seqlen_k=4000), SM90, tuned)
    for other in (
        dict(causal=True), dict(seqlen_k=4097), dict(seqlen_q=2048), dict(dtype="float16"),
        dict(kv_heads=4), dict(softcap=10.0), dict(bias=True), dict(head_dim_v=64),
    ):  # fmt: skip
        seen = replace(p, **other)
        assert config.forward_tile(seen, SM90, tuned) == config.forward_tile(seen, SM90, {})


def test_a_backward_may_be_tuned_in_part():
    p = problem(direction="bwd")
    tuned = {config.tuning_key(p, "dq"): TILE}
    both = config.backward_config(p, SM90, tuned)
    assert (both.dq, both.dkdv) == (TILE, config.backward_config(p, SM90, {}).dkdv)
    assert config.config_source(p, SM90, tuned) == "dkdv table, dq tuned"
    assert config.config_source(p, SM90, {}) == "table"
    assert config.config_source(p, pretend("sm80"), {}) == "fallback"


def test_a_tile_that_cannot_run_is_not_taken():
    p = problem(head_dim=256, head_dim_v=256)
    wide = replace(TILE, block_m=128, block_n=128, num_warps=8, num_stages=4)
    assert config.is_valid(p, SM90, "fwd", wide) is not None
    tuned = {config.tuning_key(p, "fwd"): wide}
    assert config.forward_tile(p, SM90, tuned) == config.forward_tile(p, SM90, {})
    assert config.config_source(p, SM90, tuned) == "table"


def test_decode_keeps_tile_and_splits():
    p = decode()
    chosen = config.DecodeConfig(tile=replace(TILE, block_m=16), num_splits=40)
    tuned = {config.tuning_key(p, "decode"): chosen}
    assert config.decode_config(p, SM90, tuned=tuned) == chosen
    assert config.config_source(p, SM90, tuned) == "tuned"
    assert config.decode_config(p, SM90, 3, tuned) == replace(chosen, num_splits=3)
    short = replace(p, seqlen_k=2049)
    tuned = {config.tuning_key(short, "decode"): replace(chosen, num_splits=100)}
    assert config.decode_config(short, SM90, tuned=tuned).num_splits == 65
    assert config.decode_config(replace(p, batch=3), SM90, tuned=tuned).tile != chosen.tile


def test_the_kept_table_is_read_once_and_wrong_entries_named_once(recwarn):
    p = problem()
    key = config.tuning_key(p, "fwd")
    wrong = {"fwd x": {"config": {"block": 1}}, "decode y": {"config": 3}, "z": None}
    store.save("attention", SM90, {key: {"config": asdict(TILE)}, **wrong})
    for _ in range(3):
        assert config.forward_tile(p, SM90) == TILE
    assert config.config_source(p, SM90) == "tuned"
    [said] = [str(warning.message) for warning in recwarn]
    assert "no tile in 'decode y', 'fwd x', 'z'" in said and "ridgeline tune" in said
    store.path(SM90).unlink()
    assert config.forward_tile(p, SM90) == TILE
    config.forget_kept()
    assert config.forward_tile(p, SM90) == config.forward_tile(p, SM90, {})


def test_decode_candidates_are_valid_and_hold_the_shipped_splits():
    for p in (decode(), decode(page_size=16), decode(seqlen_k=1), decode(dtype="float32")):
        for arch in (SM90, pretend("sm86")):
            shipped = config.decode_config(p, arch, tuned={})
            found = list(config.decode_candidates(p, arch))
            assert found and len(set(found)) == len(found)
            for each in found:
                assert config.is_valid(p, arch, "decode", each.tile) is None
                assert 1 <= each.num_splits <= max(1, -(-p.seqlen_k // each.tile.block_n))
                assert not each.tile.tma or arch is SM90
            assert shipped.num_splits in {each.num_splits for each in found}


def test_every_mask_has_candidates_and_branches_only_under_a_mask():
    for kernel in ("fwd", "dkdv", "dq"):
        assert not any(tile.branch for tile in config.candidates(problem(), SM90, kernel))
        masked = list(config.candidates(problem(causal=True), SM90, kernel))
        assert any(tile.branch for tile in masked)
