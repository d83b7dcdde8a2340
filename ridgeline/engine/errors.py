"""What the engine answers when it cannot take a request; what is wrong with a request itself is a
ValueError or TypeError in the project's form."""

from __future__ import annotations


class UnavailableError(Exception):
    """The engine takes no request now."""


class QueueFullError(UnavailableError):
    """Bounded queue reached; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DrainingError(UnavailableError):
    """The engine finishes what it has and takes nothing new."""


class EngineDeadError(UnavailableError):
    """The engine's thread or a worker ended."""


class ReloadError(ValueError):
    """New weights that do not fit the running model; the old ones go on."""
