"""The tables of parameters: the documented ones are these, and all of OpenAI's are in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from openai.types import completion_create_params as completion_params
from openai.types import embedding_create_params as embedding_params
from openai.types.chat import completion_create_params as chat_params

from ridgeline.engine.server import params
from ridgeline.engine.server.errors import ApiError

DOCS = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
TABLES = {
    "/v1/chat/completions": params.CHAT,
    "/v1/completions": params.COMPLETION,
    "/v1/embeddings": params.EMBEDDING,
}


def rows(table: tuple[params.Param, ...]) -> str:
    """A table as the documentation shows it."""
    kinds = {"works": "works", "fixed": "only", "refused": "refused"}
    lines = ["| parameter | | |", "| --- | --- | --- |"]
    for param in table:
        only = " or ".join(f"`{value!r}`" for value in param.accepts)
        kind = " ".join(filter(None, [kinds[param.kind], only]))
        lines.append(f"| `{param.name}` | {kind} | {param.about} |")
    return "\n".join(lines)


@pytest.mark.parametrize("route", TABLES)
def test_the_documentation_shows_the_table(route):
    section = re.search(rf"^### `{re.escape(route)}`\n\n(\|.*?)\n\n", DOCS, re.M | re.S)
    assert section is not None
    assert section.group(1) == rows(TABLES[route])


@pytest.mark.parametrize(
    ("table", "theirs"),
    [
        (params.CHAT, chat_params.CompletionCreateParamsStreaming),
        (params.COMPLETION, completion_params.CompletionCreateParamsStreaming),
        (params.EMBEDDING, embedding_params.EmbeddingCreateParams),
    ],
)
def test_every_parameter_of_the_official_client_is_known(table, theirs):
    names = {param.name for param in table}
    assert set(theirs.__annotations__) <= names, set(theirs.__annotations__) - names
    assert len(names) == len(table)


@pytest.mark.parametrize("table", TABLES.values())
def test_nothing_is_ignored(table):
    for param in table:
        if param.kind == "refused":
            with pytest.raises(ApiError, match=param.name) as raised:
                params.read_object(table, {param.name: {}})
            assert raised.value.param == param.name and raised.value.status == 400
        if param.kind == "fixed":
            for value in param.accepts:
                assert params.read_object(table, {param.name: value}) == {param.name: value}
            with pytest.raises(ApiError) as raised:
                params.read_object(table, {param.name: "something else"})
            assert raised.value.param == param.name
        assert params.read_object(table, {param.name: None}) == {}
