"""The numbers of a decode step, a row a sequence, kept up to date in one pinned buffer.

    row: token, position, slot, keys, tokens a step (0 in a row of padding), .., pages

What every row needs is computed for all rows at once; a row's pages are written only where they are
not those of the step before, or where a page came on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ridgeline.engine.paged import PagedKV, Span

FRONT = 8
"""Numbers before a row's pages, so that these start at a multiple of 32 bytes."""


class StepNumbers:
    """A host buffer of int32 [rows, FRONT + pages a sequence]."""

    def __init__(self, rows: int, width: int, cache: PagedKV, *, pinned: bool) -> None:
        self.host = torch.zeros(rows, FRONT + width, dtype=torch.int32, pin_memory=pinned)
        self.numpy = self.host.numpy()
        self.cache = cache
        self.rows = np.arange(rows)
        self.pages: list[list[int] | None] = [None] * rows
        """Whose pages a row holds: the sequence's own list, to which pages are only added."""
        self.counts = [0] * rows
        """How many of them the row holds."""
        self.pages_written = 0
        """Rows whose pages were written, of all steps."""

    def fill(self, spans: Sequence[Span], token_ids: Sequence[int], size: int) -> None:
        """Make the first `size` rows those of a step of single tokens, padded."""
        host, page, count = self.numpy, self.cache.page_tokens, len(spans)
        kept, counts = self.pages, self.counts
        for row, span in enumerate(spans):
            pages = span.pages
            if kept[row] is not pages or counts[row] > len(pages):
                kept[row], counts[row] = pages, 0
            if counts[row] < len(pages):
                first = counts[row]
                host[row, FRONT + first : FRONT + len(pages)] = pages[first:]
                counts[row] = len(pages)
                self.pages_written += 1
        keys = np.fromiter((span.num_keys for span in spans), np.int64, count)
        position = keys - 1
        own = host[self.rows[:count], FRONT + position // page].astype(np.int64)
        host[:count, 0] = token_ids
        host[:count, 1] = position
        host[:count, 2] = own * page + position % page
        host[:count, 3] = keys
        host[:count, 4] = 1
        if size > count:
            host[count:size, :5] = (0, 0, self.cache.num_pages * page, 1, 0)
            host[count:size, FRONT] = self.cache.num_pages
            kept[count:size] = [None] * (size - count)
