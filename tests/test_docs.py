"""The README's commands, paths, links and tables hold; so do the documents'."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ridgeline.cli import main as cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]


def _blocks(text: str, language: str = "") -> list[str]:
    """Code blocks of a language. Every block is looked at, or a fence that closes one of another
    language would be taken for one that opens."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [code for said, code in found if said == language]


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """(number of processes, words) of every `ridgeline ...` line in a code block, torchrun before
    it or not; under torchrun those are left out that read a config file, which is not there."""
    blocks = [block.replace("\\\n", " ") for block in _blocks(text)]
    found = []
    for line in (line for block in blocks for line in block.splitlines()):
        ranks = re.match(r"torchrun --nproc-per-node (\d+) -m (?!.* --config )", line)
        line = line[ranks.end() :] if ranks else line
        if line.startswith("ridgeline "):
            found.append((ranks[1] if ranks else "1", shlex.split(line, comments=True)))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = re.findall(r"`((?:ridgeline|tests|benchmarks|docs)/[\w/.-]*)`", text)
    links = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if "//" not in link]
    assert page.name != "README.md" or (paths and links)
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_the_first_two_commands_are_make_targets():
    first = [line.split("#")[0].split() for line in _blocks(README)[0].strip().splitlines()]
    assert first == [["make", "quickstart"], ["make", "test"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for _, target in first:
        assert re.search(rf"^{target}:", makefile, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page, monkeypatch):
    """Every command in a code block is taken by its parser as it stands."""
    for ranks, words in _commands(page.read_text(encoding="utf-8")):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        command = cli.load_command(words[1])
        prog, config, rest = cli._choose_config("ridgeline", command, words[2:])
        default, rest = command.defaults(rest) if command.defaults else (None, rest)
        assert cli.parse(prog, config, rest, default)


def test_the_explain_command_runs_as_written(capsys):
    words = re.search(r"`ridgeline (explain attention [^`]+)`", README)
    assert words is not None
    assert cli.main(words.group(1).split()) == 0
    assert "floor " in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_run(page):
    for code in _blocks(page.read_text(encoding="utf-8"), "python"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr


def test_the_tables_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "benchmarks/tables.py", "--check"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_six_files_are_named_alike():
    said = re.search(r"Read these six files in this order:(.*?)\n\n", README, re.S)
    assert said is not None
    short = re.findall(r"`([^`]+)`", said.group(1))
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    long = re.findall(r"^\d\. `([^`]+)`", text, re.M)
    assert short == long and len(short) == 6


def test_every_dependency_has_its_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=! \[]", requirement)[0]
        assert re.search(rf"^\| {name} \| .{{15,}} \|$", text, re.M), name
    for extra in project["optional-dependencies"]:
        assert re.search(rf"^\| {extra} \|", text, re.M), extra


def test_rooms_are_those_of_the_layering_test():
    rules = ast.parse((ROOT / "tests" / "test_layering.py").read_text(encoding="utf-8"))
    table = next(
        node.value
        for node in ast.walk(rules)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MAY_IMPORT"
    )
    assert isinstance(table, ast.Dict)
    rooms = {ast.literal_eval(key) for key in table.keys if key is not None}
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)/` \|", text, re.M))
    packages = {path.parent.name for path in (ROOT / "ridgeline").glob("*/__init__.py")}
    assert named <= rooms and packages <= named
