"""docs/results.md: every current cell with the peers and variants of its run."""

from __future__ import annotations

from typing import Any

from readme_tables import (
    DIRECTIONS,
    caption,
    quantize_table,
    ratio,
    serve_table,
    train_table,
)
from result_rows import (
    Cell,
    Row,
    current,
    gpu_text,
    length_text,
    markdown,
    peer_columns,
    us_text,
)

INTRO = """# Results

Written by `python benchmarks/tables.py` from the rows that the benchmarks append to
`benchmarks/results/`; nothing here is typed by hand. A line is the newest row of ours for its
problem; peers and variants beside it ran in the same process, interleaved with it, on the same
inputs. Times are medians in microseconds with the 20th and 80th percentile. "of ceiling" is the
achieved rate over the ceiling named above the table; the card's clocks drift with its power, so a
ceiling measured earlier can be passed. "error" is, for attention, the largest difference from
fp32 over that of PyTorch in the same dtype, and for W4A16 the relative difference from fp32.
"ours : best peer" above 1 means that ours is faster; "-" was not measured."""

ATTENTION = {"batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v"}
W4A16 = {"m", "n", "k", "group_size", "symmetric"}


def page(rows: list[Row]) -> str:
    """The whole document."""
    cells = current(row for row in rows if row["op"] in ("attention", "w4a16"))
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        row = cell.row
        key = (row["gpu_folder"], row["op"], row.get("direction") or "", row["dtype"], cell.impl)
        key = (*key, processor(row))
        groups.setdefault(key, []).append(cell)
    order = sorted(groups, key=lambda key: (key[0] == "cpu", key))  # GPUs before CPUs
    parts = [INTRO] + [section(key, groups[key]) for key in order]
    for title, table in (
        ("Quantization", quantize_table(rows)),
        ("Training", train_table(rows)),
        ("Serving", serve_table(rows)),
    ):
        if table:
            parts.append(f"## {title}\n\n{table}")
    return "\n\n".join(parts) + "\n"


def section(key: tuple[str, ...], cells: list[Cell]) -> str:
    """One implementation of one op, pass and dtype on one device."""
    _, op, direction, dtype, impl, on = key
    what = " ".join(filter(None, (op, DIRECTIONS.get(direction, direction))))
    heading = ", ".join(
        filter(None, (f"## {what}", f"`{impl}`", dtype, gpu_text(cells[0].row), on))
    )
    cells = sorted(cells, key=_order)
    variants = list(dict.fromkeys(name for cell in cells for name in cell.variants))
    peers = peer_columns(cells)
    unit = "tbps" if direction == "decode" else "tflops"
    # Linear layers are compared by their times, attention by its rates.
    shown = "median_us" if op == "w4a16" else unit
    names = {"tflops": "TFLOP/s", "tbps": "TB/s", "median_us": "us"}
    body = []
    for cell in cells:
        row = cell.row
        body.append(
            (
                *shape_cells(op, cell.shape),
                us_text(row["median_us"]),
                f"{us_text(row['p20_us'])} to {us_text(row['p80_us'])}",
                number(row, unit),
                f"{row['percent_of_ceiling']:.0f}%",
                f"{row['error']:.3g}" if row.get("error") is not None else "-",
                *(number(cell.variants.get(name), shown) for name in variants),
                *(number(cell.peers.get(name), shown) for name in peers),
                ratio(cell),
            )
        )
    header = (
        *shape_header(op), "us", "p20 to p80", names[unit], "of ceiling", "error",
        *(f"{name}, {names[shown]}" for name in (*variants, *peers)), "ours : best peer",
    )  # fmt: skip
    about = caption(f"Ceilings: {ceilings(cells, names[unit])}.", cells)
    return f"{heading}\n\n{about}\n\n{markdown(header, body)}"


def processor(row: Row) -> str:
    """Which one, of a CPU's row."""
    return str(row.get("cpu") or "") if row["gpu_folder"] == "cpu" else ""


def ceilings(cells: list[Cell], unit: str) -> str:
    """The ceilings that the percentages are of."""
    found = dict.fromkeys(cell.row.get("ceiling") for cell in cells)
    return "; ".join(f"{c:g} {unit}" if isinstance(c, int | float) else str(c) for c in found)


def number(row: Row | None, key: str) -> str:
    """A rate or a time of a row, "-" without one."""
    if row is None or row.get(key) is None:
        return "-"
    if key == "median_us":
        return us_text(row[key])
    return f"{row[key]:.2f}" if key == "tbps" else f"{row[key]:.0f}"


def shape_header(op: str) -> tuple[str, ...]:
    """Columns of a problem."""
    if op == "w4a16":
        return ("K", "N", "M", "group", "options")
    return ("batch x queries", "keys", "heads", "head dim", "mask and options")


def shape_cells(op: str, shape: dict[str, Any]) -> tuple[str, ...]:
    """A problem in those columns; what they do not name is in the last."""
    if op == "w4a16":
        options = [] if shape.get("symmetric") else ["asymmetric"]
        options += others(shape, W4A16)
        sizes = (f"{shape[name]:,}" for name in ("k", "n", "m"))
        return (*sizes, str(shape["group_size"]), ", ".join(options) or "-")
    heads = [shape["heads"], shape["kv_heads"]]
    dims = [shape["head_dim"], shape.get("head_dim_v", shape["head_dim"])]
    options = others(shape, ATTENTION)
    return (
        f"{shape['batch']} x {length_text(shape['seqlen_q'])}",
        length_text(shape["seqlen_k"]),
        " / ".join(map(str, heads[: 1 + (heads[0] != heads[1])])),
        " / ".join(map(str, dims[: 1 + (dims[0] != dims[1])])),
        ", ".join(options) or "full",
    )


def others(shape: dict[str, Any], named: set[str]) -> list[str]:
    """{"causal": True, "page_size": 16} -> ["causal", "page size 16"]."""
    parts = []
    for name, value in shape.items():
        if name in named:
            continue
        text = name.replace("_", " ")
        if name == "lengths":
            text = f"{len(value)} packed lengths, {sum(value):,} tokens"
        elif value is not True:
            text += f" {value}"
        parts.append(text)
    return parts


def _order(cell: Cell) -> tuple[Any, ...]:
    shape = cell.shape
    if cell.row["op"] == "w4a16":
        return (shape["k"], shape["n"], shape["m"])
    options = [name for name in shape if name not in ATTENTION and name != "causal"]
    numbers = ("head_dim", "seqlen_q", "seqlen_k", "batch", "heads", "kv_heads")
    return (len(options), sorted(options), *(shape[name] for name in numbers), str(shape))
