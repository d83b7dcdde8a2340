"""Keys and values in pages, and attention over them.

    k, v [L, pages, W, G, D]; token t of a sequence lies in page table[t // W], slot t % W

Two ways of attending:
- on a CPU, sequence by sequence: neighbouring pages are one view of the cache, others are gathered;
  one call of the attention op's implementation each;
- on a GPU, one call for all decoding sequences (keys split over the units) and one for all chunks
  of prompts, both reading pages in place.
In FP8 the cache holds E4M3 with one fp32 scale a token and head (its largest value is 448); a
step's keys and values are widened to the model's dtype before attention: half the memory, more
traffic.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.engine.populate import populate
from ridgeline.kernels.attention import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.layers import window_bounds

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU memory that is taken page by page as it is first written (NumPy callocs), so
    that an engine starts at once and a large cache costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)


class PagedKV:
    """The cache's tensors. One page more than `num_pages` is for padding rows of a graph."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_pages: int,
        page_tokens: int,
        kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_tokens, self.dtype = num_pages, page_tokens, dtype
        shape = (config.num_layers, num_pages + 1, page_tokens, kv_heads, config.head_dim)
        self.k = _zeros(shape, dtype, device)
        self.v = _zeros(shape, dtype, device)
        self.k_scale = self.v_scale = None
        if dtype == FP8:
            self.k_scale = torch.ones(shape[:-1], dtype=torch.float32, device=device)
            self.v_scale = torch.ones(shape[:-1], dtype=torch.float32, device=device)
        self.flat_k = [layer.flatten(0, 1) for layer in self.k]
        self.flat_v = [layer.flatten(0, 1) for layer in self.v]
        self.flat_k_scale = [] if self.k_scale is None else [x.flatten(0, 1) for x in self.k_scale]
        self.flat_v_scale = [] if self.v_scale is None else [x.flatten(0, 1) for x in self.v_scale]

    def take_memory(self) -> threading.Thread | None:
        """Have all of the cache's memory now, not as it is first written, so that the process grows
        no more; beside what runs where the system can (the thread that does it), else at once."""
        if self.k.device.type != "cpu":
            return None
        tensors = (self.k, self.v)  # held by the thread, though the engine may end before it
        if populate(self.k.data_ptr(), mmap.PAGESIZE * 2):

            def work() -> None:
                for tensor in tensors:
                    populate(tensor.data_ptr(), tensor.numel() * tensor.element_size())

            thread = threading.Thread(target=work, name="cache", daemon=True)
            thread.start()
            return thread
        for tensor in tensors:  # nothing is in it yet
            tensor.view(torch.uint8).flatten()[:: mmap.PAGESIZE].zero_()
        return None

    def append(
        self, layer: int, slots_P: torch.Tensor, k_PGD: torch.Tensor, v_PGD: torch.Tensor
    ) -> None:
        """Write new keys and values to their slots (page * W + offset)."""
        if self.dtype == FP8:
            k_PGD, k_scale = to_fp8(k_PGD)
            v_PGD, v_scale = to_fp8(v_PGD)
            self.flat_k_scale[layer][slots_P] = k_scale
            self.flat_v_scale[layer][slots_P] = v_scale
            # Moved as bytes: not every backend indexes 8-bit floats.
            self.flat_k[layer].view(torch.uint8)[slots_P] = k_PGD.view(torch.uint8)
            self.flat_v[layer].view(torch.uint8)[slots_P] = v_PGD.view(torch.uint8)
            return
        self.flat_k[layer].index_copy_(0, slots_P, k_PGD.to(self.dtype))
        self.flat_v[layer].index_copy_(0, slots_P, v_PGD.to(self.dtype))

    def read(
        self, layer: int, slots: slice | torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots [T, G, D]: views where the slots are neighbours. dtype: of those
        of an FP8 cache; others' are the cache's own."""
        if self.dtype != FP8:
            return self.flat_k[layer][slots], self.flat_v[layer][slots]
        k = self.flat_k[layer].view(torch.uint8)[slots].view(FP8).to(dtype)
        v = self.flat_v[layer].view(torch.uint8)[slots].view(FP8).to(dtype)
        k_scale, v_scale = self.flat_k_scale[layer][slots], self.flat_v_scale[layer][slots]
        return k * k_scale[..., None].to(dtype), v * v_scale[..., None].to(dtype)

    def key_slots(self, span: Span) -> slice | torch.Tensor:
        """Slots of a sequence's keys, in order; a slice where its pages are neighbours."""
        size = self.page_tokens
        used = span.pages[: -(-span.num_keys // size)]
        if used == list(range(used[0], used[0] + len(used))):
            return slice(used[0] * size, used[0] * size + span.num_keys)
        starts = torch.tensor(used, dtype=torch.int64) * size
        return (starts[:, None] + torch.arange(size)).flatten()[: span.num_keys]

    def num_bytes(self) -> int:
        """Bytes that the tensors take."""
        tensors = [self.k, self.v, self.k_scale, self.v_scale]
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def to_fp8(x_PGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and their scales [P, G]: x is about value * scale."""
    wide = x_PGD.float()
    # The scale is rounded up to a power of two: dividing and multiplying by it loses nothing.
    largest = wide.abs().amax(-1).clamp_min(1e-30)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    return (wide / scale[..., None]).to(FP8), scale


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence of a step: its rows among the packed ones, its pages, its keys."""

    row: int
    rows: int
    pages: list[int]
    num_keys: int
    """Tokens kept after this step, the new ones included."""


def positions_of(spans: Sequence[Span]) -> np.ndarray:
    """Position of each packed token in its sequence, int64."""
    if not spans:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(s.num_keys - s.rows, s.num_keys) for s in spans])


def slots_of(spans: Sequence[Span], page_tokens: int) -> np.ndarray:
    """Where each packed token's keys and values go, int64."""
    slots = [np.zeros(0, dtype=np.int64)]
    for span in spans:
        if span.rows == 1:  # nearly all of them
            page, offset = divmod(span.num_keys - 1, page_tokens)
            slots.append(np.array([span.pages[page] * page_tokens + offset]))
            continue
        position = np.arange(span.num_keys - span.rows, span.num_keys)
        own = np.array(span.pages, dtype=np.int64)[position // page_tokens]
        slots.append(own * page_tokens + position % page_tokens)
    return np.concatenate(slots)


class HostAttention:
    """Attention of a step on a CPU, sequence by sequence.

    A call's shapes and dtypes are the engine's own, checked by the op at each sequence's first
    layer; the other layers go to the implementation that the op chose. invariant: every query on
    its own, so a row's bits depend on nothing but its keys.
    """

    def __init__(self, cache: PagedKV, spans: Sequence[Span], *, invariant: bool = False) -> None:
        self.cache = cache
        self.slots_P = torch.from_numpy(slots_of(spans, cache.page_tokens))
        self.spans = [(span, cache.key_slots(span)) for span in spans]
        self.invariant = invariant

    def attend(
        self,
        layer: int,
        q_PHD: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        cache, dtype = self.cache, q_PHD.dtype
        cache.append(layer, self.slots_P, k_PGD, v_PGD)
        if cache.dtype == torch.float32:
            q_PHD = q_PHD.float()
        return self._over_all(layer, q_PHD, window).to(dtype)

    def _over_all(self, layer: int, q_PHD: torch.Tensor, window: int | None) -> torch.Tensor:
        cache = self.cache
        if len(self.spans) == 1:
            span, slots = self.spans[0]
            k_TGD, v_TGD = cache.read(layer, slots, q_PHD.dtype)
            return self._one(q_PHD, k_TGD, v_TGD, window)
        out_PHD = torch.empty_like(q_PHD)
        for span, slots in self.spans:
            k_TGD, v_TGD = cache.read(layer, slots, q_PHD.dtype)
            rows = slice(span.row, span.row + span.rows)
            out_PHD[rows] = self._one(q_PHD[rows], k_TGD, v_TGD, window)
        return out_PHD

    def _one(
        self, q_SHD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        if not self.invariant or q_SHD.shape[0] == 1:
            return _host_call(q_SHD, k_TGD, v_TGD, window)
        before = k_TGD.shape[0] - q_SHD.shape[0] + 1
        rows = [
            _host_call(q_SHD[i : i + 1], k_TGD[: before + i], v_TGD[: before + i], window)
            for i in range(q_SHD.shape[0])
        ]
        return torch.cat(rows)


def _host_call(
    q_SHD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, window: int | None
) -> torch.Tensor:
    bounds = window_bounds(window)
    out = flash_attn_func(q_SHD[None], k_TGD[None], v_TGD[None], causal=True, window_size=bounds)
    assert isinstance(out, torch.Tensor)
    return out[0]


@dataclass(slots=True)
class DeviceBatch:
    """Tensors of a step on a GPU: decoding rows first, then the chunks."""

    slots_P: torch.Tensor
    num_decoding: int
    decode_seqlens_B: torch.Tensor
    """int32, keys with the new one."""
    decode_table_BU: torch.Tensor
    chunk_starts: torch.Tensor | None = None
    """int32 [chunks + 1] over the rows after the decoding ones."""
    chunk_seqlens: torch.Tensor | None = None
    """int32, keys with the new ones."""
    chunk_table: torch.Tensor | None = None
    max_rows: int = 0
    max_keys: int = 0
    num_splits: int = 0
    tile: int | None = None
    """Decoding sequences a call, always so many (lengths and table are padded to a multiple): the
    kernel then is the same for any batch."""


class DeviceAttention:
    """Attention of a step on a GPU."""

    def __init__(self, cache: PagedKV, batch: DeviceBatch) -> None:
        self.cache, self.batch = cache, batch

    def attend(
        self,
        layer: int,
        q_PHD: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        self.cache.append(layer, self.batch.slots_P, k_PGD, v_PGD)
        return self.read(layer, q_PHD, window)

    def read(self, layer: int, q_PHD: torch.Tensor, window: int | None) -> torch.Tensor:
        """Attention once the step's keys and values are in the cache."""
        cache, batch = self.cache, self.batch
        bounds = window_bounds(window)
        k_pages, v_pages = cache.k[layer], cache.v[layer]
        B = batch.num_decoding
        parts: list[torch.Tensor] = []
        if B:
            q_BHD = q_PHD[:B]
            padded = batch.decode_seqlens_B.shape[0]
            if padded > B:
                q_BHD = torch.cat((q_BHD, q_BHD.new_zeros(padded - B, *q_BHD.shape[1:])))
            size = batch.tile or padded
            for start in range(0, padded, size):
                tile = slice(start, start + size)
                out = flash_attn_with_kvcache(
                    q_BHD[tile, None],
                    k_pages,
                    v_pages,
                    cache_seqlens=batch.decode_seqlens_B[tile],
                    block_table=batch.decode_table_BU[tile],
                    causal=True,
                    window_size=bounds,
                    num_splits=batch.num_splits,
                )
                assert isinstance(out, torch.Tensor)
                parts.append(out[: B - start, 0])
        if batch.chunk_starts is not None:
            assert batch.chunk_seqlens is not None
            out = flash_attn_varlen_func(
                q_PHD[B:],
                k_pages,
                v_pages,
                cu_seqlens_q=batch.chunk_starts,
                cu_seqlens_k=None,  # type: ignore[arg-type]  # seqused_k tells the lengths of pages
                max_seqlen_q=batch.max_rows,
                max_seqlen_k=batch.max_keys,
                causal=True,
                window_size=bounds,
                block_table=batch.chunk_table,
                seqused_k=batch.chunk_seqlens,
            )
            assert isinstance(out, torch.Tensor)
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class GatheredAttention:
    """Attention of a step on a GPU over an FP8 cache: the step's keys and values are widened into
    packed tensors first."""

    def __init__(self, cache: PagedKV, spans: Sequence[Span]) -> None:
        self.cache = cache
        device = cache.k.device
        self.slots_P = torch.from_numpy(slots_of(spans, cache.page_tokens)).to(device)
        keys: list[torch.Tensor] = []
        starts_q, starts_k = [0], [0]
        for span in spans:
            slots = cache.key_slots(span)
            if isinstance(slots, slice):
                slots = torch.arange(slots.start, slots.stop)
            keys.append(slots)
            starts_q.append(span.row + span.rows)
            starts_k.append(starts_k[-1] + span.num_keys)
        self.key_slots = torch.cat(keys).to(device)
        self.starts_q = torch.tensor(starts_q, dtype=torch.int32, device=device)
        self.starts_k = torch.tensor(starts_k, dtype=torch.int32, device=device)
        self.max_rows = max(span.rows for span in spans)
        self.max_keys = max(span.num_keys for span in spans)

    def attend(
        self,
        layer: int,
        q_PHD: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        self.cache.append(layer, self.slots_P, k_PGD, v_PGD)
        k, v = self.cache.read(layer, self.key_slots, q_PHD.dtype)
        out = flash_attn_varlen_func(
            q_PHD,
            k,
            v,
            cu_seqlens_q=self.starts_q,
            cu_seqlens_k=self.starts_k,
            max_seqlen_q=self.max_rows,
            max_seqlen_k=self.max_keys,
            causal=True,
            window_size=window_bounds(window),
        )
        assert isinstance(out, torch.Tensor)
        return out


@dataclass(slots=True)
class PackedAttention:
    """Attention of whole sequences side by side, nothing kept: embeddings."""

    starts: torch.Tensor
    """int32 [sequences + 1]."""
    max_len: int

    def attend(
        self,
        layer: int,
        q_PHD: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGD: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        out = flash_attn_varlen_func(
            q_PHD,
            k_PGD,
            v_PGD,
            cu_seqlens_q=self.starts,
            cu_seqlens_k=self.starts,
            max_seqlen_q=self.max_len,
            max_seqlen_k=self.max_len,
            causal=True,
            window_size=window_bounds(window),
        )
        assert isinstance(out, torch.Tensor)
        return out
