"""Data parallel on FSDP2: one wrapper for DDP, ZeRO-1, 2, 3 and HSDP.

    replicate x shard mesh     shard = 1: DDP;  replicate = 1: ZeRO;  both: HSDP
    zero 3    parameters are gathered for each block and dropped after it, forward and backward
    zero 1,2  gathered once a step, kept until the step's last backward
    zero 0,1  gradients are kept whole and reduced once a step; 2, 3: each micro-batch
              (layout.reduce chooses otherwise)

Where no data rank shares a parameter (masters.py) there is no FSDP.

Parameters are fp32 (or ModelOptions.master_dtype) shards; blocks run on a cast copy, gradients are
summed in fp32. They are summed, not averaged: the loss is already divided by the global batch's
valid tokens. Elements a rank moves a step: all-reduce 2 N; ZeRO-1, 2 2 N; ZeRO-3 3 N a micro-batch.
Source: Rajbhandari et al. 2019 (arXiv 1910.02054); Zhao et al. 2023 (2304.11277).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ridgeline.core.errors import bad_value
from ridgeline.parallel.layout import Layout
from ridgeline.parallel.mesh import World


def shard_module(
    module: nn.Module, world: World, compute_dtype: torch.dtype, *, keep_gathered: bool = False
) -> None:
    """Shard a module's own parameters (those of blocks that were sharded before stay theirs).

    Raises: ValueError where it is sharded already.
    """
    if isinstance(module, FSDPModule):
        raise bad_value("parallel", "module", "be sharded once", "again", "build a new model")
    reshard = world.layout.zero == 3 and world.layout.pp == 1 and not keep_gathered
    mesh = world.data_mesh
    if mesh.size(0) == 1:
        mesh = world.base["shard"]
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)


def finish(root: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
    """Settings of a whole stage after all its modules were sharded.

    blocks: in the order in which they run; each fetches the next one's parameters before its own
    kernels are queued, not after. (In the backward pass FSDP knows the order by itself.)
    """
    assert isinstance(root, FSDPModule)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for block, following in itertools.pairwise(blocks):
        assert isinstance(block, FSDPModule) and isinstance(following, FSDPModule)
        block.set_modules_to_forward_prefetch([following])


def before_micro_batch(root: nn.Module, layout: Layout, *, last: bool) -> None:
    """Tell FSDP what to do in the backward pass that follows: reduce now or keep, drop or keep."""
    if not isinstance(root, FSDPModule):
        return
    each = layout.reduces_each_micro_batch
    root.set_requires_gradient_sync(each or last)
    root.set_requires_all_reduce(last)  # between replicas once is enough
    root.set_reshard_after_backward(last or layout.zero == 3)


def local_shard(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part, sharing the parameter's memory."""
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's part of the reduced gradient."""
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def shard_rows(size: int, num_shards: int, index: int) -> tuple[int, int]:
    """(start, length) of FSDP's part of `size` rows: equal pieces, the last ones short or empty."""
    piece = -(-size // num_shards)
    start = min(index * piece, size)
    return start, min(piece, size - start)
