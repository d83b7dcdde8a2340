"""Result rows (benchmarks/results/<gpu>/<op>.jsonl) as cells: ours with the peers of the same run.

A cell is current when it holds the newest row of one of our implementations for a problem, on a CPU
of each kind of processor; its peers and variants come from that row's run and from no other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS = ("ref", "cpu", "tiled", "triton", "cute", "ridgeline", "ours")
PEERS = {
    "fa4": "FlashAttention-4",
    "fa3": "FlashAttention-3",
    "flashattention-3": "FlashAttention-3",
    "cudnn": "cuDNN",
    "flexattention": "FlexAttention",
    "fa2": "FlashAttention-2",
    "flashattention-2": "FlashAttention-2",
    "cublas": "cuBLAS",
    "marlin": "Marlin",
    "machete": "Machete",
    "quack": "quack",
}
"""First word of a peer's name in the rows -> its column, in the order of the columns."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """The newest row of one implementation for one problem."""

    row: Row
    shape: dict[str, Any]
    impl: str
    peers: dict[str, Row] = field(default_factory=dict)
    """Column name -> row."""
    variants: dict[str, Row] = field(default_factory=dict)
    """"batch-invariant" ... -> row of the same implementation, run otherwise."""

    def best_peer_us(self) -> float | None:
        """Microseconds of the fastest peer of the run."""
        return min((peer["median_us"] for peer in self.peers.values()), default=None)


def load(folder: Path) -> list[Row]:
    """Every result row, with its gpu's folder name under "gpu_folder"."""
    rows = []
    for path in sorted(folder.glob("**/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                rows.append({**json.loads(line), "gpu_folder": path.parent.name})
    return rows


def is_ours(row: Row) -> bool:
    """Whether a row is one of this project's implementations."""
    return str(row.get("impl", "ours")).startswith(OURS)


def names_of(row: Row) -> tuple[str, str]:
    """(implementation, variant) of a row of ours; the variant is "" in its default use."""
    impl, _, variant = row["impl"].removeprefix("ridgeline ").partition(" ")
    return impl, variant


def peer_of(row: Row) -> str:
    """The column of a peer."""
    return PEERS.get(row["impl"].split(" ")[0].lower(), row["impl"])


def shape_of(row: Row) -> dict[str, Any]:
    """A row's shape in one spelling: what is off left out, a window as its bounds (left, right)."""
    shape = {name: value for name, value in row["shape"].items() if value not in (None, False)}
    if isinstance(shape.get("window"), int):
        shape["window"] = [shape["window"] - 1, 0]
    if shape.get("head_dim_v") == shape.get("head_dim"):
        shape.pop("head_dim_v", None)
    return shape


def _problem(row: Row) -> tuple[str, ...]:
    keys = ("gpu_folder", "cpu", "op", "direction", "dtype")
    shape = json.dumps(shape_of(row), sort_keys=True)
    return (*(str(row.get(key)) for key in keys), shape)


def current(rows: Iterable[Row]) -> list[Cell]:
    """The current cells, in the order in which their problems first appear."""
    newest: dict[tuple[str, ...], Row] = {}
    together: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        together.setdefault((row["run"], *_problem(row)), []).append(row)
        if is_ours(row) and not names_of(row)[1]:
            newest[(names_of(row)[0], *_problem(row))] = row
    cells = []
    for (impl, *_), row in newest.items():
        beside = together[(row["run"], *_problem(row))]
        peers = {peer_of(other): other for other in beside if not is_ours(other)}
        variants = {
            names_of(other)[1]: other
            for other in beside
            if is_ours(other) and names_of(other)[0] == impl and names_of(other)[1]
        }
        cells.append(Cell(row, shape_of(row), impl, _in_order(peers), variants))
    return cells


def _in_order(peers: dict[str, Row]) -> dict[str, Row]:
    order = list(dict.fromkeys(PEERS.values()))
    known = {name: peers[name] for name in order if name in peers}
    return {**known, **peers}


def peer_columns(cells: Iterable[Cell]) -> list[str]:
    """Every peer that some cell has, in the order of the columns."""
    present = dict.fromkeys(name for cell in cells for name in cell.peers)
    order = list(dict.fromkeys(PEERS.values()))
    return sorted(present, key=lambda name: order.index(name) if name in order else len(order))


def sources(cells: Iterable[Cell]) -> str:
    """Device, date, commit and run of each run that the cells come from."""
    found = dict.fromkeys(
        f"{gpu_text(cell.row)}, {cell.row['date'][:10]}, commit {cell.row['commit'][:8]}, "
        f"run {cell.row['run']}"
        for cell in cells
    )
    return "; ".join(found)


def peer_names(cells: Iterable[Cell]) -> str:
    """The peers as the rows name them, with their versions."""
    return ", ".join(dict.fromkeys(p["impl"] for cell in cells for p in cell.peers.values()))


def gpu_text(row: Row) -> str:
    """The device's name: "h200" and "NVIDIA H200" -> "H200"."""
    return str(row["gpu"]).removeprefix("NVIDIA ").upper()


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(header)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def us_text(us: float) -> str:
    """Microseconds with three or four digits."""
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def length_text(tokens: int) -> str:
    """16384 -> "16k", 500 -> "500"."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
