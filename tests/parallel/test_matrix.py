"""Every layout equals one process: loss, gradient norm, every parameter's gradient, each step."""

from __future__ import annotations

import math

import pytest

from ridgeline.nn.config import DecoderConfig
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.verify import Report
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import BIASED, QWEN3, TIED, TINY, compare_with_one

CASES: dict[str, tuple[Layout, DecoderConfig]] = {
    "one": (Layout(), TIED),
    "dp2": (Layout(dp_replicate=2, zero=0, num_microbatches=2), TINY),
    "zero1": (Layout(dp_shard=2, zero=1, num_microbatches=2), TINY),
    "zero2": (Layout(dp_shard=2, zero=2, num_microbatches=2), TIED),
    "zero3": (Layout(dp_shard=2, zero=3, num_microbatches=2), TINY),
    "zero3_step": (Layout(dp_shard=2, zero=3, num_microbatches=2, reduce="step"), TINY),
    "hsdp": (Layout(dp_replicate=2, dp_shard=2, num_microbatches=2), TINY),
    "tp2": (Layout(tp=2), BIASED),
    "tp2_sp": (Layout(tp=2, sequence_parallel=True), BIASED),
    "tp4_kv2": (Layout(tp=4, sequence_parallel=True), QWEN3),
    "gpipe": (Layout(pp=2, schedule="gpipe", num_microbatches=4), TINY),
    "1f1b": (Layout(pp=2, num_microbatches=4), TIED),
    "interleaved": (Layout(pp=2, schedule="interleaved", num_microbatches=4), TINY),
    "zero_bubble": (Layout(pp=2, schedule="zero_bubble", num_microbatches=4), TIED),
    "zbv": (Layout(pp=2, schedule="zbv", num_microbatches=4), TIED),
    "cp2": (Layout(cp=2), TINY),
    "cp4": (Layout(cp=4, num_microbatches=2), TINY),
    "cp2_ddp": (Layout(cp=2, zero=0, dp_replicate=2), TINY),
    "dp2_tp2": (Layout(dp_shard=2, tp=2, sequence_parallel=True), QWEN3),
    "dp2_pp2": (Layout(dp_shard=2, pp=2, num_microbatches=2), TIED),
    "dp2_pp2_each": (Layout(dp_shard=2, pp=2, num_microbatches=2, reduce="micro_batch"), TINY),
    "dp2_zbv": (Layout(dp_shard=2, pp=2, schedule="zbv", num_microbatches=4), TIED),
    "tp2_pp2": (Layout(tp=2, pp=2, num_microbatches=2), TIED),
    "tp2_cp2": (Layout(tp=2, cp=2, sequence_parallel=True), TINY),
    "pp2_cp2": (Layout(pp=2, cp=2, num_microbatches=2), TIED),
    "dp2_tp2_pp2": (Layout(dp_shard=2, tp=2, pp=2, num_microbatches=2), TIED),
    "ddp2_tp2_pp2_sp": (
        Layout(
            dp_replicate=2,
            zero=0,
            tp=2,
            pp=2,
            num_microbatches=4,
            schedule="interleaved",
            sequence_parallel=True,
        ),
        QWEN3,
    ),
    "pp4": (Layout(pp=4, num_microbatches=4), TIED),
    "full_ac": (Layout(dp_shard=2, activation_checkpointing="full"), TINY),
    "full_ac_3d": (
        Layout(dp_shard=2, tp=2, pp=2, num_microbatches=2, activation_checkpointing="full"),
        TIED,
    ),
    "selective_ac": (
        Layout(tp=2, sequence_parallel=True, activation_checkpointing="selective"),
        TINY,
    ),
    "full_ac_cp2": (Layout(cp=2, activation_checkpointing="full"), TINY),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str) -> None:
    layout, config = CASES[name]
    report = run_ranks(layout.world_size, compare_with_one, layout, config, 2)[0]
    assert isinstance(report, Report)
    assert report.ok, f"{report.first}; {report.diverged[:10]}"
    # The comparison has something to compare: losses near log V that fall, norms of their own.
    assert abs(report.reference_losses[0] - math.log(config.vocab_size)) < 0.2
    assert min(report.reference_norms) > 0.1
    assert report.reference_norms[0] != report.reference_norms[1]
