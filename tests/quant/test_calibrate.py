"""Whole-model quantization: sequential order, determinism, exceptions, refusals, interruption."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from ridgeline.core import progress
from ridgeline.core.errors import UserError
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.quant import block
from ridgeline.quant.batches import Batch
from ridgeline.quant.block import BlockWorker
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.gptq import GPTQOptions, Hessian, quantize_layers
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Override, Recipe
from ridgeline.quant.staged import StagedBlock, _Forward

from .models import TinyModel

RECIPE = Recipe(layout=GPTQFormat(group_size=16), batch_sequences=3)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (8, 24))


def fresh(**arguments) -> TinyModel:
    torch.manual_seed(7)
    return TinyModel(**arguments)


def inputs_of(model: TinyModel, ids: torch.Tensor, name: str) -> torch.Tensor:
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0]


def suspended_forwards() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, _Forward)]


def test_every_layer_sees_its_quantized_predecessors(ids: torch.Tensor) -> None:
    """Redo each group by hand: run the model as quantized so far, take its inputs, solve."""
    model, by_hand = fresh(), fresh()
    result = quantize_model(model, ids, RECIPE)
    grid = BlockWorker(model, RECIPE, Ranks(), lambda *_, **__: None).grid(RECIPE.layout)
    for index in range(2):
        for group in by_hand.linear_groups():
            names = [f"layers.{index}.{name}" for name in group]
            hessian = Hessian.zeros(by_hand.get_submodule(names[0]).weight.shape[1])
            hessian.add(inputs_of(by_hand, ids, names[0]))
            weights = [by_hand.get_submodule(name).weight for name in names]
            solved = quantize_layers(weights, hessian.mean(), grid, 16, RECIPE.gptq)
            for name, (weight, _) in zip(names, solved, strict=True):
                with torch.no_grad():
                    by_hand.get_submodule(name).weight.copy_(weight.dequantize())
                got = result.weights[name].dequantize()
                # Batches sum in another order: a code may fall the other way now and then.
                differs = (got - weight.dequantize()).abs() > 1e-6
                assert differs.float().mean() < 0.01, name
                by_hand.get_submodule(name).weight.data.copy_(got)
                assert torch.equal(model.get_submodule(name).weight, got)


def test_two_runs_are_bitwise_equal(ids: torch.Tensor) -> None:
    first, second = (quantize_model(fresh(), ids, RECIPE) for _ in range(2))
    assert first.weights.keys() == second.weights.keys() and len(first.weights) == 14
    for name, weight in first.weights.items():
        assert torch.equal(weight.code_NK, second.weights[name].code_NK)
        assert torch.equal(weight.scale_NR, second.weights[name].scale_NR)


def test_gptq_beats_rounding_at_the_outputs(ids: torch.Tensor) -> None:
    with torch.no_grad():
        exact = fresh()(ids)
    errors = {}
    for method in ("rtn", "gptq"):
        model = fresh()
        recipe = Recipe(method=method, layout=GPTQFormat(group_size=16))
        quantize_model(model, None if method == "rtn" else ids, recipe)
        with torch.no_grad():
            errors[method] = float((model(ids) - exact).square().mean())
    assert errors["gptq"] < 0.6 * errors["rtn"]


def test_rtn_is_the_format_applied_to_every_weight() -> None:
    model, original = fresh(), fresh()
    form = GPTQFormat(group_size=16)
    result = quantize_model(model, None, Recipe(method="rtn", layout=form))
    for name, weight in result.weights.items():
        expected = form.quantize_ref(original.get_submodule(name).weight)
        assert torch.equal(weight.code_NK, expected.code_NK)
        assert torch.equal(model.get_submodule(name).weight, expected.dequantize())


def test_report(ids: torch.Tensor) -> None:
    model = fresh(bias=True)
    model.layers[0].attn["q"].bias += 1.0
    result = quantize_model(model, ids, RECIPE)
    assert result.calibration_tokens == 8 * 24 and result.seconds > 0
    assert [report.name for report in result.reports] == list(result.weights)
    report = result.reports[0]
    assert (report.name, report.n, report.k, report.bits) == ("layers.0.attn.q", 32, 32, 4)
    assert report.loss is not None and report.loss > 0 and 0 < report.weight_error < 1
    assert 0 < (report.relative_error or 0) < 1 and report.damping == 0.02
    bias_N = result.weights["layers.0.attn.q"].bias_N
    assert bias_N is not None and torch.equal(bias_N, model.layers[0].attn["q"].bias.half())
    summary = result.summary()
    assert summary["layers"] == 14 and len(summary["modules"]) == 14
    worst = result.worst(3)
    assert worst[0].relative_error == max(r.relative_error for r in result.reports)


def test_relative_error_is_that_of_the_outputs(ids: torch.Tensor) -> None:
    """The first group's inputs do not depend on any quantization: measure it directly."""
    original = fresh()
    x = inputs_of(original, ids, "layers.0.attn.q").reshape(-1, 32)
    result = quantize_model(fresh(), ids, RECIPE)
    w = original.layers[0].attn["q"].weight
    difference = result.weights["layers.0.attn.q"].dequantize() - w
    expected = (x @ difference.T).norm() / (x @ w.T).norm()
    assert result.reports[0].relative_error == pytest.approx(float(expected), rel=1e-3)


def test_overrides(ids: torch.Tensor) -> None:
    model, original = fresh(), fresh()
    recipe = Recipe(
        layout=GPTQFormat(group_size=16),
        overrides=(
            Override(pattern=r"attn\.k", bits=8, group_size=32),
            Override(pattern=r"layers\.1\.mlp", skip=True),
        ),
    )
    result = quantize_model(model, ids, recipe)
    assert result.weights["layers.0.attn.k"].bits == 8
    assert result.weights["layers.0.attn.k"].group_size == 32
    assert result.weights["layers.0.attn.q"].bits == 4
    assert sorted(result.skipped) == [f"layers.1.mlp.{name}" for name in ("down", "gate", "up")]
    assert torch.equal(model.layers[1].mlp["up"].weight, original.layers[1].mlp["up"].weight)


def test_blocks_are_streamed_out(ids: torch.Tensor) -> None:
    seen = {}
    result = quantize_model(
        fresh(), ids, RECIPE, on_block=lambda index, weights: seen.update({index: list(weights)})
    )
    assert list(seen) == [0, 1] and seen[0] + seen[1] == list(result.weights)
    assert all(name.startswith("layers.1.") for name in seen[1])


def test_not_finite_activations_are_refused(ids: torch.Tensor) -> None:
    model = fresh()
    model.layers[1].attn["v"].weight[0, 0] = float("inf")
    with pytest.raises(UserError, match=r"inputs of layers\.1\.attn\.o must be finite"):
        quantize_model(model, ids, Recipe(layout=GPTQFormat(group_size=16), overrides=(
            Override(pattern=r"layers\.1\.attn\.[qkv]", skip=True),
        )))  # fmt: skip
    assert not suspended_forwards()


def test_interruption_ends_every_thread_and_hook(ids: torch.Tensor, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    model = fresh()
    monkeypatch.setattr(block, "quantize_layers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, ids, RECIPE)
    assert not suspended_forwards()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_error_inside_a_forward_comes_out(ids: torch.Tensor) -> None:
    model = fresh()

    def broken(index: int, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    model.run_block = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        quantize_model(model, ids, RECIPE)
    assert not suspended_forwards()


def test_groups_out_of_order_are_refused(ids: torch.Tensor) -> None:
    model = fresh()
    groups = model.linear_groups()
    model.linear_groups = lambda: [groups[1], groups[0], *groups[2:]]
    with pytest.raises(UserError, match=r"block 0 must run attn.o next, got attn.q"):
        quantize_model(model, ids, RECIPE)


def test_stages_match_a_plain_forward(ids: torch.Tensor) -> None:
    model = fresh()
    with torch.no_grad():
        batches = [model.embed(part) for part in ids.split(3)]
        plain = [model.run_block(0, x) for x in batches]
    with StagedBlock(model, 0, [Batch(x=x) for x in batches]) as staged:
        for group, inputs in staged.stages():
            for x, part in zip(inputs, ids.split(3), strict=True):
                expected = inputs_of(model, part, f"layers.0.{group[0]}")
                assert torch.equal(x, expected)
        outputs = staged.finish()
    assert all(torch.equal(a.x, b) for a, b in zip(outputs, plain, strict=True))


def test_a_blocks_outputs_live_no_longer_than_their_holder(ids: torch.Tensor) -> None:
    """Without the cycle collector: on a GPU they are gigabytes a block."""
    model = fresh()
    gc.collect()
    gc.disable()
    try:
        with StagedBlock(model, 0, [Batch(x=model.embed(ids))]) as staged:
            for _, inputs in staged.stages():
                list(inputs)
            outputs = [weakref.ref(batch.x) for batch in staged.finish()]
        assert len(outputs) == 1
        assert outputs[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("order", ["natural", "activation"])
def test_other_orders_run(ids: torch.Tensor, order: str) -> None:
    recipe = Recipe(
        layout=GPTQFormat(group_size=16, desc_act=order == "activation"),
        gptq=GPTQOptions(order=order),
    )
    result = quantize_model(fresh(), ids, recipe)
    has_table = result.weights["layers.0.attn.q"].group_of_K is not None
    assert has_table == (order == "activation")


def test_little_text_is_said(capsys) -> None:
    """Four tokens an input of the widest layer (64) are the line: 256 tokens."""
    for tokens, said in ((255, True), (256, False)):
        progress.set_mode("lines")
        try:
            quantize_model(fresh(), torch.randint(0, 50, (1, tokens)), RECIPE)
        finally:
            progress.set_mode("quiet")
        out = capsys.readouterr().out
        assert ("255 calibration tokens are few for layers of 64 inputs" in out) == said


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="quantize: model must be a BlockwiseModel, got Linear"):
        quantize_model(torch.nn.Linear(2, 2), None, RECIPE)  # type: ignore[arg-type]
    for bad in (None, torch.zeros(0, 5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)):
        with pytest.raises(ValueError, match="token_ids_BS must hold calibration sequences"):
            quantize_model(fresh(), bad, RECIPE)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_damaged_weight_is_refused_by_its_layer(ids: torch.Tensor, method: str) -> None:
    model = fresh()
    name = f"layers.1.{model.linear_groups()[0][0]}"
    with torch.no_grad():
        model.get_submodule(name).weight[1, 2] = float("nan")
    recipe = replace(RECIPE, method=method)
    with pytest.raises(UserError, match=rf"quantize: the weights of {name} must be finite"):
        quantize_model(model, ids, recipe)
    if method == "rtn":  # a layer that is skipped may hold what it likes
        quantize_model(model, ids, replace(recipe, overrides=(Override(pattern=name, skip=True),)))
