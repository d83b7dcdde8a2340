"""How the next token is chosen, as the user says it; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.errors import bad_value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen and when to stop."""

    max_new_tokens: int = 128
    """At most so many tokens, >= 1."""
    temperature: float = 0.0
    """0: greedy; else logits are divided by it."""
    top_k: int | None = None
    """Only the k most likely tokens, >= 1; None: all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability, 0 < p <= 1."""
    seed: int = 0
    """Of the draw; the same seed gives the same text."""

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "be at least 1"),
            ("temperature", self.temperature >= 0, "be at least 0"),
            ("top_k", self.top_k is None or self.top_k >= 1, "be at least 1"),
            ("top_p", 0 < self.top_p <= 1, "lie in (0, 1]"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise bad_value("generate", name, rule, getattr(self, name), "change it")
