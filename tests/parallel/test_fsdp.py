"""What a step of each ZeRO stage gathers, reduces and keeps: counted, by dtype."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.parallel.layout import Layout
from ridgeline.parallel.verify import random_batch
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import SEQLEN, TINY, batch_samples, build

pytestmark = pytest.mark.dist

GROUPS = TINY.num_layers + 1  # what FSDP gathers and reduces at a time: each block, and the rest
KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "all-reduce",
}


class Counted(TorchDispatchMode):
    """(collective, dtype) -> calls on tensors; scalars are losses and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = KINDS.get(func.overloadpacket.__name__)
        if kind is not None:
            first = args[1] if kind != "all-reduce" else args[0][0]
            if first.numel() > 1:
                self.calls[kind, first.dtype] += 1
        return func(*args, **(kwargs or {}))


def _counted(rank: int, layout: Layout) -> tuple[dict[tuple[str, torch.dtype], int], int]:
    """Collectives of a step, and how many of the first block's parameters are whole once the last
    one runs."""
    model = build(layout, TINY, compute_dtype=torch.bfloat16)
    model.init_weights(0)
    indices = list(range(batch_samples(model)))
    own = [random_batch(some, SEQLEN, TINY.vocab_size, 0) for some in model.micro_batches(indices)]
    whole: list[int] = []
    last = list(model.stages[0].decoder.blocks)[-1]

    def between(module, args):
        first = next(iter(model.stages[0].decoder.blocks))
        whole.append(sum(type(p) is torch.nn.Parameter for p in first.parameters()))

    last.register_forward_pre_hook(between)
    with Counted() as counted:
        model.forward_backward(own, 100)
    return dict(counted.calls), whole[0]


@pytest.mark.parametrize(
    ("layout", "gathers", "scatters", "all_reduces"),
    [
        (Layout(dp_replicate=2, zero=0, num_microbatches=2), 0, 0, GROUPS),
        (Layout(dp_shard=2, zero=1, num_microbatches=2), GROUPS, GROUPS, 0),
        (Layout(dp_shard=2, zero=2, num_microbatches=2), GROUPS, 2 * GROUPS, 0),
        (Layout(dp_shard=2, zero=2, num_microbatches=2, reduce="step"), GROUPS, GROUPS, 0),
        (Layout(dp_shard=2, zero=3, num_microbatches=2, reduce="step"), None, GROUPS, 0),
        (Layout(dp_shard=2, zero=3, num_microbatches=2), None, 2 * GROUPS, 0),
        (Layout(dp_replicate=2, dp_shard=2, num_microbatches=2), None, 2 * GROUPS, GROUPS),
    ],
    ids=lambda value: value.describe() + value.reduce if isinstance(value, Layout) else None,
)
def test_a_step_moves_what_its_stage_says(layout, gathers, scatters, all_reduces):
    if gathers is None:  # forward and backward of each micro-batch, but for the last block and rest
        gathers = 2 * (GROUPS + GROUPS - 2)
    for calls, held in run_ranks(layout.world_size, _counted, layout):
        assert calls.get(("gather", torch.bfloat16), 0) == gathers
        assert calls.get(("scatter", torch.float32), 0) == scatters
        assert calls.get(("all-reduce", torch.float32), 0) == all_reduces
        assert sum(calls.values()) == gathers + scatters + all_reduces  # nothing in another dtype
        assert (held == 0) == (layout.zero == 3)  # stage 3 drops a block's parameters after it
