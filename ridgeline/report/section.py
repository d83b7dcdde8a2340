"""What a report is made of: plain data, so that any command can contribute a section."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; numbers are given as the text to print."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing."""

    svg: str
    """An <svg> element whose ink is currentColor (figures.py makes them)."""
    caption: str
    """What is drawn, in a sentence; also what a screen reader says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the report."""

    title: str
    paragraphs: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    """(what, value) pairs set in large type: a few numbers a reader should not miss."""
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    quote: str = ""
    """Text shown as it is (a model's answer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole page."""

    title: str
    lead: str
    """One sentence under the title."""
    sections: tuple[Section, ...]
    machine: tuple[tuple[str, str], ...] = field(default=())
    """(what, value): what was measured on, when, with which versions."""
