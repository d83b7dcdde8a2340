"""The README's tables, made from what the code and the result files say.

  python benchmarks/tables.py           write them between the markers of README.md
  python benchmarks/tables.py --check   exit 1 if README.md is not up to date

`support` comes from the registry; `results` from benchmarks/results/<gpu>/<op>.jsonl, where the
last row of a cell counts and a peer counts only from the same run as ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OURS = ("ref", "cpu", "tiled", "triton", "cute", "ridgeline", "ours")
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Update README.md, or check it."""
    parser = argparse.ArgumentParser(description="The tables of README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args(argv).check
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = replace_block(old, "support", support_table())
    new = replace_block(new, "results", results_tables(load(RESULTS)))
    if check:
        if new != old:
            print("README.md is stale; run python benchmarks/tables.py", file=sys.stderr)
        return int(new != old)
    if new != old:
        readme.write_text(new, encoding="utf-8")
    return 0


def replace_block(text: str, name: str, body: str) -> str:
    """`text` with what stands between `<!-- name:begin -->` and `<!-- name:end -->` replaced."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"tables: README.md must hold {begin} ... {end}, got neither or one")
    return f"{head}{begin}\n{body.strip()}\n{end}{tail}"


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(header)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def support_table() -> str:
    """op x implementation x architecture x dtype, from the registry."""
    from ridgeline.cli import problems  # noqa: F401  (registers every op)
    from ridgeline.core import registry

    rows = [
        (op, f"`{impl.name}`", ", ".join(map(arch_text, impl.archs)), ", ".join(impl.dtypes),
         impl.summary)
        for op in registry.ops()
        for impl in registry.impls(op)
    ]  # fmt: skip
    return markdown(("op", "impl", "runs on", "dtypes", "what it is"), rows)


def arch_text(family: str) -> str:
    """ "sm80" -> "sm80 and later"; "=sm90" -> "sm90"."""
    if family.startswith("="):
        return family[1:]
    return f"{family} and later" if family.startswith("sm") else family


def load(folder: Path) -> list[Row]:
    """Every result row, with its gpu's folder name under "gpu_folder"."""
    rows = []
    for path in sorted(folder.glob("**/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                rows.append({**json.loads(line), "gpu_folder": path.parent.name})
    return rows


def results_tables(rows: list[Row]) -> str:
    """Kernels against their peers, then training, serving and quantization, as there are rows."""
    parts = [
        _kernel_table([row for row in rows if row["op"] in ("attention", "w4a16")]),
        _train_table([row for row in rows if row["op"] == "train"]),
        _serve_table([row for row in rows if row["op"] == "serve"]),
        _quantize_table([row for row in rows if row["op"] == "quantize"]),
    ]
    return "\n\n".join(part for part in parts if part) or "No result rows yet."


def is_ours(row: Row) -> bool:
    """Whether a row is one of this project's implementations."""
    return str(row.get("impl", "ours")).startswith(OURS)


def cells(rows: list[Row]) -> list[tuple[Row, Row | None]]:
    """The newest row of ours for each (gpu, op, direction, dtype, shape), with the fastest peer of
    the same run."""
    mine: dict[str, Row] = {}
    for row in rows:
        if is_ours(row):
            best = mine.get(_cell(row))
            if best is None or best["run"] != row["run"] or row["median_us"] < best["median_us"]:
                mine[_cell(row)] = row
    pairs = []
    for cell, row in mine.items():
        peers = [
            peer for peer in rows
            if not is_ours(peer) and peer["run"] == row["run"] and _cell(peer) == cell
        ]  # fmt: skip
        pairs.append((row, min(peers, key=lambda peer: peer["median_us"], default=None)))
    return pairs


def _cell(row: Row) -> str:
    keys = ("gpu_folder", "op", "direction", "dtype", "shape")
    return json.dumps([row.get(key) for key in keys], sort_keys=True)


def headline(pairs: list[tuple[Row, Row | None]]) -> list[tuple[Row, Row | None]]:
    """Per (gpu, op, direction, dtype) the longest-running cell, where a kernel shows most."""
    best: dict[tuple, tuple[Row, Row | None]] = {}
    for row, peer in pairs:
        decode = row["op"] == "w4a16" and row["shape"]["m"] <= 16
        key = (row["gpu_folder"], row["op"], row.get("direction"), row["dtype"], decode)
        if key not in best or row["median_us"] > best[key][0]["median_us"]:
            best[key] = (row, peer)
    return [best[key] for key in sorted(best, key=str)]


def _kernel_table(rows: list[Row]) -> str:
    body = [
        (
            row["gpu"],
            " ".join(filter(None, (row["op"], row.get("direction"), row["dtype"]))),
            shape_text(row["shape"]),
            row["impl"],
            rate_text(row),
            f"{row['percent_of_ceiling']:.0f}%",
            f"{peer['impl']}: {row['median_us'] / peer['median_us']:.2f}x its time"
            if peer
            else "-",
            f"{row['date'][:10]}, {row['commit'][:8]}",
        )
        for row, peer in headline(cells(rows))
    ]
    header = ("device", "kernel", "shape", "impl", "rate", "of ceiling", "fastest peer", "measured")
    return markdown(header, body) if body else ""


def shape_text(shape: dict[str, Any]) -> str:
    """{"m": 1, "n": 4096} -> "m 1, n 4096"; flags by name, what is off left out."""
    parts = [
        name if value is True else f"{name} {value}"
        for name, value in shape.items()
        if value not in (None, False)
    ]
    return ", ".join(parts)


def rate_text(row: Row) -> str:
    """TFLOP/s or TB/s, whichever bounds the cell, with the time."""
    memory_bound = row.get("direction") == "decode" or (
        row["op"] == "w4a16" and row["shape"]["m"] <= 16
    )
    if memory_bound and row.get("tbps"):
        return f"{row['tbps']:.3g} TB/s ({row['median_us']:.4g} us)"
    if row.get("tflops"):
        return f"{row['tflops']:.3g} TFLOP/s ({row['median_us']:.4g} us)"
    return f"{row['median_us']:.4g} us"


def _latest(rows: list[Row], keys: tuple[str, ...]) -> list[Row]:
    kept = {json.dumps([row.get(key) for key in keys], sort_keys=True): row for row in rows}
    return list(kept.values())


def _train_table(rows: list[Row]) -> str:
    body = [
        (
            row["gpu"], row["model"], row.get("impl", "ours"),
            shape_text(row["layout"]) or "one device",
            str(row["seqlen"]), f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{100 * row['mfu_noncausal']:.1f}% / {100 * row['mfu_causal']:.1f}%",
            f"{row['date'][:10]}, {row['commit'][:8]}",
        )
        for row in _latest(rows, ("gpu_folder", "model", "impl", "layout", "seqlen"))
    ]  # fmt: skip
    header = (
        "device", "training", "impl", "layout", "seqlen", "tokens/s a device",
        "MFU non-causal / causal", "measured",
    )  # fmt: skip
    return markdown(header, body) if body else ""


def _serve_table(rows: list[Row]) -> str:
    body = [
        (
            row["gpu"], row["model"], row.get("impl", "ours"), row["weights"],
            str(row.get("batch", row.get("load"))), f"{row['tokens_per_s']:,.0f}",
            f"{row['tbps']:.3g}" if row.get("tbps") else "-",
            f"{row['date'][:10]}, {row['commit'][:8]}",
        )
        for row in _latest(rows, ("gpu_folder", "model", "impl", "weights", "batch", "load"))
    ]  # fmt: skip
    header = ("device", "serving", "impl", "weights", "batch", "tokens/s", "TB/s", "measured")
    return markdown(header, body) if body else ""


def _quantize_table(rows: list[Row]) -> str:
    body = [
        (
            row["gpu"], row["model"],
            f"{row['method']}, {row['bits']} bits, group {row['group_size']}",
            "symmetric" if row["symmetric"] else "asymmetric",
            f"{row['ppl_before']:.3f}", f"{row['ppl_after']:.3f}", f"{row['seconds']:.0f}",
            f"{row['date'][:10]}, {row['commit'][:8]}",
        )
        for row in _latest(
            rows, ("gpu_folder", "model", "method", "bits", "group_size", "symmetric", "act_order")
        )
    ]  # fmt: skip
    header = (
        "device", "quantization", "method", "zero point", "perplexity before", "after", "seconds",
        "measured",
    )  # fmt: skip
    return markdown(header, body) if body else ""


if __name__ == "__main__":
    sys.exit(main())
