"""Exit codes, messages, help and JSON of the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Literal

import pytest

import ridgeline
from ridgeline.cli import main as cli
from ridgeline.cli.command import Command
from ridgeline.cli.usage import flag_names, with_flags
from ridgeline.core import progress
from ridgeline.core.errors import UserError, bad_value, unsupported


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """A command for tests."""

    count: int = 1
    """How many, at least 1."""
    kind: Literal["a", "b"] = "a"
    """Which."""
    limit: float | None = None
    """How far; none: as far as it goes."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise bad_value("fake", "count", "be at least 1", self.count, "raise it")


@pytest.fixture
def fake(monkeypatch):
    """Put a function in the place of `doctor`; returns how to call it."""

    def install(function):
        command = Command(
            run=function,
            config=FakeConfig,
            show=lambda result: f"count was {result['count']}",
            kept=lambda config: f"kept {config.count} files",
        )
        monkeypatch.setattr(cli, "load_command", lambda name: command)

    return install


def _raise(error):
    def function(config):
        raise error

    return function


def test_done_prints_the_result(fake, capsys):
    fake(lambda config: {"count": config.count})
    assert cli.main(["doctor", "--count", "3"]) == 0
    assert capsys.readouterr().out == "count was 3\n"


def test_json_prints_one_object_a_line_and_nothing_else(fake, capsys):
    def function(config):
        progress.say("for people")
        with progress.task("work", 2, "steps") as advance:
            advance(2)
        return {"count": config.count}

    fake(function)
    assert cli.main(["doctor", "--json", "--count", "2"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["progress", "result"]
    assert events[-1] == {"event": "result", "command": "doctor", "count": 2}


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (bad_value("op", "x", "be 1", 2, "mend it"), 2, "op: x must be 1, got 2; mend it"),
        (unsupported("op", "x", "be 1", 2, "mend it"), 2, "op: x must be 1, got 2; mend it"),
        (TypeError("op: a must be an int"), 2, "op: a must be an int"),
        (UserError("text: f is\nempty"), 1, "text: f is empty"),
        (FileNotFoundError(2, "No such file", "a.txt"), 1, "doctor: No such file (a.txt)"),
        (OSError("odd"), 1, "doctor: odd"),
        (KeyboardInterrupt(), 1, "doctor: interrupted; kept 1 files"),
        (
            RuntimeError("broken"),
            1,
            "doctor: RuntimeError: broken; --debug prints the traceback",
        ),
    ],
)
def test_errors_are_one_line_on_stderr(fake, capsys, error, code, line):
    fake(_raise(error))
    assert cli.main(["doctor"]) == code
    said = capsys.readouterr()
    assert said.err == f"ridgeline: {line}\n"
    assert said.out == ""


def test_an_error_in_json_mode_is_an_event_too(fake, capsys):
    fake(_raise(UserError("text: f is empty")))
    assert cli.main(["doctor", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == {"event": "error", "message": "text: f is empty", "exit_code": 1}
    assert said.err == "ridgeline: text: f is empty\n"


def test_the_traceback_only_with_debug(fake, capsys):
    fake(_raise(UserError("text: f is empty")))
    assert cli.main(["doctor", "--debug"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said and said.endswith("ridgeline: text: f is empty\n")


def test_a_config_that_refuses_its_values_exits_with_2(fake, capsys):
    fake(lambda config: {"count": config.count})
    assert cli.main(["doctor", "--count", "0"]) == 2
    assert capsys.readouterr().err == (
        "ridgeline: fake: --count must be at least 1, got 0; raise it\n"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--count", "x"], "doctor: --count must be a whole number, got x"),
        (["--count"], "doctor: --count must have a value, got nothing"),
        (["--cout", "3"], "doctor: flags must be known ones, got --cout 3; did you mean --count?"),
        (["--kind", "c"], "doctor: --kind must be one of a, b, got c"),
        (["--limit", "x"], "doctor: --limit must be none or a number, got x"),
        (["stray"], "doctor: flags must be known ones, got stray"),
    ],
)
def test_flags_that_do_not_parse_are_one_line_and_exit_with_2(fake, capsys, words, line):
    fake(lambda config: {"count": config.count})
    assert cli.main(["doctor", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"ridgeline: {line}")
    assert said.err.endswith(" see ridgeline doctor --help\n")
    assert cli.main(["doctor", *words, "--json"]) == 2
    event = json.loads(capsys.readouterr().out)
    assert event["event"] == "error" and event["message"].startswith(line.split(" 3;")[0])


def test_what_must_be_given_is_named(capsys):
    assert cli.main(["explain", "attention"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "ridgeline: explain attention: --seqlen must be given, got nothing; "
        "see ridgeline explain attention --help\n"
    )


def test_the_reporter_is_put_back(fake):
    before = progress.mode()
    fake(lambda config: {"count": 1})
    cli.main(["doctor", "--json"])
    assert progress.mode() == before


def test_warnings_are_one_line(fake):
    def function(config):
        said.append(warnings.formatwarning("attention: using ref", RuntimeWarning, "a.py", 1))
        return {"count": 1}

    said, before = [], warnings.formatwarning
    fake(function)
    assert cli.main(["doctor"]) == 0
    assert said == ["ridgeline: warning: attention: using ref\n"]
    assert warnings.formatwarning is before


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    every_steps: int = 1
    peak_tflops: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PartsConfig:
    log: PartConfig
    save: PartConfig
    max_tokens: int = 1
    out: str = ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("engine: max_tokens must be 1, got 2; x", "engine: --max-tokens must be 1, got 2; x"),
        (
            "op: out x/y must be a folder, got none; x",
            "op: --out x/y must be a folder, got none; x",
        ),
        ("op: log.every_steps must be 1, got 0; x", "op: --log.every-steps must be 1, got 0; x"),
        ("save: every_steps must be 1, got 0; x", "save: --save.every-steps must be 1, got 0; x"),
        ("op: every_steps must be 1, got 0; x", "op: every_steps must be 1, got 0; x"),  # of two
        ("op: peak must be 1; raise max_tokens", "op: peak must be 1; raise --max-tokens"),
        ("op: a must be 1, got max_tokens; b", "op: a must be 1, got max_tokens; b"),  # a value
        ("op: a/max_tokens must go out; see max_tokens.json", None),
        ("op: damping must be 1, got 0; x", "op: --damp must be 1, got 0; x"),
    ],
)
def test_errors_name_flags(said, told):
    names = flag_names(PartsConfig) | {"damping": "--damp"}
    assert with_flags(said, names) == (told or said)
    assert with_flags("op: out must be 1, got 2; x", names, plain=False) == (
        "op: out must be 1, got 2; x"
    )


def test_unknown_command_and_no_command(capsys):
    assert cli.main(["frobnicate"]) == 2
    said = capsys.readouterr().err
    assert "command must be one of quickstart, doctor" in said and "did you mean" not in said
    assert cli.main(["quantise"]) == 2
    assert "got 'quantise'; did you mean quantize? see ridgeline" in capsys.readouterr().err
    assert cli.main(["explain", "atention"]) == 2
    assert "got 'atention'; did you mean attention? see ridgeline" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert "usage: ridgeline" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ridgeline {ridgeline.__version__}\n"
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in cli.COMMANDS)


@pytest.mark.parametrize("words", ["--help", "--version", "frobnicate"])
def test_the_first_word_imports_no_torch(words):
    script = (
        "import sys\n"
        "from ridgeline.cli.main import main\n"
        f"main([{words!r}])\n"
        "heavy = {'torch', 'tyro', 'numpy', 'matplotlib', 'triton', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_m_runs_it():
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"ridgeline {ridgeline.__version__}\n")


def test_an_error_that_is_not_of_our_form_points_at_debug(fake, capsys):
    fake(_raise(TypeError("unsupported operand type(s) for +: 'int' and 'str'")))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("'str' (--debug shows the traceback)")
    fake(_raise(bad_value("fake", "count", "be even", 3, "double it")))
    assert cli.main(["doctor"]) == 2
    assert "--debug" not in capsys.readouterr().err
