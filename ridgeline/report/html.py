"""The report as one HTML file: no script, no external resource, light and dark."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import jinja2

from ridgeline.core.files import atomic_write_text
from ridgeline.report.section import Report


def render(report: Report) -> str:
    """The page's text; everything but the figures is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = files("ridgeline.report").joinpath("report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(report=report)


def write(report: Report, path: Path) -> Path:
    """Write the page, all or nothing. Raises: UserError when the disk refuses."""
    atomic_write_text(path, render(report))
    return path
