from __future__ import annotations

import json

import pytest

from ridgeline.core import progress


@pytest.fixture
def mode():
    before = progress.mode()
    yield progress.set_mode
    progress.set_mode(before)


def test_json_mode_prints_one_object_a_line(mode, capsys):
    mode("json")
    with progress.task("load", 3, "files") as advance:
        advance(1)
        advance(2, note="done")
    progress.event("result", ppl=13.15)
    progress.say("not for machines")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["event"] == "progress" and lines[0]["done"] == 3 and lines[0]["note"] == "done"
    assert lines[1] == {"event": "result", "ppl": 13.15}
    assert len(lines) == 2


def test_quiet_prints_nothing(mode, capsys):
    mode("quiet")
    with progress.task("load", 3) as advance:
        advance(3)
    progress.event("x")
    progress.say("x")
    assert capsys.readouterr() == ("", "")


def test_bars_go_to_stderr(mode, capsys):
    mode("bars")
    with progress.task("load", 2, "files") as advance:
        advance(2, note="half")
    out, err = capsys.readouterr()
    assert out == "" and "load" in err and "2/2" in err


def test_bytes_are_told_in_megabytes(mode, capsys):
    mode("lines")
    with progress.task("fetch", 92_871_040, "bytes") as advance:
        advance(92_871_040)
    assert capsys.readouterr().err.startswith("fetch: 92.9 of 92.9 MB 0 s")


def test_quiet_during_restores(mode):
    mode("json")
    assert progress.quiet_during(progress.mode) == "quiet"
    assert progress.mode() == "json"
