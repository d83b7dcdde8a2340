"""Which activations wait for the backward pass: all, few (selective), or blocks' inputs (full).

full keeps b s C elements a block and runs its forward again (a third more FLOPs). selective keeps
what is dear to make again for its size: the attention's output and LSE, and the products with
matrices whose output is no wider than the model (q, k, v, o, down); the MLP's wide products, norms,
rotations and SwiGLU are made again. Blocks may also be compiled: one function of (block, x, step),
so that blocks can share a compilation, the recomputation inside it.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 5 (what is worth recomputing).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ridgeline.core.errors import bad_value
from ridgeline.kernels.attention.dispatch import attention_op

Run = Callable[..., torch.Tensor]
BACKEND = "inductor"
"""What torch.compile hands graphs to; tests that only count graphs use a faster one."""

_KEPT = (
    attention_op,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def wrap_block(block: nn.Module, kind: str, width: int, *, compiled: bool = False) -> None:
    """Make a block recompute in its backward pass, and compile it; its parameters' names stay.

    kind: none, selective or full; width: outputs up to which selective keeps a product.
    Raises: ValueError for a block that is sharded already.
    """
    if any(base.__name__ == "FSDPModule" for base in type(block).__mro__):
        raise bad_value(
            "parallel",
            "recomputation and compilation",
            "come before sharding",
            "a sharded block",
            "build with ParallelModel, which keeps the order",
        )
    if kind != "none" or compiled:
        block.forward = functools.partial(_function(kind, width, compiled), block)


@functools.cache
def _function(kind: str, width: int, compiled: bool) -> Run:
    """The one function that all blocks of a kind run."""
    run: Run = _plain
    if kind != "none":
        context: dict[str, Any] = {}
        if kind == "selective":
            policy = functools.partial(_policy, width)
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            context = {"context_fn": contexts}

        def recomputed(block: nn.Module, *args: Any) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return _plain(block, *args)
            found = checkpoint(
                _plain, block, *args, use_reentrant=False, preserve_rng_state=False, **context
            )
            assert isinstance(found, torch.Tensor)
            return found

        run = recomputed
    return torch.compile(run, backend=BACKEND) if compiled else run


def _plain(block: nn.Module, *args: Any) -> torch.Tensor:
    return type(block).forward(block, *args)


def _policy(width: int, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in _KEPT
    if op in _PRODUCTS:
        keep = args[-1].shape[-1] <= width
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
