"""What a server may ask of an engine. AsyncEngine is one; a test may bring its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ridgeline.engine.outputs import EngineStats, Health, RequestOutput
from ridgeline.engine.params import MaskFactory, SamplingParams

Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that runs, in words and sizes."""

    name: str
    max_model_len: int
    """Tokens of prompt plus output."""
    vocab_size: int
    """Width of the logits."""
    eos_token_ids: tuple[int, ...]
    weights: str
    dtype: str
    device: str
    kv_dtype: str
    page_tokens: int
    num_pages: int
    kv_bytes: int
    """Of the KV cache, on one rank."""


class OutputStream(Protocol):
    """The outputs of one request, for `async for`; an async generator is one too."""

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None:
        """Want nothing more: the request is aborted if it has not ended."""
        ...


class EngineClient(Protocol):
    """An engine as its callers see it; all methods may be called on the event loop's thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Any:
        """A ridgeline.nn.tokenizer.Tokenizer, or something with its methods."""
        ...

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what add_request would raise for the request itself."""
        ...

    def add_request(
        self,
        prompt: Sequence[int] | str,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str = "",
        deadline_s: float | None = None,
        mask: MaskFactory | None = None,
    ) -> OutputStream:
        """Queue a request; refuses at the call. Closing the stream, or cancelling who waits for it,
        aborts the request."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; False where there is none of that id."""
        ...

    async def embed(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", pooling: Pooling = "mean"
    ) -> list[list[float]]:
        """Unit vectors of texts, from the final hidden states."""
        ...

    def health(self) -> Health: ...

    def stats(self) -> EngineStats: ...

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait; False where requests had to be aborted."""
        ...

    async def reload(self, folder: Path) -> None:
        """Swap the weights between two steps; requests in flight go on."""
        ...

    async def close(self) -> None:
        """Abort everything and end the engine's thread."""
        ...
