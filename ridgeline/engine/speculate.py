"""Drafts by prompt lookup: what followed the last few tokens where they stood before.

No second model: text that repeats (code, quotations, summaries) drafts well, other text drafts
little and costs a wider step. Whether a draft is right is decided by sampling itself, so outputs
are those without drafts. Plain Python, no torch.
Source: Saxena, "Prompt lookup decoding", 2023, https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

MAX_NGRAM = 3
MIN_NGRAM = 2


@dataclass(slots=True)
class Lookup:
    """Where each n-gram of a growing text was seen last."""

    _places: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram -> index after its latest occurrence but for the text's very end."""
    _indexed: int = 0

    def propose(self, token_ids: Tokens[int], most: int) -> list[int]:
        """At most `most` tokens that may come next."""
        end = len(token_ids)
        for stop in range(max(self._indexed, MIN_NGRAM), end):  # n-grams that end before `end`
            for size in range(MIN_NGRAM, min(MAX_NGRAM, stop) + 1):
                self._places[tuple(token_ids[stop - size : stop])] = stop
        self._indexed = max(self._indexed, end)
        for size in range(min(MAX_NGRAM, end - 1), MIN_NGRAM - 1, -1):
            place = self._places.get(tuple(token_ids[end - size :]))
            if place is not None and place < end:
                return list(token_ids[place : place + most])
        return []
