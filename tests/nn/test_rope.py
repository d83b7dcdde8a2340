"""Rotary scaling: the ends of each scheme and what is refused (parity: test_decoder.py)."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.nn.rope import RopeConfig, cos_sin, inverse_frequencies, rotate

CPU = torch.device("cpu")


def test_default_frequencies_and_rotation_by_hand():
    rope = RopeConfig(base=100.0)
    assert inverse_frequencies(rope, 4, CPU).tolist() == pytest.approx([1.0, 0.1])
    cos, sin = cos_sin(rope, 4, torch.tensor([0, 2]))
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]])
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[0, 0], x[0, 0])
    a, b = 2.0, 0.2
    expected = [
        math.cos(a) - 3 * math.sin(a),
        2 * math.cos(b) - 4 * math.sin(b),
        3 * math.cos(a) + math.sin(a),
        4 * math.cos(b) + 2 * math.sin(b),
    ]
    assert turned[0, 1, 0].tolist() == pytest.approx(expected)


def test_scores_depend_on_distance_only():
    rope = RopeConfig()
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i: int, j: int) -> float:
        return float(
            (
                rotate(q, *cos_sin(rope, 16, torch.tensor([i])))
                * rotate(k, *cos_sin(rope, 16, torch.tensor([j])))
            ).sum()
        )

    assert score(90, 83) == pytest.approx(score(7, 0), abs=1e-4)
    assert abs(score(90, 82) - score(7, 0)) > 1e-3


def test_llama3_and_yarn_leave_fast_dims_and_stretch_slow_ones():
    plain = inverse_frequencies(RopeConfig(base=1e6), 64, CPU)
    for kind in ("llama3", "yarn"):
        rope = RopeConfig(base=1e6, kind=kind, factor=8.0, original_max_seqlen=4096)
        ratio = plain / inverse_frequencies(rope, 64, CPU)
        assert ratio[0] == 1.0
        assert ratio[-1] == pytest.approx(8.0, rel=1e-5)
        assert (ratio.diff() >= -1e-4).all()
        assert ((ratio > 1.01) & (ratio < 7.9)).any()


def test_yarn_temperature_from_the_paper():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = RopeConfig.from_hf({"rope_scaling": scaling}, 256)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    cos, _ = cos_sin(rope, 32, torch.tensor([0]))
    assert cos.flatten().tolist() == pytest.approx([rope.attention_factor] * 16)


def test_bf16_is_rounded_once():
    x = torch.randn(1, 5, 2, 32).bfloat16()
    cos, sin = cos_sin(RopeConfig(), 32, torch.arange(5) + 1000)
    exact = rotate(x.double().float(), cos, sin)
    assert torch.equal(rotate(x, cos, sin), exact.bfloat16())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(kind="dynamic"), "rope: kind must be one of .*, got 'dynamic'"),
        (dict(base=1.0), "rope: base must be > 1, got 1.0"),
        (dict(kind="linear", factor=0.5), "rope: factor must be at least 1, got 0.5"),
        (dict(kind="llama3", high_freq_factor=1.0), "rope: high_freq_factor must exceed"),
    ],
)
def test_bad_values(options, match):
    with pytest.raises(ValueError, match=match):
        RopeConfig(**options)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "kind must be one of"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling must have a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ],
)
def test_bad_config_json(config, match):
    with pytest.raises(ValueError, match=match):
        RopeConfig.from_hf(config, 128)
