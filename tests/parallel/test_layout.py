"""Layouts that cannot run are refused by name; each misfit has its own message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.parallel.layout import Layout, Workload, check_layout, samples_of_rank

WORK = Workload(
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    seqlen=32,
    num_microbatches=8,
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        ({"dp_shard": 2, "zero": 0}, "dp_shard must be 1 with zero = 0"),
        ({"sequence_parallel": True}, "sequence_parallel must be off with tp = 1"),
        ({"tp": 2, "async_tp": True}, "async_tp must come with sequence_parallel and compile"),
        ({"pp": 2, "stages_per_rank": 2}, "stages_per_rank must be 1 with schedule 1f1b"),
        (
            {"pp": 2, "schedule": "interleaved", "stages_per_rank": 1},
            "stages_per_rank must be at least 2 with schedule interleaved",
        ),
        (
            {"pp": 2, "schedule": "zbv", "activation_checkpointing": "full"},
            "activation_checkpointing must be none with schedule zbv",
        ),
        ({"pp": 2, "schedule": "zero_bubble", "reduce": "micro_batch"}, "reduce must be step"),
        ({"dp_shard": 2, "zero": 1, "reduce": "micro_batch"}, "reduce must be step with zero = 1"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1"),
        ({"schedule": "2f2b"}, "schedule must be one of gpipe, 1f1b"),
    ],
)
def test_impossible_layouts_are_refused(fields, message):
    with pytest.raises(ValueError, match="layout: ") as caught:
        Layout(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "work", "message"),
    [
        (Layout(tp=2), {}, "sizes must multiply to the number of ranks (4), got pp 1 x"),
        (Layout(tp=4), {"num_heads": 6}, "tp must divide the 6 query heads, got 4"),
        (
            Layout(tp=4),
            {"num_heads": 12, "num_kv_heads": 3},
            "tp must divide the 3 key-value heads or be a multiple of them, got 4",
        ),
        (Layout(tp=4), {"intermediate_size": 94}, "tp must divide the MLP's width 94, got 4"),
        (Layout(tp=4), {"vocab_size": 3}, "tp must be at most the vocabulary's 3 tokens"),
        (
            Layout(tp=4, sequence_parallel=True),
            {"seqlen": 34},
            "sequence_parallel must find samples that tp x cp = 4 divides, got 34 tokens",
        ),
        (
            Layout(pp=4),
            {"num_microbatches": 3},
            "num_microbatches must be at least the 4 stages of schedule 1f1b, got 3",
        ),
        (
            Layout(pp=4, schedule="gpipe"),
            {"num_microbatches": 3},
            "num_microbatches must be at least the 4 stages, got 3",
        ),
        (Layout(pp=4, schedule="zbv"), {"num_layers": 7}, "pp must leave each of the 8 stages"),
        (
            Layout(pp=4, schedule="interleaved"),
            {"num_microbatches": 10},
            "num_microbatches must be a multiple of pp 4",
        ),
        (Layout(cp=4), {"seqlen": 36}, "cp must cut samples of 36 tokens into 8 equal pieces"),
        (Layout(cp=4), {"windowed": True}, "cp must be 1 for a model with sliding windows"),
    ],
)
def test_misfits_have_their_own_message(layout, work, message):
    with pytest.raises(ValueError, match="layout: ") as caught:
        check_layout(layout, replace(WORK, **work), world_size=4)
    assert message in str(caught.value)


def test_tensor_parallel_across_nodes_is_a_warning():
    assert check_layout(Layout(tp=4), WORK, world_size=4, local_world_size=4) == []
    (warning,) = check_layout(Layout(tp=4), WORK, world_size=4, local_world_size=2)
    assert "tp 4 does not divide the 2 ranks of a node" in warning


def test_stages_of_each_schedule():
    assert [Layout(pp=2).stages_of(rank) for rank in range(2)] == [(0,), (1,)]
    interleaved = Layout(pp=2, schedule="interleaved", stages_per_rank=3)
    assert [interleaved.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [Layout(pp=2, schedule="zbv").stages_of(r) for r in range(2)] == [(0, 3), (1, 2)]


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_batch_is_read_whole_and_in_order_whatever_dp_is(dp, num_microbatches):
    batch = list(range(100, 116))
    layout = Layout(dp_replicate=dp, zero=0)
    read = [samples_of_rank(batch, layout, rank, num_microbatches) for rank in range(dp)]
    pieces = [read[rank][m] for m in range(num_microbatches) for rank in range(dp)]
    assert [sample for piece in pieces for sample in piece] == batch


def test_an_uneven_batch_is_refused():
    with pytest.raises(ValueError, match=r"dp x num_microbatches must divide the batch of 6"):
        samples_of_rank(list(range(6)), Layout(dp_shard=2), 0, 2)


def test_descriptions():
    assert Layout().describe() == "one process" and Layout().is_single
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2, pp=2, cp=2, sequence_parallel=True)
    assert layout.describe() == "HSDP 2x2 (ZeRO-3) x CP2 x TP2+SP x PP2 (1f1b)"
    assert layout.world_size == 32 and layout.dp == 4
