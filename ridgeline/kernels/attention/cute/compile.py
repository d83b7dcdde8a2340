"""Tracing and compiling with the DSL for sm_90a, without a GPU; library.py imports it on demand."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ridgeline.kernels.attention.cute.backward import Backward
from ridgeline.kernels.attention.cute.backward_persistent import PersistentBackward
from ridgeline.kernels.attention.cute.cache import ARCHITECTURE, Config, Traits
from ridgeline.kernels.attention.cute.cached import CachedForward
from ridgeline.kernels.attention.cute.forward import Forward
from ridgeline.kernels.attention.cute.forward_tail import TailForward
from ridgeline.kernels.attention.cute.mainloop import DTYPES
from ridgeline.kernels.attention.cute.roles import BackwardByRoles
from ridgeline.kernels.attention.cute_sm90_backward_config import (
    ROW_STATISTICS,
    BackwardConfig,
    BackwardTraits,
    counts,
    is_persistent,
)
from ridgeline.kernels.attention.cute_sm90_cached_config import CachedConfig, CachedTraits
from ridgeline.kernels.attention.cute_sm90_config import ForwardConfig, ForwardTraits
from ridgeline.kernels.attention.cute_sm90_roles_config import RolesConfig
from ridgeline.kernels.attention.cute_sm90_tail_config import pieces_row


def trace(traits: Traits, config: Config, cubin_dir: Path | None = None) -> Any:
    """Compile for sm_90a without a GPU; the result can be exported, the cubin kept in a folder."""
    keep = f" --keep-cubin --dump-dir {cubin_dir}" if cubin_dir else ""
    with warnings.catch_warnings():
        # Long unrolled loops are meant: registers can be indexed by constants only.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return _compile(traits, config, f"--enable-tvm-ffi --gpu-arch {ARCHITECTURE}{keep}")


def _compile(traits: Traits, config: Config, options: str) -> Any:
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = (Float32(1), Float32(1), Int32(0), Int32(0), Int32(1), Int32(1))
    if isinstance(traits, CachedTraits) and isinstance(config, CachedConfig):
        arguments = (*_cached_tensors(traits), *numbers, stream)
        return cute.compile(CachedForward(traits, config), *arguments, options=options)
    if isinstance(traits, ForwardTraits) and isinstance(config, ForwardConfig):
        if config.split_tail:
            arguments = (*_tail_tensors(traits, config), *numbers, Int32(1), stream)
            return cute.compile(TailForward(traits, config), *arguments, options=options)
        arguments = (*_forward_tensors(traits), *numbers, stream)
        return cute.compile(Forward(traits, config), *arguments, options=options)
    assert isinstance(traits, BackwardTraits) and not isinstance(config, ForwardConfig)
    arguments = (*_backward_tensors(traits, config), *numbers, Int32(1), Int32(0), Int32(0), stream)
    if is_persistent(config):
        return cute.compile(PersistentBackward(traits, config), *arguments, options=options)
    if isinstance(config, RolesConfig):
        return cute.compile(BackwardByRoles(traits, config), *arguments, options=options)
    return cute.compile(Backward(traits, config), *arguments, options=options)


class _Shapes:
    """Stand-ins of a call's tensors: dynamic lengths, and strides but for the last."""

    def __init__(self, traits: Traits):
        self.packed = traits.varlen
        self.dtype = DTYPES[traits.dtype]
        self.b, self.s, self.t, self.h, self.g = (cute.sym_int32() for _ in range(5))
        self.dim_qk, self.dim_v = (cute.sym_int32(divisibility=8) for _ in range(2))
        self.entries = cute.sym_int32()

    def tokens(self, length: Any, heads: Any, dim: Any) -> Any:
        """Like q, k, v."""
        shape = (length, heads, dim) if self.packed else (self.b, length, heads, dim)
        strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]]
        return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

    def cache(self, traits: CachedTraits, rows: Any, dim: Any) -> Any:
        """Like k, v of a cache: any number of rows, or pages."""
        packed = traits.varlen and not traits.page_rows
        shape = (self.t, self.g, dim) if packed else (rows, self.t, self.g, dim)
        strides = [cute.sym_int64(divisibility=8) for _ in shape[1:]]
        return make_fake_tensor(self.dtype, shape, (*strides, 1), assumed_align=16)

    def rows(self) -> Any:
        """Like the LSE."""
        shape = (self.h, self.s) if self.packed else (self.b, self.h, self.s)
        strides = [cute.sym_int64() for _ in shape[1:]]
        return make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=4)

    def vector(self, kind: Any, length: Any, wanted: bool = True) -> Any:
        return make_fake_tensor(kind, (length,), (1,), assumed_align=4) if wanted else None

    def tiles(self, words: int) -> Any:
        """fp32 [tiles, H, words], contiguous."""
        strides = [cute.sym_int64(divisibility=4) for _ in range(2)]
        shape = (cute.sym_int32(), self.h, words)
        return make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=16)


def _forward_tensors(traits: ForwardTraits) -> list[Any]:
    x = _Shapes(traits)
    return [
        x.tokens(x.s, x.h, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.rows(),
        x.vector(Float32, x.h, traits.sinks),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, cute.sym_int32(), traits.seqused),
        x.vector(Int32, 2),
    ]


def _tail_tensors(traits: ForwardTraits, config: ForwardConfig) -> list[Any]:
    *tensors, starts_q, starts_k, used, _ = _forward_tensors(traits)
    assert starts_q is starts_k is used is None
    shape = (cute.sym_int32(), *pieces_row(config, traits))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    pieces = make_fake_tensor(Float32, shape, tuple(strides), assumed_align=16)
    counter = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
    return [*tensors, pieces, counter]


def _cached_tensors(traits: CachedTraits) -> list[Any]:
    x = _Shapes(traits)
    part = part_lse = pages = None
    if traits.split:
        splits = cute.sym_int32()
        strides = [cute.sym_int64(divisibility=8) for _ in range(3)]
        shape = (cute.sym_int32(), x.h, splits, x.dim_v)
        part = make_fake_tensor(Float32, shape, (*strides, 1), assumed_align=16)
        strides = [cute.sym_int64() for _ in range(2)]
        part_lse = make_fake_tensor(Float32, shape[:3], (*strides, 1), assumed_align=4)
    if traits.page_rows:
        shape = (x.b if not traits.varlen else cute.sym_int32(), cute.sym_int32())
        pages = make_fake_tensor(Int32, shape, (cute.sym_int64(), 1), assumed_align=4)
    rows = cute.sym_int32()
    return [
        x.tokens(x.s, x.h, x.dim_qk),
        x.cache(traits, rows, x.dim_qk),
        x.cache(traits, rows, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.rows(),
        part,
        part_lse,
        x.vector(Float32, x.h, traits.sinks),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, x.entries, traits.varlen and not traits.page_rows),
        x.vector(Int32, cute.sym_int32(), traits.seqused),
        x.vector(Int32, cute.sym_int32(), traits.seqused),
        x.vector(Int32, cute.sym_int32(), traits.leftpad),
        x.vector(Int32, cute.sym_int32(), traits.kv_rows),
        pages,
    ]


def _backward_tensors(traits: BackwardTraits, config: BackwardConfig | RolesConfig) -> list[Any]:
    x = _Shapes(traits)
    turns = None
    if counts(config, traits.deterministic):
        shape = (cute.sym_int32(), x.h, 1)
        turns = make_fake_tensor(Int32, shape, (cute.sym_int64(), 1, 1), assumed_align=4)
    return [
        x.tokens(x.s, x.h, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.tokens(x.s, x.h, x.dim_v),
        x.rows(),
        x.rows(),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, x.entries, traits.varlen),
        x.vector(Int32, cute.sym_int32(), traits.seqused),
        x.vector(Int32, cute.sym_int32(), traits.seqused),
        x.tokens(x.s, x.h, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_qk),
        x.tokens(x.t, x.g, x.dim_v),
        x.tiles(ROW_STATISTICS * config.block_q),
        x.tiles(config.block_q * traits.head_dim),
        turns,
    ]
