"""Attention on Hopper (H100, H200), CuTe DSL: the entry points. The kernels are in cute/.

    forward(q, k, v, options, extras) -> (out, lse_ln)
    backward(dout, dlse, q, k, v, out, lse_ln, options, extras) -> AttentionGrads

Meaning and layouts: problem.py. Numerics: 16-bit operands, fp32 sums and softmax, P rounded to the
inputs' dtype before P V; exponentials good to 2 ulp. Backward: P and dS rounded to the inputs'
dtype, dQ summed in fp32 by atomic additions, whose order changes its last bits from call to call
unless options.deterministic orders them; dK and dV are bitwise repeatable. Which problems it takes
and with which tiles: cute_sm90_config.py and cute_sm90_backward_config.py. Compiled code is kept in
the user cache (cute/library.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ridgeline.core import env
from ridgeline.core.arch import Arch, detect
from ridgeline.kernels.attention.buffers import Make, maker, nothing, zero_maker
from ridgeline.kernels.attention.cute import library
from ridgeline.kernels.attention.cute.blocks import UNBOUNDED
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    ROW_STATISTICS,
    BackwardConfig,
    backward_config,
    backward_traits,
    counts,
    is_finishing,
    run_together,
)
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    heads_per_section as backward_section,
)
from ridgeline.kernels.attention.cute_sm90_cached import Cached, cached, used_lengths
from ridgeline.kernels.attention.cute_sm90_cached_config import CachedTraits, forward_key
from ridgeline.kernels.attention.cute_sm90_choice import forward_kernel
from ridgeline.kernels.attention.cute_sm90_config import heads_per_section, padded
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig
from ridgeline.kernels.attention.cute_sm90_tail_config import counter_words, pieces_shape, tail_of
from ridgeline.kernels.attention.problem import (
    AttentionExtras,
    AttentionGrads,
    AttentionOptions,
    AttentionProblem,
)
from ridgeline.kernels.attention.recent import Recent

_counters: dict[int, torch.Tensor] = {}
_tail_counters: dict[int, torch.Tensor] = {}
_plans: Recent[Plan] = Recent(2048)
_option_values = operator.attrgetter(*[field.name for field in fields(AttentionOptions)])
"""A tuple is hashed and compared in half of the time of a dataclass."""
_NOTHING = AttentionExtras()


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
    return _forward(_planned("fwd", (q, k, v), options, extras), extras, q, k, v)


def prepare_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`forward` of dense tensors of these shapes, strides, dtypes and device, without extras: its
    plan is found already."""
    plan = _planned("fwd", (q, k, v), options, _NOTHING)
    if plan.copied or plan.empty or plan.cached is not None or plan.pieces is not None:
        return functools.partial(_forward, plan, _NOTHING)
    kernel, device, numbers, make_out, make_lse = (
        plan.kernel, plan.device, plan.numbers, plan.out, plan.lse,
    )  # fmt: skip
    current_device = torch._C._cuda_getDevice

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        odd = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        if odd or current_device() != device:
            return _forward(plan, _NOTHING, q, k, v)
        out, lse = make_out(), make_lse()
        kernel(q, k, v, out, lse, None, None, None, None, _counter(q, device), *numbers)
        return out, lse

    return run


def prepare_backward(options: AttentionOptions) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`backward` of one kind of dense tensors without extras: (dout, dlse, q, k, v, out, lse) ->
    (dq, dk, dv). Strides may be others at each call, as hooks may have had what was saved."""
    plans: Recent[Plan] = Recent(16)

    def run(dout: torch.Tensor, dlse: torch.Tensor | None, *saved: torch.Tensor) -> Any:
        q, k, v, out, lse_ln = saved
        strides = (q.stride(), k.stride(), v.stride(), out.stride(), dout.stride())
        plan = plans.get(strides)
        if plan is None:
            plan = _planned("bwd", (q, k, v, out, dout), options, _NOTHING)
            plans[strides] = plan
        return _backward(plan, _NOTHING, (dout, dlse, q, k, v, out, lse_ln))[:3]

    return run


def _forward(
    plan: Plan, extras: AttentionExtras, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch._C._cuda_getDevice() != plan.device:
        with torch.cuda.device(plan.device):
            return _forward(plan, extras, q, k, v)
    out, lse = plan.out(), plan.lse()
    if plan.empty:
        return out, lse
    if plan.cached is not None:
        arguments = plan.cached.arguments(plan.readable(q, k, v), out, lse, extras)
        plan.kernel(*arguments, *plan.numbers)
        return out, lse
    if plan.pieces is not None:
        tensors = (*plan.readable(q, k, v), out, lse, extras.sinks_H, plan.pieces())
        plan.kernel(*tensors, _tail_counter(q, plan.device), *plan.numbers)
        return out, lse
    plan.kernel(
        *plan.readable(q, k, v),
        out,
        lse,
        extras.sinks_H,
        extras.cu_seqlens_q,
        extras.cu_seqlens_k,
        extras.seqused_k,
        _counter(q, plan.device),
        *plan.numbers,
    )
    return out, lse


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse_ln: torch.Tensor,
    options: AttentionOptions,
    extras: AttentionExtras,
) -> AttentionGrads:
    """Gradients of q, k, v and the sinks; dlse is like lse_ln or None.

    Shapes: as forward's, dout and out alike. Views that TMA cannot read are copied.
    """
    plan = _planned("bwd", (q, k, v, out, dout), options, extras)
    tensors = (dout, dlse, q, k, v, out, lse_ln)
    dq, dk, dv, statistics = _backward(plan, extras, tensors)
    dsinks = None
    if extras.sinks_H is not None:
        assert plan.config is not None
        delta = _delta(statistics, plan.problem, plan.config, extras.cu_seqlens_q, q.shape[0])
        dsinks = sink_gradient(extras.sinks_H, lse_ln, delta)
    return AttentionGrads(dq=dq, dk=dk, dv=dv, dsinks=dsinks)


def _backward(
    plan: Plan, extras: AttentionExtras, tensors: tuple[torch.Tensor | Any, ...]
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, statistics) of dout, dlse, q, k, v, out and lse_ln."""
    if torch._C._cuda_getDevice() != plan.device:
        with torch.cuda.device(plan.device):
            return _backward(plan, extras, tensors)
    dout, dlse, q, k, v, out, lse_ln = tensors
    dq, dk, dv = plan.dq(), plan.dk(), plan.dv()
    statistics, dq_sum = plan.statistics(), plan.dq_sum()
    problem = plan.problem
    plan.kernel(
        *plan.readable(q, k, v, out, dout),
        lse_ln,
        lse_ln if dlse is None else dlse.contiguous(),
        extras.cu_seqlens_q,
        extras.cu_seqlens_k,
        *(used_lengths(extras, problem.batch, q.device) if problem.seqused else (None, None)),
        dq,
        dk,
        dv,
        statistics,
        dq_sum,
        None if plan.turns is None else plan.turns(),
        *plan.numbers,
        0 if dlse is None else 1,
        plan.together,
    )
    return dq, dk, dv, statistics


def _delta(
    statistics: torch.Tensor,
    problem: AttentionProblem,
    config: BackwardConfig | RolesConfig,
    starts: torch.Tensor | None,
    num_rows: int,
) -> torch.Tensor:
    """rowsum(dO * O) - dLSE, like the LSE, out of the kernel's tiles. starts: cu_seqlens_q."""
    if starts is not None:
        row = torch.arange(num_rows, device=starts.device)
        sequence = torch.searchsorted(starts[1:-1].contiguous(), row, right=True)
        first = starts[sequence].long()
        tile = first // config.block_q + sequence + (row - first) // config.block_q
        tile = tile.clamp(max=statistics.shape[0] - 1)
        return statistics[tile, :, config.block_q + (row - first) % config.block_q].T
    shape = (problem.batch, -1, problem.heads, ROW_STATISTICS, config.block_q)
    delta = statistics.view(shape)[:, :, :, 1].transpose(1, 2)
    return delta.flatten(2)[:, :, : problem.seqlen_q]


def sink_gradient(sinks_H: torch.Tensor, lse_ln: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """-sum over rows of exp(sink - LSE) * delta; lse_ln and delta are [B, H, S] or [H, S]."""
    share = torch.exp(sinks_H.float()[:, None] - lse_ln)
    # A row that no sequence has is in no tile: its delta may be anything.
    total = torch.where(lse_ln == float("-inf"), 0.0, share * delta).sum(-1)
    return -(total if total.ndim == 1 else total.sum(0)).to(sinks_H.dtype)


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
    page_size, lengths = None, (extras.seqused_q, extras.seqused_k)
    if extras.page_ids_BU is not None:
        if packed:  # those of keys in pages are always given
            lengths = lengths[:1]
        page_size = k.shape[1]
        longest_k = extras.page_ids_BU.shape[1] * page_size
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
        seqused=any(used is not None for used in lengths),
        page_size=page_size,
        leftpad=extras.leftpad_k is not None,
        kv_batch_idx=extras.kv_batch_idx is not None,
    )


def window(options: AttentionOptions) -> tuple[int, int]:
    """(left, right) bounds for the kernel; an open side is far beyond every key."""
    left = UNBOUNDED if options.window_left is None else min(options.window_left, UNBOUNDED)
    right = UNBOUNDED if options.window_right is None else min(options.window_right, UNBOUNDED)
    return left, min(right, 0) if options.causal else right


def readable_by_tma(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where TMA cannot read its strides or address."""
    if strides_fit_tma(tensor) and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def strides_fit_tma(tensor: torch.Tensor) -> bool:
    """Whether TMA can read a tensor with these strides."""
    *strides, last = tensor.stride()
    vector = 16 // tensor.element_size()
    return last == 1 and all(stride > 0 and stride % vector == 0 for stride in strides)


def warm(problems: Iterable[AttentionProblem], arch: Arch) -> list[Path]:
    """Compile what these problems need, each in its direction, into the user cache, on any machine;
    returns the files."""
    files = []
    for problem in problems:
        if problem.direction == "bwd":
            key = backward_traits(problem), backward_config(problem, arch)
        else:
            key = forward_key(problem, arch)
        files.append(library.compile_kernel(*key))
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a call needs beside its tensors: made once a kind of call, as Python is what a short
    call costs."""

    kernel: Callable[..., None]
    device: int
    problem: AttentionProblem
    numbers: tuple[float | int, ...]
    """The launch's numbers, but for the backward's last two."""
    copied: bool
    """Whether a tensor that TMA reads has strides it cannot."""
    out: Make = nothing
    lse: Make = nothing
    dq: Make = nothing
    dk: Make = nothing
    dv: Make = nothing
    statistics: Make = nothing
    dq_sum: Make = nothing
    turns: Make | None = None
    """What a call allocates, contiguous, on the current device."""
    empty: bool = False
    """Whether there are no queries."""
    config: BackwardConfig | RolesConfig | None = None
    together: int = 0
    cached: Cached | None = None
    """What a forward by the kernel of caches needs beside."""
    pieces: Make | None = None
    """The workspace of a forward whose last tiles are cut."""

    def readable(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors, or copies where TMA cannot read their strides or address."""
        address = int(self.copied)  # 1 is no multiple of 16 either
        for tensor in tensors:
            address |= tensor.data_ptr()
        if address % 16:
            return tuple(readable_by_tma(tensor) for tensor in tensors)
        return tensors


def _planned(
    direction: Literal["fwd", "bwd"],
    tensors: tuple[torch.Tensor, ...],
    options: AttentionOptions,
    extras: AttentionExtras,
) -> Plan:
    """The plan of a call on q, k, v and what else TMA reads, found by a key that is cheap to make:
    a problem takes 50 us."""
    q, k, v = tensors[:3]
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        q.dtype,
        q.get_device(),
        _option_values(options),
        env.switches("attention"),
    )
    if direction == "bwd":
        key = (*key, "bwd", *[size for x in tensors[3:] for size in (x.shape, x.stride())])
    if not (
        extras.cu_seqlens_q is None
        and extras.sinks_H is None
        and extras.seqused_q is None
        and extras.seqused_k is None
        and extras.leftpad_k is None
        and extras.kv_batch_idx is None
        and extras.page_ids_BU is None
    ):
        key = (*key, *_kinds_of(extras))
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(direction, tensors, options, extras)
        _plans[key] = plan
    return plan


def _kinds_of(extras: AttentionExtras) -> tuple[Any, ...]:
    """What a plan depends on beside the values of optional tensors."""
    starts, pages = extras.cu_seqlens_q, extras.page_ids_BU
    packed = None if starts is None else (starts.shape[0], extras.max_seqlen_q, extras.max_seqlen_k)
    return (
        packed,
        extras.sinks_H is None,
        extras.seqused_q is None and extras.seqused_k is None,
        extras.leftpad_k is None,
        extras.kv_batch_idx is None,
        None if pages is None else pages.shape,
    )


def _plan(
    direction: Literal["fwd", "bwd"],
    tensors: tuple[torch.Tensor, ...],
    options: AttentionOptions,
    extras: AttentionExtras,
) -> Plan:
    q, k, v = tensors[:3]
    deterministic = direction == "bwd" and options.deterministic
    problem = replace(
        problem_of(q, k, v, options, extras), direction=direction, deterministic=deterministic
    )
    device = q.device.index or 0
    arch = _arch(device)
    scalars = (options.softmax_scale, options.softcap, *window(options))
    common = {
        "device": device,
        "problem": problem,
        "copied": not all(strides_fit_tma(x) for x in tensors),
    }
    if direction == "fwd":
        shape = (*q.shape[:-1], v.shape[-1])
        lse_shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (*q.shape[0:3:2], q.shape[1])
        key, last = (
            forward_kernel(problem, arch),
            (heads_per_section(problem, arch), arch.num_units),
        )
        more = pieces = None
        if isinstance(key[0], CachedTraits):
            more, key, last = cached(q, v, problem, arch, options.num_splits)
        elif key[1].split_tail:
            cut = tail_of(problem, key[1], arch)
            pieces = maker(q, pieces_shape(cut, key[1], key[0]), torch.float32)
            last = (*last, cut.ranges)
        return Plan(
            kernel=library.kernel(*key),
            numbers=(*scalars, *last),
            cached=more,
            pieces=pieces,
            out=maker(q, shape),
            lse=maker(q, lse_shape, torch.float32),
            empty=q.shape[0] == 0,
            **common,
        )
    config = backward_config(problem, arch)
    num_tiles = problem.batch * -(-problem.seqlen_q // config.block_q)
    if problem.varlen:
        num_tiles = q.shape[0] // config.block_q + problem.batch
    counted, more = counts(config, deterministic), 2 if is_finishing(config) else 1
    tiles = (num_tiles, problem.heads)
    lengths = (problem.seqlen_q, problem.seqlen_k)
    # Rows behind the used ones belong to no tile; those behind the last packed sequence the kernel
    # clears.
    make_gradient = zero_maker if problem.seqused else maker
    return Plan(
        kernel=library.kernel(backward_traits(problem), config),
        numbers=(*scalars, backward_section(problem, arch), *lengths),
        config=config,
        dq=make_gradient(q, q.shape),
        dk=make_gradient(q, k.shape),
        dv=make_gradient(q, v.shape),
        statistics=maker(q, (*tiles, ROW_STATISTICS * config.block_q), torch.float32),
        dq_sum=maker(q, (*tiles, config.block_q * padded(problem.head_dim)), torch.float32),
        turns=maker(q, (num_tiles + more, problem.heads, 1), torch.int32) if counted else None,
        together=int(run_together(problem, config, arch)),
        **common,
    )


def _stream(device: int) -> int:
    """PyTorch's current stream, as CUDA's handle; making a Stream object takes longer."""
    return torch._C._cuda_getCurrentRawStream(device)


@functools.cache
def _arch(device: int) -> Arch:
    return detect(f"cuda:{device}")


def _counter(q: torch.Tensor, device: int) -> torch.Tensor:
    """The work queue's two words, zero between launches: one pair a stream, as launches of one
    stream follow each other. What a graph captures gets its own, as graphs may run beside each
    other and beside the stream they were captured on."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=q.device)
    key = _stream(device) << 8 | device
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(2, dtype=torch.int32, device=q.device)
    return counter


def _tail_counter(q: torch.Tensor, device: int) -> torch.Tensor:
    """The same with a word for each piece's place and warpgroup, which launches leave at zero too:
    enough for any launch, as those of a stream may be of different shapes."""
    words = counter_words(_arch(device).num_units)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int32, device=q.device)
    key = _stream(device) << 8 | device
    counter = _tail_counters.get(key)
    if counter is None:
        counter = _tail_counters[key] = torch.zeros(words, dtype=torch.int32, device=q.device)
    return counter
