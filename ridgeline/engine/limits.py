"""How much one client may ask for: caps of a request and of the queue.

Counts that a client names are capped before anything is allocated for them (CVE-2026-34756: an
unbounded `n`); the queue is bounded by requests and by tokens, so a busy server says so at once.
Pure Python, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from ridgeline.core.errors import bad_value

MAX_N = 8
"""Choices of one request."""
MAX_LOGPROBS = 20
"""Alternatives told a token."""
MAX_STOP = 4
"""Stop strings of a request."""
MAX_STOP_CHARS = 64
"""Characters of one stop string."""
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
"""Tokens with a bias of their own."""
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the queue; every one at least 1."""

    max_queue_requests: int = 256
    """Requests that wait or run."""
    max_queue_tokens: int = 262_144
    """Tokens that they may come to: prompts plus max_tokens, times n."""
    max_embed_prompts: int = 64
    """Texts of one embedding request."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise bad_value("limits", field.name, "be a whole number >= 1", value, "raise it")
