"""SIGTERM told as Ctrl-C is: in one line, with what is kept, after the same cleaning up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from ridgeline.core import env

TERMINATED = 128 + signal.SIGTERM
"""Exit code, as a shell gives it for a process that the signal ended."""


class TerminatedError(KeyboardInterrupt):
    """The process was told to end."""


@contextlib.contextmanager
def told(wanted: bool) -> Iterator[None]:
    """SIGTERM raises TerminatedError in the main thread; while that is on its way more are ignored.

    Not under torchrun, which sends it to all ranks when one has failed, and says so itself.
    """
    main = threading.current_thread() is threading.main_thread()
    if not wanted or not main or env.has_torchrun():
        yield
        return

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
