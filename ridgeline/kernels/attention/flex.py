"""Attention with a user's score_mod and mask_mod, forward and backward, on every implementation.

    causal = lambda b, h, i, j: i >= j
    blocks = create_block_mask(causal, None, None, S, T, q.device)
    out = flex_attn_func(q, k, v, mask_mod=causal, block_mask=blocks)

Meaning: mods.py, and problem.py for the rest. Not an operator of torch.library (a function is no
argument of one): under torch.compile it breaks the graph. Where PyTorch's FlexAttention compiles
the whole call anew, here the mod alone is printed as Triton and called by the shipped kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.core.errors import bad_value, unsupported
from ridgeline.kernels.attention.arguments import (
    Arguments,
    check,
    window_bounds,
    with_fp32_sinks,
)
from ridgeline.kernels.attention.dispatch import module_of
from ridgeline.kernels.attention.mods import (
    BlockMask,
    MaskMod,
    Mods,
    ScoreMod,
    create_block_mask,
)

__all__ = ["BlockMask", "create_block_mask", "flex_attn_func"]


def flex_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: BlockMask | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    *,
    sinks: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attn_func` (or, with cu_seqlens, `flash_attn_varlen_func`) with user functions.

    Shapes: as there. score_mod(score, b, h, i, j) -> score; mask_mod(b, h, i, j) -> bool, True
    where query i sees key j; both in torch operations that broadcast. block_mask is of mask_mod
    (`create_block_mask`), for dense sequences: blocks without anything are not visited.
    Numerics: mods in fp32; gradients through score_mod by its derivative. Tensors that a mod
    indexes take no gradient.
    Raises: ValueError, TypeError, NotImplementedError before anything runs, naming the argument.
    Source: the interface is FlexAttention's.
    """
    left, right = window_bounds(window_size)
    inputs = (q, k, v, sinks, bias)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    a = Arguments(
        q=q,
        k=k,
        v=v,
        sinks=sinks,
        bias=bias,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window_left=left,
        window_right=right,
        softcap=softcap,
        needs_grad=needs_grad,
        impl=impl,
    )
    check(a)
    mods = Mods(score_mod, mask_mod, block_mask)
    _check_blocks(a, mods)
    call = _Call(a, mods)
    out, lse = _Flex.apply(*inputs, call)
    return (out, lse) if return_lse else out


def _check_blocks(a: Arguments, mods: Mods) -> None:
    blocks = mods.blocks
    if blocks is None:
        return

    def wrong(must: str, got: object, do: str) -> ValueError:
        return bad_value("flex_attn_func", "block_mask", must, got, do)

    if mods.mask is None:
        raise wrong("be given with mask_mod", None, "partly hidden blocks need it")
    if a.varlen:
        raise unsupported(
            "flex_attn_func", "block_mask", "be None with cu_seqlens", "a BlockMask", "leave it out"
        )
    sizes, want = (blocks.seqlen_q, blocks.seqlen_k), (a.seqlen_q, a.seqlen_k)
    if sizes != want:
        raise wrong(f"be of lengths {want}", sizes, "make one for these lengths")
    leads, most = tuple(blocks.key_blocks.shape[:2]), (a.batch, a.q.shape[-2])
    if any(lead not in (1, size) for lead, size in zip(leads, most, strict=True)):
        raise wrong(f"have batch and heads of 1 or {most}", leads, "make one for this batch")
    if blocks.key_blocks.device != a.q.device:
        raise wrong(f"be on q's device {a.q.device}", blocks.key_blocks.device, "make it there")


@dataclass(frozen=True, slots=True)
class _Call:
    """What autograd carries from forward to backward beside tensors."""

    a: Arguments
    mods: Mods

    def module(self, direction: str) -> Any:
        """The implementation that takes the call."""
        problem = replace(self.a.problem(direction), mods=True)
        return module_of(problem, self.a.q.device, self.a.impl)


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, sinks, bias, call: _Call):
        a = with_fp32_sinks(call.a)
        if a.needs_grad:
            call.module("bwd")  # a refusal better now than after a whole forward
        extras = replace(a.extras(), mods=call.mods)
        out, lse = call.module("fwd").forward(q, k, v, a.options(), extras)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, bias, out, lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout, dlse):
        q, k, v, sinks, bias, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 6
        dout = torch.zeros_like(out) if dout is None else dout
        a = with_fp32_sinks(replace(ctx.call.a, q=q, k=k, v=v, sinks=sinks, bias=bias))
        extras = replace(a.extras(), mods=ctx.call.mods)
        module = ctx.call.module("bwd")
        grads = module.backward(dout, dlse, q, k, v, out, lse, a.options(), extras)
        found = (grads.dq, grads.dk, grads.dv, grads.dsinks, grads.dbias)
        given = (q, k, v, sinks, bias)
        return (
            *(None if g is None else g.to(t.dtype) for g, t in zip(found, given, strict=True)),
            None,
        )
