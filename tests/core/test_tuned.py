"""What `tune` keeps: whole files, by version, from several processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ridgeline.core import tuned
from ridgeline.core.arch import pretend

SM90 = pretend("sm90")


def test_what_is_saved_is_loaded(cache):
    assert tuned.load("attention", SM90) == {}
    file = tuned.save("attention", SM90, {"a": {"config": {"x": 1}}, "b": {"config": {"x": 2}}})
    assert file == cache / "tuned" / "sm90_H200.json" == tuned.path(SM90)
    tuned.save("attention", SM90, {"b": {"config": {"x": 3}}})
    tuned.save("w4a16", SM90, {"c": {}})
    assert tuned.load("attention", SM90) == {"a": {"config": {"x": 1}}, "b": {"config": {"x": 3}}}
    assert tuned.load("w4a16", SM90) == {"c": {}}
    assert tuned.load("attention", pretend("sm80")) == {}


def test_another_version_is_kept_and_not_used(cache, monkeypatch):
    tuned.save("attention", SM90, {"a": {"config": {}}})
    before = tuned.version()
    monkeypatch.setattr(tuned, "version", lambda: "ridgeline 99, triton 99")
    assert tuned.load("attention", SM90) == {}
    file = tuned.save("attention", SM90, {"a": {"config": {"new": 1}}})
    assert set(json.loads(file.read_text())) == {before, "ridgeline 99, triton 99"}
    monkeypatch.undo()


@pytest.mark.parametrize("text", ["{", "[]", '{"%s": 3}', '{"%s": {"attention": [1]}}'])
def test_a_damaged_file_is_named_and_replaced(cache, text):
    file = tuned.path(SM90)
    file.parent.mkdir(parents=True)
    file.write_text(text.replace("%s", tuned.version()))
    with pytest.warns(RuntimeWarning, match="sm90_H200.json is not used in full"):
        assert tuned.load("attention", SM90) == {}
    tuned.save("attention", SM90, {"a": {"config": {}}})
    assert tuned.load("attention", SM90) == {"a": {"config": {}}}


def test_processes_do_not_lose_each_others_entries(cache):
    code = (
        "import sys\nfrom ridgeline.core import tuned\nfrom ridgeline.core.arch import pretend\n"
        "for i in range(20):\n"
        "    tuned.save('attention', pretend('sm90'), {f'{sys.argv[1]} {i}': {}})\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert len(tuned.load("attention", SM90)) == 60
    assert sorted(p.name for p in tuned.path(SM90).parent.iterdir()) == [
        "sm90_H200.json", "sm90_H200.lock",
    ]  # fmt: skip
