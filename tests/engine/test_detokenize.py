"""Text comes whole characters at a time, never the start of a stop string, and adds up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.detokenize import TextStream
from ridgeline.engine.speculate import Lookup

TEXT = "Grüße, 世界! \U0001f9ed ok"


def pieces(tokenizer, text: str, stop=(), **options) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stop, **options)
    found = []
    for token in text.encode():
        piece, stopped = stream.push(token)
        found.append(piece)
        if stopped:
            return found, stopped
    found.append(stream.flush())
    return found, None


def test_bytes_of_a_character_come_together(tokenizer):
    found, _ = pieces(tokenizer, TEXT)
    assert "".join(found) == TEXT
    assert [piece for piece in found if piece] == list(TEXT)


def test_a_stop_string_across_tokens_is_held_back(tokenizer):
    found, stopped = pieces(tokenizer, "one two END three", stop=("END", "never"))
    assert stopped == "END" and "".join(found) == "one two "
    assert all("E" not in piece for piece in found)
    kept, _ = pieces(tokenizer, "one two END three", stop=("END",), include_stop=True)
    assert "".join(kept) == "one two END"


def test_a_false_start_is_given_out(tokenizer):
    found, stopped = pieces(tokenizer, "ENENTER", stop=("END",))
    assert stopped is None and "".join(found) == "ENENTER"


def test_a_broken_character_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    given_out = stream.push("é".encode()[0])[0]
    assert given_out == "" and stream.flush() == "\ufffd"


def test_special_tokens(tokenizer):
    stream = TextStream(tokenizer)
    assert stream.push(256)[0] == "" and stream.flush() == ""
    shown = TextStream(tokenizer, skip_special_tokens=False)
    assert shown.push(256)[0] + shown.flush() == tokenizer.decode([256], skip_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="abé世", max_size=20),
    st.lists(st.text(alphabet="abé世", min_size=1, max_size=4), max_size=3),
)
def test_the_text_before_the_first_stop(tokenizer, text, stop):
    found, stopped = pieces(tokenizer, text, stop=tuple(stop))
    ends = [(text.find(each) + len(each), each) for each in stop if each in text]
    if ends:
        end, first = min(ends)
        assert stopped == first and "".join(found) == text[: end - len(first)]
    else:
        assert stopped is None and "".join(found) == text


def test_drafts_are_what_followed_before():
    lookup = Lookup()
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    assert lookup.propose(text, 3) == [4, 5, 1]
    assert lookup.propose([*text, 4], 9) == [5, 1, 2, 3, 4]
    assert lookup.propose([*text, 4, 9], 3) == []
    assert Lookup().propose([7], 3) == [] and Lookup().propose([7, 7, 7], 2) == [7]
