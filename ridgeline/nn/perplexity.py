"""Perplexity of a model on a text, and how far two models' predictions lie apart.

    nll = -1/n sum ln p(token | the tokens before it in its window),  ppl = exp(nll)

Protocol: the joined text's tokens are cut into non-overlapping windows of `window` tokens; each
window is scored alone, so window - 1 tokens of it count; a rest shorter than a window is left out.
The logits of a window are made and used in slices, at most SLICE_TOKENS * V floats at a time.
KL is the mean of sum_v p ln(p / q) over positions, p of the base and q of the other model, in nats;
agreement is how often their first choices are equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core import progress
from ridgeline.core.errors import bad_value
from ridgeline.nn.decoder import Decoder

SLICE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """A measured perplexity with its protocol."""

    nll: float
    """Mean negative log-likelihood, nats a token."""
    tokens: int
    """Scored tokens: windows * (window - 1)."""
    windows: int
    window: int
    """Tokens of a window."""
    seconds: float

    @property
    def ppl(self) -> float:
        """exp(nll)."""
        return math.exp(self.nll)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Distance of a model's predictions from a base model's."""

    kl: float
    """Mean KL(base || other), nats."""
    top1_agreement: float
    """Share of positions with the same most likely token, 0 .. 1."""
    tokens: int


def windows_of(
    token_ids: Sequence[int] | torch.Tensor, window: int, max_windows: int | None = None
) -> torch.Tensor:
    """Non-overlapping windows of joined tokens: int64 [windows, window], a shorter rest left out.

    Raises: ValueError for a window below 2 or a text shorter than a window.
    """
    if window < 2:
        raise bad_value("perplexity", "window", "be at least 2 tokens", window, "widen it")
    ids = torch.as_tensor(token_ids, dtype=torch.int64).flatten()
    count = len(ids) // window
    if max_windows is not None:
        count = min(count, max_windows)
    if count < 1:
        raise bad_value(
            "perplexity",
            "text",
            f"have at least one window of {window} tokens",
            f"{len(ids)} tokens",
            "give more text or a smaller window",
        )
    return ids[: count * window].view(count, window)


@torch.inference_mode()
def perplexity(
    model: Decoder,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    window: int = 1024,
    max_windows: int | None = None,
    label: str = "perplexity",
) -> Perplexity:
    """Perplexity of `model` on joined tokens, in windows as the module says.

    Raises: ValueError for a text shorter than a window or a window beyond the model's context.
    """
    rows = windows_of(token_ids, window, max_windows)
    device = _device(model)
    start = time.perf_counter()
    total = 0.0
    with progress.task(label, len(rows), "windows") as advance:
        for done, row in enumerate(rows, start=1):
            total += _window_nll(model, row.to(device))
            mean = total / (done * (window - 1))
            advance(1, note=f"ppl {math.exp(mean):.3f}")
    tokens = rows.numel() - len(rows)
    return Perplexity(
        nll=total / tokens,
        tokens=tokens,
        windows=len(rows),
        window=window,
        seconds=time.perf_counter() - start,
    )


@torch.inference_mode()
def compare(
    base: Decoder,
    other: Decoder,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    window: int = 1024,
    max_windows: int | None = None,
) -> Comparison:
    """KL divergence and top-1 agreement of `other` with `base` on the scored positions.

    Raises: ValueError as `perplexity`.
    """
    rows = windows_of(token_ids, window, max_windows)
    kl, agree = 0.0, 0
    with progress.task("compare", len(rows), "windows") as advance:
        for row in rows:
            x = base.hidden(row[None].to(_device(base)))
            y = other.hidden(row[None].to(_device(other)))
            for start, end in _slices(window - 1):
                p = base.head(x[:, start:end]).float().log_softmax(-1).cpu()
                q = other.head(y[:, start:end]).float().log_softmax(-1).cpu()
                kl += float((p.exp() * (p - q)).sum())
                agree += int((p.argmax(-1) == q.argmax(-1)).sum())
            advance(1)
    tokens = rows.numel() - len(rows)
    return Comparison(kl=kl / tokens, top1_agreement=agree / tokens, tokens=tokens)


def _window_nll(model: Decoder, row: torch.Tensor) -> float:
    """Sum of -ln p over a window's tokens but the first."""
    x = model.hidden(row[None])
    total = 0.0
    for start, end in _slices(len(row) - 1):
        logits = model.head(x[:, start:end]).float()
        target = row[None, start + 1 : end + 1]
        chosen = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        total += float((logits.logsumexp(-1) - chosen).double().sum())
    return total


def _slices(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, SLICE_TOKENS):
        yield start, min(start + SLICE_TOKENS, length)


def _device(model: Decoder) -> torch.device:
    return next(model.parameters()).device
