"""What a ParallelModel offers beside a step: boxes, whole tensors, evaluation, clipping, bf16."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy

from ridgeline.kernels.attention import cpu
from ridgeline.nn.decoder import Decoder, initial_value
from ridgeline.parallel import activations, fsdp
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import LayoutError, same_everywhere, together
from ridgeline.parallel.verify import Reference, compare, random_batch
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import SEQLEN, TIED, TINY, batch_samples, build, compare_with_one

pytestmark = pytest.mark.dist

SPREAD = [
    Layout(dp_shard=3, num_microbatches=2),  # 3 divides neither 67 nor 32: short and empty shards
    Layout(dp_shard=2, tp=2),
    Layout(pp=2, schedule="zbv", num_microbatches=4),
    Layout(dp_replicate=2, zero=0, pp=2, num_microbatches=2),
    Layout(cp=2, tp=2),
]


def _boxes(rank: int, layout: Layout, config) -> dict:
    model = build(layout, config)
    model.init_weights(3)
    held = {
        name: (model.shard_of(name), p.detach().clone())
        for name, p in model.parameters_here().items()
    }
    whole = {name: model.full(name) for name in model.all_names}
    return {"held": held, "whole": whole if rank == 0 else None}


@pytest.mark.parametrize("layout", SPREAD, ids=lambda layout: layout.describe())
@pytest.mark.parametrize("config", [TINY, TIED], ids=["untied", "tied"])
def test_boxes_cover_every_parameter_and_hold_its_value(layout, config):
    results = run_ranks(layout.world_size, _boxes, layout, config)
    plain = Decoder(config, seed=3)
    for name, parameter in plain.named_parameters():
        assert torch.equal(results[0]["whole"][name], parameter)
        owned = torch.zeros(parameter.shape)
        held = torch.zeros(parameter.shape)
        copies = torch.zeros(parameter.shape)
        for result in results:
            if name not in result["held"]:
                continue
            box, local = result["held"][name]
            assert box.global_shape == tuple(parameter.shape)
            assert torch.equal(box.cut(parameter.detach()), local), name
            box.cut(held).add_(1)
            box.cut(copies).fill_(box.copies)
            if box.is_owner:
                box.cut(owned).add_(1)
        assert (owned == 1).all(), name  # one writer of every element
        assert torch.equal(held, copies), name


def _evaluated(rank: int, layout: Layout) -> tuple[float, float, float]:
    model = build(layout, TIED)
    model.init_weights(0)
    indices = list(range(batch_samples(model)))
    own = [random_batch(some, SEQLEN, 67, 0) for some in model.micro_batches(indices)]
    num_valid = random_batch(indices, SEQLEN, 67, 0).num_valid
    before = model.evaluate(own).item()
    loss = model.forward_backward(own, num_valid).item()
    model.zero_grad()
    return before, model.evaluate(own).item(), loss * num_valid


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, tp=2),
        Layout(pp=2, num_microbatches=4),
        Layout(pp=2, schedule="zero_bubble", num_microbatches=4),
        Layout(pp=2, schedule="zbv", num_microbatches=4),
        Layout(cp=2),
    ],
    ids=lambda layout: layout.describe(),
)
def test_evaluation_is_the_summed_loss_and_changes_nothing(layout):
    results = run_ranks(layout.world_size, _evaluated, layout)
    for before, after, loss in results:
        assert before == pytest.approx(loss, rel=1e-5)
        assert before == after == results[0][0]


def _clipped(rank: int, layout: Layout) -> dict:
    model = build(layout, TIED)
    model.init_weights(0)
    indices = list(range(batch_samples(model)))
    own = [random_batch(some, SEQLEN, 67, 0) for some in model.micro_batches(indices)]
    model.forward_backward(own, random_batch(indices, SEQLEN, 67, 0).num_valid)
    norm = model.clip(0.25).item()
    gradients = {name: model.full_gradient(name) for name in model.all_names}
    return {"norm": norm, "after": model.clip(None).item(), "gradients": gradients}


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2, tp=2), Layout(tp=2, pp=2, num_microbatches=2)],
    ids=lambda layout: layout.describe(),
)
def test_clipping_is_that_of_the_whole_gradient(layout):
    results = run_ranks(layout.world_size, _clipped, layout)
    samples = 2 * (layout.num_microbatches or 1) * layout.dp
    reference = Reference(TIED, 0)
    whole = random_batch(list(range(samples)), SEQLEN, 67, 0)
    _, norm = reference.forward_backward(whole, whole.num_valid)
    assert norm > 0.25
    torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.25)
    for result in results:
        assert result["norm"] == pytest.approx(norm, rel=1e-5)
        assert result["after"] == pytest.approx(0.25, rel=1e-4)
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(gradient, reference.gradient(name), rtol=1e-4, atol=1e-6)


def _in_bf16(rank: int, layout: Layout) -> tuple[float, set[torch.dtype], float]:
    model = build(layout, TINY, compute_dtype=torch.bfloat16)
    seen: set[torch.dtype] = set()
    for stage in model.stages:
        for block in stage.decoder.blocks:
            block.mlp.down_proj.register_forward_hook(lambda m, a, y: seen.add(y.dtype))
    report = compare(model, batch_samples=batch_samples(model), steps=1, tolerance=5e-2)
    masters = {p.dtype for p in model.parameters_here().values()}
    masters |= {p.grad.dtype for p in model.parameters_here().values() if p.grad is not None}
    assert masters == {torch.float32}
    return (report.worst.error if report else 0.0), seen, 0.0


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_shard=2, num_microbatches=2),
        Layout(tp=2, sequence_parallel=True),
        Layout(pp=2, num_microbatches=2),
        Layout(pp=2, schedule="zbv", num_microbatches=4),
        Layout(cp=2, activation_checkpointing="full"),
    ],
    ids=lambda layout: layout.describe(),
)
def test_bf16_computes_in_bf16_over_fp32_masters(layout):
    error, seen, _ = run_ranks(layout.world_size, _in_bf16, layout)[0]
    assert seen == {torch.bfloat16}
    assert 1e-4 < error < 0.1  # rounded, and no worse than rounding


def _counting(rank: int, layout: Layout) -> tuple[int, int]:
    model = build(layout, TINY)
    model.init_weights(0)
    calls = {"attention": 0, "gate": 0}
    forward = cpu.forward

    def counted(*args):
        calls["attention"] += 1
        return forward(*args)

    def seen(module, args, output):
        calls["gate"] += 1

    cpu.forward = counted
    for block in model.stages[0].decoder.blocks:
        block.mlp.gate_proj.register_forward_hook(seen)
    model.forward_backward([random_batch([0, 1], SEQLEN, 67, 0)], 30)
    return calls["gate"], calls["attention"]


@pytest.mark.parametrize(
    ("kind", "gates", "attentions"), [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)]
)
def test_checkpointing_runs_again_what_it_says(kind, gates, attentions):
    counts = run_ranks(1, _counting, Layout(activation_checkpointing=kind))[0]
    assert counts == (gates * TINY.num_layers, attentions * TINY.num_layers)


@pytest.mark.parametrize(("width", "kept"), [(32, True), (33, False)])
def test_selective_keeps_products_no_wider_than_the_model(width, kept):
    mm, weight = torch.ops.aten.mm.default, torch.empty(8, width)
    decision = activations._policy(32, None, mm, torch.empty(4, 8), weight)
    assert (decision == CheckpointPolicy.MUST_SAVE) is kept
    other = activations._policy(32, None, torch.ops.aten.silu.default, weight)
    assert other == CheckpointPolicy.PREFER_RECOMPUTE


def _compiled(rank: int, layout: Layout) -> tuple[bool, int]:
    activations.BACKEND = "aot_eager"
    report = compare_with_one(rank, layout, TINY, 2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return report is None or report.ok, graphs


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's own, while it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, compile_blocks=True, activation_checkpointing="selective"),
        pytest.param(
            Layout(dp_shard=2, num_microbatches=2, compile_blocks=True), marks=pytest.mark.slow
        ),
        pytest.param(
            Layout(pp=2, num_microbatches=2, compile_blocks=True, activation_checkpointing="full"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda layout: f"{layout.describe()} {layout.activation_checkpointing}",
)
def test_compiled_blocks_equal_and_share_their_graphs(layout):
    for ok, graphs in run_ranks(layout.world_size, _compiled, layout):
        assert ok
        assert graphs <= 3  # one, and again when the number of documents first changes


def test_wrapping_in_the_wrong_order_is_refused():
    assert run_ranks(2, _wrong_order, Layout(dp_shard=2))[0] == 3


def _wrong_order(rank: int, layout: Layout) -> int:
    model = build(layout, TINY)
    block = next(iter(model.stages[0].decoder.blocks))
    refused = 0
    for wrap in (
        lambda: activations.wrap_block(block, "full", 32),
        lambda: activations.wrap_block(block, "none", 32, compiled=True),
        lambda: fsdp.shard_module(block, model.world, torch.float32),
    ):
        with pytest.raises(ValueError, match="parallel: "):
            wrap()
        refused += 1
    return refused


def _asynchronous(rank: int, layout: Layout) -> str:
    with pytest.raises(NotImplementedError) as caught:
        build(layout, TINY)
    return str(caught.value)


def test_overlap_without_a_gpu_is_refused():
    layout = Layout(tp=2, sequence_parallel=True, compile_blocks=True, async_tp=True)
    assert "async_tp must run on GPUs, got cpu" in run_ranks(2, _asynchronous, layout)[0]


def _failing_together(rank: int) -> tuple[str, str]:
    def check() -> int:
        if rank == 1:
            raise ValueError("layout: only rank 1 sees this")
        return rank

    with pytest.raises(ValueError, match="only rank 1 sees this"):
        together(check)
    with pytest.raises(LayoutError, match="the config must be the same on every rank") as caught:
        same_everywhere("the config", "aa" if rank < 2 else "bb")
    assert together(lambda: rank) == rank
    same_everywhere("the config", "aa")
    return str(caught.value), str(dist.get_rank())


def test_an_error_of_one_rank_is_raised_on_all():
    results = run_ranks(3, _failing_together)
    assert "got aa on rank 0 and bb on rank 2" in results[0][0]
    assert len({text for text, _ in results}) == 1


def test_fresh_weights_do_not_depend_on_the_layout():
    plain = Decoder(TINY, seed=7)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, initial_value(TINY, name, tuple(parameter.shape), 7))
