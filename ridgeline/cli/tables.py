"""Plain text for people: aligned tables and numbers with units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, a rule under the header."""
    cells = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in cells]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


def number(value: float) -> str:
    """Three significant digits, thousands whole: 0.0123, 4.35, 12,345."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def scaled(value: float, unit: str) -> str:
    """With an SI prefix: scaled(8.4e7, "B") -> "84 MB"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def flops_text(flops: float) -> str:
    """550 GFLOP."""
    return scaled(flops, "FLOP")


def bytes_text(count: float) -> str:
    """84 MB (powers of ten)."""
    return scaled(count, "B")


def time_text(us: float) -> str:
    """Microseconds in the unit that fits: 14.1 ms."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{us / factor:.3g} {unit}"
    return f"{us:.3g} us"
