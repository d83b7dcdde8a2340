"""/v1/embeddings: unit vectors of texts, from the model's final hidden states."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

from ridgeline.engine.server import params as parameters
from ridgeline.engine.server.chat import read_model
from ridgeline.engine.server.errors import from_engine, must
from ridgeline.engine.server.generation import salt_of, too_late
from ridgeline.engine.server.prompts import encode, read_prompts
from ridgeline.engine.server.state import ServerState


async def embeddings(state: ServerState, body: Any, key: str) -> dict[str, Any]:
    """The list object. Raises: ApiError that names what is wrong."""
    given = parameters.read_object(parameters.EMBEDDING, body)
    model = read_model(state, given)
    prompts = read_prompts(parameters.require(given, "input"), "input", state.config.max_prompts)
    encoding = given.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise must("encoding_format", "be float or base64", encoding)
    pooling = given.get("pooling", "mean")
    if pooling not in ("mean", "last"):
        raise must("pooling", "be mean or last", pooling)
    dimensions = given.get("dimensions")
    if dimensions is not None and (isinstance(dimensions, bool) or not isinstance(dimensions, int)):
        raise must("dimensions", "be a whole number", dimensions, "invalid_type")
    parameters.read_label(given, "user")
    ids = [
        each
        if isinstance(each, list)
        else await encode(state, each, "input", add_special_tokens=True)
        for each in prompts
    ]
    deadline_s = state.config.deadline_s
    try:
        async with asyncio.timeout(deadline_s):
            vectors = await state.engine.embed(ids, salt=salt_of(key, ""), pooling=pooling)
    except TimeoutError:
        raise too_late(deadline_s) from None
    except (ValueError, TypeError) as error:
        raise from_engine(error, {"prompt": "input", "prompts": "input"}) from error
    if dimensions is not None and dimensions != len(vectors[0]):
        raise must("dimensions", f"be the model's width, {len(vectors[0])}", dimensions)
    tokens = sum(map(len, ids))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": _encoded(vector, encoding)}
            for i, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
