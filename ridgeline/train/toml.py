"""Config files: TOML to and from the dataclasses of config.py, with each value's type checked."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.core.errors import UserError, bad_type, bad_value
from ridgeline.train.config import TrainConfig, to_dict

Config = TypeVar("Config")


def load_config(path: Path | str, base: TrainConfig | None = None) -> TrainConfig:
    """Read a TOML file over `base` (default: the defaults); its values are what flags then go over.

    Raises: UserError where the file cannot be read or is no TOML; ValueError or TypeError for a key
    or value that the config does not take.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config: could not read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"config: {path} is not UTF-8; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"config: {path} is not valid TOML: {error}") from error
    return merge(base if base is not None else TrainConfig(), values)


def merge(config: Config, values: dict[str, Any], prefix: str = "") -> Config:
    """A copy of a config with nested plain values put over it; every key and type is checked.

    Raises: ValueError for an unknown key or a value out of range, TypeError for one of a wrong
    type."""
    hints = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise bad_value(
                "config", name, f"be one of {', '.join(hints)}", repr(key), "correct the name"
            )
        current = getattr(config, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise bad_type("config", name, "be a table", repr(value), f"write [{name}]")
            changes[key] = merge(current, value, f"{name}.")
        else:
            changes[key] = _convert(name, value, hints[key])
    return dataclasses.replace(typing.cast(Any, config), **changes)


def _convert(name: str, value: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [option for option in typing.get_args(hint) if option is not type(None)]
        return _convert(name, value, inner[0])
    if origin is typing.Literal:
        options = typing.get_args(hint)
        if value not in options:
            raise bad_value(
                "config", name, f"be one of {', '.join(options)}", repr(value), "use one of these"
            )
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise bad_type("config", name, "be a list", repr(value), f"write [{value!r}]")
        return tuple(_convert(name, item, typing.get_args(hint)[0]) for item in value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        kind = "str" if hint is Path else hint.__name__
        raise bad_type("config", name, f"be of type {kind}", repr(value), "correct the value")
    return value


def to_toml(config: Any) -> str:
    """The resolved config as TOML that `load_config` reads back; a none stands as a comment."""
    lines: list[str] = []
    _write_table(to_dict(config), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(values: dict[str, Any], table: str, lines: list[str]) -> None:
    if table:
        lines += ["", f"[{table}]"]
    for key, value in values.items():
        if not isinstance(value, dict):
            lines.append(f"# {key} = none" if value is None else f"{key} = {_literal(value)}")
    for key, value in values.items():
        if isinstance(value, dict):
            _write_table(value, f"{table}.{key}" if table else key, lines)


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, str):
        # JSON's escapes are a subset of TOML's, but for the solidus and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        text = repr(value)
        return text if any(c in text for c in ".en") else text + ".0"
    return json.dumps(value)
