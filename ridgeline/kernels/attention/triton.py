"""Attention on any GPU that Triton compiles for: the entry points.

    forward(q, k, v, options, extras) -> (out, lse_ln)
    backward(dout, dlse, q, k, v, out, lse_ln, options, extras) -> AttentionGrads
    append_kv(k_cache, v_cache, k, v, where) ; rotate_queries(q, where, advance) -> q

Meaning and layouts: problem.py. Numerics: products of 16-bit operands summed in fp32 (of fp32
inputs as three tf32 products, near fp32), softmax in fp32, P and dS rounded to the inputs' dtype
before the products they enter. Every sum has a fixed order: results are bitwise repeatable.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ridgeline.kernels.attention import triton_bwd, triton_decode, triton_fwd
from ridgeline.kernels.attention.config import (
    BackwardConfig,
    DecodeConfig,
    TileConfig,
    backward_config,
    decode_config,
    forward_tile,
    next_power_of_2,
    takes_decode,
)
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionGrads, AttentionOptions
from ridgeline.kernels.attention.triton_append import append_kv as append_kv
from ridgeline.kernels.attention.triton_append import rotate_queries as rotate_queries
from ridgeline.kernels.attention.triton_plan import (
    BACKWARD_GROUP_BYTES,
    Inputs,
    Launch,
    Tiles,
    arch_of,
    batched,
    call_of,
    cdiv,
    flat_strides,
    inputs_of,
    launch_options,
    problem_of,
    seeds_of,
    strides_of,
    tensor_args,
    tiles_of,
    variant_of,
)


def forward(q, k, v, options: AttentionOptions, extras: AttentionExtras):
    """Attention forward -> (out, lse_ln fp32). See the module's docstring."""
    x = inputs_of(q, k, v, options, extras)
    if not q.numel():
        out, lse = forward_outputs(x)
        return (out[0] if x.packed_q else out), lse
    problem, arch = problem_of(x, "fwd"), arch_of(q.device)
    decode = takes_decode(problem)
    tile = None if decode else forward_tile(problem, arch)
    if tile is not None and needs_widening(x, tile):
        x = widened(x)
    out, lse = forward_outputs(x, cleared=decode)
    if tile is None:
        launches = plan_decode(x, out, lse, decode_config(problem, arch, options.num_splits))
    else:
        launches = plan_forward(x, out, lse, tile)
    for launch in launches:
        launch.run()
    return (out[0] if x.packed_q else out)[..., : v.shape[-1]], lse


def needs_widening(x: Inputs, tile: TileConfig) -> bool:
    """Whether head dims are padded in memory first, so that TMA can read them: not of a cache,
    which has more rows than the call looks at."""
    cache = x.extras.kv_batch_idx is not None or not x.descriptors
    return tile.tma and not cache and (x.q.shape[-1], x.v.shape[-1]) != x.columns


def widened(x: Inputs) -> Inputs:
    """q, k and v as wide as their tiles, zero where there was nothing."""
    d, dv = x.columns
    return replace(x, q=_padded(x.q, d), k=_padded(x.k, d), v=_padded(x.v, dv))


def _padded(x: torch.Tensor, columns: int) -> torch.Tensor:
    missing = columns - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def forward_outputs(x: Inputs, cleared: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for out (4-D) and lse; cleared: packed rows are 0 and -inf from the start, for a
    kernel that does not write those that no sequence has."""
    shape = (*x.q.shape[:3], x.v.shape[-1])
    rows = (x.heads, shape[1]) if x.packed_q else (shape[0], x.heads, shape[1])
    if x.packed_q and cleared:
        return x.q.new_zeros(shape), torch.full(rows, float("-inf"), device=x.q.device)
    return x.q.new_empty(shape), torch.empty(rows, device=x.q.device, dtype=torch.float32)


def plan_decode(
    x: Inputs, out: torch.Tensor, lse: torch.Tensor, config: DecodeConfig
) -> list[Launch]:
    """The split-KV launch and, with several splits, the merge; out is 4-D."""
    tile, splits = config.tile, config.num_splits
    d, dv = x.columns
    tma = tile.tma and all(flat_strides(*t) for t in ((x.k, d), (x.v, dv)))
    tma &= not x.paged or x.k.shape[1] % tile.block_n == 0
    variant = variant_of(x, tile, tma, direct=splits == 1)
    kv = (x.k, tile.block_n, False), (x.v, tile.block_n, False)
    places, descriptors = tensor_args(kv, tma)
    lse_strides = (x.lse_strides[0], 1, x.lse_strides[1], 0)
    results = ((out, (*strides_of(out), 0)), (lse, lse_strides))
    partial = results
    if splits > 1:
        batch, rows, heads, dim = out.shape
        part = torch.empty((batch, rows, heads, splits, dim), device=lse.device)
        part_lse = torch.empty((batch, rows, heads, splits), device=lse.device)
        if x.packed_q:  # rows that no sequence has are not written
            part_lse.fill_(float("-inf"))
        partial = ((part, part.stride()[:4]), (part_lse, part_lse.stride()))
    row_tiles = cdiv(x.heads // x.kv_heads * x.seqlen_q, tile.block_m)
    split = Launch(
        kernel=triton_decode.attention_split,
        grid=(splits, x.kv_heads * row_tiles, x.batch),
        args=(
            (x.q, strides_of(x.q)),
            *places,
            *descriptors,
            *partial,
            splits,
            row_tiles,
            call_of(x),
            variant,
        ),
        options=launch_options(tile),
    )
    if splits == 1:
        return [split]
    merge = Launch(
        kernel=triton_decode.attention_merge,
        grid=(out.shape[1], x.heads, out.shape[0]),
        args=(
            *partial,
            *results,
            splits,
            next_power_of_2(splits),
            variant.head_dim_v,
            variant.block_dv,
        ),
        options={"num_warps": 4},
    )
    return [split, merge]


def plan_forward(x: Inputs, out: torch.Tensor, lse: torch.Tensor, tile: TileConfig) -> list[Launch]:
    """The forward kernel's launch, after that of its list of tiles if it has one; out is 4-D."""
    tma = tile.tma and x.descriptors and x.flat
    variant = variant_of(x, tile, tma, ragged=tma)
    ragged_n = not variant.whole_n
    tensors = (
        (x.q, tile.block_m, not variant.whole_m),
        (x.k, tile.block_n, ragged_n),
        (x.v, tile.block_n, ragged_n),
    )
    places, descriptors = tensor_args(tensors, tma)
    tiles = tiles_of(x, "q", tile.block_m)
    main = Launch(
        kernel=triton_fwd.attention_fwd,
        grid=tiles.grid,
        args=(
            *places,
            *descriptors,
            (out, strides_of(out)),
            (lse, *x.lse_strides),
            call_of(x, tiles),
            *seeds_of(x.extras),
            variant,
        ),
        options=launch_options(tile),
    )
    return [*tiles.made_by, main]


def backward(
    dout, dlse, q, k, v, out, lse_ln, options: AttentionOptions, extras: AttentionExtras
) -> AttentionGrads:
    """Gradients of q, k, v, the sinks and the bias. See the module's docstring."""
    if not q.numel():
        return _nothing_flows_back(q, k, v, extras)
    x = inputs_of(q, k, v, options, extras)
    config = backward_config(problem_of(x, "bwd"), arch_of(q.device))
    if needs_widening(x, config.dkdv) or needs_widening(x, config.dq):
        x = widened(x)
    dout, out = (batched(_padded(t, x.v.shape[-1]), x.packed_q) for t in (dout, out))
    plan = BackwardPlan(x, dout, dlse, out, lse_ln, config)
    for launch in plan.launches():
        launch.run()
    packed_k = extras.cu_seqlens_k is not None
    return AttentionGrads(
        dq=(plan.dq[0] if x.packed_q else plan.dq)[..., : q.shape[-1]],
        dk=(plan.dk[0] if packed_k else plan.dk)[..., : k.shape[-1]],
        dv=(plan.dv[0] if packed_k else plan.dv)[..., : v.shape[-1]],
        dsinks=plan.dsinks(),
        dbias=plan.dbias,
    )


def _nothing_flows_back(q, k, v, extras: AttentionExtras) -> AttentionGrads:
    """The gradients of a call without queries."""
    sinks, bias = extras.sinks_H, extras.bias
    return AttentionGrads(
        dq=torch.zeros_like(q),
        dk=torch.zeros_like(k),
        dv=torch.zeros_like(v),
        dsinks=None if sinks is None else torch.zeros_like(sinks),
        dbias=None if bias is None else torch.zeros_like(bias),
    )


class BackwardPlan:
    """Buffers and launches of one backward, in the order in which they run."""

    def __init__(self, x: Inputs, dout, dlse, out, lse_ln, config: BackwardConfig):
        self.x, self.dout, self.dlse, self.out, self.lse = x, dout, dlse, out, lse_ln
        self.config = config
        self.tma = x.descriptors and x.flat and flat_strides(dout, x.columns[1]) is not None
        new = torch.empty_like if x.extras.kv_batch_idx is None else torch.zeros_like
        kept = {"memory_format": torch.contiguous_format}
        self.dq, self.dk, self.dv = (new(t, **kept) for t in (x.q, x.k, x.v))
        self.delta, self.lse_log2 = (torch.empty(x.aligned_rows, device=x.q.device) for _ in "dl")
        self.row_strides = (0 if x.packed_q else self.delta.stride(0), self.delta.stride(-2))
        sinks = x.extras.sinks_H is not None
        self.delta_of_lse = torch.empty_like(lse_ln) if sinks else None
        bias = x.extras.bias
        self.dbias = None if bias is None else torch.zeros_like(bias, **kept)
        self.seeds = seeds_of(x.extras)

    def launch(self, kernel: str, tile: TileConfig) -> list[Launch]:
        """The launches of dkdv or dq with another tile, into the same buffers (for the tuner)."""
        self.config = BackwardConfig(dkdv=tile, dq=tile)
        if kernel == "dkdv":
            tiles = self._tiles("k", tile.block_n)
            return [*tiles.made_by, self._dkdv(tiles)]
        tiles = self._tiles("q", tile.block_m)
        return [*tiles.made_by, self._dq(tiles)]

    def _tiles(self, side: str, block: int) -> Tiles:
        return tiles_of(self.x, side, block, BACKWARD_GROUP_BYTES)

    def _variant(self, tile: TileConfig):
        tma = self.tma and tile.tma
        return variant_of(self.x, tile, tma, ragged=tma)

    def launches(self) -> list[Launch]:
        """Everything, in order."""
        queries = self._tiles("q", self.config.dq.block_m)
        keys = self._tiles("k", self.config.dkdv.block_n)
        found = [*queries.made_by, *keys.made_by, self._rows(queries)]
        blocks = self.x.extras.mods is not None and self.x.extras.mods.blocks is not None
        if self.config.joined and not blocks:
            found.append(self._joined(keys, queries))
        else:
            found += [self._dkdv(keys), self._dq(queries)]
        if self.dbias is not None:
            found.append(self._dbias())
        return found

    def _tensors(self, tile: TileConfig):
        """Places and descriptors of q, k, v and dout for a tile."""
        x, variant = self.x, self._variant(tile)
        tensors = (
            (x.q, tile.block_m, not variant.whole_m),
            (x.k, tile.block_n, not variant.whole_n),
            (x.v, tile.block_n, not variant.whole_n),
            (self.dout, tile.block_m, not variant.whole_m),
        )
        return tensor_args(tensors, self.tma and tile.tma)

    def rows(self) -> list[Launch]:
        """The launches of delta and LSE alone, which dkdv and dq read (for the tuner)."""
        queries = self._tiles("q", self.config.dq.block_m)
        return [*queries.made_by, self._rows(queries)]

    def _rows(self, tiles: Tiles) -> Launch:
        x, rows = self.x, self.config.dq.block_m
        tile = TileConfig(block_m=rows, block_n=64, num_warps=4, num_stages=1)
        dlse = (None, (0, 0, 0))
        if self.dlse is not None:
            d = self.dlse.unsqueeze(0) if x.packed_q else self.dlse
            dlse = (self.dlse, (d.stride(0), d.stride(1), d.stride(2)))
        return Launch(
            kernel=triton_bwd.attention_rows,
            grid=tiles.grid,
            args=(
                (self.out, strides_of(self.out)),
                (self.dout, strides_of(self.dout)),
                (self.lse, *x.lse_strides),
                dlse,
                (self.delta, self.lse_log2, self.delta_of_lse),
                self.row_strides,
                call_of(x, tiles),
                self._variant(tile),
            ),
            options=launch_options(tile),
        )

    def _dkdv(self, tiles: Tiles) -> Launch:
        x, tile = self.x, self.config.dkdv
        places, descriptors = self._tensors(tile)
        return Launch(
            kernel=triton_bwd.attention_dkdv,
            grid=tiles.grid,
            args=(
                *places,
                *descriptors,
                (self.delta, self.lse_log2),
                ((self.dk, strides_of(self.dk)), (self.dv, strides_of(self.dv))),
                self.row_strides,
                call_of(x, tiles, "k"),
                *self.seeds,
                self._variant(tile),
            ),
            options=launch_options(tile),
        )

    def _dq(self, tiles: Tiles) -> Launch:
        x, tile = self.x, self.config.dq
        places, descriptors = self._tensors(tile)
        return Launch(
            kernel=triton_bwd.attention_dq,
            grid=tiles.grid,
            args=(
                *places,
                *descriptors,
                (self.delta, self.lse_log2),
                (self.dq, strides_of(self.dq)),
                self.row_strides,
                call_of(x, tiles),
                *self.seeds,
                self._variant(tile),
            ),
            options=launch_options(tile),
        )

    def _joined(self, keys: Tiles, queries: Tiles) -> Launch:
        """dK, dV and dQ in one launch."""
        x, dkdv, dq = self.x, self.config.dkdv, self.config.dq
        places, descriptors = self._tensors(dkdv)
        tiles, group = (keys.grid[0], queries.grid[0]), x.heads // x.kv_heads
        grid, call_dq = (tiles[0] + group * tiles[1], x.kv_heads, x.batch), None
        if x.packed_q:
            grid, call_dq = (sum(tiles), 1, 1), call_of(x, queries)
        return Launch(
            kernel=triton_bwd.attention_grads,
            grid=grid,
            args=(
                *places,
                *descriptors,
                (self.delta, self.lse_log2),
                ((self.dk, strides_of(self.dk)), (self.dv, strides_of(self.dv))),
                (self.dq, strides_of(self.dq)),
                self.row_strides,
                call_of(x, keys, "k"),
                call_dq,
                tiles,
                *self.seeds,
                self._variant(dkdv),
                self._variant(dq),
            ),
            options=launch_options(dkdv),
        )

    def _dbias(self) -> Launch:
        x, bias = self.x, self.dbias
        rows = 32 if x.q.element_size() == 4 or x.q.shape[-1] > 128 else 64
        tile = TileConfig(block_m=rows, block_n=rows, num_warps=4, num_stages=1)
        return Launch(
            kernel=triton_bwd.attention_dbias,
            grid=(
                cdiv(bias.shape[2], rows),
                cdiv(bias.shape[3], rows),
                bias.shape[0] * bias.shape[1],
            ),
            args=(
                *self._tensors(tile)[0],
                (self.delta, self.lse_log2),
                (bias, bias.shape[0], bias.shape[1], bias.stride()[:3]),
                self.row_strides,
                x.batch,
                x.heads,
                call_of(x),
                *self.seeds,
                self._variant(tile),
            ),
            options=launch_options(tile),
        )

    def dsinks(self) -> torch.Tensor | None:
        """-sum over rows of exp(sink - LSE) * delta; call after the launches."""
        sinks = self.x.extras.sinks_H
        if sinks is None:
            return None
        share = torch.exp(sinks.float()[:, None] - self.lse)
        share = torch.where(self.lse == float("-inf"), 0.0, share)
        total = (share * self.delta_of_lse).sum(-1)
        return -(total if self.x.packed_q else total.sum(0)).to(sinks.dtype)
