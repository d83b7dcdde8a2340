"""Text of a choice as its tokens come, and where a stop string ends it.

A token may end inside a UTF-8 character or inside a stop string; text is given out only when it can
no longer change and can no longer be the start of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The text of one choice.

    Stop strings are searched in the text as decoded; with several, the one that ends first wins.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """tokenizer: a ridgeline.nn.tokenizer.Tokenizer; None gives no text at all."""
        self._stream = (
            None if tokenizer is None else tokenizer.stream(skip_special_tokens=skip_special_tokens)
        )
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        """Decoded, not given out."""

    def push(self, token_id: int, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text to give out, the stop string that was completed or None).

        may_stop False (before min_tokens): a stop string completed now is plain text.
        """
        if self._stream is None:
            return "", None
        self._held += self._stream.push(token_id)
        if may_stop and self._stop:
            found = [(self._held.find(s) + len(s), s) for s in self._stop if s in self._held]
            if found:
                end, stop = min(found)
                kept = self._held[: end if self._include_stop else end - len(stop)]
                self._held = ""
                return kept, stop
        return self._give(self._safe()), None

    def flush(self) -> str:
        """What is left when the choice ended for another reason."""
        if self._stream is None:
            return ""
        self._held += self._stream.flush()
        return self._give(len(self._held))

    def _safe(self) -> int:
        """Characters that no stop string can begin in."""
        safe = len(self._held)
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
                if self._held.endswith(stop[:size]):
                    safe = min(safe, len(self._held) - size)
                    break
        return safe

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text
