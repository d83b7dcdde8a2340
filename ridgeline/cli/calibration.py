"""Calibration and held-out tokens of `ridgeline quantize`: a text, JSON lines, or the built-in set.

A text (and the built-in one: Wikipedia leads) is joined and cut into blocks of equal length, of
which a seeded choice is taken; held-out windows are blocks that were not chosen, of the built-in
set its test part. In JSON lines every line is a document: a text field, or `messages` that go
through the model's chat template. Documents are cut at the sequence length; shorter ones stay
short (their right padding is masked).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.core import progress
from ridgeline.core.errors import UserError
from ridgeline.core.text import read_text, wiki_split
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.recipe import calibration_blocks, chosen_blocks

JSON_LINES = (".jsonl", ".ndjson")
_WHOLE_CHARS, _PIECE_CHARS = 2**22, 2**20
"""A text up to the first is tokenized at once (some 170 bytes of memory a character); a longer one
in pieces of about the second, cut after a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for."""

    text: Path | None
    """A text or JSON-lines file; None: the built-in set."""
    json_field: str
    sequences: int
    sequence_tokens: int
    seed: int
    held_out: Path | None
    """Text to hold the two models against each other on; None: what `text` has left."""
    held_out_windows: int
    calibrate: bool = True
    """False: held-out windows only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What was found."""

    source: str
    """"built-in Wikipedia leads", or the file."""
    ids_BS: torch.Tensor
    """int64, rows filled up at the right with the last token where they are short."""
    lengths_B: torch.Tensor | None
    """Tokens of each row; None: all full."""
    held_out_WS: torch.Tensor | None
    """int64 windows for the comparison; None: there is no text left for it."""

    @property
    def count(self) -> int:
        """Calibration tokens."""
        return self.ids_BS.numel() if self.lengths_B is None else int(self.lengths_B.sum())


def read_tokens(request: Request, tokenizer: Tokenizer) -> Tokens:
    """Tokens as asked for.

    Raises: UserError for a file that cannot be read or holds too little, naming the line in JSON
    lines; ValueError for sizes that make no sense.
    """
    path = request.text
    if not request.calibrate:
        held_out = request.held_out or request.text
        assert held_out is not None, "nothing to read"
        ids = encoded(tokenizer, read_text(held_out))
        windows = _windows(ids, request, str(held_out)) if request.held_out_windows else None
        nothing = torch.zeros(0, 0, dtype=torch.int64)
        return Tokens(source="none", ids_BS=nothing, lengths_B=None, held_out_WS=windows)
    if path is not None and path.suffix.lower() in JSON_LINES:
        found = _from_documents(request, tokenizer, path)
    else:
        found = _from_text(request, tokenizer)
    if request.held_out is not None and request.held_out_windows:
        ids = encoded(tokenizer, read_text(request.held_out))
        windows = _windows(ids, request, str(request.held_out))
        found = Tokens(
            source=found.source, ids_BS=found.ids_BS, lengths_B=found.lengths_B, held_out_WS=windows
        )
    return found


def encoded(tokenizer: Tokenizer, text: str) -> torch.Tensor:
    """Token ids of a text, int64 [tokens], in bounded memory."""
    if len(text) <= _WHOLE_CHARS:
        return torch.tensor(tokenizer.encode(text), dtype=torch.int64)
    parts, start = [], 0
    while start < len(text):
        end = start + _PIECE_CHARS
        end = text.rfind("\n", start, end) + 1 or end
        parts.append(torch.tensor(tokenizer.encode(text[start:end]), dtype=torch.int64))
        start = end
    return torch.cat(parts)


def _from_text(request: Request, tokenizer: Tokenizer) -> Tokens:
    if request.text is None:
        split = wiki_split()
        calibration, test = split.calibration, split.test
        source = "built-in Wikipedia leads"
    else:
        calibration, test, source = read_text(request.text), None, str(request.text)
    ids = encoded(tokenizer, calibration)
    sizes = {
        "sequences": request.sequences, "length": request.sequence_tokens, "seed": request.seed
    }  # fmt: skip
    rows = calibration_blocks(ids, **sizes)
    held_out = None
    if request.held_out_windows and request.held_out is None:
        if test is not None:
            tokens = request.held_out_windows * request.sequence_tokens
            head = tokenizer.encode(test[: 12 * tokens])
            held_out = _windows(torch.tensor(head), request, source)
        else:
            rest = _rest(ids, request)
            held_out = rest if len(rest) else None
    return Tokens(source=source, ids_BS=rows, lengths_B=None, held_out_WS=held_out)


def _rest(ids: torch.Tensor, request: Request) -> torch.Tensor:
    """Blocks of the text that were not chosen, from the start on."""
    length = request.sequence_tokens
    blocks = ids.numel() // length
    chosen = set(chosen_blocks(blocks, request.sequences, request.seed).tolist())
    free = [block for block in range(blocks) if block not in chosen][: request.held_out_windows]
    return ids[: blocks * length].reshape(blocks, length)[free].long()


def _windows(ids: torch.Tensor, request: Request, source: str) -> torch.Tensor:
    length = request.sequence_tokens
    count = min(len(ids) // length, request.held_out_windows)
    if count == 0:
        raise UserError(
            f"quantize: the held-out text {source} must hold {length} tokens, got {len(ids)}; "
            "give more text or --held-out-windows 0"
        )
    return ids[: count * length].reshape(count, length).long()


def _from_documents(request: Request, tokenizer: Tokenizer, path: Path) -> Tokens:
    documents = [
        ids[: request.sequence_tokens] for ids in _documents(request, tokenizer, path) if len(ids)
    ]
    wanted = request.sequences
    if not documents:
        raise UserError(f"quantize: text {path} must hold documents, got none; give another file")
    if len(documents) < wanted:
        progress.say(f"quantize: {path} holds {len(documents)} documents where {wanted} were asked")
    pick = chosen_blocks(len(documents), min(wanted, len(documents)), request.seed).tolist()
    rows = [documents[index] for index in pick]
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    padded = [row + [row[-1]] * (longest - len(row)) for row in rows]
    total, asked = int(lengths.sum()), wanted * request.sequence_tokens
    if total < asked // 2:
        progress.say(
            f"quantize: {path} gives {total} calibration tokens where {asked} were asked "
            f"(documents of {total // len(rows)} tokens in the mean); longer ones calibrate better"
        )
    free = [i for i in range(len(documents)) if i not in set(pick)]
    spare = [token for i in free for token in documents[i]]
    windows = None
    if request.held_out is None and request.held_out_windows:
        if len(spare) >= request.sequence_tokens:
            windows = _windows(torch.tensor(spare), request, str(path))
    return Tokens(
        source=str(path),
        ids_BS=torch.tensor(padded),
        lengths_B=None if int(lengths.min()) == longest else lengths,
        held_out_WS=windows,
    )


def _documents(request: Request, tokenizer: Tokenizer, path: Path) -> Iterator[list[int]]:
    """Token ids of each line's document."""
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"quantize: {path} line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} must be JSON, got {error}; repair it") from error
        if not isinstance(entry, dict):
            raise UserError(f"{where} must be an object, got {type(entry).__name__}; repair it")
        if isinstance(entry.get("messages"), list):
            try:
                text = tokenizer.apply_chat_template(entry["messages"], add_generation_prompt=False)
            except (ValueError, TypeError) as error:
                raise UserError(f"{where}: {error}") from error
        elif isinstance(entry.get(request.json_field), str):
            text = entry[request.json_field]
        else:
            raise UserError(
                f"{where} must hold a text {request.json_field!r} or chat messages, got "
                f"{', '.join(sorted(entry)) or 'nothing'}; name the field with --json-field"
            )
        yield tokenizer.encode(text)
