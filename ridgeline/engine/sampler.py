"""The next tokens from logits, for all rows of a step at once.

    logits -> + bias -> penalties -> forbidden tokens -> / temperature -> top-k -> min-p, top-p
    -> the token at u of the cumulated probabilities (likeliest first; of untouched logits that no
       rule narrows by token id, and nothing is sorted)

u is a number in [0, 1) that is a function of (seed, choice, position) alone, so a request's tokens
do not depend on what else is in the batch, on preemption or on speculation. Rows that need nothing
of this cost an argmax. Everything is computed in fp32; log-probabilities are of the raw logits.
Sources: top-p, Holtzman et al. 2019 (arXiv 1904.09751); min-p, Nguyen et al. 2024 (2407.01082);
repetition penalty, Keskar et al. 2019 (1909.05858); SplitMix64, Steele et al. 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.engine.outputs import TokenLogprob
from ridgeline.engine.params import SamplingParams

NUM_CANDIDATES = 512
"""Tokens looked at first; the whole vocabulary is sorted only where top-p reaches beyond them."""
_U64 = 2**64 - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) from a counter: SplitMix64 over (seed, choice, position)."""
    state = (seed + choice * 0xD1342543DE82EF95) & _U64
    for step in (position, 0x632BE59BD9B4E019):
        state = (state + 0x9E3779B97F4A7C15 * (step + 1)) & _U64
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _U64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _U64
        state = mixed ^ (mixed >> 31)
    return (state >> 40) / 2**24  # 24 bits: exact in fp32, below 1


@dataclass(slots=True, kw_only=True)
class SamplingState:
    """What sampling keeps of one choice between steps."""

    params: SamplingParams
    seed: int
    choice: int
    prompt_ids: Sequence[int]
    stop_ids: tuple[int, ...]
    """Tokens that may not come before min_tokens."""
    mask: Any = None
    """A TokenMask, or None."""
    counts_V: torch.Tensor | None = None
    """fp32, times each token was generated; with penalties."""
    seen_V: torch.Tensor | None = None
    """bool, tokens of prompt and output; with a repetition penalty."""
    num_counted: int = 0

    @property
    def touches(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        p = self.params
        return bool(p.logit_bias or p.has_penalties or p.min_tokens or self.mask is not None)

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is taken of untouched logits."""
        return self.params.greedy and not self.touches

    @property
    def stateless(self) -> bool:
        """Whether a row depends on earlier tokens through the logits alone (so drafts may be
        checked in one step)."""
        return not self.params.has_penalties and self.mask is None


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits to sample from."""

    state: SamplingState
    output_ids: Sequence[int]
    """Generated before this row's token (drafted ones included)."""

    @property
    def takes_likeliest(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        return self.state.plain and self.state.params.logprobs is None


@dataclass(slots=True)
class Sampled:
    """The tokens of a step's rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    """Row -> why its mask failed; its token means nothing."""


def sample(logits_RV: torch.Tensor, rows: Sequence[Row]) -> Sampled:
    """Choose a token for every row."""
    if all(row.state.plain for row in rows):
        chosen_R = logits_RV.argmax(-1)
        errors: dict[int, str] = {}
    else:
        scores_RV = logits_RV.float()
        touched = any(row.state.touches for row in rows)
        if touched and scores_RV is logits_RV:
            scores_RV = logits_RV.clone()
        errors = _touch(scores_RV, rows) if touched else {}
        chosen_R = _draw(scores_RV, rows)
    told = _logprobs(logits_RV, chosen_R, rows)
    return Sampled(chosen_R.tolist(), told, errors)


# ---- changes of the scores ---------------------------------------------------------------------


def _touch(scores_RV: torch.Tensor, rows: Sequence[Row]) -> dict[int, str]:
    """Bias, penalties and forbidden tokens, in place."""
    _bias(scores_RV, rows)
    errors: dict[int, str] = {}
    for index, row in enumerate(rows):
        params = row.state.params
        if params.has_penalties:
            _penalize(scores_RV[index], row)
        if params.min_tokens > len(row.output_ids) and row.state.stop_ids:
            scores_RV[index, list(row.state.stop_ids)] = -torch.inf
        if row.state.mask is not None:
            try:
                _forbid(scores_RV[index], row.state.mask)
            except Exception as error:  # of the caller's grammar: it ends this request alone
                errors[index] = f"{type(error).__name__}: {error}"
    return errors


def _bias(scores_RV: torch.Tensor, rows: Sequence[Row]) -> None:
    biased = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.state.params.logit_bias.items()
    ]
    if not biased:
        return
    where = torch.tensor([b[:2] for b in biased], device=scores_RV.device)
    bias = torch.tensor([b[2] for b in biased], dtype=torch.float32, device=scores_RV.device)
    scores_RV.index_put_((where[:, 0], where[:, 1]), bias, accumulate=True)


def _penalize(scores_V: torch.Tensor, row: Row) -> None:
    state, params = row.state, row.state.params
    counts_V, seen_V = _counts(state, row.output_ids, scores_V)
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        turned = torch.where(scores_V > 0, scores_V / factor, scores_V * factor)
        scores_V.copy_(torch.where(seen_V, turned, scores_V))
    scores_V -= params.frequency_penalty * counts_V
    scores_V -= params.presence_penalty * (counts_V > 0)


def _counts(
    state: SamplingState, output_ids: Sequence[int], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of generated tokens, brought up to date by the new ones."""
    if state.counts_V is None or state.seen_V is None:
        state.counts_V = torch.zeros_like(like)
        state.seen_V = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
        state.seen_V[list(state.prompt_ids)] = True
    new = list(output_ids[state.num_counted :])
    if new:
        index = torch.tensor(new, device=like.device)
        state.counts_V.index_add_(0, index, torch.ones(len(new), device=like.device))
        state.seen_V[index] = True
        state.num_counted = len(output_ids)
    return state.counts_V, state.seen_V


def _forbid(scores_V: torch.Tensor, mask: Any) -> None:
    words = torch.full((-(-scores_V.shape[0] // 32),), -1, dtype=torch.int32)
    if not mask.allowed(words):
        return
    bits = torch.arange(32, dtype=torch.int32)
    allowed = (words[:, None] >> bits & 1).flatten()[: scores_V.shape[0]].bool()
    if not bool(allowed.any()):
        raise ValueError("the grammar allows no token")
    scores_V.masked_fill_(~allowed.to(scores_V.device), -torch.inf)


# ---- the draw ----------------------------------------------------------------------------------


def _draw(scores_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    params = [row.state.params for row in rows]
    drawing: dict[bool, list[int]] = {False: [], True: []}
    for index, (row, p) in enumerate(zip(rows, params, strict=True)):
        if not p.greedy:  # of sums by token id rounding may find a token that is forbidden
            drawing[p.narrows or row.state.touches].append(index)
    drawn = len(drawing[False]) + len(drawing[True])
    device = scores_RV.device
    # Of rows that all draw there is no likeliest token to look for.
    if drawn < len(rows):
        chosen_R = scores_RV.argmax(-1)
    else:
        chosen_R = torch.empty(len(rows), dtype=torch.int64, device=device)

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    for narrows, places in drawing.items():
        if not places:
            continue
        every = len(places) == len(rows)
        index_R = torch.tensor(places, device=device)
        some = [params[i] for i in places]
        draws = column(
            [
                uniform(rows[i].state.seed, rows[i].state.choice, len(rows[i].output_ids))
                for i in places
            ]
        )
        scaled = (scores_RV if every else scores_RV[index_R]) / column(
            [p.temperature for p in some]
        )
        chosen_R[index_R] = (
            _nucleus(scaled, some, draws, column) if narrows else _any(scaled, draws)
        )
    return chosen_R


def _any(scaled_RV: torch.Tensor, draw_R1: torch.Tensor) -> torch.Tensor:
    """Tokens drawn from the whole distribution, in the order of their ids."""
    cumulated = scaled_RV.softmax(-1).cumsum(-1)
    total_R1 = cumulated[:, -1:]
    place = torch.searchsorted(cumulated, draw_R1 * total_R1, right=True)
    # Where rounding takes a draw to the end: the first token that has all of the sum before it.
    last = torch.searchsorted(cumulated, total_R1.contiguous())
    return torch.minimum(place, last)[:, 0]


def _nucleus(
    scaled_RV: torch.Tensor,
    params: Sequence[SamplingParams],
    draw_R1: torch.Tensor,
    column: Callable[[Sequence[float]], torch.Tensor],
) -> torch.Tensor:
    """Tokens drawn from what top-k, min-p and top-p leave, likeliest first."""
    V = scaled_RV.shape[-1]
    log_total_R1 = scaled_RV.logsumexp(-1, keepdim=True)
    top_k = [min(p.top_k or V, V) for p in params]
    top_p_R1 = column([p.top_p for p in params])
    min_p_R1 = column([p.min_p for p in params])
    limit_R1 = column(top_k)
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
        if count == V or not _reaches_beyond(kept, probs, top_k, params, count):
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
    kept: torch.Tensor,
    probs: torch.Tensor,
    top_k: Sequence[int],
    params: Sequence[SamplingParams],
    count: int,
) -> bool:
    """Whether some row could draw a token beyond the first `count`."""
    mass = kept.sum(-1).tolist()
    ratio = (probs[:, -1] / probs[:, 0]).tolist()
    for row, p in enumerate(params):
        closed = top_k[row] <= count or p.min_p > ratio[row] or mass[row] >= p.top_p
        if not closed or (p.top_p >= 1.0 and top_k[row] > count and p.min_p <= ratio[row]):
            return True
    return False


# ---- log-probabilities -------------------------------------------------------------------------


def _logprobs(
    logits_RV: torch.Tensor, chosen_R: torch.Tensor, rows: Sequence[Row]
) -> list[TokenLogprob | None]:
    told: list[TokenLogprob | None] = [None] * len(rows)
    asked = [i for i, row in enumerate(rows) if row.state.params.logprobs is not None]
    if not asked:
        return told
    index = torch.tensor(asked, device=logits_RV.device)
    wide_RV = logits_RV[index].float()
    # Not log_softmax: on a CPU its sum over a vocabulary is off by 1e-5 (docs/log/engine.md).
    logprobs_RV = wide_RV - wide_RV.logsumexp(-1, keepdim=True)
    chosen = chosen_R[index]
    own = logprobs_RV.gather(-1, chosen[:, None])[:, 0].tolist()
    most = max(rows[i].state.params.logprobs or 0 for i in asked)
    top = logprobs_RV.topk(most) if most else None
    values = [[]] * len(asked) if top is None else top.values.tolist()
    ids = [[]] * len(asked) if top is None else top.indices.tolist()
    for place, (row, token_id) in enumerate(zip(asked, chosen.tolist(), strict=True)):
        k = rows[row].state.params.logprobs or 0
        pairs = tuple(zip(ids[place][:k], values[place][:k], strict=True))
        told[row] = TokenLogprob(token_id, own[place], pairs)
    return told
