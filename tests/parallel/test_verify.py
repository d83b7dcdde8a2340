"""verify finds what is wrong, by name: negative controls."""

from __future__ import annotations

import pytest
import torch

from ridgeline.parallel import collectives, fsdp, tensor
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.plans.decoder import decoder_plan
from ridgeline.parallel.verify import Report, compare, random_batch
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import TIED, TINY, batch_samples, build

pytestmark = pytest.mark.dist


def _report(layout: Layout, rank_function) -> Report:
    report = run_ranks(layout.world_size, rank_function, layout)[0]
    assert isinstance(report, Report)
    return report


def _compare(layout: Layout, config=TINY) -> Report | None:
    model = build(layout, config)
    return compare(model, batch_samples=batch_samples(model), steps=1)


def _dropped_all_reduce(rank: int, layout: Layout) -> Report | None:
    collectives._Copy.backward = staticmethod(lambda ctx, grad: (grad, None, None))
    return _compare(layout)


def test_a_dropped_all_reduce_is_seen():
    report = _report(Layout(tp=2), _dropped_all_reduce)
    assert not report.ok and report.first is not None
    assert abs(report.losses[0] - report.reference_losses[0]) < 1e-5  # the forward pass is right
    # The head's own gradient is right; all that lies behind it is not.
    assert "lm_head.weight" not in report.diverged
    assert "model.layers.3.mlp.down_proj.weight" in report.diverged
    assert "model.embed_tokens.weight" in report.diverged


def _one_rank_keeps_its_gradient(rank: int, layout: Layout) -> Report | None:
    if rank == 1:
        original = fsdp.local_gradient

        def scaled(parameter):
            gradient = original(parameter)
            return None if gradient is None else 1.001 * gradient

        fsdp.local_gradient = scaled
    return _compare(layout)


def test_a_scaled_gradient_is_seen():
    report = _report(Layout(dp_shard=2), _one_rank_keeps_its_gradient)
    assert report.first is not None and report.first.name == "gradient norm"
    assert len(report.diverged) == 39
    assert report.worst.error == pytest.approx(1e-3, rel=0.1)


def _averaged(rank: int, layout: Layout) -> Report | None:
    finish = fsdp.finish

    def averaging(root, blocks):
        finish(root, blocks)
        for module in root.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_gradient_divide_factor(2.0)

    fsdp.finish = averaging
    return _compare(layout)


def test_averaging_instead_of_summing_is_seen():
    report = _report(Layout(dp_replicate=2, zero=0), _averaged)
    assert report.first is not None and report.first.name == "gradient norm"
    assert report.norms[0] < 0.6 * report.reference_norms[0]
    assert len(report.diverged) == 39


def _tied_apart(rank: int, layout: Layout) -> Report | None:
    model = build(layout, TIED)
    model._share_tied_gradient = lambda: None
    return compare(model, batch_samples=batch_samples(model), steps=1)


def test_a_forgotten_tie_is_seen():
    report = _report(Layout(pp=2, num_microbatches=2), _tied_apart)
    assert report.diverged == ("model.embed_tokens.weight",)


def _norm_not_summed(rank: int, layout: Layout) -> Report | None:
    tensor.SharedNorm.forward = lambda self, x: torch.rms_norm(x, self.shape, self.weight, self.eps)
    return _compare(layout)


def test_a_norm_that_saw_half_the_tokens_is_seen():
    report = _report(Layout(tp=2, sequence_parallel=True), _norm_not_summed)
    assert report.diverged and all("norm" in name for name in report.diverged)


def _typo(rank: int, layout: Layout) -> str:
    def plan_of(config, split):
        plan = dict(decoder_plan(config, split))
        plan["model.layers.*.mlp.gate_prj"] = plan.pop("model.layers.*.mlp.gate_proj")
        return plan

    with pytest.raises(ValueError, match="plan") as caught:
        build(layout, TINY, plan_of=plan_of)
    return str(caught.value)


def test_a_typo_in_a_plan_is_an_error():
    messages = run_ranks(2, _typo, Layout(tp=2))
    assert messages[0] == messages[1]
    assert "'model.layers.*.mlp.gate_prj' must match a module, got no match" in messages[0]
    assert "model.layers.*.mlp.gate_proj" in messages[0]  # the nearest name is told


def test_batches_are_a_function_of_seed_and_index():
    whole = random_batch([3, 1, 2], 16, 67, seed=5)
    parts = [random_batch([index], 16, 67, seed=5) for index in (3, 1, 2)]
    assert torch.equal(whole.token_ids_P, torch.cat([part.token_ids_P for part in parts]))
    assert whole.num_valid == sum(part.num_valid for part in parts) < 48
    assert whole.cu_seqlens[-1] == 48 and len(whole.seqlens) == 3 + 6
    assert not torch.equal(whole.token_ids_P, random_batch([3, 1, 2], 16, 67, 6).token_ids_P)
