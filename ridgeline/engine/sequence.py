"""One choice of a request on its way through the engine. Plain Python, no torch.

A sequence is its tokens (prompt, then output), how many of them have keys and values in the cache
(`num_computed`) and in which pages. Being computed and being generated are the same thing: each
step computes some of the tokens that are not yet, and one that reaches the end samples a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ridgeline.engine.outputs import FinishReason
from ridgeline.engine.params import Request, SamplingParams


class Status(Enum):
    """Where a sequence is."""

    HELD = "held"
    """A further choice that waits for the first to compute their prompt."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of a request."""

    request: Request
    index: int
    """Of the choice, 0 .. n - 1."""
    order: int
    """Of arrival: smaller is older."""
    token_ids: list[int]
    num_prompt: int
    max_tokens: int
    """New tokens at most, the context's end considered."""
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of the full pages that the prefix cache knows or will know, from the first on."""
    status: Status = Status.WAITING
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache at the first admission."""
    bypassed: int = 0
    """Times a younger sequence was admitted before this one."""
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_missing(self) -> int:
        """Tokens without keys and values; at least 1 until it ends."""
        return len(self.token_ids) - self.num_computed

    @property
    def decoding(self) -> bool:
        """Whether only its last token is missing."""
        return self.num_missing == 1 and self.num_output > 0

    @property
    def is_last(self) -> bool:
        """Whether its next token is its last for its length."""
        return self.num_output + 1 >= self.max_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED


def sequences_of(request: Request, order: int, max_tokens: int) -> list[Sequence]:
    """The n choices of a request; all but the first are held back until its prompt is computed."""
    return [
        Sequence(
            request=request,
            index=index,
            order=order + index,
            token_ids=list(request.prompt_ids),
            num_prompt=len(request.prompt_ids),
            max_tokens=max_tokens,
            status=Status.WAITING if index == 0 else Status.HELD,
        )
        for index in range(request.params.n)
    ]
