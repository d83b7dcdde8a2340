"""Widths from measured error: the budget holds, errors are the layers', better layers get fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.mixed import Choice, Measured, choose_widths, measure_widths, with_widths
from ridgeline.quant.recipe import Override, Recipe
from ridgeline.quant.report import packed_bytes

from .test_awq import decoder

RECIPE = Recipe(layout=GPTQFormat(group_size=16), batch_sequences=4)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (8, 24), generator=torch.Generator().manual_seed(0))


def test_errors_are_those_of_rounding_each_layer(ids: torch.Tensor) -> None:
    model, exact = decoder(), decoder()
    measured = measure_widths(model, ids, RECIPE, (8, 4))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), exact.parameters(), strict=True)
    )
    assert len(measured) == 14 and measured[0].name == "model.layers.0.self_attn.q_proj"
    seen = []
    layer = model.blocks[1].mlp.down_proj
    hook = layer.register_forward_pre_hook(lambda m, a: seen.append(a[0].reshape(-1, 64)))
    model(ids)
    hook.remove()
    for place, bits in enumerate((4, 8)):
        form = replace(RECIPE.layout, bits=bits)
        wrong = form.quantize_ref(layer.weight).dequantize() - layer.weight
        expected = (seen[0] @ wrong.T).norm() / (seen[0] @ layer.weight.T).norm()
        choice = measured[-1].choices[place]
        assert choice.bits == bits
        assert choice.error == pytest.approx(float(expected) ** 2, rel=1e-3)


def layer(name: str, *errors: float) -> Measured:
    choices = tuple(
        Choice(bits=bits, error=error, num_bytes=100 * bits / 8)
        for bits, error in zip((2, 4, 8), errors, strict=True)
    )
    return Measured(name=name, weights=100, choices=choices)


def test_the_layer_that_needs_it_gets_more() -> None:
    layers = [layer("a", 0.1, 0.05, 0.0), layer("b", 0.9, 0.2, 0.1), layer("c", 0.3, 0.1, 0.05)]
    assert choose_widths(layers, 2.0) == {"a": 2, "b": 2, "c": 2}
    assert choose_widths(layers, 2.7) == {"a": 2, "b": 4, "c": 2}
    assert choose_widths(layers, 3.4) == {"a": 2, "b": 4, "c": 4}
    assert choose_widths(layers, 99.0) == {"a": 8, "b": 8, "c": 8}
    with pytest.raises(ValueError, match=r"target_bits must be at least 2.00, .* got 1.9"):
        choose_widths(layers, 1.9)


def test_the_result_keeps_the_budget(ids: torch.Tensor) -> None:
    skipped = replace(RECIPE, overrides=(Override(pattern="layers.0.mlp.up_proj", skip=True),))
    measured = measure_widths(decoder(), ids, skipped, (3, 4, 8))
    assert len(measured) == 13
    chosen = choose_widths(measured, 6.0)
    assert len(set(chosen.values())) > 1
    done = quantize_model(decoder(), ids, with_widths(skipped, chosen))
    assert {name: weight.bits for name, weight in done.weights.items()} == chosen
    weights = sum(weight.code_NK.numel() for weight in done.weights.values())
    assert 5.0 < 8 * packed_bytes(done.weights) / weights <= 6.0
    assert done.skipped == ["model.layers.0.mlp.up_proj"]
