"""The draw: each row's token from its scores, by numbers that are known before the scores are.

    scores / temperature -> top-k -> min-p, top-p -> the token at u of the cumulated probabilities
    (likeliest first; of untouched scores that no rule narrows by token id, and nothing is sorted)

u is a number in [0, 1) that is a function of (seed, choice, position) alone. So a step whose scores
are still being computed can be drawn from as well (flight.py): on a GPU nothing here waits for the
device, but where a row's top-p may reach beyond the candidates.
Sources: top-p, Holtzman et al. 2019 (arXiv 1904.09751); min-p, Nguyen et al. 2024 (2407.01082);
SplitMix64, Steele et al. 2014.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.engine.params import SamplingParams

NUM_CANDIDATES = 512
"""Tokens looked at first; the whole vocabulary is sorted only where top-p reaches beyond them."""
COLUMNS = 5
"""Of a row's numbers: u, temperature, top-p, min-p, top-k."""
ALL = 2.0**24
"""top-k where there is none: more than any vocabulary, exact in fp32."""
_U64 = 2**64 - 1
_CHOICE, _STEP, _LAST = 0xD1342543DE82EF95, 0x9E3779B97F4A7C15, 0x632BE59BD9B4E019
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Numbers in [0, 1) from counters: SplitMix64 over (seed, choice, position), row by row."""
    with np.errstate(over="ignore"):  # modulo 2^64
        state = np.array(seeds, np.uint64) + np.array(choices, np.uint64) * np.uint64(_CHOICE)
        for step in (np.array(positions, np.uint64), np.uint64(_LAST)):
            state = state + np.uint64(_STEP) * (step + np.uint64(1))
            mixed = (state ^ (state >> np.uint64(30))) * np.uint64(_MIX_1)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
            state = mixed ^ (mixed >> np.uint64(31))
    return (state >> np.uint64(40)).astype(np.float32) / np.float32(2**24)  # 24 bits: exact


@dataclass(frozen=True, slots=True)
class Draws:
    """What a step's rows are drawn by."""

    numbers_R5: np.ndarray
    """fp32."""
    order_R: np.ndarray
    """int64: rows that take the likeliest token, those drawn from all tokens, those narrowed."""
    ends: tuple[int, int]
    """Where the second and the third kind begin in `order_R`."""
    closed: bool
    """No narrowed row can reach beyond the candidates."""

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        counters: Sequence[tuple[int, int, int]],
        touched: Sequence[bool] | None = None,
    ) -> Draws:
        """counters: seed, choice and position of each row. touched: rows whose scores were changed:
        they are narrowed, as of sums by token id rounding may find a token that is forbidden."""
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row, p in enumerate(params):
            narrowed = p.narrows or (touched is not None and touched[row])
            kinds[0 if p.greedy else 2 if narrowed else 1].append(row)
        numbers_R5 = np.array(
            [(0.0, p.temperature or 1.0, p.top_p, p.min_p, p.top_k or ALL) for p in params],
            np.float32,
        ).reshape(-1, COLUMNS)
        numbers_R5[:, 0] = uniform(*zip(*counters, strict=True)) if counters else 0.0
        order_R = np.array(kinds[0] + kinds[1] + kinds[2], np.int64)
        first, second = len(kinds[0]), len(kinds[0]) + len(kinds[1])
        closed = all(is_within(params[row]) for row in kinds[2])
        return Draws(numbers_R5, order_R, (first, second), closed)


def is_within(params: SamplingParams) -> bool:
    """Whether top-k alone keeps a row within the candidates."""
    return params.top_k is not None and params.top_k <= NUM_CANDIDATES


def draw(
    scores_RV: torch.Tensor, draws: Draws, numbers_R5: torch.Tensor, order_R: torch.Tensor
) -> torch.Tensor:
    """Tokens, int64 [R]; the last two are those of `draws`, on the scores' device."""
    rows, (first, second) = len(draws.order_R), draws.ends
    # Of rows that all draw there is no likeliest token to look for.
    if first:
        chosen_R = scores_RV.argmax(-1)
    else:
        chosen_R = torch.empty(rows, dtype=torch.int64, device=scores_RV.device)
    for begin, end in ((first, second), (second, rows)):
        if begin == end:
            continue
        every = end - begin == rows
        index = order_R[begin:end]
        numbers = numbers_R5 if every else numbers_R5[index]
        scaled = (scores_RV if every else scores_RV[index]) / numbers[:, 1:2]
        if begin == second:
            found = _nucleus(scaled, numbers, draws.closed)
        else:
            found = _any(scaled, numbers[:, :1].contiguous())
        chosen_R[index] = found
    return chosen_R


def _any(scaled_RV: torch.Tensor, draw_R1: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from the whole distribution, in the order of their ids."""
    cumulated = scaled_RV.softmax(-1).cumsum(-1)
    total_R1 = cumulated[:, -1:]
    place = torch.searchsorted(cumulated, draw_R1 * total_R1, right=True)
    # Where rounding takes a draw to the end: the first token that has all of the sum before it.
    last = torch.searchsorted(cumulated, total_R1.contiguous())
    return torch.minimum(place, last)[:, 0]


def _nucleus(scaled_RV: torch.Tensor, numbers_R5: torch.Tensor, closed: bool) -> torch.Tensor:
    """Tokens drawn from what top-k, min-p and top-p leave, likeliest first."""
    V = scaled_RV.shape[-1]
    log_total_R1 = scaled_RV.logsumexp(-1, keepdim=True)
    draw_R1, _, top_p_R1, min_p_R1, limit_R1 = numbers_R5.split(1, dim=-1)
    limit_R1 = limit_R1.clamp(max=V)
    count = min(V, NUM_CANDIDATES)
    while True:
        values, index = _likeliest(scaled_RV, count)
        probs = (values - log_total_R1).exp()
        rank = torch.arange(count, device=scaled_RV.device)
        kept = probs.masked_fill(rank >= limit_R1, 0.0)
        mass_R1 = torch.where(limit_R1 < V, kept.sum(-1, keepdim=True), 1.0)
        # top-p is of the probabilities after top-k
        before = kept.cumsum(-1) - kept
        inside = (before < top_p_R1 * mass_R1) & (kept > 0)
        inside &= probs >= min_p_R1 * probs[:, :1]
        inside[:, 0] = True  # the likeliest always stays
        if closed or count == V or not _reaches_beyond(kept, probs, numbers_R5, count):
            break
        count = V
    kept = kept.masked_fill(~inside, 0.0)
    cumulated = kept.cumsum(-1)
    target = draw_R1 * cumulated[:, -1:]
    place = (cumulated <= target).sum(-1, keepdim=True)
    last = inside.long().mul(rank + 1).amax(-1, keepdim=True) - 1
    return index.gather(-1, torch.minimum(place, last))[:, 0]


def _likeliest(scaled_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The count largest, in descending order; equal ones by token id, so that the order is one."""
    if count == scaled_RV.shape[-1]:
        found = scaled_RV.sort(dim=-1, descending=True, stable=True)
        return found.values, found.indices
    index = scaled_RV.topk(count, dim=-1).indices.sort(dim=-1).values
    found = scaled_RV.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    return found.values, index.gather(-1, found.indices)


def _reaches_beyond(
    kept: torch.Tensor, probs: torch.Tensor, numbers_R5: torch.Tensor, count: int
) -> bool:
    """Whether some row could draw a token beyond the first `count`."""
    top_p, min_p, top_k = numbers_R5[:, 2], numbers_R5[:, 3], numbers_R5[:, 4]
    far = (top_k > count) & (min_p <= probs[:, -1] / probs[:, 0])
    return bool((far & ((kept.sum(-1) < top_p) | (top_p >= 1.0))).any())
