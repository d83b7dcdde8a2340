"""The one form of an error: `<op>: <arg> must <rule>, got <value>; <what to do>`.

ValueError, TypeError and NotImplementedError for arguments; UserError for what is wrong outside the
program (files, downloads, a machine that lacks something). The command line prints either as one
line and exits with 2 (arguments) or 1 (UserError); anything else is a bug of ours.
"""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program is wrong (a file, a download); the message is one line."""


def message(op: str, arg: str, must: str, got: object, do: str) -> str:
    """Build the message: message("attention", "head_dim", "be at most 256", 512, "split heads")."""
    return f"{op}: {arg} must {must}, got {got}; {do}"


def bad_value(op: str, arg: str, must: str, got: object, do: str) -> ValueError:
    """A ValueError in the project's form, to be raised by the caller."""
    return ValueError(message(op, arg, must, got, do))


def bad_type(op: str, arg: str, must: str, got: object, do: str) -> TypeError:
    """A TypeError in the project's form, to be raised by the caller."""
    return TypeError(message(op, arg, must, got, do))


def unsupported(op: str, arg: str, must: str, got: object, do: str) -> NotImplementedError:
    """A NotImplementedError in the project's form, to be raised by the caller."""
    return NotImplementedError(message(op, arg, must, got, do))


def common(error: BaseException) -> BaseException:
    """Mark an error that every rank raises alike: the first rank alone tells it."""
    error.__dict__["raised_on_every_rank"] = True
    return error


def is_common(error: BaseException) -> bool:
    """Whether `common` marked it."""
    return bool(error.__dict__.get("raised_on_every_rank"))
