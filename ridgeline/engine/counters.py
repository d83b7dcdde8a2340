"""What the engine counts while it runs; a snapshot is an EngineStats."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import Any, Protocol

from ridgeline.engine.outputs import EngineStats, FinishReason

WINDOW_S = 10.0
"""Of the rates."""


class Step(Protocol):
    """What is counted of a step."""

    @property
    def decodes_only(self) -> bool: ...

    @property
    def spans(self) -> list[Any]: ...


class Counters:
    """Written by the engine's thread, read by any."""

    def __init__(
        self, *, weight_bytes: int = 0, kv_token_bytes: int = 0, read_ceiling: float | None = None
    ) -> None:
        """read_ceiling: bytes/s that the device can read; None: unknown."""
        self.weight_bytes, self.kv_token_bytes = weight_bytes, kv_token_bytes
        self.read_ceiling = read_ceiling
        self._stats = EngineStats()
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int, int, float]] = deque()
        """(end, new tokens, bytes read, seconds) of steps; bytes of decode steps only."""

    def step(self, step: Step, new_tokens: int, now_s: float, seconds: float) -> None:
        """A step ended."""
        read = 0
        if step.decodes_only:
            kept = sum(span.num_keys for span in step.spans)
            read = self.weight_bytes + kept * self.kv_token_bytes
        with self._lock:
            self._stats.steps += 1
            self._stats.generation_tokens += new_tokens
            self._recent.append((now_s, new_tokens, read, seconds))
            self._forget_old(now_s)

    def started(self, queue_s: float, prompt_tokens: int) -> None:
        """A request left the queue for the first time."""
        with self._lock:
            self._stats.queue_s.add(queue_s)
            self._stats.prompt_tokens += prompt_tokens

    def first_token(self, ttft_s: float) -> None:
        """A choice has its first token."""
        with self._lock:
            self._stats.ttft_s.add(ttft_s)

    def tokens_after(self, each_s: float, count: int) -> None:
        """Further tokens of a choice, so long after the ones before."""
        with self._lock:
            self._stats.inter_token_s.add(each_s, count)

    def finished(self, reason: FinishReason, e2e_s: float) -> None:
        """A choice ended."""
        with self._lock:
            self._stats.finished[reason] += 1
            self._stats.e2e_s.add(e2e_s)

    def drafted(self, proposed: int, accepted: int) -> None:
        """A draft was checked."""
        with self._lock:
            self._stats.spec_proposed += proposed
            self._stats.spec_accepted += accepted

    def rejected(self) -> None:
        """A request was refused for a full queue."""
        with self._lock:
            self._stats.rejected += 1

    def reloaded(self) -> None:
        """The weights were swapped."""
        with self._lock:
            self._stats.reloads += 1

    @property
    def steps(self) -> int:
        return self._stats.steps

    def snapshot(self, now_s: float, **gauges: int) -> EngineStats:
        """Everything so far; gauges are fields of EngineStats that the caller knows."""
        with self._lock:
            stats = replace(
                self._stats,
                ttft_s=self._stats.ttft_s.copy(),
                inter_token_s=self._stats.inter_token_s.copy(),
                queue_s=self._stats.queue_s.copy(),
                e2e_s=self._stats.e2e_s.copy(),
                finished=dict(self._stats.finished),
            )
            for name, value in gauges.items():
                setattr(stats, name, value)
            self._forget_old(now_s)
            self._rates(stats, now_s)
        return stats

    def busy_rate(self) -> float:
        """Tokens a second of the last steps, times without any left out; 0 before the first."""
        with self._lock:
            seconds = sum(row[3] for row in self._recent)
            return sum(row[1] for row in self._recent) / seconds if seconds else 0.0

    def _rates(self, stats: EngineStats, now_s: float) -> None:
        if not self._recent:
            return
        first_s = self._recent[0][0] - self._recent[0][3]
        stats.tokens_per_s = sum(row[1] for row in self._recent) / max(now_s - first_s, 1e-9)
        seconds = sum(row[3] for row in self._recent if row[2])
        if seconds:
            stats.bytes_per_s = sum(row[2] for row in self._recent) / seconds
        if self.read_ceiling and seconds:
            stats.bandwidth_share = stats.bytes_per_s / self.read_ceiling

    def _forget_old(self, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - WINDOW_S:
            self._recent.popleft()
