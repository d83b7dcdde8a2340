"""Tokens as logprobs show them: their text and their bytes, half characters included."""

from __future__ import annotations

import re
from typing import Any

from ridgeline.engine.outputs import TokenLogprob

LOWEST = -9999.0
"""What JSON shows for minus infinity, as OpenAI's API does."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes with (GPT-2's table): printable Latin-1
    stands for itself, the other bytes follow from U+0100 in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_of_char()


class TokenTexts:
    """Texts and bytes of a tokenizer's tokens, kept once computed."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kept: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        """(text, bytes) of a token."""
        if token_id not in self._kept:
            self._kept[token_id] = self._read(token_id)
        return self._kept[token_id]

    def _read(self, token_id: int) -> tuple[str, list[int]]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:
            raw = self._tokenizer.token(token_id) or ""
            if found := _BYTE_TOKEN.fullmatch(raw):
                return text, [int(found.group(1), 16)]
            if raw and all(char in _BYTES for char in raw):
                return text, [_BYTES[char] for char in raw]
        return text, list(text.encode("utf-8"))


def chat_logprobs(entries: tuple[TokenLogprob, ...], texts: TokenTexts) -> list[dict[str, Any]]:
    """choices[].logprobs.content."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        text, data = texts(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": data}

    return [
        shown(entry.token_id, entry.logprob)
        | {"top_logprobs": [shown(token_id, value) for token_id, value in entry.top]}
        for entry in entries
    ]


def completion_logprobs(
    entries: tuple[TokenLogprob, ...], texts: TokenTexts, offset: int
) -> dict[str, Any]:
    """choices[].logprobs of /v1/completions; offset: where the first token's text starts."""
    tokens, offsets = [], []
    for entry in entries:
        text = texts(entry.token_id)[0]
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    tops = [{texts(t)[0]: max(value, LOWEST) for t, value in entry.top} for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.logprob, LOWEST) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
