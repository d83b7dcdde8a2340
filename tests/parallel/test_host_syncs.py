"""A step asks the device for nothing: on a GPU each answer waits for all that is queued."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.parallel.layout import Layout
from ridgeline.parallel.verify import random_batch
from ridgeline.train.config import OptimConfig
from ridgeline.train.optim import PartOptimizer
from tests.parallel.harness import run_ranks
from tests.parallel.layouts import SEQLEN, TIED, batch_samples, build

pytestmark = pytest.mark.dist

ASKING = {
    "_local_scalar_dense": "a number is read (.item(), float(), if)",
    "nonzero": "a size depends on values",
    "lift_fresh": "a tensor is made of host numbers, whose copy is waited for",
}


class Asked(TorchDispatchMode):
    """Names of the operations that would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ASKING:
            self.names.append(f"{name}: {ASKING[name]}")
        return func(*args, **(kwargs or {}))


def _asked(rank: int, layout: Layout) -> list[str]:
    model = build(layout, TIED, compute_dtype=torch.bfloat16)
    model.init_weights(0)
    optimizer = PartOptimizer(model.parameters_here().items(), OptimConfig())
    indices = list(range(batch_samples(model)))
    own = [random_batch(some, SEQLEN, 67, 0) for some in model.micro_batches(indices)]
    for _ in range(2):  # the first step makes what later ones keep
        with Asked() as asked:
            model.forward_backward(own, 100)
            model.clip(1.0)
            optimizer.step(1e-3)
            optimizer.zero_grad()
            model.zero_grad()
    return asked.names


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sequence_parallel=True, activation_checkpointing="full"),
        Layout(dp_shard=2, num_microbatches=2),
        Layout(pp=2, num_microbatches=2),
        Layout(cp=2),
    ],
    ids=lambda layout: layout.describe(),
)
def test_a_step_asks_nothing(layout):
    # A context plan is made of host numbers, and its copies are pinned (context._moved).
    planned = "lift_fresh" if layout.cp > 1 else "none"
    for names in run_ranks(layout.world_size, _asked, layout):
        assert [name for name in names if not name.startswith(planned)] == []


def test_the_trap_sees_what_waits():
    x = torch.arange(4.0)
    with Asked() as asked:
        x.sum().item()
        x.nonzero()
        torch.tensor([1.0, 2.0])
    assert [name.split(":")[0] for name in asked.names] == list(ASKING)
