"""What a client asks for: sampling parameters and the request. Pure Python, no torch.

Every field works; a value out of range is refused here, before a token is queued, in the form
`sampling: <field> must <rule>, got <value>; <what to do>`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from ridgeline.core.errors import bad_type, bad_value
from ridgeline.engine.limits import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
)

MAX_TOKEN_ID = 2**31 - 1


class TokenMask(Protocol):
    """Which tokens may come next: a grammar's state for one choice of a request."""

    def allowed(self, bitmask: Any) -> bool:
        """Clear the bits of forbidden tokens: bit t % 32 of word t // 32 of a CPU int32 tensor
        [ceil(vocab / 32)] that comes with all bits set. False: all are allowed."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by the chosen token; False where it is against the grammar."""
        ...


MaskFactory = Callable[[], TokenMask]
"""Makes the mask of one choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends."""

    max_tokens: int | None = None
    """At most so many new tokens, >= 1; None: to the end of the context."""
    min_tokens: int = 0
    """No end-of-sequence and no stop before so many."""
    temperature: float = 1.0
    """0: greedy; else logits are divided by it. 0 .. 100."""
    top_k: int | None = None
    """Only the k most likely tokens, >= 1; None: all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability, 0 < p <= 1."""
    min_p: float = 0.0
    """Only tokens at least this times as likely as the likeliest, 0 <= p <= 1."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token already generated, -2 .. 2."""
    frequency_penalty: float = 0.0
    """Taken off once per occurrence in what was generated, -2 .. 2."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens of prompt and output, 0 < r <= 10."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens, -100 .. 100."""
    seed: int | None = None
    """Of the draws: same request and seed, same tokens; None: one is drawn."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and so many alternatives, 0 .. 20; None: none. Of the
    model's own distribution: before temperature, penalties, bias and mask."""
    stop: tuple[str, ...] = ()
    """Text that ends the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's end-of-sequence tokens."""
    include_stop: bool = False
    """Whether the stop string is part of the text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence tokens."""
    n: int = 1
    """Independent choices, 1 .. 8."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, list | tuple):
                raise _type(name, "be a list", value)
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.logit_bias, Mapping):
            raise _type("logit_bias", "be a mapping of token id to bias", self.logit_bias)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID, optional=True)
        _whole("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID)
        _real("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 1, MAX_TOKEN_ID, optional=True)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _whole("seed", self.seed, 0, MAX_SEED, optional=True)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _whole("n", self.n, 1, MAX_N)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _type(name, "be true or false", getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _value("min_tokens", f"be at most max_tokens {self.max_tokens}", self.min_tokens)

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP:
            raise _value("stop", f"hold at most {MAX_STOP} strings", len(self.stop))
        for text in self.stop:
            if not isinstance(text, str):
                raise _type("stop", "hold strings", text)
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                rule = f"hold strings of 1 .. {MAX_STOP_CHARS} characters"
                raise _value("stop", rule, f"one of {len(text)}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            rule = f"hold at most {MAX_STOP_TOKEN_IDS} ids"
            raise _value("stop_token_ids", rule, len(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, MAX_TOKEN_ID)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            rule = f"hold at most {MAX_LOGIT_BIAS} tokens"
            raise _value("logit_bias", rule, len(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, MAX_TOKEN_ID)
            _real("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def narrows(self) -> bool:
        """Whether unlikely tokens are left out of a draw."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen so far change the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request, as it goes to the scheduler."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    """Only requests of one salt share cached prefixes."""
    deadline_s: float | None = None
    """Seconds from arrival after which it is ended."""
    mask: MaskFactory | None = None


def _type(name: str, must: str, got: object) -> TypeError:
    return bad_type("sampling", name, must, f"{type(got).__name__} {str(got)[:40]}", "change it")


def _value(name: str, must: str, got: object) -> ValueError:
    return bad_value("sampling", name, must, got, "change it")


def _whole(name: str, value: object, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise _type(name, "be a whole number", value)
    if not low <= value <= high:
        rule = f"be at least {low}" if high == MAX_TOKEN_ID else f"lie in {low} .. {high}"
        raise _value(name, rule, value)


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _type(name, "be a number", value)
    above = value > low if open_low else value >= low
    if not (math.isfinite(value) and above and value <= high):
        left = "(" if open_low else "["
        raise _value(name, f"lie in {left}{low:g}, {high:g}]", value)
