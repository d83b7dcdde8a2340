"""An engine without a model: echoes the prompt's tokens, one a step, or a script of tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ridgeline.core.errors import bad_value
from ridgeline.engine.client import ModelInfo
from ridgeline.engine.errors import DrainingError, EngineDeadError, QueueFullError, ReloadError
from ridgeline.engine.outputs import (
    Delta,
    EngineStats,
    Health,
    RequestOutput,
    TokenLogprob,
    Usage,
)
from ridgeline.engine.params import MaskFactory, SamplingParams
from ridgeline.nn.tokenizer import Tokenizer

PAGE = 16


@dataclass
class _Running:
    tokens: int
    pages: int
    started: float = field(default_factory=time.monotonic)
    aborted: bool = False


class FakeEngine:
    """EngineClient: behaves as its contract says; `script` is what every request answers."""

    def __init__(
        self, folder: Path, *, tokens_per_s: float = 2000.0, capacity: int = 32,
        capacity_tokens: int = 100_000, max_model_len: int = 4096,
    ) -> None:  # fmt: skip
        self.tokenizer = Tokenizer(folder)
        eos = self.tokenizer.role_id("eos_token")
        self.info = ModelInfo(
            name=folder.name, max_model_len=max_model_len, vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=() if eos is None else (eos,), weights="float32", dtype="float32",
            device="cpu", kv_dtype="float32", page_tokens=PAGE, num_pages=4096, kv_bytes=0,
        )  # fmt: skip
        self._defaults = (tokens_per_s, capacity, capacity_tokens)
        self.running: dict[str, _Running] = {}
        self.reset()

    def reset(self) -> None:
        """As it was made."""
        self.tokens_per_s, self.capacity, self.capacity_tokens = self._defaults
        self.script: list[int] | None = None
        self.fail_at: int | None = None
        self.counters = EngineStats()
        self.seen: list[tuple[Sequence[int], SamplingParams, str, float | None]] = []
        self.draining = self.dead = self.closed = False
        self.reload_s = 0.0
        self.reload_error: Exception | None = None
        self.reloaded: list[Path] = []
        self._steps, self._last_step = 0, time.monotonic()

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if not len(prompt_ids):
            raise bad_value("request", "prompt", "have at least one token", 0, "give some text")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.info.vocab_size:
            raise bad_value(
                "request", "prompt", f"hold tokens in 0 .. {self.info.vocab_size - 1}",
                max(prompt_ids), "use the model's tokenizer",
            )  # fmt: skip
        if len(prompt_ids) + (params.max_tokens or 1) > self.info.max_model_len:
            raise bad_value(
                "request", "max_tokens", f"fit in the context of {self.info.max_model_len} tokens",
                f"{len(prompt_ids)} + {params.max_tokens}", "shorten it",
            )  # fmt: skip
        for token in params.logit_bias:
            if token >= self.info.vocab_size:
                raise bad_value("request", "logit_bias", "hold tokens", token, "change it")

    def add_request(
        self, prompt, params, *, request_id=None, salt="", deadline_s=None,
        mask: MaskFactory | None = None,
    ):  # fmt: skip
        if self.dead:
            raise EngineDeadError("the engine's thread ended")
        if self.draining:
            raise DrainingError("the server is shutting down")
        self.check(prompt, params)
        budget = (params.max_tokens or len(prompt)) + len(prompt)
        used = sum(each.tokens for each in self.running.values())
        if len(self.running) >= self.capacity or used + budget > self.capacity_tokens:
            self.counters.rejected += 1
            raise QueueFullError("the queue is full", 1.5)
        self.seen.append((list(prompt), params, salt, deadline_s))
        assert request_id is not None and request_id not in self.running
        self.running[request_id] = _Running(budget, -(-budget // PAGE))
        return self._run(request_id, list(prompt), params, deadline_s, mask)

    async def _run(self, request_id, prompt, params, deadline_s, mask):
        try:
            async for output in self._steps_of(request_id, prompt, params, deadline_s, mask):
                yield output
        finally:
            self.running.pop(request_id, None)

    async def _steps_of(self, request_id, prompt, params, deadline_s, factory):
        state, n = self.running[request_id], params.n
        script = list(self.script if self.script is not None else prompt)
        most = params.max_tokens or self.info.max_model_len - len(prompt)
        decoders = [self.tokenizer.stream() for _ in range(n)]
        masks = [factory() if factory else None for _ in range(n)]
        texts, made = [""] * n, 0
        step = 0
        while True:
            await asyncio.sleep(1 / self.tokens_per_s)
            self._steps += 1
            self._last_step = time.monotonic()
            usage = Usage(prompt_tokens=len(prompt), completion_tokens=made, cached_tokens=0)

            def last(reason, error=None, usage=usage):
                self.counters.finished[reason] += n
                deltas = tuple(Delta(index=i, finish_reason=reason) for i in range(n))
                return RequestOutput(
                    request_id=request_id, deltas=deltas, finished=True, usage=usage, error=error
                )

            if state.aborted or request_id not in self.running:
                yield last("abort")
                return
            if deadline_s is not None and time.monotonic() - state.started > deadline_s:
                yield last("deadline")
                return
            if self.fail_at == step:
                yield last("error", "a kernel failed")
                return
            deltas, ended = [], False
            for i in range(n):
                token, end = self._next(script, step, masks[i])
                made += 1
                self.counters.generation_tokens += 1
                text = "" if end else decoders[i].push(token)
                texts[i] += text
                reason = "stop" if end else "length" if step + 1 >= most else None
                for stop in params.stop:
                    if stop in texts[i]:
                        cut = len(texts[i]) - texts[i].index(stop)
                        text, reason = text[: max(len(text) - cut, 0)], "stop"
                if reason:
                    text += decoders[i].flush()
                    ended = True
                    self.counters.finished[reason] += 1
                logprobs = None
                if params.logprobs is not None:
                    top = tuple((t, -1.0 - t) for t in range(params.logprobs))
                    logprobs = (TokenLogprob(token, -0.5, top),)
                deltas.append(
                    Delta(
                        index=i,
                        token_ids=(token,),
                        text=text,
                        logprobs=logprobs,
                        finish_reason=reason,
                    )  # fmt: skip
                )
            usage = Usage(prompt_tokens=len(prompt), completion_tokens=made, cached_tokens=0)
            yield RequestOutput(
                request_id=request_id, deltas=tuple(deltas), finished=ended, usage=usage
            )
            if ended:
                return
            step += 1

    def _next(self, script, step, mask):
        """(token, whether the text ends there)."""
        eos = self.info.eos_token_ids[0]
        token = script[step] if step < len(script) else eos
        if mask is not None:
            words = -(-self.info.vocab_size // 32)
            bits = torch.full((words,), -1, dtype=torch.int32)
            if mask.allowed(bits):
                allowed = [
                    t for t in range(self.info.vocab_size) if int(bits[t // 32]) >> (t % 32) & 1
                ]
                if token not in allowed:  # what ends things soon comes first
                    closing = [self.tokenizer.encode(char)[0] for char in '"}]']
                    token = next((t for t in (eos, *closing) if t in allowed), allowed[0])
            assert mask.accept(token)
        return token, token == eos

    def abort(self, request_id: str) -> bool:
        found = self.running.pop(request_id, None)
        if found is not None:
            found.aborted = True
        return found is not None

    async def embed(self, prompts, *, salt="", pooling="mean"):
        for prompt in prompts:
            self.check(prompt, SamplingParams(max_tokens=1))
        return [[1.0, 0.0, 0.0] if pooling == "mean" else [0.0, 1.0, 0.0] for _ in prompts]

    def health(self) -> Health:
        now = time.monotonic()
        state = "dead" if self.dead else "draining" if self.draining else "ready"
        oldest = max((now - r.started for r in self.running.values()), default=0.0)
        return Health(
            state=state, steps=self._steps, last_step_age_s=now - self._last_step,
            oldest_request_age_s=oldest, running=len(self.running), waiting=0,
            reason="its thread ended" if self.dead else "",
        )  # fmt: skip

    def stats(self) -> EngineStats:
        self.counters.running = len(self.running)
        self.counters.kv_pages_used = sum(each.pages for each in self.running.values())
        self.counters.kv_pages_total = self.info.num_pages
        self.counters.queued_tokens = sum(each.tokens for each in self.running.values())
        self.counters.bandwidth_share = 0.5
        return self.counters

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        end = time.monotonic() + timeout_s
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.005)
        left = list(self.running)
        for request_id in left:
            self.abort(request_id)
        return not left

    async def reload(self, folder: Path) -> None:
        if self.reload_error is not None:
            raise self.reload_error
        if not (folder / "config.json").is_file():
            raise ReloadError(f"reload: folder must be a model, got {folder.name}; check it")
        await asyncio.sleep(self.reload_s)
        self.reloaded.append(folder)
        self.counters.reloads += 1

    async def close(self) -> None:
        self.closed = True
        for request_id in list(self.running):
            self.abort(request_id)
