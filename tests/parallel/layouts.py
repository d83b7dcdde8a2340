"""Tiny models and what the ranks of a test run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.nn.config import DecoderConfig
from ridgeline.parallel.layout import Layout, check_layout
from ridgeline.parallel.mesh import build_world
from ridgeline.parallel.model import ModelOptions, ParallelModel
from ridgeline.parallel.plans.decoder import decoder_plan
from ridgeline.parallel.verify import Report, compare, workload

SEQLEN = 16
TINY = DecoderConfig(
    vocab_size=67,  # odd: no tensor axis divides it
    hidden_size=32,
    intermediate_size=48,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_seqlen=64,
)
TIED = replace(TINY, tie_embeddings=True)
QWEN3 = replace(TIED, family="qwen3", qk_norm=True)
BIASED = replace(TINY, qkv_bias=True, out_bias=True, mlp_bias=True)


def build(
    layout: Layout,
    config: DecoderConfig,
    samples: int = 2,
    plan_of: Any = decoder_plan,
    **more: Any,
) -> ParallelModel:
    """The parallel model of a rank, micro-batches of so many samples."""
    num_microbatches = layout.num_microbatches or 1
    check_layout(
        layout, workload(config, SEQLEN, num_microbatches), world_size=dist.get_world_size()
    )
    options = ModelOptions(
        seqlen=SEQLEN, micro_batch_samples=samples, num_microbatches=num_microbatches, **more
    )
    return ParallelModel(config, build_world(layout, torch.device("cpu")), options, plan_of)


def batch_samples(model: ParallelModel) -> int:
    """Samples of the global batch."""
    options = model.options
    return options.micro_batch_samples * options.num_microbatches * model.world.layout.dp


def compare_with_one(rank: int, layout: Layout, config: DecoderConfig, steps: int) -> Report | None:
    """A rank of a parity test."""
    model = build(layout, config)
    return compare(model, batch_samples=batch_samples(model), steps=steps)
