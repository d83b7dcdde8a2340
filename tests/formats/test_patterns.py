"""Patterns of a checkpoint: the usual ones run, those that could take for ever do not."""

from __future__ import annotations

import time

import pytest

from ridgeline.core.errors import UserError
from ridgeline.formats.gptq_config import read_config
from ridgeline.formats.patterns import refusal

PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@pytest.mark.parametrize(
    "pattern",
    [
        r"model\.layers\.3\.self_attn\.q_proj$",
        r".*\.down_proj",
        r".*\.(q|k|v)_proj.*",
        r"model\.layers\.(?:1[0-9]|2[0-3])\..*mlp.*",
        r"^.*layers\.[0-9]+\.mlp\.gate$",
        r"layers\.\d{1,3}\.(?!mlp).*",
        r"(model\.)?lm_head",
    ],
)
def test_usual_patterns_run(pattern) -> None:
    assert refusal(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a+)+$", "repetition inside a repetition"),
        (r"(?:[a-z.]+\d*)*!", "repetition inside a repetition"),
        (r"((a|aa)|b)*$", "choice inside a repetition"),
        (r"(.*)\1", "reference to a group"),
        (r".*.*.*.*.*.*x", "6 repetitions where 4"),
        ("a" * 2000, "2000 characters where 1024"),
        ("(", "no regular expression"),
    ],
)
def test_patterns_that_could_take_for_ever_are_refused(pattern, why) -> None:
    assert why in str(refusal(pattern))
    started = time.perf_counter()
    with pytest.raises(UserError, match=r"quantization_config.dynamic\[.*the pattern must be"):
        read_config({**PLAIN, "dynamic": {f"-:{pattern}": {}}}).layout_of("a" * 60)
    assert time.perf_counter() - started < 5.0
