"""Hopper tiles: every head dim gets a valid one, budgets are computed, refusals say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from ridgeline.core import registry
from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention import cute_sm90_config as cfg
from ridgeline.kernels.attention import impls  # noqa: F401  registers
from ridgeline.kernels.attention.cute import cache
from ridgeline.kernels.attention.problem import AttentionProblem

from . import cases

H200 = KNOWN["sm90"]
BASE = AttentionProblem(
    batch=2, seqlen_q=1024, seqlen_k=2048, heads=8, kv_heads=2, head_dim=128, head_dim_v=128
)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 96, 112, 128, 160, 192, 200, 224, 256])
@pytest.mark.parametrize("varlen", [False, True])
def test_every_head_dim_gets_a_valid_tile(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, varlen: bool
) -> None:
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")
    problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim, varlen=varlen)
    assert cfg.refuses(problem, H200) is None
    traits, config = cfg.forward_traits(problem), cfg.forward_config(problem, H200)
    assert cfg.why_invalid(config, traits) is None
    assert traits.head_dim >= head_dim
    assert cfg.shared_memory_bytes(config, traits) <= H200.smem_bytes
    assert cfg.consumer_registers(config, traits) <= cfg.registers(config, traits)[1]


@pytest.mark.parametrize("num_warpgroups", [1, 2, 3])
@pytest.mark.parametrize("varlen", [False, True])
def test_register_split_fits_the_register_file(num_warpgroups: int, varlen: bool) -> None:
    config = cfg.ForwardConfig(block_k=64, num_warpgroups=num_warpgroups)
    traits = cfg.ForwardTraits(head_dim=64, head_dim_v=64, dtype="bfloat16", varlen=varlen)
    producer, consumer = cfg.registers(config, traits)
    assert producer % 8 == 0 and consumer % 8 == 0
    assert 128 * (producer + num_warpgroups * consumer) <= 65536


def test_shared_memory_of_a_known_tile() -> None:
    traits = cfg.ForwardTraits(head_dim=128, head_dim_v=128, dtype="bfloat16")
    config = cfg.ForwardConfig(block_k=128, num_warpgroups=2)
    kib = 1024
    q_and_o, keys_and_values = 2 * 32 * kib, 2 * 64 * kib
    assert cfg.shared_memory_bytes(config, traits) == cfg.BARRIER_BYTES + q_and_o + keys_and_values
    reused = replace(config, output_reuses_q=True)
    saved = cfg.shared_memory_bytes(config, traits) - cfg.shared_memory_bytes(reused, traits)
    assert saved == 32 * kib


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_warpgroups": 4}, "num_warpgroups must be"),
        ({"q_stages": 3}, "q_stages must be"),
        ({"q_stages": 2, "output_reuses_q": True}, "output_reuses_q needs"),
        ({"block_k": 120}, "multiple of 16"),
        ({"stages": 3}, "power of two"),
        ({"block_k": 256}, "shared memory"),
        ({"num_warpgroups": 3}, "registers"),
        ({"lazy_log2": -1.0}, "negative"),
    ],
)
def test_invalid_tiles_say_why(change: dict, why: str) -> None:
    traits = cfg.ForwardTraits(head_dim=128, head_dim_v=128, dtype="bfloat16")
    good = cfg.ForwardConfig(block_k=128, num_warpgroups=2)
    assert cfg.why_invalid(good, traits) is None
    assert why in (cfg.why_invalid(replace(good, **change), traits) or "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dropout": True}, "dropout"),
        ({"alibi": True}, "ALiBi"),
        ({"bias": True}, "bias"),
        ({"page_size": 16}, "paged"),
        ({"mods": True}, "score or mask"),
        ({"head_dim": 264, "head_dim_v": 264}, "multiples of 8 up to 256"),
        ({"head_dim": 100}, "multiples of 8"),
        ({"seqlen_k": 0}, "empty"),
    ],
)
def test_refusals_name_the_reason(change: dict, why: str) -> None:
    assert cfg.refuses(BASE, H200) is None
    assert why in (cfg.refuses(replace(BASE, **change), H200) or "")


@pytest.mark.parametrize(
    ("change", "rings"),
    [
        ({}, (4, 2)),
        ({"seqlen_q": 4096}, (4, 2)),
        ({"causal": False}, (2, 1)),
        ({"window_left": 9}, (2, 1)),
        ({"sinks": True}, (2, 1)),
        ({"varlen": True}, (2, 1)),
        ({"head_dim": 128, "head_dim_v": 128}, (2, 1)),
    ],
)
def test_deep_rings_only_where_they_measured_faster(change: dict, rings: tuple) -> None:
    problem = replace(BASE, head_dim=64, head_dim_v=64, causal=True)
    config = cfg.forward_config(replace(problem, **change), H200)
    assert (config.stages, config.q_stages) == rings
    short = change.get("seqlen_q", BASE.seqlen_q) <= 1024 and not change.get("varlen")
    narrow = change.get("head_dim", 64) == 64
    two = not narrow or (short and change.get("causal", True))
    assert config.num_warpgroups == (2 if two else 3)


@pytest.mark.parametrize(
    ("change", "turns"),
    [
        ({}, False),
        ({"causal": True}, False),
        ({"seqlen_q": 1024}, True),
        ({"seqlen_k": 2048}, True),
        ({"window_left": 9}, True),
        ({"softcap": 3.0}, True),
        ({"varlen": True}, False),
        ({"head_dim": 96}, True),
        ({"head_dim": 64, "head_dim_v": 64}, True),
    ],
)
def test_turns_are_left_out_only_where_that_measured_faster(change: dict, turns: bool) -> None:
    long = replace(BASE, head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_k=4096)
    assert cfg.forward_config(replace(long, **change), H200).ping_pong == turns


def test_causal_and_window_share_the_right_bound_in_the_compile_key() -> None:
    causal = cfg.forward_traits(replace(BASE, causal=True))
    window = cfg.forward_traits(replace(BASE, window_right=7))
    assert causal == window and causal.has_right and not causal.has_left


def test_sections_fill_l2_but_not_more() -> None:
    causal = replace(BASE, causal=True, batch=1, seqlen_k=16384, heads=16, kv_heads=16)
    section = cfg.heads_per_section(causal, H200)
    head_bytes = 16384 * 256 * 2
    assert section == 2 ** (section.bit_length() - 1)
    assert section * head_bytes <= H200.l2_bytes < 4 * section * head_bytes
    assert cfg.heads_per_section(replace(causal, causal=False), H200) == 1


def test_hopper_takes_it_where_the_dsl_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.pretend_packages(monkeypatch, ("cutlass", "tvm_ffi"))
    assert registry.select(BASE, H200).name == "cute_sm90"
    assert registry.select(replace(BASE, direction="bwd"), H200).name == "cute_sm90"
    assert registry.select(BASE, KNOWN["sm80"]).name != "cute_sm90"
    assert registry.select(replace(BASE, dtype="float32"), H200).name != "cute_sm90"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_without_the_dsl_it_needs_a_filled_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direction: Literal["fwd", "bwd"]
) -> None:
    cases.pretend_packages(monkeypatch, ("tvm_ffi",))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    problem = replace(BASE, direction=direction)
    refusals = registry.explain(problem, H200).refusals
    assert "needs the package cutlass" in (refusals["cute_sm90"] or "")
    if direction == "fwd":
        key = cfg.forward_traits(problem), cfg.forward_config(problem, H200)
    else:
        key = bwd.backward_traits(problem), bwd.backward_config(problem, H200)
    folder = tmp_path / "cute" / f"attention-4.8.1-{cache.ARCHITECTURE}-{cache.digest()}"
    folder.mkdir(parents=True)
    (folder / f"{cache.kernel_name(*key)}.so").touch()
    assert registry.explain(problem, H200).refusals["cute_sm90"] is None
