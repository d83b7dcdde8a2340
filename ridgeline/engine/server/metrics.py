"""/metrics in Prometheus' text form, and /health as plain data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ridgeline.engine.outputs import EngineStats, Histogram
from ridgeline.engine.server.state import Counters, ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "ridgeline_"

_HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft_s", "From arrival to the first token."),
    ("inter_token_latency_seconds", "inter_token_s", "Between two tokens of a choice."),
    ("queue_time_seconds", "queue_s", "From arrival to the first step."),
    ("request_seconds", "e2e_s", "From arrival to the end."),
)
_COUNTERS = (
    ("prompt_tokens_total", "prompt_tokens", "Tokens of prompts."),
    ("generation_tokens_total", "generation_tokens", "Tokens generated."),
    ("prefix_cache_queries_tokens_total", "prefix_query_tokens", "Prompt tokens looked up."),
    ("prefix_cache_hits_tokens_total", "prefix_hit_tokens", "Prompt tokens found in the cache."),
    ("preemptions_total", "preemptions", "Sequences that gave up their pages."),
    ("requests_rejected_total", "rejected", "Requests refused for a full queue."),
    ("steps_total", "steps", "Steps of the engine."),
    ("speculated_tokens_total", "spec_proposed", "Tokens proposed by prompt lookup."),
    ("speculated_tokens_accepted_total", "spec_accepted", "Of those, tokens accepted."),
    ("reloads_total", "reloads", "Weights swapped while running."),
)
_GAUGES = (
    ("requests_running", "running", "Sequences in the running batch."),
    ("requests_waiting", "waiting", "Sequences that wait."),
    ("queued_tokens", "queued_tokens", "Tokens that everything inside may come to."),
    ("kv_pages_used", "kv_pages_used", "KV-cache pages in use."),
    ("kv_pages", "kv_pages_total", "KV-cache pages."),
    ("tokens_per_second", "tokens_per_s", "Generated, over the last ten seconds."),
    ("read_bytes_per_second", "bytes_per_s", "Weights and cache read by decode steps."),
)


def metrics_text(state: ServerState) -> str:
    """All metrics of now."""
    stats = state.engine.stats()
    health = state.engine.health()
    lines = [*_engine_lines(stats), *_server_lines(state.counters)]
    used = stats.kv_pages_used / stats.kv_pages_total if stats.kv_pages_total else 0.0
    lines += _single("kv_usage_ratio", "gauge", "Share of the KV-cache pages in use.", used)
    if stats.bandwidth_share is not None:
        about = "Achieved share of the device's measured read bandwidth."
        lines += _single("bandwidth_ratio", "gauge", about, stats.bandwidth_share)
    about = "Since the last step of the engine ended."
    lines += _single("last_step_age_seconds", "gauge", about, health.last_step_age_s)
    about = "Age of the oldest request inside."
    lines += _single("oldest_request_age_seconds", "gauge", about, health.oldest_request_age_s)
    about = "Whether the engine makes progress."
    lines += _single("healthy", "gauge", about, float(health.ok))
    about = "Since the server started."
    lines += _single("uptime_seconds", "counter", about, time.monotonic() - state.started)
    return "\n".join(lines) + "\n"


def _engine_lines(stats: EngineStats) -> Iterator[str]:
    for name, field, about in _HISTOGRAMS:
        yield from _histogram(name, about, getattr(stats, field))
    for kind, table in (("counter", _COUNTERS), ("gauge", _GAUGES)):
        for name, field, about in table:
            yield from _single(name, kind, about, getattr(stats, field))
    yield from _head("choices_finished_total", "counter", "Choices that ended, by reason.")
    for reason, count in sorted(stats.finished.items()):
        yield f'{PREFIX}choices_finished_total{{reason="{reason}"}} {count}'


def _server_lines(counters: Counters) -> Iterator[str]:
    yield from _head("http_answers_total", "counter", "Answers by route and status.")
    for (route, status), count in sorted(counters.answers.items()):
        yield f'{PREFIX}http_answers_total{{route="{route}",status="{status}"}} {count}'
    about = "Requests whose client left before the end."
    yield from _single("clients_gone_total", "counter", about, counters.client_gone)
    about = "Connections dropped because nothing was read from them."
    yield from _single("slow_readers_total", "counter", about, counters.slow_readers)
    yield from _single("http_inside", "gauge", "Requests being worked on.", counters.inside)


def _head(name: str, kind: str, about: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]


def _single(name: str, kind: str, about: str, value: float) -> list[str]:
    return [*_head(name, kind, about), f"{PREFIX}{name} {value:.10g}"]


def _histogram(name: str, about: str, histogram: Histogram) -> Iterator[str]:
    yield from _head(name, "histogram", about)
    total = 0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        yield f'{PREFIX}{name}_bucket{{le="{bound:g}"}} {total}'
    yield f'{PREFIX}{name}_bucket{{le="+Inf"}} {histogram.count}'
    yield f"{PREFIX}{name}_sum {histogram.total:.10g}"
    yield f"{PREFIX}{name}_count {histogram.count}"


def health_json(state: ServerState) -> tuple[int, dict[str, Any]]:
    """(status, body): 200 where requests are served and steps go on, else 503."""
    health = state.engine.health()
    ok = health.ok and not state.draining
    body = {
        "status": "draining" if state.draining else health.state,
        "steps": health.steps,
        "last_step_age_s": round(health.last_step_age_s, 3),
        "oldest_request_age_s": round(health.oldest_request_age_s, 3),
        "running": health.running,
        "waiting": health.waiting,
        "uptime_s": round(time.monotonic() - state.started, 1),
    }
    if health.reason:
        body["reason"] = health.reason
    return (200 if ok else 503), body
