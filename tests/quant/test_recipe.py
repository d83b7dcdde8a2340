"""Recipes, their exceptions, and calibration blocks."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant.gptq import GPTQOptions
from ridgeline.quant.recipe import Override, Recipe, calibration_blocks


def test_overrides_in_order() -> None:
    recipe = Recipe(
        overrides=(
            Override(pattern=r"layers\.0\.", skip=True),
            Override(pattern="down", bits=8, group_size=32),
            Override(pattern="down", skip=True),
        )
    )
    assert recipe.layout_of("layers.0.mlp.down") is None
    down = recipe.layout_of("layers.1.mlp.down")
    assert down is not None and (down.bits, down.group_size) == (8, 32)
    assert recipe.layout_of("layers.1.mlp.up") == recipe.layout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(method="awq2"), "quantize: method must be one of"),
        (lambda: Recipe(batch_sequences=0), "quantize: batch_sequences must be at least 1"),
        (
            lambda: Recipe(layout=GPTQFormat(desc_act=True)),
            "layout.desc_act must be true exactly when gptq.order is activation",
        ),
        (
            lambda: Recipe(gptq=GPTQOptions(order="activation")),
            "layout.desc_act must be true exactly when gptq.order is activation",
        ),
        (lambda: Override(pattern="("), "override.pattern must be a regular expression"),
        (lambda: Override(pattern="a", skip=True, bits=8), "override must either skip"),
    ],
)
def test_bad_recipes(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_blocks_are_whole_distinct_and_repeatable() -> None:
    ids = torch.arange(1000)
    blocks = calibration_blocks(ids, sequences=9, length=100, seed=3)
    assert blocks.shape == (9, 100) and blocks.dtype == torch.int64
    starts = blocks[:, 0]
    assert len(set(starts.tolist())) == 9 and (starts % 100 == 0).all()
    assert torch.equal(blocks, starts[:, None] + torch.arange(100))
    assert torch.equal(blocks, calibration_blocks(ids, sequences=9, length=100, seed=3))
    assert not torch.equal(blocks, calibration_blocks(ids, sequences=9, length=100, seed=4))


def test_too_little_text_is_said() -> None:
    with pytest.raises(UserError, match="must hold 4 x 300 = 1200 tokens, got 1000; give more"):
        calibration_blocks(torch.arange(1000), sequences=4, length=300)
    with pytest.raises(ValueError, match="sequences and length must be at least 1 and 2"):
        calibration_blocks(torch.arange(1000), sequences=0, length=300)
