"""/v1/completions: how a text goes on; several prompts and choices in one request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ridgeline.engine.outputs import TokenLogprob
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.server import params as parameters
from ridgeline.engine.server.chat import read_format, read_model
from ridgeline.engine.server.errors import invalid, must
from ridgeline.engine.server.generation import Generation, Plan, log_label, salt_of
from ridgeline.engine.server.grammar_text import json_grammar
from ridgeline.engine.server.prompts import encode, read_prompts
from ridgeline.engine.server.sse import DONE, event
from ridgeline.engine.server.state import ServerState, usage_json
from ridgeline.engine.server.tokens import completion_logprobs

ROUTE = "/v1/completions"
DEFAULT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked body."""

    model: str
    prompts: list[str | list[int]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    echo: bool
    schema: dict[str, Any] | None
    label: str
    deadline_s: float


def read_completion(state: ServerState, body: Any) -> CompletionRequest:
    """Check a body. Raises: ApiError that names what is wrong."""
    given = parameters.read_object(parameters.COMPLETION, body)
    model = read_model(state, given)
    prompts = read_prompts(parameters.require(given, "prompt"), "prompt", state.config.max_prompts)
    stream = parameters.read_flag(given, "stream")
    echo = parameters.read_flag(given, "echo")
    if echo and "logprobs" in given:
        raise invalid("echo", "'echo' cannot be combined with 'logprobs'")
    schema = read_format(given)
    if schema is not None:
        parameters.check_grammar_mix(given, "a grammar")
    more = {
        "max_tokens": given.get("max_tokens", DEFAULT_TOKENS),
        "logprobs": given.get("logprobs"),
    }
    params = parameters.read_sampling(given, more)
    best_of = given.get("best_of", params.n)
    if isinstance(best_of, bool) or best_of != params.n:
        raise must("best_of", f"equal n, {params.n}", best_of)
    return CompletionRequest(
        model=model,
        prompts=prompts,
        params=params,
        stream=stream,
        include_usage=parameters.read_include_usage(given, stream),
        echo=echo,
        schema=schema,
        label=log_label(user=parameters.read_label(given, "user")),
        deadline_s=parameters.read_deadline(given, state.config.deadline_s),
    )


async def plan_completion(
    state: ServerState, request: CompletionRequest, request_id: str, key: str
) -> Plan:
    """Token ids, grammar and the rest of what the engine needs. Raises: ApiError."""
    prompts = [
        each
        if isinstance(each, list)
        else await encode(state, each, "prompt", add_special_tokens=True)
        for each in request.prompts
    ]
    mask = None
    if request.schema is not None:
        if state.grammars is None:
            raise invalid("response_format", "this model's tokenizer has no grammar support")
        mask = await state.grammars.compile(json_grammar(request.schema), "response_format")
    return Plan(
        request_id=request_id,
        route=ROUTE,
        prompts=prompts,
        params=request.params,
        names={"prompt_ids": "prompt"},
        salt=salt_of(key, ""),
        deadline_s=request.deadline_s,
        mask=mask,
        grammar_param="response_format" if mask else None,
        label=request.label,
    )


def _base(state: ServerState, request: CompletionRequest, request_id: str) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": state.fingerprint,
    }


async def _echoes(state: ServerState, request: CompletionRequest, plan: Plan) -> list[str]:
    """What stands before each choice's text."""
    n = request.params.n
    if not request.echo:
        return [""] * (n * len(plan.prompts))
    texts = []
    for given, ids in zip(request.prompts, plan.prompts, strict=True):
        if isinstance(given, str):
            texts += [given] * n
        else:
            texts += [await asyncio.to_thread(state.engine.tokenizer.decode, ids)] * n
    return texts


async def whole_answer(
    state: ServerState, request: CompletionRequest, generation: Generation
) -> dict[str, Any]:
    """The text_completion object. Raises: ApiError."""
    texts = await _echoes(state, request, generation.plan)
    logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
    reasons: list[str | None] = [None] * len(texts)
    async for index, delta in generation.outputs():
        texts[index] += delta.text
        logprobs[index] += delta.logprobs or ()
        reasons[index] = delta.finish_reason or reasons[index]
    wanted = request.params.logprobs is not None
    choices = [
        {
            "text": text,
            "index": index,
            "logprobs": completion_logprobs(tuple(entries), state.texts, 0) if wanted else None,
            "finish_reason": reason,
        }
        for index, (text, entries, reason) in enumerate(zip(texts, logprobs, reasons, strict=True))
    ]
    answer = _base(state, request, generation.plan.request_id)
    return {**answer, "choices": choices, "usage": usage_json(generation.usage)}


async def chunks(
    state: ServerState, request: CompletionRequest, generation: Generation
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; ends with [DONE]."""
    base = _base(state, request, generation.plan.request_id)
    usage = {"usage": None} if request.include_usage else {}

    def chunk(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return event({**base, "choices": [choice], **usage})

    offsets = [0] * (request.params.n * len(generation.plan.prompts))
    for index, text in enumerate(await _echoes(state, request, generation.plan)):
        if text:
            yield chunk(index, text)
    async for index, delta in generation.outputs():
        logprobs = None
        if delta.logprobs:
            logprobs = completion_logprobs(delta.logprobs, state.texts, offsets[index])
            offsets[index] += sum(len(text) for text in logprobs["tokens"])
        if delta.text or logprobs or delta.finish_reason:
            yield chunk(index, delta.text, logprobs, delta.finish_reason)
    if request.include_usage:
        yield event({**base, "choices": [], "usage": usage_json(generation.usage)})
    yield DONE
