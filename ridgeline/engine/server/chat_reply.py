"""The answer of /v1/chat/completions, whole or as chunks, in OpenAI's objects."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from ridgeline.engine.outputs import Delta, TokenLogprob
from ridgeline.engine.server.chat import ChatRequest
from ridgeline.engine.server.generation import Generation
from ridgeline.engine.server.sse import DONE, event
from ridgeline.engine.server.state import ServerState, new_id, usage_json
from ridgeline.engine.server.tokens import chat_logprobs
from ridgeline.engine.server.tools import Piece, ToolParser, assemble


class Choice:
    """One choice as it grows: text split into content and tool calls."""

    def __init__(self, state: ServerState, request: ChatRequest) -> None:
        calls = request.tools.mode != "none"
        self.parser = ToolParser(state.tools) if calls else None
        self.pieces: list[Piece] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> list[Piece]:
        """Take a delta; what is new of content and calls."""
        pieces: list[Piece] = []
        if self.parser is None:
            pieces = [delta.text] if delta.text else []
        else:
            pieces = self.parser.push(delta.text)
            if delta.finish_reason is not None:
                pieces += self.parser.flush()
        if delta.finish_reason is not None:
            called = self.parser is not None and self.parser.num_calls > 0
            stopped = delta.finish_reason == "stop"
            self.finish_reason = "tool_calls" if called and stopped else delta.finish_reason
        return [piece for piece in pieces if piece != ""]


def _base(state: ServerState, request: ChatRequest, request_id: str, kind: str) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "service_tier": "default",
        "system_fingerprint": state.fingerprint,
    }


async def whole_answer(
    state: ServerState, request: ChatRequest, generation: Generation
) -> dict[str, Any]:
    """The chat.completion object. Raises: ApiError."""
    choices = [Choice(state, request) for _ in range(request.params.n)]
    async for index, delta in generation.outputs():
        choice = choices[index]
        choice.pieces += choice.add(delta)
        choice.logprobs += delta.logprobs or ()
    answer = _base(state, request, generation.plan.request_id, "chat.completion")
    answer["choices"] = [
        _whole_choice(state, request, index, choice) for index, choice in enumerate(choices)
    ]
    answer["usage"] = usage_json(generation.usage)
    if request.metadata is not None:
        answer["metadata"] = request.metadata
    return answer


def _whole_choice(
    state: ServerState, request: ChatRequest, index: int, choice: Choice
) -> dict[str, Any]:
    content, calls = assemble(choice.pieces)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": new_id("call"), "type": "function", "function": call} for call in calls
        ]
    logprobs = None
    if request.params.logprobs is not None:
        entries = chat_logprobs(tuple(choice.logprobs), state.texts)
        logprobs = {"content": entries, "refusal": None}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }


async def chunks(
    state: ServerState, request: ChatRequest, generation: Generation
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: role, content or calls, finish, usage where asked for, [DONE]."""
    base = _base(state, request, generation.plan.request_id, "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        usage = {"usage": None} if request.include_usage else {}
        return event({**base, "choices": [choice], **usage})

    choices = [Choice(state, request) for _ in range(request.params.n)]
    for index in range(len(choices)):
        yield chunk(index, {"role": "assistant", "content": "", "refusal": None})
    async for index, delta in generation.outputs():
        pieces = choices[index].add(delta)
        more: dict[str, Any] = {}
        if delta.logprobs:
            content = chat_logprobs(delta.logprobs, state.texts)
            more["logprobs"] = {"content": content, "refusal": None}
            pieces = pieces or [""]
        for piece in pieces:
            yield chunk(index, _delta_json(piece), **more)
            more = {}
        if choices[index].finish_reason is not None:
            yield chunk(index, {}, finish_reason=choices[index].finish_reason)
    if request.include_usage:
        yield event({**base, "choices": [], "usage": usage_json(generation.usage)})
    yield DONE


def _delta_json(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, str):
        return {"content": piece}
    call: dict[str, Any] = {"index": piece.index}
    if piece.name is not None:
        call |= {"id": new_id("call"), "type": "function"}
        call["function"] = {"name": piece.name, "arguments": piece.arguments}
    else:
        call["function"] = {"arguments": piece.arguments}
    return {"tool_calls": [call]}
