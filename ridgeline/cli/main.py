"""`ridgeline <command>`: parse, run, print, and turn errors into exit codes.

Exit codes: 0 done; 2 bad arguments (what a caller can cause: ValueError, TypeError,
NotImplementedError); 1 failed with a one-line reason on stderr (the traceback only with --debug);
3 done, but a gate of the command refuses the result (quantize --max-kl); 143 ended by SIGTERM.
A command's module is imported when the command is chosen, so `ridgeline --help` imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import io
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Annotated, Any

import ridgeline
from ridgeline.cli import terminate
from ridgeline.cli.command import Command, Output
from ridgeline.cli.usage import flag_names, usage_error, with_flags
from ridgeline.core import env, progress
from ridgeline.core.errors import UserError, common, is_common

COMMANDS: dict[str, str] = {
    "quickstart": "The whole path on real weights, from perplexity to 4 bits, ending in a report.",
    "doctor": "What this machine has, which implementations run on it, and its measured ceilings.",
    "explain": "Which kernel and tile a problem gets, why others refuse, and its roofline floor.",
    "tune": "Time the valid tiles of a kernel on this machine's GPU and keep the fastest.",
    "warmup": "Compile the Hopper kernels into the user cache, with or without a GPU.",
    "train": "Train a decoder on text files, on one process or many (torchrun).",
    "verify": "Compare a parallel layout with one process, tensor by tensor, on a tiny model.",
    "quantize": "Quantize a Hugging Face folder with GPTQ, AWQ or plain rounding.",
    "eval": "Perplexity of a model folder on a text file.",
    "generate": "Answer a prompt, streamed token by token.",
    "serve": "Serve a model folder over OpenAI's API, with a chat page at /.",
    "bench": "Load a running server and measure latencies and throughput.",
    "convert": "Write a GGUF file, a Hugging Face folder or a checkpoint as a Hugging Face folder.",
}
"""Name and one line of each command; `ridgeline.cli.<name>` holds it."""

DONE, FAILED, BAD_ARGUMENTS = 0, 1, 2

_SPEAK_S = 30.0
"""Longest that a silent rank waits for the end that torchrun brings it."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line on `argv` (default: the process's own); returns the exit code."""
    words = [_as_utf8(word) for word in (sys.argv[1:] if argv is None else argv)]
    if not words:
        print(usage(), file=sys.stderr)
        return BAD_ARGUMENTS
    if words[0] in ("-h", "--help"):
        print(usage())
        return DONE
    if words[0] == "--version":
        print(f"ridgeline {ridgeline.__version__}")
        return DONE
    if words[0] not in COMMANDS:
        names, hint = ", ".join(COMMANDS), _hint(words[0], COMMANDS)
        return _fail(
            f"command must be one of {names}, got {words[0]!r}; {hint}see ridgeline --help",
            BAD_ARGUMENTS,
        )
    with _one_line_warnings(), _reporter("--json" in words[1:]):
        return _guarded(words[0], words[1:])


def _hint(word: str, known: Iterable[str]) -> str:
    """A question for a word that is nearly one of the known ones, else ""."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _as_utf8(word: str) -> str:
    """An argument as the text it is, also under a locale that cannot decode it (LC_ALL=C)."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def usage() -> str:
    """What `ridgeline --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: ridgeline <command> [options]",
        "",
        "A decoder LLM from training to 4-bit serving at the hardware's limit.",
        "",
        "commands:",
        *(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()),
        "",
        "ridgeline <command> --help lists a command's options; all take --json and --debug.",
        "ridgeline --version prints the version.",
    ]
    return "\n".join(lines)


def load_command(name: str) -> Command:
    """Import the module of a command."""
    return importlib.import_module(f"ridgeline.cli.{name}").COMMAND


def parse(
    prog: str, config: type, words: list[str], default: Any = None, note: str = ""
) -> tuple[Any, Output]:
    """Read a command's flags into its config and the output flags.

    default: a config whose values are the flags' defaults; None: the dataclass's.

    Raises: ValueError for flags that do not parse and values that the config refuses;
    SystemExit(0) after --help.
    """
    import tyro

    invocation = dataclasses.make_dataclass(
        "Invocation",
        [
            ("config", Annotated[config, tyro.conf.arg(name="")]),
            ("output", Annotated[Output, tyro.conf.arg(name=""), tyro.conf.FlagCreatePairsOff]),
        ],
        kw_only=True,
    )
    start = None if default is None else invocation(config=default, output=Output())
    about = f"{config.__doc__}\n\n{note}".strip()
    said = io.StringIO()
    parsed: Any
    try:
        with redirect_stderr(said):
            parsed = tyro.cli(invocation, args=words, prog=prog, description=about, default=start)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(usage_error(prog, said.getvalue())) from None
    return parsed.config, parsed.output


def _guarded(name: str, words: list[str]) -> int:
    debug = "--debug" in words
    command, config = None, None
    try:
        command = load_command(name)
        config = _read_flags(name, command, words)
        with terminate.told(command.tells_sigterm):
            result = command.run(config)
        progress.event("result", command=name, **result)
        if text := command.show(result):
            progress.say(text)
        return command.code(result)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else DONE
    except KeyboardInterrupt as stop:
        kept = command.kept(config) if command and config is not None else "nothing was written"
        ended = isinstance(stop, terminate.TerminatedError)
        said, code = ("terminated", terminate.TERMINATED) if ended else ("interrupted", FAILED)
        return _fail(f"{name}: {said}; {kept}", code, debug=debug, once=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ValueError, TypeError, NotImplementedError) as error:
        reason = _with_flags(str(error), command, words)
        hint = "" if debug or _ours(reason) else " (--debug shows the traceback)"
        once = is_common(error)
        return _fail(f"{reason}{hint}", BAD_ARGUMENTS, debug=debug, once=once)
    except UserError as error:
        own = str(error).startswith(f"{name}: ")
        reason = _with_flags(str(error), command, words, plain=own)
        return _fail(reason, FAILED, debug=debug, once=is_common(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _fail(f"{name}: {error.strerror or error}{where}", FAILED, debug=debug)
    except Exception as error:
        hint = "" if debug else "; --debug prints the traceback"
        return _fail(f"{name}: {type(error).__name__}: {error}{hint}", FAILED, debug=debug)


def _read_flags(name: str, command: Command, words: list[str]) -> Any:
    try:
        prog, chosen, rest = _choose_config(f"ridgeline {name}", command, words)
        default, rest = command.defaults(rest) if command.defaults else (None, rest)
        return parse(prog, chosen, rest, default, command.note)[0]
    except (ValueError, TypeError, NotImplementedError, UserError) as error:
        raise common(error) from error.__cause__  # every rank was given the same flags


def _with_flags(
    reason: str, command: Command | None, words: list[str], *, plain: bool = True
) -> str:
    """A reason that names a config's fields, as the user knows them. plain: see with_flags."""
    if command is None:
        return reason
    config = command.config
    if isinstance(config, Mapping):
        config = config.get(words[0]) if words else None
    if config is None:
        return reason
    return with_flags(reason, {**flag_names(config), **command.flags}, plain=plain)


def _ours(reason: str) -> bool:
    """Whether a message has the project's form, `<op>: <arg> ...; <what to do>`; another is likely
    a library's or a bug of ours, and says little without its traceback."""
    return re.match(r"[^:;]+: .+(; | must ).+", reason, re.DOTALL) is not None


def _choose_config(prog: str, command: Command, words: list[str]) -> tuple[str, type, list[str]]:
    if not isinstance(command.config, Mapping):
        return prog, command.config, words
    names = ", ".join(command.config)
    if words and words[0] in ("-h", "--help"):
        width = max(map(len, command.config))
        lines = [f"  {name:<{width}}  {_summary(kind)}" for name, kind in command.config.items()]
        print("\n".join([f"usage: {prog} <{names.replace(', ', '|')}> [options]", "", *lines]))
        raise SystemExit(DONE)
    if not words or words[0] not in command.config:
        got = repr(words[0]) if words else "nothing"
        command_name = prog.removeprefix("ridgeline ")
        hint = _hint(words[0], command.config) if words else ""
        raise ValueError(
            f"{command_name}: the next word must be one of {names}, got {got}; {hint}see {prog} "
            "--help"
        )
    return f"{prog} {words[0]}", command.config[words[0]], words[1:]


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _fail(reason: str, code: int, *, debug: bool = False, once: bool = False) -> int:
    """Say why, and return the exit code. once: every rank of the run says it, so the first does."""
    rank = env.rank()
    if once and rank > 0:
        if env.has_torchrun():  # it ends all ranks when one has ended: the one that speaks is first
            time.sleep(_SPEAK_S)
        return code
    if debug:
        traceback.print_exc()
    line = " ".join(reason.split())
    by = "" if env.world_size() == 1 or once else f"[rank {rank}] "
    print(f"ridgeline: {by}{line}", file=sys.stderr)
    progress.event("error", message=line, exit_code=code)
    return code


@contextmanager
def _reporter(as_json: bool) -> Iterator[None]:
    before = progress.mode()
    talking = "json" if as_json else "bars" if sys.stderr.isatty() else "lines"
    progress.set_mode(talking if env.rank() == 0 else "quiet")  # of many ranks the first one talks
    try:
        yield
    finally:
        progress.set_mode(before)


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    before = warnings.formatwarning
    first = env.rank() == 0  # what all ranks would say is said once
    warnings.formatwarning = lambda message, *_, **__: (
        f"ridgeline: warning: {message}\n" if first else ""
    )
    try:
        yield
    finally:
        warnings.formatwarning = before


if __name__ == "__main__":
    sys.exit(main())
