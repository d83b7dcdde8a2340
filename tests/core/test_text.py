"""The split of a text, and user's files that are none."""

from __future__ import annotations

import pytest

from ridgeline.core.errors import UserError
from ridgeline.core.text import SEPARATOR, read_text, split_documents, wiki_documents, wiki_split

DOCUMENTS = [f"document {number} " + "x" * (number % 7) for number in range(100)]


def test_parts_by_characters():
    text = SEPARATOR.join(DOCUMENTS)
    split = split_documents(DOCUMENTS)
    assert split.calibration == text[: len(text) // 2]
    assert split.test == text[int(len(text) * 0.8) :]
    middle = text[len(text) // 2 : int(len(text) * 0.8)]
    assert all(document in middle for document in split.train)
    assert len(SEPARATOR.join(split.train)) > 0.9 * len(middle)
    assert split_documents(DOCUMENTS) == split


def test_no_document_in_two_parts():
    split = split_documents(DOCUMENTS)
    for document in split.train:
        assert document + SEPARATOR not in split.calibration
        assert SEPARATOR + document not in split.test


@pytest.mark.parametrize("documents", [[], [""], ["one only"]])
def test_too_little(documents):
    with pytest.raises(ValueError, match="text: documents must be enough for three parts"):
        split_documents(documents)


def test_read_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Grüße\r\n", encoding="utf-8", newline="")
    assert read_text(path) == "Grüße\r\n"
    path.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match="must be UTF-8, got byte 0xff at 3"):
        read_text(path)
    path.write_bytes(b" \n")
    with pytest.raises(UserError, match="must hold text, got an empty file"):
        read_text(path)
    with pytest.raises(UserError, match="could not read .*nope: No such file"):
        read_text(tmp_path / "nope")


@pytest.mark.weights
def test_wikipedia_leads():
    try:
        documents = wiki_documents()
    except UserError as error:
        pytest.skip(f"no text: {error}")
    assert len(documents) == 10_033
    assert documents[0].startswith("20th-century classical music is Western art music")
    split = wiki_split()
    assert (len(split.calibration), len(split.train), len(split.test)) == (
        2_447_544,
        3_137,
        979_018,
    )
