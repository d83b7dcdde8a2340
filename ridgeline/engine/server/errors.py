"""Errors as OpenAI's API sends them: {"error": {"message", "type", "param", "code"}}.

What a client can cause is a 4xx that names the parameter; what is wrong here is a 5xx that tells
nothing of the inside. An engine's ValueError in the project's form becomes the first kind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import UserError
from ridgeline.engine.errors import DrainingError, QueueFullError, UnavailableError

INVALID = "invalid_request_error"
BUSY = "rate_limit_error"
BROKEN = "server_error"

_OWN_FORM = re.compile(r"(?P<op>[\w ]+): (?P<arg>[\w.\[\]-]+) must ")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that goes to the client."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names its parameter."""
    return ApiError(400, message, param=param, code=code)


def must(param: str, rule: str, got: object, code: str = "invalid_value") -> ApiError:
    """A 400 in one form: `'temperature' must be a number, got 'hot'`."""
    return invalid(param, f"{param!r} must {rule}, got {shown(got)}", code)


def shown(value: object) -> str:
    """A value of a client's in an error message: short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def busy(message: str, retry_after_s: float) -> ApiError:
    """A 429 that says when to come again."""
    seconds = max(1, math.ceil(retry_after_s))
    headers = {"Retry-After": str(seconds)}
    return ApiError(429, message, kind=BUSY, code="queue_full", headers=headers)


def from_engine(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """What the engine raised, as an answer; names: its argument names -> the client's."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return busy(str(error), error.retry_after_s)
    if isinstance(error, UnavailableError):
        code = "draining" if isinstance(error, DrainingError) else "engine_unavailable"
        headers = {"Retry-After": "5"}
        return ApiError(503, str(error), kind=BROKEN, code=code, headers=headers)
    if isinstance(error, ValueError | TypeError | NotImplementedError | UserError):
        found = _OWN_FORM.match(str(error))
        argument = found.group("arg") if found else None
        param = (names or {}).get(argument or "", argument)
        too_long = found is not None and found.group("op") == "request" and "context" in str(error)
        return invalid(
            param, str(error), "context_length_exceeded" if too_long else "invalid_value"
        )
    return internal()


def internal(request_id: str = "") -> ApiError:
    """Something of ours is wrong; the log has it under the id."""
    hint = f" (request {request_id})" if request_id else ""
    message = f"the server had an error while it worked on this request{hint}"
    return ApiError(500, message, kind=BROKEN, code="internal_error")
