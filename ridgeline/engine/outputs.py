"""What the engine gives back: deltas of a request, health, counters. Pure Python, no torch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "deadline", "error")

LATENCY_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What is new of one choice. Text may lag behind its tokens (half a character, the start of a
    stop string); all texts joined are the whole text."""

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One a token of token_ids, where asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or the string that stopped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt, found in the prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step brought a request."""

    request_id: str
    deltas: tuple[Delta, ...]
    finished: bool
    usage: Usage
    error: str | None = None
    """One line for the client, where a choice ended with "error"."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One finished output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """What a prompt became."""

    prompt_ids: list[int]
    choices: list[Choice]
    usage: Usage | None = None
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Take what a step brought."""
        for delta in output.deltas:
            choice = self.choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            if delta.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or []), *delta.logprobs]
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.stop_reason = delta.stop_reason or choice.stop_reason
        self.usage, self.error = output.usage, output.error or self.error


HealthState = Literal["ready", "draining", "reloading", "stalled", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the engine makes progress."""

    state: HealthState
    steps: int
    last_step_age_s: float
    """Since the last step ended (since the start, before the first)."""
    oldest_request_age_s: float
    """0 without requests."""
    running: int
    waiting: int
    reason: str = ""
    """Why it is stalled or dead."""

    @property
    def ok(self) -> bool:
        """Whether new requests will be served."""
        return self.state in ("ready", "reloading")


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound; the last count is of what lies above all bounds."""

    bounds: tuple[float, ...] = LATENCY_BOUNDS_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        self.count += times

    def copy(self) -> Histogram:
        """A snapshot."""
        return Histogram(self.bounds, list(self.counts), self.total, self.count)


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, gauges of now. A snapshot belongs to its reader."""

    ttft_s: Histogram = field(default_factory=Histogram)
    inter_token_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_pages_used: int = 0
    kv_pages_total: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    """Choices by finish_reason."""
    rejected: int = 0
    """Requests refused for a full queue."""
    steps: int = 0
    tokens_per_s: float = 0.0
    """Generated, over the last ten seconds."""
    bytes_per_s: float = 0.0
    """Weights and cache read in decode steps, over the time of those steps, last ten seconds."""
    bandwidth_share: float | None = None
    """bytes_per_s over the device's read ceiling; None where no ceiling is known."""
    spec_proposed: int = 0
    spec_accepted: int = 0
    reloads: int = 0
