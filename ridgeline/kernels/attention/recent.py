"""What was used last, by key: a bounded table whose hit costs one look into a dictionary."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """The values used since the last `most` new keys, and at most twice as many of older ones.

    Two dictionaries: a full young one becomes the old one, and what is found in the old one moves
    to the young one. Each step is one operation of a dictionary, so threads may share it: the worst
    that a race does is that a value is made twice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._young: dict[Hashable, V] = {}
        self._old: dict[Hashable, V] = {}

    def get(self, key: Hashable) -> V | None:
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self[key] = found
        return found

    def __setitem__(self, key: Hashable, value: V) -> None:
        young = self._young
        if len(young) >= self._most:
            self._old, self._young = young, {}
            young = self._young
        young[key] = value

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def clear(self) -> None:
        self._young, self._old = {}, {}
