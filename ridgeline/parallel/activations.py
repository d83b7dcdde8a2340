"""Which activations wait for the backward pass: all, few (selective), or blocks' inputs (full).

full keeps b s C elements a block and runs its forward again (a third more FLOPs). selective keeps
what is dear to make again for its size: the attention's output and LSE, and the products with
matrices whose output is no wider than the model (q, k, v, o, down); the MLP's wide products, norms,
rotations and SwiGLU are made again. Then each block may be compiled.
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

_KEPT = (
    torch.ops.ridgeline.attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
)
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def checkpoint_block(block: nn.Module, kind: str, width: int) -> None:
    """Make a block recompute in its backward pass; its parameters' names stay.

    width: outputs up to which a product is kept (the model's, or its part on this rank).
    """
    if kind == "none":
        return
    if _is_sharded(block):
        raise wrap_order("activation checkpointing", "sharded")
    context: Any = {}
    if kind == "selective":
        policy = functools.partial(_policy, width)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        context = {"context_fn": contexts}
    forward = block.forward

    def recomputed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context)

    block.forward = recomputed


def compile_block(block: nn.Module) -> None:
    """Compile a block's forward; all blocks share one compilation."""
    if _is_sharded(block):
        raise wrap_order("torch.compile", "sharded")
    compiled: Callable[..., Any] = torch.compile(block.forward, dynamic=False)
    block.forward = compiled


def wrap_order(what: str, already: str) -> ValueError:
    """The error of wrapping in the wrong order."""
    return bad_value(
        "parallel",
        what,
        "be applied in the order tensor split, checkpointing, compile, sharding",
        f"a block that is already {already}",
        "build with ParallelModel, which keeps the order",
    )


def _is_sharded(block: nn.Module) -> bool:
    return any(c.__name__ == "FSDPModule" for c in type(block).__mro__)


def _policy(width: int, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in _KEPT
    if op in _PRODUCTS:
        keep = args[-1].shape[-1] <= width
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
