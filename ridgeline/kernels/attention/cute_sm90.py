"""Attention on Hopper (H100, H200), CuTe DSL: the entry points. The kernels are in cute/.

    forward(q, k, v, options, extras) -> (out, lse_ln)

Meaning and layouts: problem.py. Numerics: 16-bit operands, fp32 sums and softmax, P rounded to the
inputs' dtype before P V; exponentials good to 2 ulp. Which problems it takes and with which tiles:
cute_sm90_config.py. Compiled code is kept in the user cache (cute/library.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import tvm_ffi

from ridgeline.core.arch import Arch, detect
from ridgeline.kernels.attention.cute import library
from ridgeline.kernels.attention.cute.blocks import UNBOUNDED
from ridgeline.kernels.attention.cute_sm90_config import (
    forward_config,
    forward_traits,
    heads_per_section,
)
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionOptions,
    AttentionProblem,
)

_counters: dict[tuple[int, int], torch.Tensor] = {}


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    extras: AttentionExtras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention forward -> (out like q with v's head dim, lse_ln fp32).

    Shapes: dense q_BSHD k_BTGD v_BTGV -> out_BSHV, lse [B, H, S]; packed q_PHD k_PGD v_PGV with
    cu_seqlens -> out_PHV, lse [H, P]. Strides are free but for the last; views that TMA cannot
    read (a stride of 0 or not a multiple of 16 bytes) are copied.
    """
    problem = problem_of(q, k, v, options, extras)
    kernel, section, num_units = _plan(problem, q.device.index)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (q.shape[1], q.shape[0]) if problem.varlen else (*q.shape[0:3:2], q.shape[1])
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    left, right = window(options)
    with torch.cuda.device(q.device), tvm_ffi.use_torch_stream():
        kernel(
            *(readable_by_tma(x) for x in (q, k, v)),
            out,
            lse,
            extras.sinks_H,
            extras.cu_seqlens_q,
            extras.cu_seqlens_k,
            extras.seqused_k,
            _counter(q.device),
            options.softmax_scale,
            options.softcap,
            left,
            right,
            section,
            num_units,
        )
    return out, lse


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    extras: AttentionExtras,
) -> AttentionProblem:
    """The problem that the tensors of a call pose."""
    packed = extras.cu_seqlens_q is not None
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if packed:
        assert extras.cu_seqlens_q is not None
        batch, longest_q, longest_k = (
            extras.cu_seqlens_q.shape[0] - 1,
            extras.max_seqlen_q or 0,
            extras.max_seqlen_k or 0,
        )
    else:
        batch, longest_q, longest_k = q.shape[0], q.shape[1], k.shape[1]
    return AttentionProblem(
        batch=batch,
        seqlen_q=longest_q,
        seqlen_k=longest_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        causal=options.causal,
        window_left=options.window_left,
        window_right=options.window_right,
        softcap=options.softcap,
        sinks=extras.sinks_H is not None,
        varlen=packed,
        seqused=extras.seqused_k is not None,
    )


def window(options: AttentionOptions) -> tuple[int, int]:
    """(left, right) bounds for the kernel; an open side is far beyond every key."""
    left = UNBOUNDED if options.window_left is None else min(options.window_left, UNBOUNDED)
    right = UNBOUNDED if options.window_right is None else min(options.window_right, UNBOUNDED)
    return left, min(right, 0) if options.causal else right


def readable_by_tma(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where TMA cannot read its strides or address."""
    *strides, last = tensor.stride()
    vector = 16 // tensor.element_size()
    fits = all(stride > 0 and stride % vector == 0 for stride in strides)
    if last == 1 and fits and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def warm(problems: Iterable[AttentionProblem], arch: Arch) -> list[Path]:
    """Compile what these problems need into the user cache, on any machine; returns the files."""
    return [
        library.compile_kernel(forward_traits(problem), forward_config(problem, arch))
        for problem in problems
    ]


@functools.lru_cache(maxsize=1024)
def _plan(problem: AttentionProblem, device: int) -> tuple[Callable[..., None], int, int]:
    """(kernel, heads of a section, SMs): what a call needs beside its tensors, once a shape."""
    arch = _arch(device)
    kernel = library.kernel(forward_traits(problem), forward_config(problem, arch))
    return kernel, heads_per_section(problem, arch), arch.num_units


@functools.cache
def _arch(device: int) -> Arch:
    return detect(f"cuda:{device}")


def _counter(device: torch.device) -> torch.Tensor:
    """The work queue's two words, zero between launches: one pair a stream, as launches of one
    stream follow each other. Inside a graph capture the graph gets its own."""
    stream = torch.cuda.current_stream(device).cuda_stream
    key = (device.index or 0, stream)
    counter = _counters.get(key)
    if counter is None:
        counter = torch.zeros(2, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            _counters[key] = counter
    return counter
