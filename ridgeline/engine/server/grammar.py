"""Grammar-constrained sampling with llguidance: which tokens may come next.

llguidance (MIT, Rust, no dependency of its own) computes a mask from the grammar's state in tens of
microseconds without walking the vocabulary in advance, has limits for every stage of its work, and
keeps no cache on disk; xgrammar would bring torch, Triton and transformers as dependencies and has
had an unbounded cache (GHSA-389x-67px-mjg3).

A grammar is compiled in a killable process first; only one that was compiled there within its time
and limits is compiled here. Compiled ones are kept, the least recently used dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance

from ridgeline.engine.params import MaskFactory
from ridgeline.engine.server.errors import ApiError, invalid
from ridgeline.engine.server.grammar_text import LIMITS
from ridgeline.engine.server.jobs import JobTimeoutError, Worker

MAX_CACHED = 64


class _RefusedError(Exception):
    """Why a grammar cannot be used."""


class GrammarMask:
    """The state of one choice: a TokenMask of engine/params.py."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self, bitmask: Any) -> bool:
        self._matcher.unsafe_compute_mask_ptr(bitmask.data_ptr(), 4 * bitmask.numel())
        return True

    def accept(self, token_id: int) -> bool:
        return self._matcher.consume_token(token_id) and not self._matcher.is_error()


class TriggerMask:
    """Free text until a marker is written, then the grammar until it ends, then free again."""

    def __init__(
        self, tokenizer: llguidance.LLTokenizer, matcher: llguidance.LLMatcher, marker: str
    ) -> None:
        self._tokenizer, self._fresh = tokenizer, matcher
        self._marker = marker.encode("utf-8")
        self._tail = b""
        self._inside: llguidance.LLMatcher | None = None

    def allowed(self, bitmask: Any) -> bool:
        if self._inside is None:
            return False
        self._inside.unsafe_compute_mask_ptr(bitmask.data_ptr(), 4 * bitmask.numel())
        return True

    def accept(self, token_id: int) -> bool:
        if self._inside is not None:
            taken = self._inside.consume_token(token_id)
        else:
            self._tail += self._tokenizer.decode_bytes([token_id])
            at = self._tail.find(self._marker)
            if at < 0:
                self._tail = self._tail[-len(self._marker) :]
                return True
            rest = self._tail[at + len(self._marker) :]
            self._inside, self._tail = self._fresh.deep_copy(), b""
            taken = not rest or self._inside.consume_tokens(self._tokenizer.tokenize_bytes(rest))
        if self._inside.is_accepting() and self._inside.is_stopped():
            self._inside = None
            return taken
        return taken and not self._inside.is_error()


class GrammarCompiler:
    """Grammars of one tokenizer, as factories of masks.

    tokenizer_json: path of the tokenizers library's file; vocab_size: width of the logits.
    """

    def __init__(
        self,
        tokenizer_json: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        self._path, self._vocab_size = tokenizer_json, vocab_size
        self._eos, self._timeout_s = list(eos_token_ids), timeout_s
        self._worker = Worker(
            {
                "job": "tokenizer",
                "tokenizer": str(self._path),
                "vocab_size": self._vocab_size,
                "eos_token_ids": self._eos,
            }
        )
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._loading = asyncio.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._compiling: dict[str, asyncio.Task[llguidance.LLMatcher]] = {}
        """Grammars that are waited for: requests with the same one share the work."""

    async def compile(self, grammar: str, param: str, *, marker: str = "") -> MaskFactory:
        """A factory of masks; with a marker the grammar holds only after it.

        Raises: ApiError that names `param`.
        """
        tokenizer = await self.load(param)
        key = hashlib.sha256(grammar.encode("utf-8")).hexdigest()
        if key in self._compiled:
            matcher = self._compiled[key]
        else:
            task = self._compiling.get(key)
            if task is None:
                task = asyncio.ensure_future(self._compile(grammar, tokenizer))
                self._compiling[key] = task
                task.add_done_callback(lambda done: self._compiled_once(key, done))
            try:
                matcher = await asyncio.shield(task)
            except _RefusedError as error:
                raise _refused(param, str(error)) from error
        if key in self._compiled:
            self._compiled.move_to_end(key)
        if marker:
            return lambda: TriggerMask(tokenizer, matcher, marker)
        return lambda: GrammarMask(matcher.deep_copy())

    async def _compile(
        self, grammar: str, tokenizer: llguidance.LLTokenizer
    ) -> llguidance.LLMatcher:
        """Raises: _RefusedError."""
        await self._try_apart(grammar)
        limits = llguidance.LLParserLimits(**LIMITS)
        make: Callable[[], llguidance.LLMatcher] = lambda: llguidance.LLMatcher(  # noqa: E731
            tokenizer, grammar, log_level=0, limits=limits
        )
        matcher = await asyncio.to_thread(make)
        if matcher.is_error():
            raise _RefusedError(matcher.get_error())
        return matcher

    def _compiled_once(self, key: str, task: asyncio.Task[llguidance.LLMatcher]) -> None:
        del self._compiling[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._compiled[key] = task.result()
        while len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)

    def is_special(self, token_id: int) -> bool:
        """Whether the grammar must name a token as <token> to mean it."""
        return self._tokenizer is not None and self._tokenizer.is_special_token(token_id)

    async def load(self, param: str) -> llguidance.LLTokenizer:
        """Read the tokenizer, once. Raises: ApiError for one that has no grammar support."""
        async with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = await asyncio.to_thread(self._read_tokenizer)
                except Exception as error:
                    raise ApiError(
                        400, "this model's tokenizer has no grammar support", param=param,
                        code="unsupported_parameter",
                    ) from error  # fmt: skip
        return self._tokenizer

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        text = self._path.read_text(encoding="utf-8")
        return llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos)

    async def _try_apart(self, grammar: str) -> None:
        try:
            answer = await self._worker.run(
                "grammar", self._timeout_s, grammar=grammar, tokenizer=str(self._path)
            )
        except JobTimeoutError as error:
            raise _RefusedError(f"it must compile within {self._timeout_s:g} seconds") from error
        if message := answer.get("error"):
            raise _RefusedError(message)

    async def close(self) -> None:
        """End the worker, and what waits for it."""
        for task in list(self._compiling.values()):
            task.cancel()
        await self._worker.close()


def _refused(param: str, message: str) -> ApiError:
    line = " ".join(message.split("\n1 |")[0].split())[:300]  # without the grammar's own text
    return invalid(param, f"{param!r} cannot be used as a grammar: {line}", "invalid_schema")
