"""Every parameter of the API: what it does here, or the error that names it.

A parameter is one of three: it works; it is fixed (only values that change nothing are taken); it
is refused. Anything else is unknown and refused by name too. `null` is "not given", as in OpenAI's
API. docs/serve.md shows these tables; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.engine.params import SamplingParams
from ridgeline.engine.server.errors import ApiError, from_engine, invalid, must, shown

Kind = Literal["works", "fixed", "refused"]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of an endpoint."""

    name: str
    kind: Kind
    about: str
    """What it does, or why it is refused."""
    accepts: tuple[Any, ...] = ()
    """Values of a fixed one."""


def _works(name: str, about: str) -> Param:
    return Param(name, "works", about)


def _fixed(name: str, about: str, *accepts: Any) -> Param:
    return Param(name, "fixed", about, accepts)


def _refused(name: str, about: str) -> Param:
    return Param(name, "refused", about)


SAMPLING = (
    _works("temperature", "0 is greedy and exactly repeatable; 0 .. 100, default 1"),
    _works("top_p", "in (0, 1], default 1"),
    _works("top_k", "the k most likely tokens (not in OpenAI's API)"),
    _works(
        "min_p", "in [0, 1]: at least so likely as this times the likeliest (not in OpenAI's API)"
    ),
    _works("presence_penalty", "-2 .. 2"),
    _works("frequency_penalty", "-2 .. 2"),
    _works("repetition_penalty", "in (0, 10], over prompt and output (not in OpenAI's API)"),
    _works("logit_bias", "token id -> -100 .. 100, at most 300 tokens"),
    _works("seed", "0 .. 2^63 - 1: the same request and seed give the same tokens"),
    _works("stop", "a string or at most 4 of at most 64 characters; not part of the text"),
    _works("stop_token_ids", "tokens that end the text (not in OpenAI's API)"),
    _works("min_tokens", "no end before so many (not in OpenAI's API)"),
    _works("ignore_eos", "go on after the model's end tokens (not in OpenAI's API)"),
    _works("n", "1 .. 8 choices"),
)
COMMON = (
    _works("model", "the name the server gives its model"),
    _works("stream", "server-sent events, byte for byte what OpenAI's client reads"),
    _works("stream_options", "include_usage: a last chunk with the token counts"),
    _works("user", "a label in the request log"),
    _works("deadline_s", "the request is ended after so many seconds (not in OpenAI's API)"),
)
CHAT = (
    _works("messages", "system, developer, user, assistant and tool messages of text"),
    *COMMON,
    *SAMPLING,
    _works(
        "max_completion_tokens", "at most so many new tokens; default: to the end of the context"
    ),
    _works("max_tokens", "the older name of max_completion_tokens"),
    _works("logprobs", "true: log-probabilities of the model's own distribution"),
    _works("top_logprobs", "0 .. 20 alternatives a token; with logprobs"),
    _works("response_format", "text, json_object, json_schema: the grammar constrains sampling"),
    _works("tools", "at most 128 functions; strict ones have their schema enforced"),
    _works("tool_choice", "none, auto, required, a function by name, allowed_tools"),
    _works("parallel_tool_calls", "false: at most one call"),
    _works("chat_template_kwargs", "enable_thinking: true or false (not in OpenAI's API)"),
    _works("metadata", "at most 16 pairs of strings, given back with the answer"),
    _works("prompt_cache_key", "only requests of the same key share cached prefixes"),
    _works("safety_identifier", "a label in the request log"),
    _fixed("store", "nothing is stored", False),
    _fixed("service_tier", "there is one tier", "auto", "default"),
    _fixed("modalities", "text only", ["text"]),
    _fixed("verbosity", "the model has no such setting", "medium"),
    _fixed("reasoning_effort", "the model has no such setting", "none"),
    _fixed("prompt_cache_retention", "the cache lives in memory", "in_memory"),
    _refused("audio", "text only"),
    _refused("prediction", "speculation is a setting of the server"),
    _refused("web_search_options", "nothing is fetched from a network"),
    _refused("moderation", "there is no moderation model"),
    _refused("prompt_cache_options", "use prompt_cache_key"),
    _refused("functions", "deprecated; use tools"),
    _refused("function_call", "deprecated; use tool_choice"),
)
COMPLETION = (
    _works("prompt", "a text, texts, token ids, or lists of token ids; at most 64 prompts"),
    *COMMON,
    *SAMPLING,
    _works("max_tokens", "at most so many new tokens, default 16"),
    _works("logprobs", "0 .. 20 alternatives a token"),
    _works("echo", "the prompt before the text; not together with logprobs"),
    _works("response_format", "as in /v1/chat/completions (not in OpenAI's API)"),
    _works("best_of", "must equal n"),
    _fixed("suffix", "the model continues a text, it does not fill in", ""),
)
EMBEDDING = (
    _works("input", "a text, texts, token ids, or lists of token ids; at most 64"),
    _works("model", "the name the server gives its model"),
    _works("encoding_format", "float or base64 (little-endian float32)"),
    _works("pooling", "mean (default) or last: of the final hidden states (not in OpenAI's API)"),
    _works("dimensions", "must be the model's width"),
    _works("user", "a label in the request log"),
)

DEADLINE_RULE = "be a number of seconds above 0"


def read_object(table: tuple[Param, ...], body: Any) -> dict[str, Any]:
    """The given parameters of a body, nulls left out; refuses what the table refuses."""
    if not isinstance(body, dict):
        raise invalid(None, f"the body must be a JSON object, got {shown(body)}", "invalid_type")
    known = {param.name: param for param in table}
    given: dict[str, Any] = {}
    for name, value in body.items():
        if name not in known:
            raise invalid(name[:100], f"unknown parameter: {name[:100]!r}", "unknown_parameter")
        if value is None:
            continue
        param = known[name]
        same = [v for v in param.accepts if type(v) is type(value) and v == value]
        if param.kind == "refused":
            raise invalid(
                name, f"{name!r} is not supported: {param.about}", "unsupported_parameter"
            )
        if param.kind == "fixed" and not same:
            raise must(name, f"be {_either(param.accepts)} ({param.about})", value)
        given[name] = value
    return given


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))


def read_flag(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A parameter that is true or false."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise must(name, "be true or false", value, "invalid_type")
    return value


def read_label(given: Mapping[str, Any], name: str) -> str:
    """A short text that names something; "" where it is not given."""
    value = given.get(name, "")
    if not isinstance(value, str):
        raise must(name, "be a string", value, "invalid_type")
    if len(value) > 512:
        raise must(name, "have at most 512 characters", f"{len(value)} characters")
    return value


def read_deadline(given: Mapping[str, Any], longest_s: float) -> float:
    """Seconds until the request is ended; the server's own bound is the longest."""
    value = given.get("deadline_s", longest_s)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise must("deadline_s", DEADLINE_RULE, value, "invalid_type")
    if not value > 0:
        raise must("deadline_s", DEADLINE_RULE, value)
    return min(float(value), longest_s)


def read_include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    """stream_options.include_usage."""
    options = given.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "'stream_options' must come with 'stream': true")
    if not isinstance(options, dict):
        raise must("stream_options", "be an object", options, "invalid_type")
    for name, value in options.items():
        param = f"stream_options.{name[:60]}"
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(param, f"unknown parameter: {param!r}", "unknown_parameter")
        if not isinstance(value, bool | None):
            raise must(param, "be true or false", value, "invalid_type")
        if name == "include_obfuscation" and value:
            raise invalid(param, f"{param!r} is not supported", "unsupported_parameter")
    return bool(options.get("include_usage"))


def read_sampling(given: Mapping[str, Any], more: Mapping[str, Any]) -> SamplingParams:
    """The parameters that the sampler knows; more: fields that an endpoint reads its own way.

    Raises: ApiError that names the client's parameter.
    """
    same_name = (
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "seed", "min_tokens", "ignore_eos", "n"),
    )
    fields = {name: given[name] for name in same_name if name in given}
    if "stop" in given:
        fields["stop"] = (given["stop"],) if isinstance(given["stop"], str) else given["stop"]
    if "stop_token_ids" in given:
        fields["stop_token_ids"] = given["stop_token_ids"]
    if "logit_bias" in given:
        fields["logit_bias"] = _read_logit_bias(given["logit_bias"])
    try:
        return SamplingParams(**fields, **more)
    except (ValueError, TypeError) as error:
        raise from_engine(error, sampling_names(given)) from error


def sampling_names(given: Mapping[str, Any]) -> dict[str, str]:
    """The engine's field names -> what this client called them."""
    names = {}
    if "max_completion_tokens" in given:
        names["max_tokens"] = "max_completion_tokens"
    if "top_logprobs" in given:
        names["logprobs"] = "top_logprobs"
    return names


def _read_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise must("logit_bias", "be an object of token id and bias", value, "invalid_type")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise must("logit_bias", "have token ids as keys", key)
        biases[int(key)] = bias
    return biases


def check_grammar_mix(given: Mapping[str, Any], what: str) -> None:
    """A grammar decides where the text ends; what would overrule it is refused by name."""
    for name in ("ignore_eos", "min_tokens"):
        if given.get(name):
            raise invalid(name, f"{name!r} cannot be combined with {what}")


def require(given: Mapping[str, Any], name: str) -> Any:
    """A parameter that must be given."""
    if name not in given:
        raise ApiError(
            400,
            f"missing required parameter: {name!r}",
            param=name,
            code="missing_required_parameter",
        )
    return given[name]
