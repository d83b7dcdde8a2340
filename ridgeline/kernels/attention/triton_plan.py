"""From a call to kernel launches: arguments and compile keys of the Triton attention kernels.

A `Launch` is a kernel with its grid, arguments and compile options: what runs on a GPU is also what
the tests compile ahead of time without one (`compile_for`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.core import env
from ridgeline.core.arch import Arch, detect, pretend
from ridgeline.core.dtypes import dtype_name
from ridgeline.kernels.attention.config import TileConfig, block_dims
from ridgeline.kernels.attention.mods import BLOCK as MASK_BLOCK
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions, AttentionProblem
from ridgeline.kernels.attention.rng import threshold
from ridgeline.kernels.attention.triton_common import Call, Variant
from ridgeline.kernels.attention.triton_mods import ModCode, code_of
from ridgeline.kernels.attention.triton_tiles import list_tiles

LOG2E = 1.4426950408889634
_LARGEST_ROW_STRIDE = 2**22
"""Elements; offsets inside a tile are 32-bit."""
FORWARD_GROUP_BYTES, BACKWARD_GROUP_BYTES = 40 * 2**20, 12 * 2**20
"""What the heads of a group of listed tiles may stream of the longest sequence: an H200's L2, with
room for the rest. Backward reads its own side in both kernels too: 16 mixed lengths, head dim 128,
causal, heads in groups of 16, 4, 1: 1,228, 1,157, 1,177 us (H200, 2026-11-30)."""
_ROW_ALIGN = 128
"""triton_bwd.ROW_ALIGN"""
_RAGGED_ROWS, _LARGEST_EXTENT = 2**30, 2**31 - 2**16


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch on the current stream (under the interpreter: run)."""
        if min(self.grid) > 0:
            self.kernel[self.grid](*self.args, **self.options)


def compile_for(launch: Launch, capability: int = 90):
    """Compile a launch's kernel for a GPU that need not be here (Triton's compiled kernel)."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.options)
    _, signature, constexprs, attrs = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=target, options=launch.options)


@cache
def arch_of(device: torch.device) -> Arch:
    """The architecture to configure for; interpreted kernels pretend to be on sm90, under a device
    name of their own: what was tuned there says nothing about a GPU."""
    if device.type != "cpu":
        return detect(device)
    if env.triton_interpreted():
        return replace(pretend("sm90"), device="Triton interpreter", pretended=False)
    return pretend("sm90")


def batched(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """[B, S, H, D] of a dense, packed or paged tensor, last dim contiguous, rows not far apart."""
    x = x.unsqueeze(0) if packed else x
    if x.stride(-1) != 1 or x.stride(1) > _LARGEST_ROW_STRIDE:
        x = x.contiguous()
    return x


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch, row and head stride, elements."""
    return x.stride(0), x.stride(1), x.stride(2)


def flat_strides(x: torch.Tensor, columns: int) -> tuple[int, int, int] | None:
    """How a [B, S, H, D] tensor lies in a matrix with one query or key a row.

    Returns (rows a batch, rows a head, columns a head), or None where TMA cannot read it so as
    tiles of so many columns.
    """
    batch, row, head = strides_of(x)
    size, dim = x.element_size(), x.shape[-1]
    if x.numel() == 0 or row <= 0 or dim != columns:
        return None
    if x.data_ptr() % 16 or row * size % 16 or head * size % 16 or x.stride(-1) != 1:
        return None
    batch = 0 if x.shape[0] == 1 else batch
    head = 0 if x.shape[2] == 1 else head
    if batch % row or batch < 0 or head < 0:
        return None
    if head >= row:
        return None if head % row else (batch // row, head // row, 0)
    return None if head * (x.shape[2] - 1) + dim > row else (batch // row, 0, head)


def tile_descriptor(
    x: torch.Tensor, flat: tuple[int, int, int], rows: int, ragged: bool
) -> TensorDescriptor:
    """A descriptor of `rows` rows of one head, in the matrix of `flat_strides`.

    Ragged: two dimensions in front whose strides take an address back, so that the row dimension
    can end where a sequence does (`load_tile`). Source: the idea is triton.tools.ragged_tma's.
    """
    row = x.stride(1)
    cols = (x.shape[2] - 1) * flat[2] + x.shape[3]
    if ragged:
        shape = [_LARGEST_EXTENT, _LARGEST_EXTENT, _RAGGED_ROWS, cols]
        strides = [2**34 - row, row, row, 1]
        return TensorDescriptor(x, shape, strides, [1, 1, rows, x.shape[3]])
    num = (x.shape[0] - 1) * flat[0] + (x.shape[2] - 1) * flat[1] + x.shape[1]
    return TensorDescriptor(x, [num, cols], [row, 1], [rows, x.shape[3]])


def tensor_args(tensors: Iterable[tuple[torch.Tensor, int, bool]], tma: bool) -> tuple[list, list]:
    """([(tensor, strides, flat strides)...], [descriptor or None...]) of (tensor, tile rows,
    ragged) triples; with tma each has the columns of its tiles.

    Descriptors are arguments of their own: Triton 3.6 does not launch those that lie in a tuple.
    """
    places, descriptors = [], []
    for x, rows, ragged in tensors:
        flat = flat_strides(x, x.shape[-1]) if tma else None
        places.append((x, strides_of(x), flat or (0, 0, 0)))
        descriptors.append(tile_descriptor(x, flat, rows, ragged) if flat else None)
    return places, descriptors


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a call as [B, S, H, D], and the facts that every launch needs."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: AttentionOptions
    extras: AttentionExtras
    batch: int
    seqlen_q: int
    seqlen_k: int
    packed_q: bool
    paged: bool
    mods: tuple[ModCode, tuple[Any, ...] | None] | None = None
    """A user's functions, compiled, and the tensors that they index."""

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of a tile of q or k, and of v."""
        return block_dims(problem_of(self, "fwd"))

    @property
    def flat(self) -> bool:
        """Whether TMA can read q, k and v."""
        d, dv = self.columns
        return all(flat_strides(*t) for t in ((self.q, d), (self.k, d), (self.v, dv)))

    @property
    def whole_keys(self) -> bool:
        """Every sequence has all the stored keys, so the tensor's bounds are the sequence's."""
        x = self.extras
        return all(t is None for t in (x.cu_seqlens_k, x.seqused_k, x.leftpad_k, x.page_ids_BU))

    @property
    def descriptors(self) -> bool:
        """Whether tensor descriptors can load any tile: pages are gathered, and nothing but a mask
        hides the NaN that left padding may hold."""
        return not self.paged and self.extras.leftpad_k is None

    @property
    def whole_queries(self) -> bool:
        return self.extras.cu_seqlens_q is None and self.extras.seqused_q is None

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Batch and head stride of an LSE-shaped tensor ([B, H, S] or [H, P])."""
        rows = self.q.shape[1]
        return (0, rows) if self.packed_q else (self.heads * rows, rows)

    @property
    def aligned_rows(self) -> tuple[int, ...]:
        """Shape of what backward keeps of rows: each sequence's begin at a multiple of 128."""
        rows = cdiv(self.q.shape[1], _ROW_ALIGN) * _ROW_ALIGN
        if self.packed_q:
            return (self.heads, rows + (self.batch + 1) * _ROW_ALIGN)
        return (self.q.shape[0], self.heads, rows)

    @property
    def right(self) -> int | None:
        """Right bound of the window; causal is 0."""
        bound = self.options.window_right
        if self.options.causal:
            return 0 if bound is None else min(0, bound)
        return bound


def inputs_of(q, k, v, options: AttentionOptions, extras: AttentionExtras) -> Inputs:
    """Normalize the tensors of a validated call."""
    paged = extras.page_ids_BU is not None
    packed_q = extras.cu_seqlens_q is not None
    packed_k = extras.cu_seqlens_k is not None and not paged
    batch = extras.cu_seqlens_q.shape[0] - 1 if packed_q else q.shape[0]
    if paged:
        seqlen_k = extras.page_ids_BU.shape[1] * k.shape[1]
    else:
        seqlen_k = extras.max_seqlen_k if packed_k else k.shape[1]
    return Inputs(
        q=batched(q, packed_q),
        k=batched(k, packed_k),
        v=batched(v, packed_k),
        options=options,
        extras=extras,
        batch=batch,
        seqlen_q=extras.max_seqlen_q if packed_q else q.shape[1],
        seqlen_k=seqlen_k,
        packed_q=packed_q,
        paged=paged,
        mods=None if extras.mods is None else code_of(extras.mods, q.device),
    )


def problem_of(x: Inputs, direction: str) -> AttentionProblem:
    """The problem, for the tile config."""
    options, extras = x.options, x.extras
    return AttentionProblem(
        batch=x.batch,
        seqlen_q=x.seqlen_q,
        seqlen_k=x.seqlen_k,
        heads=x.heads,
        kv_heads=x.kv_heads,
        head_dim=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        dtype=dtype_name(x.q.dtype),
        causal=options.causal,
        window_left=options.window_left,
        window_right=options.window_right,
        softcap=options.softcap,
        dropout=options.dropout_p > 0,
        alibi=extras.alibi_slopes is not None,
        sinks=extras.sinks_H is not None,
        bias=extras.bias is not None,
        mods=extras.mods is not None,
        varlen=x.packed_q,
        seqused=extras.seqused_k is not None,
        page_size=x.k.shape[1] if x.paged else None,
        deterministic=options.deterministic,
        direction=direction,
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of one side of a call: the grid, and the list of packed ones."""

    grid: tuple[int, int, int]
    entries: torch.Tensor | None = None
    head_group: int = 1
    made_by: tuple[Launch, ...] = ()


def tiles_of(x: Inputs, side: str, block: int, group_bytes: int = FORWARD_GROUP_BYTES) -> Tiles:
    """The tiles of `block` rows of side q or k; packed ones are listed longest first."""
    seqlen, heads = (x.seqlen_q, x.heads) if side == "q" else (x.seqlen_k, x.kv_heads)
    if not x.packed_q:
        return Tiles((cdiv(seqlen, block), heads, x.batch))
    q, k = x.extras.cu_seqlens_q, x.extras.cu_seqlens_k
    own, other = (q, k) if side == "q" else (k, q)
    other = own if other is None else other  # paged keys: their lengths order nothing
    rows = (x.q if side == "q" else x.k).shape[1]
    capacity = cdiv(cdiv(rows, block) + x.batch, 16) * 16  # one kind of number to Triton
    entries = torch.empty((capacity, 2), device=x.q.device, dtype=torch.int32)
    kind = "flat" if x.right is None else "rising" if side == "q" else "falling"
    lanes = 16 if x.batch < 16 else 64
    made = Launch(
        kernel=list_tiles,
        grid=(x.batch + 1, 1, 1),
        args=(entries, own, other, x.batch, rows, capacity, block, kind, lanes),
        options={"num_warps": 2, **debug_options()},
    )
    other_bytes = (x.seqlen_k if side == "q" else x.seqlen_q) * x.q.element_size()
    other_bytes *= x.q.shape[-1] + x.v.shape[-1]
    fitting = max(1, min(heads, group_bytes // max(1, other_bytes)))
    group = next(n for n in range(fitting, 0, -1) if heads % n == 0)
    return Tiles((capacity * heads, 1, 1), entries, group, (made,))


def call_of(x: Inputs, tiles: Tiles | None = None, side: str = "q") -> Call:
    """The runtime arguments of a call; tiles: of the kernel's grid, side: whose tiles those are."""
    options, extras = x.options, x.extras
    slopes, bias = extras.alibi_slopes, extras.bias
    if slopes is not None:
        slopes = slopes.float().contiguous()
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    bias_strides = (0, 0, 0)
    if bias is not None:
        bias_strides = tuple(
            s if n > 1 else 0 for n, s in zip(bias.shape, bias.stride(), strict=True)
        )[:3]
    return Call(
        tiles=None if tiles is None else tiles.entries,
        num_tiles=1 if tiles is None or tiles.entries is None else tiles.entries.shape[0],
        head_group=1 if tiles is None else tiles.head_group,
        cu_q=extras.cu_seqlens_q,
        cu_k=extras.cu_seqlens_k,
        used_q=extras.seqused_q,
        used_k=extras.seqused_k,
        pad_k=extras.leftpad_k,
        kv_rows=extras.kv_batch_idx,
        pages=extras.page_ids_BU,
        slopes=slopes,
        sinks=None if extras.sinks_H is None else extras.sinks_H.float().contiguous(),
        bias=bias,
        stride_pages=extras.page_ids_BU.stride(0) if x.paged else 0,
        stride_slopes_b=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        bias_strides=bias_strides,
        aux=None if x.mods is None else x.mods[1],
        **_block_lists(x, side),
        batch=x.batch,
        rows_q=x.q.shape[1],
        rows_k=x.k.shape[1],
        stores_k=x.k.shape[0] if env.kernel_debug() else 0,
        seqlen_q=x.seqlen_q,
        seqlen_k=x.seqlen_k,
        left=options.window_left or 0,
        right=x.right or 0,
        scale=float(options.softmax_scale),
        scale_log2=float(options.softmax_scale) * LOG2E,
        softcap=float(options.softcap),
        keep_scale=1.0 / (1.0 - options.dropout_p),
        threshold=threshold(options.dropout_p),
    )


def _block_lists(x: Inputs, side: str) -> dict[str, Any]:
    """The lists of a block mask that programs over tiles of a side walk."""
    blocks = None if x.extras.mods is None else x.extras.mods.blocks
    if blocks is None:
        return {"block_entries": None, "block_counts": None, "block_strides": (0, 0, 0)}
    entries, counts = blocks.key_blocks, blocks.num_key_blocks
    if side == "k":
        entries, counts = blocks.query_blocks, blocks.num_query_blocks
    per_batch, per_head = counts.stride()[:2]
    batch = per_batch if counts.shape[0] > 1 else 0
    strides = (batch, per_head if counts.shape[1] > 1 else 0, entries.shape[-1])
    return {"block_entries": entries, "block_counts": counts, "block_strides": strides}


def variant_of(x: Inputs, tile: TileConfig, tma: bool, **flags: bool) -> Variant:
    """The compile key of a kernel for a call."""
    options, extras = x.options, x.extras
    block_d, block_dv = x.columns
    code = None if x.mods is None else x.mods[0]
    blocks = extras.mods is not None and extras.mods.blocks is not None
    plain = not options.softcap and extras.bias is None and extras.alibi_slopes is None
    plain &= code is None or not code.scored
    page_size = x.k.shape[1] if x.paged else 0
    whole_m = x.whole_queries and x.seqlen_q % (MASK_BLOCK if blocks else tile.block_m) == 0
    whole_n = x.whole_keys and x.seqlen_k % (MASK_BLOCK if blocks else tile.block_n) == 0
    return Variant(
        head_dim=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        group=x.heads // x.kv_heads,
        left=options.window_left is not None,
        right=x.right is not None,
        fold=plain and options.softmax_scale > 0,
        softcap=options.softcap != 0,
        dropout=options.dropout_p > 0,
        precision="tf32x3" if x.q.dtype == torch.float32 else "tf32",
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_d=block_d,
        block_dv=block_dv,
        num_stages=tile.num_stages,
        tma=tma,
        page_size=page_size,
        page_shift=max(0, page_size.bit_length() - 1),
        same_rows=x.k.stride()[:2] == x.v.stride()[:2],
        mods=code,
        blocks=blocks,
        branch=tile.branch or (code is not None and code.masked),
        held=tile.held,
        whole_m=whole_m,
        whole_n=whole_n,
        **flags,
    )


def seeds_of(extras: AttentionExtras) -> tuple[int, int]:
    """(seed, offset) as signed 64-bit values with the same bits."""
    seed = extras.dropout_seed & (2**64 - 1)
    return (seed - 2**64 if seed >= 2**63 else seed), extras.dropout_offset & (2**32 - 1)


def launch_options(tile: TileConfig) -> dict[str, Any]:
    """Triton's compile options of a tile."""
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **debug_options()}


def debug_options() -> dict[str, Any]:
    """In debug mode: assertions on the device are compiled in. Those on overflow are not: random
    words wrap."""
    return {"debug": True, "sanitize_overflow": False} if env.kernel_debug() else {}


def interpreted() -> bool:
    """Whether kernels run in Triton's CPU interpreter."""
    return env.triton_interpreted()


def cdiv(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)
