"""The pages of the KV cache: who holds which, and which known prefix lies where.

A page holds the keys and values of `page_tokens` consecutive tokens. Full pages are named by a
SHA-256 chain over everything before them, started from the salt, so two sequences share a page only
where all earlier tokens agree and the salt does:

    digest_0 = SHA-256(salt),  digest_{i+1} = SHA-256(digest_i, tokens of page i)

A hit also compares the tokens themselves. A page nobody holds stays in the cache until it is needed
for something else, least recently used first. Plain Python, no torch; O(1) a page.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cached:
    """What a page is known to hold."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def root_digest(salt: str) -> bytes:
    """Start of a chain."""
    return hashlib.sha256(b"ridgeline prefix cache\0" + salt.encode()).digest()


def next_digest(parent: bytes, token_ids: Tokens[int]) -> bytes:
    """Name of a page of these tokens after `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class BlockPool:
    """A fixed number of pages, counted references, and the prefix cache over them."""

    def __init__(
        self, num_pages: int, page_tokens: int, *, prefix_cache: bool = True, runs: bool = False
    ) -> None:
        """runs: give a sequence neighbouring pages where possible (a CPU then reads them in
        place)."""
        assert num_pages >= 1 and page_tokens >= 1
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.prefix_cache, self.runs = prefix_cache, runs
        self.references = [0] * num_pages
        self._cached: list[Cached | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._blank = bytearray(b"\1" * num_pages)
        """1 where a page is free and holds nothing known."""
        self._promised = bytearray(num_pages)
        """1 where a page lies in the run that a sequence may still come to (with `runs`)."""
        self._room = bytearray(b"\1" * num_pages)
        """1 where a page is blank and not promised."""
        self._promises: dict[int, range] = {}
        """First page of a run -> the run."""

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, known ones among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_tokens)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        """Take pages, forgetting what they held.

        after: the sequence's last page; expected: pages it may come to (with `runs`).
        """
        assert count <= len(self._free), "more pages than are free"
        if count and self.runs and after is None:
            after = self._start_run(count, max(expected, count))
        taken: list[int] = []
        for _ in range(count):
            neighbour = None if after is None or not self.runs else after + 1
            page = neighbour if neighbour in self._free else self._oldest()
            assert page is not None
            self._take(page)
            self._forget(page)
            taken.append(page)
            after = page
        return taken

    def share(self, pages: list[int]) -> None:
        """Hold known pages once more."""
        for page in pages:
            if self.references[page]:
                self.references[page] += 1
            else:
                self._take(page)

    def release(self, pages: list[int]) -> None:
        """Let go of pages; those nobody holds can be taken, the last of a sequence first."""
        for page in reversed(pages):
            assert self.references[page] > 0, f"page {page} released twice"
            self.references[page] -= 1
            if not self.references[page]:
                self._free[page] = None
                if self._cached[page] is None:
                    self._free.move_to_end(page, last=False)  # nothing is lost with it
                    self._set_blank(page, 1)
                if page in self._promises:
                    self._promise(self._promises.pop(page), 0)

    def free_of(self, pages: list[int]) -> int:
        """How many of these pages nobody holds: sharing them takes them off the free ones."""
        return sum(not self.references[page] for page in pages)

    # ---- prefix cache ------------------------------------------------------------------------

    def match(
        self, token_ids: Tokens[int], salt: str, max_pages: int
    ) -> tuple[list[int], list[bytes]]:
        """The longest run of known pages that these tokens start with, at most max_pages, with
        their digests; nothing is held yet."""
        pages: list[int] = []
        digests: list[bytes] = []
        if not self.prefix_cache:
            return pages, digests
        parent = root_digest(salt)
        for number in range(min(max_pages, len(token_ids) // self.page_tokens)):
            tokens = tuple(token_ids[number * self.page_tokens : (number + 1) * self.page_tokens])
            digest = next_digest(parent, tokens)
            page = self._page_of.get(digest)
            if page is None:
                break
            known = self._cached[page]
            if known is None or known.token_ids != tokens or known.parent != parent:
                break
            pages.append(page)
            digests.append(digest)
            parent = digest
        return pages, digests

    def remember(self, page: int, parent: bytes, token_ids: Tokens[int]) -> bytes:
        """A held page is full and computed; the first page of a name is the one that is found."""
        tokens = tuple(token_ids)
        digest = next_digest(parent, tokens)
        if self.prefix_cache and digest not in self._page_of and self._cached[page] is None:
            self._cached[page] = Cached(digest, parent, tokens)
            self._page_of[digest] = page
        return digest

    def forget_all(self) -> None:
        """Empty the prefix cache: the weights changed."""
        self._page_of.clear()
        self._cached = [None] * self.num_pages
        for page in self._free:
            self._set_blank(page, 1)

    def check(self, holders: list[list[int]]) -> None:
        """Whether the counts agree with who holds pages. For tests."""
        counts = [0] * self.num_pages
        for pages in holders:
            assert len(set(pages)) == len(pages), "a sequence holds a page twice"
            for page in pages:
                counts[page] += 1
        assert counts == self.references, "references differ from holders"
        free = {page for page, count in enumerate(counts) if not count}
        assert free == set(self._free), "free pages differ from pages without holder"
        for digest, page in self._page_of.items():
            known = self._cached[page]
            assert known is not None and known.digest == digest, "prefix cache points astray"
        for page in range(self.num_pages):
            blank = page in free and self._cached[page] is None
            assert self._blank[page] == blank, "blank pages differ"
            room = blank and not self._promised[page]
            assert self._room[page] == room, "room for runs differs"
        promised = {page for run in self._promises.values() for page in run}
        assert promised == {p for p in range(self.num_pages) if self._promised[p]}

    def _start_run(self, count: int, expected: int) -> int | None:
        """The page before a run of `expected` free ones, which is promised; else of `count`."""
        start = self._room.find(b"\1" * expected)
        if start >= 0:
            self._promises[start] = range(start, start + expected)
            self._promise(self._promises[start], 1)
            return start - 1
        start = self._room.find(b"\1" * count)
        return start - 1 if start >= 0 else None

    def _promise(self, run: range, value: int) -> None:
        for page in run:
            self._promised[page] = value
            self._set_blank(page, self._blank[page])

    def _set_blank(self, page: int, value: int) -> None:
        self._blank[page] = value
        self._room[page] = value and not self._promised[page]

    def _oldest(self) -> int:
        return next(iter(self._free))

    def _take(self, page: int) -> None:
        del self._free[page]
        self._set_blank(page, 0)
        self.references[page] = 1

    def _forget(self, page: int) -> None:
        known = self._cached[page]
        if known is not None:
            self._cached[page] = None
            del self._page_of[known.digest]
