"""The same loop on a GPU: falls, resumes, and follows the CPU's fp32 curve."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ridgeline.nn.config import DecoderConfig
from ridgeline.train.trainer import train
from tests.train.helpers import curve, rows_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def head_dim_64(small_model):
    """The small model with a head dim that GPU kernels take."""
    shape = DecoderConfig.from_hf(json.loads((small_model / "config.json").read_text()))
    wider = dataclasses.replace(shape, hidden_size=128, head_dim=64)
    (small_model / "config.json").write_text(json.dumps(wider.to_hf()))


def test_bf16_falls_and_resumes(make_config, head_dim_64):
    changes = {"device": "cuda", "dtype": "bfloat16", "steps": 20}
    straight, config = make_config("straight", **changes), make_config(**changes)
    result = train(straight)
    assert result.losses[-1] < result.losses[0] - 1.0
    train(config, stop_at_step=7)
    assert train(config).resumed_from == 7
    for ours, theirs in zip(curve(config), curve(straight), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)  # a backward pass may add in another order
    assert 0 < rows_of(config)[-1]["peak_memory_gib"] < 8


def test_bf16_follows_fp32_on_the_cpu(make_config, head_dim_64):
    on_gpu = make_config("gpu", device="cuda", dtype="bfloat16", steps=10)
    on_cpu = make_config("cpu", steps=10)
    train(on_gpu)
    train(on_cpu)
    for ours, theirs in zip(rows_of(on_gpu), rows_of(on_cpu), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-2)
