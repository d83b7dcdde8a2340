"""AWQ: folds leave the function as it is, are chosen by measurement, and lower the error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ridgeline.core.protocols import ScaleFold
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.grid import GridSpec, quantize_rtn
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder
from ridgeline.quant import awq
from ridgeline.quant.awq import AWQOptions, FoldSearch, apply_fold, candidate, take_sample
from ridgeline.quant.batches import Batch
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.recipe import Override, Recipe

from .models import TinyModel

SHAPE = DecoderConfig(
    vocab_size=61, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, max_seqlen=64, qkv_bias=True, out_bias=True, mlp_bias=True, init_std=0.1,
)  # fmt: skip
RECIPE = Recipe(
    method="awq", layout=AWQFormat(group_size=16), awq=AWQOptions(grid=6, search_tokens=24),
    batch_sequences=4,
)  # fmt: skip
GRID = (GridSpec(symmetric=False), 16)


def decoder() -> Decoder:
    """Norms of very different strength, as real ones are: some input channels matter more."""
    model = Decoder(SHAPE, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter.copy_(torch.randn(32, generator=generator).mul(1.2).exp())
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=generator)
    return model.requires_grad_(False)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (8, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", range(4))
def test_a_fold_leaves_the_function_as_it_is(ids: torch.Tensor, place: int) -> None:
    """Norm -> qkv, v -> o under shared heads with a bias, norm -> gate and up, up -> down."""
    model = decoder()
    fold = model.scale_folds()[place]
    exact = model(ids)
    P = len(model.blocks[0].get_submodule(fold.producer).weight)
    scale_P = torch.rand(P, generator=torch.Generator().manual_seed(1)) * 3 + 0.2
    before = model.blocks[0].get_submodule(fold.consumers[0]).weight.clone()
    apply_fold(model.blocks[0], fold, scale_P, None)
    assert not torch.equal(before, model.blocks[0].get_submodule(fold.consumers[0]).weight)
    torch.testing.assert_close(model(ids), exact, rtol=2e-5, atol=2e-5)


def test_a_folded_norm_is_what_its_dtype_can_hold(ids: torch.Tensor) -> None:
    """The norm is rounded to fp16 and the consumers follow: still the same function."""
    model = decoder()
    model.blocks[0].input_layernorm.weight.copy_(model.blocks[0].input_layernorm.weight.half())
    exact = model(ids)
    scale_P = torch.rand(32, generator=torch.Generator().manual_seed(1)) * 3 + 0.2
    apply_fold(model.blocks[0], model.scale_folds()[0], scale_P, torch.float16)
    stored = model.blocks[0].input_layernorm.weight
    assert torch.equal(stored, stored.half().float())
    torch.testing.assert_close(model(ids), exact, rtol=2e-5, atol=2e-5)


class PlusOne(nn.Module):
    """A norm that multiplies by 1 + w, before one linear; one channel is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.Module(), nn.Linear(8, 4)
        self.norm.weight = nn.Parameter(torch.linspace(-1.0, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.rms_norm(x, (8,)) * (1 + self.norm.weight))


def test_norms_that_add_one() -> None:
    block, x = PlusOne().requires_grad_(False), torch.randn(5, 8)
    fold = ScaleFold(producer="norm", consumers=("linear",), norm="1+w")
    exact, before = block(x), block.norm.weight.clone()
    apply_fold(block, fold, torch.linspace(0.3, 3.0, 8), torch.bfloat16)
    torch.testing.assert_close(block(x), exact, rtol=1e-5, atol=1e-5)
    assert block.norm.weight[0] == before[0] == -1.0 and not torch.equal(block.norm.weight, before)


def search(model: Decoder, batch: Batch, **options) -> list[awq.FoldReport]:
    made = FoldSearch(model, 0, lambda name: GRID, AWQOptions(**options))
    return [report for _, report in made.choose(take_sample(batch, 24))]


def test_the_search_measures_the_parents_output(ids: torch.Tensor, monkeypatch) -> None:
    """Its errors are those of the attention module with the rounded linears put in by hand."""
    monkeypatch.setattr(awq, "_JUDGED_RANGE", 1.0)
    model = decoder()
    batch = Batch(x=model.embed(ids))
    before = {name: p.clone() for name, p in model.named_parameters()}
    reports = search(model, batch, grid=6, search_tokens=24)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    fold, report = model.scale_folds()[0], reports[0]
    assert report.accepted and report.error_scaled < report.error_plain
    check = model.blocks[0].input_layernorm(model.embed(ids)[4:6])
    step = model._step(torch.arange(24))
    attention = model.blocks[0].self_attn
    exact = attention(check, step)
    exact_scales = replace(GRID[0], scale_dtype=torch.float32)
    for name in fold.consumers:
        linear = model.blocks[0].get_submodule(name)
        linear.weight.copy_(quantize_rtn(linear.weight, exact_scales, 16).dequantize())
    wrong = (attention(check, step) - exact).norm() / exact.norm()
    assert report.error_plain == pytest.approx(float(wrong), rel=1e-3)


@pytest.mark.parametrize("grid", [1, 2, 7, 20])
def test_the_grid_is_searched_in_both_forms_identity_first(grid) -> None:
    """The best of the whole grid where the error has one valley a form; identity where nothing
    is better."""
    points = [(step / grid, over) for over in (False, True) for step in range(grid)]
    for target in points:
        tried: list[tuple[float, bool]] = []

        def error(r: float, over: bool, target=target, tried=tried) -> float:
            tried.append((r, over))
            return abs(r - target[0]) + (over != target[1])

        assert awq.best_point(error, grid) == target
        assert tried[0] == (0.0, False) and len(set(tried)) == len(tried) <= grid + 5
        assert set(tried) >= {point for point in points if point[0] * grid % 2 == 0}
    for same in (1.0, float("nan")):
        assert awq.best_point(lambda r, over, same=same: same, grid) == (0.0, False)
    assert candidate(torch.ones(3), torch.ones(3), 0.0, False) is None


def test_candidates_are_balanced_and_finite() -> None:
    x = torch.tensor([0.0, 1.0, 4.0, float("inf")])
    scale = candidate(x, torch.ones(4), 0.5, False)
    assert scale is not None and bool(torch.isfinite(scale).all())
    even = candidate(x[:3], torch.ones(3), 0.5, False)
    assert even is not None and float(even.max() * even.min()) == pytest.approx(1.0, rel=1e-5)
    over = candidate(torch.ones(2), torch.tensor([0.25, 1.0]), 0.5, True)
    assert over is not None and float(over[0] / over[1]) == pytest.approx(2.0)


def test_a_fold_that_does_not_help_is_not_made(ids, monkeypatch) -> None:
    """Candidates that are all worse on the check tokens: the block stays as it is."""
    model, plain = decoder(), decoder()
    rough = torch.logspace(-3, 3, 32)

    def bad(x_P, w_P, ratio, over):
        return None if (ratio, over) == (0.0, False) else rough.repeat(2)[: len(x_P)]

    monkeypatch.setattr(awq, "candidate", bad)
    result = quantize_model(model, ids, replace(RECIPE, awq=replace(RECIPE.awq, clip=False)))
    assert [fold.accepted for fold in result.folds] == [False] * 8
    assert {fold.reason for fold in result.folds} == {"no candidate lowers the error"}
    norms = [name for name, _ in plain.named_parameters() if "layernorm" in name]
    assert all(torch.equal(model.get_parameter(n), plain.get_parameter(n)) for n in norms)


def output_error(model: Decoder, ids: torch.Tensor) -> float:
    return float((model(ids) - decoder()(ids)).norm())


def test_awq_beats_rounding_and_says_what_it_did(ids: torch.Tensor) -> None:
    errors, results = {}, {}
    for method in ("rtn", "awq", "awq+gptq"):
        model = decoder()
        results[method] = quantize_model(model, ids, replace(RECIPE, method=method))
        errors[method] = output_error(model, ids)
    assert errors["awq"] < 0.8 * errors["rtn"] and errors["awq+gptq"] < errors["awq"]
    folds = results["awq"].folds
    assert [fold.producer for fold in folds[:4]] == [
        "model.layers.0.input_layernorm", "model.layers.0.self_attn.v_proj",
        "model.layers.0.post_attention_layernorm", "model.layers.0.mlp.up_proj",
    ]  # fmt: skip
    assert any(fold.accepted for fold in folds)
    assert all(fold.error_scaled < fold.error_plain for fold in folds if fold.accepted)
    assert len(results["awq"].summary()["folds"]) == 8


def test_a_plain_linear_is_left_out_of_folds(ids: torch.Tensor) -> None:
    recipe = replace(RECIPE, overrides=(Override(pattern=r"v_proj|layers\.1\.mlp\.up", skip=True),))
    model, exact = decoder(), decoder()
    result = quantize_model(model, ids, recipe)
    reasons = {fold.producer.split(".", 2)[2]: fold.reason for fold in result.folds}
    assert reasons["0.self_attn.v_proj"] == "self_attn.v_proj is not quantized"
    assert reasons["1.mlp.up_proj"] == "mlp.up_proj is not quantized"
    for name in result.skipped:
        assert torch.equal(
            model.get_submodule(name).weight, exact.get_submodule(name).weight
        )  # fmt: skip


def test_clipping_leaves_queries_and_keys_alone(ids: torch.Tensor) -> None:
    """Their ranges hold every weight (none moves by more than half a step); others' clip."""
    identity = replace(RECIPE, awq=AWQOptions(grid=1, search_tokens=24, clip=True))
    exact = decoder()
    result = quantize_model(decoder(), ids, replace(identity, layout=AWQFormat(group_size=8)))
    folds = {name for fold in result.folds if fold.accepted for name in fold.consumers}
    steps = {}
    for name, weight in result.weights.items():
        if name in folds or name.endswith(("v_proj", "up_proj")):
            continue  # not the weights that are compared with
        wrong = (weight.dequantize() - exact.get_submodule(name).weight).reshape(
            len(weight.scale_NR), -1, 8
        )
        steps[name] = float((wrong / weight.scale_NR[..., None].float()).abs().max())
    kept = [steps[name] for name in steps if name.endswith(("q_proj", "k_proj"))]
    clipped = [steps[name] for name in steps if not name.endswith(("q_proj", "k_proj"))]
    assert all(step <= 0.5 + 1e-3 for step in kept)
    assert any(step > 0.51 for step in clipped), steps


def test_two_runs_are_bitwise_equal(ids: torch.Tensor) -> None:
    first, second = (quantize_model(decoder(), ids, RECIPE) for _ in range(2))
    for name, weight in first.weights.items():
        assert torch.equal(weight.code_NK, second.weights[name].code_NK)


def test_packed_sequences_search_too(ids: torch.Tensor) -> None:
    """Right padding left out: the packed rows of three lengths."""
    model = decoder()
    batch = Batch(
        x=model.embed(ids[:1, :23]), cu_seqlens=torch.tensor([0, 9, 15, 23], dtype=torch.int32)
    )
    reports = search(model, batch, grid=3, search_tokens=8)
    assert all(report.error_plain is not None for report in reports)


def test_models_without_folds_are_refused(ids: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"say where scales fold \(scale_folds\) for awq"):
        quantize_model(TinyModel(), ids, RECIPE)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="awq: grid must be at least 1, got 0"):
        AWQOptions(grid=0)
    with pytest.raises(ValueError, match="awq: search_tokens must be at least 1, got 0"):
        AWQOptions(search_tokens=0)
