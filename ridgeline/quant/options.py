"""What can be asked of a run, as plain values: no torch here, so that a command can refuse nonsense
before it imports anything heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ridgeline.core.errors import bad_value

METHODS = ("rtn", "gptq", "awq", "awq+gptq")


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQOptions:
    """How one layer is solved."""

    order: str = "static"
    """natural: columns as stored; static: by descending diagonal of H with groups kept as stored
    (no cost at run time); activation: by descending diagonal with groups along that order (g_idx in
    the file, "desc_act")."""
    damping: float = 0.02
    """Added to the diagonal of H, as a fraction of its mean. Range (0, 1]."""
    damping_step: float = 0.01
    """Added to the fraction whenever the factorization fails; each raise is reported."""
    damping_limit: float = 1.0
    """Where raising stops and the layer is refused."""
    block: int = 128
    """Columns between two updates of the rest."""
    clip_search: bool = True
    """Choose each group's scale for least weighted rounding error instead of its extremes."""
    refits: int = 0
    """Times that scales are fitted to the codes in the metric H and the columns solved again
    (static and natural order only)."""

    def __post_init__(self) -> None:
        if self.order not in ("natural", "static", "activation"):
            raise bad_value(
                "gptq",
                "order",
                "be natural, static or activation",
                repr(self.order),
                "choose one of these",
            )
        if not 0.0 < self.damping <= 1.0:
            raise bad_value("gptq", "damping", "lie in (0, 1]", self.damping, "0.02 is usual")
        if self.damping_step <= 0.0 or self.damping_limit < self.damping:
            raise bad_value(
                "gptq",
                "damping_limit",
                "be at least damping, with a positive step",
                (self.damping_limit, self.damping_step),
                "keep the defaults",
            )
        if self.block < 1:
            raise bad_value("gptq", "block", "be at least 1", self.block, "128 is usual")
        if self.refits < 0:
            raise bad_value("gptq", "refits", "be 0 or more", self.refits, "0 or 1 is usual")


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQOptions:
    """How scales are searched."""

    grid: int = 20
    """Values of r, from 0 to 1 - 1 / grid, tried in either form of s. Range 1 or more."""
    search_tokens: int = 128
    """Tokens that every candidate is measured on, at least (whole sequences for attention)."""
    clip: bool = True
    """Search ranges narrower than the extremes (awq alone; q and k keep theirs)."""

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise bad_value("awq", "grid", "be at least 1", self.grid, "20 is usual")
        if self.search_tokens < 1:
            raise bad_value("awq", "search_tokens", "be at least 1", self.search_tokens, "e.g. 128")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """An exception for the linears whose full name a pattern matches."""

    pattern: str
    """A regular expression, searched in the full name ("model.layers.3.mlp.down_proj")."""
    skip: bool = False
    """Leave the layer as it is."""
    bits: int | None = None
    """Another width; None keeps the recipe's."""
    group_size: int | None = None
    """Another group size; None keeps the recipe's."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise bad_value(
                "quantize",
                "override.pattern",
                "be a regular expression",
                repr(self.pattern),
                str(error),
            ) from error
        if self.skip and (self.bits is not None or self.group_size is not None):
            raise bad_value(
                "quantize",
                "override",
                "either skip a layer or change it",
                f"both for {self.pattern!r}",
                "keep one",
            )


def parse_override(text: str) -> Override:
    """An exception in one word: "PATTERN=bits:8,group:32" or "PATTERN=skip".

    Raises: ValueError for another form or values that make no sense.
    """
    pattern, found, rest = text.rpartition("=")
    if rest == "skip" and found:
        return Override(pattern=pattern, skip=True)
    values: dict[str, int] = {}
    for part in rest.split(","):
        key, _, number = part.partition(":")
        if not found or key not in ("bits", "group") or not number.isdigit() or key in values:
            raise bad_value(
                "quantize",
                "override",
                "be PATTERN=bits:N,group:N or PATTERN=skip",
                repr(text),
                "for example 'down_proj=bits:8'",
            )
        values[key] = int(number)
    return Override(pattern=pattern, bits=values.get("bits"), group_size=values.get("group"))
