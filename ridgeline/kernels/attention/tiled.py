"""FlashAttention-1 and -2 written plainly, counting what moves between slow and fast memory.

Documentation that runs. Slow memory holds Q, K, V, O of one head; fast memory holds M elements. A
tile is `load`ed (counted), worked on, and `store`d (counted); nothing else crosses.

    one step:  S = scale Q_i K_j^T,  m' = max(m, rowmax S),  P = exp(S - m'),
               l' = exp(m - m') l + rowsum P,  O' = exp(m - m') O + P V_j       (online softmax)

- FlashAttention-1: outer loop over K, V blocks, inner over Q blocks. K and V are read once, Q and O
  (with l and m) once for each of the Tc = T / Bc outer steps, and O is kept normalised: rescaled
  and rewritten each time. Bc = ceil(M / 4D), Br = min(Bc, D): of the order of S T D^2 / M elements.
- FlashAttention-2: outer loop over Q blocks, inner over K, V. O stays in fast memory, is divided
  by l once at the end and written once; only O and LSE leave. K and V are read once for each Q
  block of M / 4D rows; the K, V blocks are as long as the scores leave room for.
- FlashAttention-2's backward: outer over K, V blocks (dK, dV stay), inner over Q blocks (dQ is
  read, added to and written).
`naive_traffic` counts standard attention, which writes and reads S and P: of the order of S T.
Numerics: fp32. Source: Dao et al., "FlashAttention", 2022, algorithm 1 and theorem 2; Dao,
"FlashAttention-2", 2023, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ridgeline.kernels.attention.problem import AttentionExtras, AttentionGrads, AttentionOptions

NEG_INF = float("-inf")
FAST_MEMORY_ELEMENTS = 48 * 1024
"""What `forward` and `backward` assume: 192 KiB of fp32, about a streaming multiprocessor's."""


@dataclass(slots=True)
class Traffic:
    """Elements moved between slow and fast memory."""

    read: int = 0
    written: int = 0

    @property
    def elements(self) -> int:
        """Both directions."""
        return self.read + self.written

    def bytes(self, itemsize: int) -> int:
        """Both directions, for elements of a width."""
        return self.elements * itemsize

    def load(self, tile: torch.Tensor) -> torch.Tensor:
        """Bring a tile into fast memory."""
        self.read += tile.numel()
        return tile.clone()

    def store(self, target: torch.Tensor, tile: torch.Tensor) -> None:
        """Write a tile back."""
        self.written += tile.numel()
        target.copy_(tile)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes: rows of Q and rows of K and V."""

    q_rows: int
    kv_rows: int


def tiles_for(fast_elements: int, head_dim: int) -> Tiles:
    """Block sizes of FlashAttention-1, algorithm 1, line 1: Bc = ceil(M / 4D), Br = min(Bc, D).

    Raises: ValueError when not even one row each of Q, K, V and O fits.
    """
    if fast_elements < 4 * head_dim:
        raise ValueError(
            f"attention: fast_elements must be at least {4 * head_dim}, got {fast_elements}; "
            "a row each of Q, K, V and O has to fit"
        )
    kv_rows = -(-fast_elements // (4 * head_dim))
    return Tiles(min(kv_rows, head_dim), kv_rows)


def resident_tiles(
    fast_elements: int, head_dim: int, *, resident: int, passing: int, scores: int
) -> tuple[int, int]:
    """Rows of the tiles that stay and of those that pass by, FlashAttention-2's block sizes.

    Traffic falls with the rows r that stay, so `resident` tiles take half of M; the rows c that
    pass get what is left: resident r D + passing c D + scores r c <= M. (The row statistics, of
    the order of r, are not counted.) Raises: ValueError when not even one row of each fits.
    """
    stay = fast_elements // (2 * resident * head_dim)
    left = fast_elements - resident * stay * head_dim
    passing_rows = left // (passing * head_dim + scores * stay)
    if stay < 1 or passing_rows < 1:
        need = max(2 * resident * head_dim, (resident + passing) * head_dim + scores)
        raise ValueError(
            f"attention: fast_elements must be at least {need}, got {fast_elements}; "
            "a row of each tile has to fit"
        )
    return stay, passing_rows


def naive_traffic(seqlen_q: int, seqlen_k: int, head_dim: int) -> Traffic:
    """Standard attention of one head: write S, read S, write P, read P; Q, K, V read, O written.

    Source: FlashAttention (2022), algorithm 0.
    """
    pairs = seqlen_q * seqlen_k
    return Traffic(
        read=head_dim * (seqlen_q + 2 * seqlen_k) + 2 * pairs,
        written=head_dim * seqlen_q + 2 * pairs,
    )


def _spans(length: int, block: int) -> Iterator[slice]:
    for start in range(0, length, block):
        yield slice(start, min(length, start + block))


@dataclass(frozen=True, slots=True)
class _Mask:
    """Bottom-right causal, or none."""

    shift: int
    """T - S."""
    causal: bool

    def skips(self, rows: slice, keys: slice) -> bool:
        """Whether a whole tile is hidden: it is then never loaded."""
        return self.causal and keys.start > rows.stop - 1 + self.shift

    def apply(self, score: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        if not self.causal:
            return score
        i = torch.arange(rows.start, rows.stop, device=score.device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=score.device)[None, :]
        return score.masked_fill(j > i + self.shift, NEG_INF)


def flash_1(
    q_SD: torch.Tensor,
    k_TD: torch.Tensor,
    v_TV: torch.Tensor,
    options: AttentionOptions,
    fast_elements: int,
    traffic: Traffic,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-1's forward of one head -> (out_SV, lse_S)."""
    tiles = tiles_for(fast_elements, max(q_SD.shape[1], v_TV.shape[1]))
    S, T = q_SD.shape[0], k_TD.shape[0]
    mask = _Mask(T - S, options.causal)
    out, sums = q_SD.new_zeros(S, v_TV.shape[1]), q_SD.new_zeros(S)
    maxima = q_SD.new_full((S,), NEG_INF)
    for keys in _spans(T, tiles.kv_rows):
        k, v = traffic.load(k_TD[keys]), traffic.load(v_TV[keys])
        for rows in _spans(S, tiles.q_rows):
            if mask.skips(rows, keys):
                continue
            q, o = traffic.load(q_SD[rows]), traffic.load(out[rows])
            m, total = traffic.load(maxima[rows]), traffic.load(sums[rows])
            score = mask.apply(q @ k.T * options.softmax_scale, rows, keys)
            new_m = torch.maximum(m, score.amax(1))
            p, decay = _exp(score, new_m), _exp(m[:, None], new_m)[:, 0]
            new_total = decay * total + p.sum(1)
            # O is normalised at every step: undo the old divisor, add, divide by the new one
            o = (decay * total)[:, None] * o + p @ v
            traffic.store(out[rows], o / new_total.masked_fill(new_total == 0, 1.0)[:, None])
            traffic.store(maxima[rows], new_m)
            traffic.store(sums[rows], new_total)
    return out, maxima + torch.log(sums)


def _exp(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """exp(x - m) by rows; a row that has seen nothing (m = -inf) gives zeros."""
    return torch.exp(x - m.masked_fill(m == NEG_INF, 0.0)[:, None])


def flash_2(
    q_SD: torch.Tensor,
    k_TD: torch.Tensor,
    v_TV: torch.Tensor,
    options: AttentionOptions,
    fast_elements: int,
    traffic: Traffic,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-2's forward of one head -> (out_SV, lse_S)."""
    dim = max(q_SD.shape[1], v_TV.shape[1])
    # Q and O stay, K and V pass by, P is written over S
    q_rows, kv_rows = resident_tiles(fast_elements, dim, resident=2, passing=2, scores=1)
    S, T = q_SD.shape[0], k_TD.shape[0]
    mask = _Mask(T - S, options.causal)
    out, lse = q_SD.new_zeros(S, v_TV.shape[1]), q_SD.new_full((S,), NEG_INF)
    for rows in _spans(S, q_rows):
        q = traffic.load(q_SD[rows])
        o, total = q.new_zeros(q.shape[0], v_TV.shape[1]), q.new_zeros(q.shape[0])
        m = q.new_full((q.shape[0],), NEG_INF)
        for keys in _spans(T, kv_rows):
            if mask.skips(rows, keys):
                break
            k, v = traffic.load(k_TD[keys]), traffic.load(v_TV[keys])
            score = mask.apply(q @ k.T * options.softmax_scale, rows, keys)
            new_m = torch.maximum(m, score.amax(1))
            p, decay = _exp(score, new_m), _exp(m[:, None], new_m)[:, 0]
            total = decay * total + p.sum(1)
            o = decay[:, None] * o + p @ v  # not divided: the rescale is deferred
            m = new_m
        traffic.store(out[rows], o / total.masked_fill(total == 0, 1.0)[:, None])
        traffic.store(lse[rows], m + torch.log(total))
    return out, lse


@dataclass(frozen=True, slots=True)
class Saved:
    """What forward leaves for backward, of one head: O, LSE; and the gradients given."""

    out_SV: torch.Tensor
    lse_S: torch.Tensor
    dout_SV: torch.Tensor
    dlse_S: torch.Tensor


def flash_2_backward(
    q_SD: torch.Tensor,
    k_TD: torch.Tensor,
    v_TV: torch.Tensor,
    saved: Saved,
    options: AttentionOptions,
    fast_elements: int,
    traffic: Traffic,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashAttention-2's backward of one head -> (dq_SD, dk_TD, dv_TV)."""
    dim = max(q_SD.shape[1], v_TV.shape[1])
    # K, V, dK and dV stay, Q, dO and dQ pass by; P and dS
    kv_rows, q_rows = resident_tiles(fast_elements, dim, resident=4, passing=3, scores=2)
    S, T, scale = q_SD.shape[0], k_TD.shape[0], options.softmax_scale
    mask = _Mask(T - S, options.causal)
    dq, dk, dv = (torch.zeros_like(x) for x in (q_SD, k_TD, v_TV))
    delta = torch.zeros_like(saved.lse_S)
    for rows in _spans(S, q_rows):  # the preprocess: rowsum(dO O) - dLSE
        o, do = traffic.load(saved.out_SV[rows]), traffic.load(saved.dout_SV[rows])
        traffic.store(delta[rows], (o * do).sum(1) - traffic.load(saved.dlse_S[rows]))
    for keys in _spans(T, kv_rows):
        k, v = traffic.load(k_TD[keys]), traffic.load(v_TV[keys])
        dk_tile, dv_tile = torch.zeros_like(k), torch.zeros_like(v)
        for rows in _spans(S, q_rows):
            if mask.skips(rows, keys):
                continue
            q, do = traffic.load(q_SD[rows]), traffic.load(saved.dout_SV[rows])
            lse, d = traffic.load(saved.lse_S[rows]), traffic.load(delta[rows])
            p = _exp(mask.apply(q @ k.T * scale, rows, keys), lse)
            dv_tile += p.T @ do
            ds = p * (do @ v.T - d[:, None]) * scale
            dk_tile += ds.T @ q
            traffic.store(dq[rows], traffic.load(dq[rows]) + ds @ k)
        traffic.store(dk[keys], dk_tile)
        traffic.store(dv[keys], dv_tile)
    return dq, dk, dv


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    extras: AttentionExtras,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-2 head by head, as an implementation of the op (dense, causal or not)."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, S, H, _ = q.shape
    out = q.new_empty((B, S, H, v.shape[-1]))
    lse = q.new_empty((B, H, S), dtype=dtype)
    for b, h, g in _heads(q, k):
        out[b, :, h], lse[b, h] = flash_2(
            q[b, :, h].to(dtype),
            k[b, :, g].to(dtype),
            v[b, :, g].to(dtype),
            options,
            FAST_MEMORY_ELEMENTS,
            Traffic(),
        )
    return out, lse


def _heads(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    ratio = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            yield b, h, h // ratio


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
    """FlashAttention-2's backward head by head."""
    dtype = lse_ln.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dlse = torch.zeros_like(lse_ln) if dlse is None else dlse
    for b, h, g in _heads(q, k):
        saved = Saved(out[b, :, h].to(dtype), lse_ln[b, h], dout[b, :, h].to(dtype), dlse[b, h])
        grads = flash_2_backward(
            q[b, :, h].to(dtype),
            k[b, :, g].to(dtype),
            v[b, :, g].to(dtype),
            saved,
            options,
            FAST_MEMORY_ELEMENTS,
            Traffic(),
        )
        dq[b, :, h], dk[b, :, g], dv[b, :, g] = (
            grads[0],
            dk[b, :, g] + grads[1],
            dv[b, :, g] + grads[2],
        )
    return AttentionGrads(dq=dq.to(q.dtype), dk=dk.to(k.dtype), dv=dv.to(v.dtype))
