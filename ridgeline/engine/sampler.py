"""The next tokens from logits, for all rows of a step at once.

    logits -> + bias -> penalties -> forbidden tokens -> the draw (draw.py)

A row's draw is a function of (seed, choice, position) and its scores alone, so a request's tokens
do not depend on what else is in the batch, on preemption or on speculation. Rows that need nothing
of this cost an argmax. Everything is computed in fp32; log-probabilities are of the raw logits.
Source: repetition penalty, Keskar et al. 2019 (1909.05858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.engine.draw import Draws, draw, is_within
from ridgeline.engine.outputs import TokenLogprob
from ridgeline.engine.params import SamplingParams


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
    def is_blind(self) -> bool:
        """Whether a token is drawn by numbers that are known before the logits are, and nothing
        else is asked for: the step may be one that nobody waits for."""
        p = self.params
        known = p.greedy or not p.narrows or is_within(p)
        return known and not self.touches and p.logprobs is None

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


def draws_of(states: Sequence[SamplingState], positions: Sequence[int]) -> Draws:
    """What rows are drawn by. positions: of each one's token in its output."""
    counters = [(s.seed, s.choice, at) for s, at in zip(states, positions, strict=True)]
    return Draws.of([s.params for s in states], counters, [s.touches for s in states])


def _draw(scores_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    draws = draws_of([row.state for row in rows], [len(row.output_ids) for row in rows])
    device = scores_RV.device
    numbers, order = (torch.from_numpy(x).to(device) for x in (draws.numbers_R5, draws.order_R))
    return draw(scores_RV, draws, numbers, order)


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
