"""Text files into documents, read in bounded memory, with errors that name the place.

A document ends at a blank line, at a line equal to a separator, at a JSON line's end, or at the
file's end. Line ends are normalised to LF and a byte order mark is dropped; documents of white
space are not counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.core.errors import UserError
from ridgeline.train.config import DataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentRule:
    """What ends a document."""

    kind: str
    """auto, blank_line, separator, jsonl or file."""
    separator: str = ""
    json_field: str = "text"

    @staticmethod
    def of(config: DataConfig) -> DocumentRule:
        """The rule that a config asks for."""
        return DocumentRule(
            kind=config.documents, separator=config.separator.strip(), json_field=config.json_field
        )

    def kind_of(self, path: Path) -> str:
        """The rule of one file, auto resolved by its name."""
        if self.kind != "auto":
            return self.kind
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            return "jsonl"
        return "separator" if self.separator else "blank_line"


def file_digest(path: Path) -> str:
    """SHA-256 of a text file. Raises: UserError where it is missing, unreadable or empty."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            size = 0
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise UserError(f"data: could not read {path}: {error.strerror or error}") from error
    if size == 0:
        raise UserError(f"data: {path} is empty; give a text file with text in it")
    return digest.hexdigest()


def read_documents(path: Path, rule: DocumentRule) -> Iterator[str]:
    """The documents of a file in order.

    Raises: UserError where the file cannot be read, is not UTF-8, has a bad JSON line or no text.
    """
    kind, found = rule.kind_of(path), False
    lines = _lines(path)
    if kind == "jsonl":
        texts: Iterable[str] = _json_texts(path, lines, rule.json_field)
    elif kind == "file":
        texts = ("".join(lines) for _ in range(1))
    elif kind == "separator":
        texts = _split(lines, lambda line: line.strip() == rule.separator)
    else:
        texts = _split(lines, lambda line: not line.strip())
    for text in texts:
        text = text.strip("\n")
        if text.strip():
            found = True
            yield text
    if not found:
        raise UserError(f"data: {path} has no text in it; give a file with documents")


def _lines(path: Path) -> Iterator[str]:
    offset = 0
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"data: {path} is not UTF-8 (byte 0x{raw[error.start]:02x} at offset "
                        f"{offset + error.start}, line {number}); convert it, as with iconv"
                    ) from error
                offset += len(raw)
                if number == 1:
                    line = line.removeprefix("\ufeff")
                yield line.replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"data: could not read {path}: {error.strerror or error}") from error


def _split(lines: Iterable[str], ends: Callable[[str], bool]) -> Iterator[str]:
    kept: list[str] = []
    for line in lines:
        if ends(line):
            yield "".join(kept)
            kept = []
        else:
            kept.append(line)
    yield "".join(kept)


def _json_texts(path: Path, lines: Iterable[str], field: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise UserError(f"data: {path} line {number} is not JSON: {error}") from error
        text = record.get(field) if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise UserError(
                f"data: {path} line {number} has no text in field {field!r}; set data.json_field"
            )
        yield text
