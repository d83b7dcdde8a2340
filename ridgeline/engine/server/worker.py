"""The process in which a client's text meets a template or a grammar compiler.

`python -m ridgeline.engine.server.worker` reads one JSON job a line and answers one JSON line. A
job that takes longer than its time is ended by the kernel's alarm, whatever it is doing; memory is
bounded too. The server starts another one then (jobs.py): no request can stop the event loop. Time
is this process's own, so that a busy machine refuses nothing that an idle one takes.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
from typing import Any

from ridgeline.engine.server.grammar_text import LIMITS
from ridgeline.nn.chat import ChatTemplate

MAX_MEMORY_BYTES = 2 * 2**30
_templates: dict[str, ChatTemplate] = {}
_tokenizers: dict[str, Any] = {}


def render(job: dict[str, Any]) -> dict[str, Any]:
    """A conversation through a chat template."""
    source = job["template"]
    if source not in _templates:
        _templates.clear()
        _templates[source] = ChatTemplate(source, job["special_tokens"])
    text = _templates[source].render(job["messages"], tools=job["tools"], **job["variables"])
    return {"text": text}


def tokenizer(job: dict[str, Any]) -> dict[str, Any]:
    """Read a tokenizer, for the grammars that come after."""
    import llguidance

    with open(job["tokenizer"], encoding="utf-8") as file:
        _tokenizers[job["tokenizer"]] = llguidance.LLTokenizer(
            file.read(), n_vocab=job["vocab_size"], eos_token=job["eos_token_ids"]
        )
    return {}


def grammar(job: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar once, to see that it can be: within the time and the limits."""
    import llguidance

    if job["tokenizer"] not in _tokenizers:
        raise ValueError("the tokenizer could not be read")
    matcher = llguidance.LLMatcher(
        _tokenizers[job["tokenizer"]],
        job["grammar"],
        log_level=0,
        limits=llguidance.LLParserLimits(**LIMITS),
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"error": matcher.get_error()} if matcher.is_error() else {}


def nothing(job: dict[str, Any]) -> dict[str, Any]:
    """Say that the process is there."""
    del job
    return {}


JOBS = {"nothing": nothing, "render": render, "tokenizer": tokenizer, "grammar": grammar}


def main() -> None:
    """Answer jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; it closes our input
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["timeout_s"])  # no handler: the alarm ends us
        try:
            answer = JOBS[job["job"]](job)
        except Exception as error:
            answer = {"error": f"{error}"[:1000] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(json.dumps(answer).encode("ascii") + b"\n")
        out.flush()


if __name__ == "__main__":
    main()
