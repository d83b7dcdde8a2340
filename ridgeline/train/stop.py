"""Ctrl-C and SIGTERM as a request: the first one asks the loop to stop, a second one stops it
now."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While it is entered, SIGINT and SIGTERM are noted in `reason`; the second raises
    KeyboardInterrupt. Does nothing outside the main thread, where Python delivers no signals.

    alone: not started by torchrun. Under it Ctrl-C reaches each rank twice, as SIGINT from the
    terminal and as SIGTERM from torchrun; there only the second of a kind counts as a second one.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.reason: str | None = None
        self._alone = alone
        self._seen: set[int] = set()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and (self._alone or number in self._seen):
            raise KeyboardInterrupt
        self._seen.add(number)
        self.reason = self.reason or signal.Signals(number).name

    @property
    def number(self) -> int:
        """The signal noted; 0: none."""
        return 0 if self.reason is None else int(signal.Signals[self.reason])

    @staticmethod
    def named(number: int) -> str | None:
        """A signal's name; None for 0."""
        return signal.Signals(number).name if number else None
