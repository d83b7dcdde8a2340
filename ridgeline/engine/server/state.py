"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ridgeline
from ridgeline.engine.client import EngineClient
from ridgeline.engine.server.config import ServerConfig
from ridgeline.engine.server.errors import busy
from ridgeline.engine.server.grammar import GrammarCompiler
from ridgeline.engine.server.jobs import Worker
from ridgeline.engine.server.tokens import TokenTexts
from ridgeline.engine.server.tools import ToolFormat, tool_format

log = logging.getLogger("ridgeline.serve")


@dataclass(slots=True)
class Counters:
    """What the HTTP side counts, for /metrics."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By route and status."""
    client_gone: int = 0
    """Requests whose client left before the end."""
    slow_readers: int = 0
    """Connections dropped because their reader took nothing."""
    inside: int = 0
    """Requests now between reading their body and their last byte."""
    peak_inside: int = 0


class ServerState:
    """One server: engine, configuration, and what they need at each request."""

    def __init__(self, engine: EngineClient, config: ServerConfig, folder: Path | None) -> None:
        self.engine, self.config, self.folder = engine, config, folder
        self.counters = Counters()
        self.created = int(time.time())
        self.started = time.monotonic()
        self.texts = TokenTexts(engine.tokenizer)
        self.render_worker = Worker()
        self.tools: ToolFormat = tool_format(self.template)
        self.encoding = asyncio.Semaphore(2)
        """Texts that are tokenized at once, on threads."""
        self.draining = False
        self.reload_lock = asyncio.Lock()
        tokenizer_folder = getattr(engine.tokenizer, "folder", None)
        self.grammars = None
        if tokenizer_folder is not None:
            self.grammars = GrammarCompiler(
                Path(tokenizer_folder) / "tokenizer.json",
                engine.info.vocab_size,
                engine.info.eos_token_ids,
                config.grammar_timeout_s,
            )
        self.fingerprint = self._fingerprint()

    @property
    def template(self) -> str | None:
        """The source of the model's chat template."""
        found = getattr(self.engine.tokenizer, "chat_template", None)
        return None if found is None else found.source

    def _fingerprint(self) -> str:
        info = self.engine.info
        text = f"{ridgeline.__version__} {info.name} {info.weights} {info.dtype} {info.device}"
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    @contextlib.asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Count a request that is worked on. Raises: ApiError 429 where there are too many."""
        if self.counters.inside >= self.config.max_requests:
            raise busy(
                f"the server works on {self.config.max_requests} requests already; try again later",
                self.retry_after_s(),
            )
        self.counters.inside += 1
        self.counters.peak_inside = max(self.counters.peak_inside, self.counters.inside)
        try:
            yield
        finally:
            self.counters.inside -= 1

    def retry_after_s(self) -> float:
        """About how long what is inside takes: its tokens over the present rate, 1 .. 60 s."""
        stats = self.engine.stats()
        if not stats.tokens_per_s:  # nothing was computed yet: soon
            return 1.0
        return min(max(stats.queued_tokens / stats.tokens_per_s / 4, 1.0), 60.0)

    async def close(self) -> None:
        """End the worker processes."""
        await self.render_worker.close()
        if self.grammars is not None:
            await self.grammars.close()


def new_id(prefix: str) -> str:
    """chatcmpl-<32 hex digits>."""
    return f"{prefix}-{uuid.uuid4().hex}"


def usage_json(usage: Any) -> dict[str, Any]:
    """Token counts as OpenAI sends them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
