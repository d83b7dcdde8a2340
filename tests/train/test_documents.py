import hashlib

import pytest

from ridgeline.core.errors import UserError
from ridgeline.train.config import DataConfig
from ridgeline.train.documents import DocumentRule, file_digest, read_documents


def read(tmp_path, content, name="a.txt", **rule):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_documents(file, DocumentRule(**{"kind": "auto"} | rule)))


def test_blank_lines_end_documents(tmp_path):
    text = "\n\nfirst\nsecond line\n \t\n\nthird\n"
    assert read(tmp_path, text) == ["first\nsecond line", "third"]


def test_a_separator_ends_documents_and_blank_lines_do_not(tmp_path):
    text = "one\n\nstill one\n<eod>\n<eod>\ntwo\n <eod> \nthree with <eod> inside"
    assert read(tmp_path, text, separator="<eod>") == [
        "one\n\nstill one",
        "two",
        "three with <eod> inside",
    ]


def test_json_lines(tmp_path):
    text = '{"text": "a\\n\\nb"}\n\n"plain string"\n{"text": "c", "id": 3}\n{"text": " "}\n'
    assert read(tmp_path, text, name="a.jsonl") == ["a\n\nb", "plain string", "c"]
    assert read(tmp_path, '{"body": "x"}', kind="jsonl", json_field="body") == ["x"]


def test_a_file_as_one_document(tmp_path):
    assert read(tmp_path, "a\n\nb\n", kind="file") == ["a\n\nb"]


def test_line_ends_and_byte_order_mark(tmp_path):
    assert read(tmp_path, "\ufeffa\r\nb\r\n\r\nc") == ["a\nb", "c"]


@pytest.mark.parametrize(
    ("content", "name", "text"),
    [
        (b"good\nbad \xff here", "a.txt", r"a.txt is not UTF-8 \(byte 0xff at offset 9, line 2\)"),
        (b" \n\n\t\n", "a.txt", r"a.txt has no text in it"),
        (b'{"text": 3}', "a.jsonl", r"line 1 has no text in field 'text'"),
        (b'"x"\n{oops', "a.jsonl", r"line 2 is not JSON"),
        (b'{"text": " "}', "a.jsonl", r"has no text in it"),
    ],
)
def test_errors_name_the_place(tmp_path, content, name, text):
    with pytest.raises(UserError, match=text) as caught:
        read(tmp_path, content, name=name)
    assert "\n" not in str(caught.value)


def test_digest_and_its_refusals(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"text")
    assert file_digest(file) == hashlib.sha256(b"text").hexdigest()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UserError, match=r"empty.txt is empty"):
        file_digest(tmp_path / "empty.txt")
    with pytest.raises(UserError, match=r"could not read .*missing.txt: No such file"):
        file_digest(tmp_path / "missing.txt")
    with pytest.raises(UserError, match=r"could not read .*: Is a directory"):
        file_digest(tmp_path)


def test_the_rule_of_a_config():
    rule = DocumentRule.of(DataConfig(separator=" <eod> ", json_field="body"))
    assert rule == DocumentRule(kind="auto", separator="<eod>", json_field="body")
