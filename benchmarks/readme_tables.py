"""The measured tables of README.md: what each kernel does beside its peers, on few lines.

Each function takes cells and returns a caption and a table, or "" where nothing was measured.
"""

from __future__ import annotations

from result_rows import (
    PEERS,
    Cell,
    Row,
    current,
    gpu_text,
    is_ours,
    length_text,
    markdown,
    peer_names,
    sources,
    us_text,
)

TOKENS = 16384
"""Tokens of the attention cells shown: where every peer is at its best."""
HEAD_DIMS = (64, 128, 256)
ROWS = (1, 8, 16, 64, 1024)
"""Rows of activations shown for W4A16."""
DIRECTIONS = {"fwd": "forward", "bwd": "backward"}


def results_tables(rows: list[Row]) -> str:
    """Kernels beside their peers, then quantization, training and serving, as there are rows."""
    cells = current(row for row in rows if row["op"] in ("attention", "w4a16"))
    parts = []
    for gpu in sorted({cell.row["gpu_folder"] for cell in cells}):
        here = [cell for cell in cells if cell.row["gpu_folder"] == gpu]
        parts += [hopper_table(here), triton_table(here), decode_table(here), w4a16_table(here)]
    parts += [quantize_table(rows), train_table(rows), serve_table(rows)]
    return "\n\n".join(part for part in parts if part) or "No result rows yet."


def plain(cells: list[Cell], impl: str) -> dict[tuple[str, int, bool], Cell]:
    """(direction, head dim, causal) -> the cell of as many keys as queries and no other option."""
    allowed = {"batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "causal"}
    return {
        (cell.row["direction"], cell.shape["head_dim"], "causal" in cell.shape): cell
        for cell in cells
        if cell.row["op"] == "attention"
        and cell.impl == impl
        and cell.row["dtype"] == "bfloat16"
        and cell.row["direction"] in DIRECTIONS
        and cell.shape.keys() <= allowed
        and cell.shape["seqlen_q"] == cell.shape["seqlen_k"] == TOKENS
        and cell.shape["heads"] == cell.shape["kv_heads"]
    }


def rate(row: Row | None) -> str:
    """TFLOP/s of a row, "-" without one."""
    return f"{row['tflops']:.0f}" if row else "-"


def ratio(cell: Cell | None, peer: str | None = None) -> str:
    """How many times as fast as a peer, or as the fastest of the run."""
    if cell is None or not cell.peers or (peer and peer not in cell.peers):
        return "-"
    us = cell.peers[peer]["median_us"] if peer else cell.best_peer_us()
    return f"{us / cell.row['median_us']:.2f}"


def caption(title: str, cells: list[Cell]) -> str:
    """What is in a table, where it was measured, and who the peers are."""
    peers = peer_names(cells)
    return f"{title} {sources(cells)}." + (f" Peers: {peers}." if peers else "")


def hopper_table(cells: list[Cell]) -> str:
    """The Hopper kernel, one line a pass, head dim and mask."""
    found = plain(cells, "cute_sm90")
    columns = [name for name in PEERS.values() if any(name in c.peers for c in found.values())]
    columns = list(dict.fromkeys(columns))
    body = []
    for direction in (name for name in DIRECTIONS if any(key[0] == name for key in found)):
        for dim in HEAD_DIMS:
            for causal in (False, True):
                cell = found.get((direction, dim, causal))
                if cell is None:
                    continue
                peers = [cell.peers.get(name) for name in columns]
                body.append(
                    (
                        DIRECTIONS[direction], str(dim), "causal" if causal else "full",
                        rate(cell.row), *map(rate, peers), ratio(cell),
                    )
                )  # fmt: skip
    header = ("pass", "head dim", "mask", "`cute_sm90`", *columns, "ours : best peer")
    title = (
        f"**Attention on Hopper**, TFLOP/s (causal counts half the pairs), bf16, "
        f"{length_text(TOKENS)} tokens, hidden 2,048."
    )
    return f"{caption(title, list(found.values()))}\n\n{markdown(header, body)}" if body else ""


def triton_table(cells: list[Cell]) -> str:
    """The portable kernel, forward / backward in one cell."""
    found = plain(cells, "triton")
    columns = ("FlexAttention", "cuDNN", "FlashAttention-2")
    body = []
    for dim in sorted({key[1] for key in found}):
        for causal in (False, True):
            both = [found.get((direction, dim, causal)) for direction in DIRECTIONS]
            body.append(
                (
                    str(dim), "causal" if causal else "full",
                    " / ".join(rate(cell.row if cell else None) for cell in both),
                    *(
                        " / ".join(rate(cell.peers.get(name) if cell else None) for cell in both)
                        for name in columns
                    ),
                    " / ".join(ratio(cell, "FlexAttention") for cell in both),
                )
            )  # fmt: skip
    header = ("head dim", "mask", "`triton`", *columns, "ours : FlexAttention")
    title = (
        f"**Attention in Triton**, TFLOP/s forward / backward, bf16, {length_text(TOKENS)} tokens, "
        "hidden 2,048."
    )
    return f"{caption(title, list(found.values()))}\n\n{markdown(header, body)}" if body else ""


def decode_table(cells: list[Cell]) -> str:
    """Decode: a line a batch, a column a page size."""
    found = [c for c in cells if c.row["op"] == "attention" and c.row["direction"] == "decode"]
    if not found:
        return ""
    impl = found[-1].impl
    found = [c for c in found if c.impl == impl]
    pages = sorted({c.shape.get("page_size", 0) for c in found}, key=lambda page: (page > 0, -page))
    by_line: dict[tuple[int, ...], dict[int, Cell]] = {}
    for c in found:
        line = (c.shape["seqlen_q"], c.shape["batch"], c.shape["seqlen_k"])
        by_line.setdefault(line, {})[c.shape.get("page_size", 0)] = c
    body = []
    for (queries, batch, keys), line in sorted(by_line.items()):
        values = [
            f"{c.row['tbps']:.2f} ({c.row['percent_of_ceiling']:.0f}%)" if c else "-"
            for c in map(line.get, pages)
        ]
        body.append((f"{batch} x {length_text(keys)}", str(queries), *values))
    header = [f"pages of {page}" if page else "contiguous" for page in pages]
    first = found[0].shape
    title = (
        f"**Decode (`{impl}`)**, TB/s of keys and values read (of the ceiling), bf16, "
        f"{first['heads']} query heads on {first['kv_heads']}, head dim {first['head_dim']}."
    )
    table = markdown(("batch x keys", "queries", *header), body)
    return f"{caption(title, found)}\n\n{table}"


def w4a16_table(cells: list[Cell]) -> str:
    """W4A16: a line a layer, a column a number of rows."""
    found = [
        c
        for c in cells
        if c.row["op"] == "w4a16" and c.impl == "cute_sm90" and c.shape["m"] in ROWS
    ]
    layers: dict[tuple[int, int], dict[int, Cell]] = {}
    for c in found:
        layers.setdefault((c.shape["k"], c.shape["n"]), {})[c.shape["m"]] = c
    body = []
    for (k, n), line in sorted(layers.items()):
        texts = []
        for c in map(line.get, ROWS):
            texts.append(_w4a16_text(c) if c else "-")
        body.append((f"{k:,} -> {n:,}", *texts))
    if not body:
        return ""
    title = (
        "**W4A16 (`cute_sm90`)**, microseconds of ours / the faster 4-bit peer / cuBLAS on bf16 "
        "weights (roofline floor in % of ours), by rows M; groups of "
        f"{found[0].shape['group_size']}, symmetric."
    )
    header = ("layer K -> N", *(f"M = {m:,}" for m in ROWS))
    return f"{caption(title, found)}\n\n{markdown(header, body)}"


def _w4a16_text(cell: Cell) -> str:
    """Ours / the faster 4-bit peer / cuBLAS (share of the floor); "-": was not in the run."""
    times = {name: peer["median_us"] for name, peer in cell.peers.items()}
    wide = times.pop("cuBLAS", None)
    packed = min(times.values(), default=None)
    texts = ["-" if us is None else us_text(us) for us in (cell.row["median_us"], packed, wide)]
    return f"{' / '.join(texts)} ({cell.row['percent_of_ceiling']:.0f}%)"


def newest(rows: list[Row], op: str, keys: tuple[str, ...]) -> list[list[Row]]:
    """Rows of an op by `keys`, of each only those of its newest run."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["op"] == op:
            groups.setdefault(repr([row.get(key) for key in keys]), []).append(row)
    return [[r for r in group if r["run"] == group[-1]["run"]] for group in groups.values()]


def measured(row: Row) -> str:
    """Device, date and commit of a row."""
    return f"{gpu_text(row)}, {row['date'][:10]}, {row['commit'][:8]}"


def spread(group: list[Row], key: str, digits: int) -> str:
    """A figure; with several seeds its least and most."""
    values = [row[key] for row in group if row.get(key) is not None]
    if not values:
        return "-"
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def quantize_table(rows: list[Row]) -> str:
    """Quantization: perplexity, agreement and time, by library, method, layout and tokens."""
    keys = ("gpu_folder", "model", "impl", "variant", "method", "bits", "group_size", "symmetric")
    body = []
    for group in newest(rows, "quantize", (*keys, "act_order", "options", "calibration_tokens")):
        row, seeds = group[-1], len(group)
        order = row.get("act_order")
        kind = "symmetric" if row["symmetric"] else "asymmetric"
        body.append(
            (
                row["model"],
                _library_text(row),
                f"{row['method']}, {row['bits']} bits, group {row['group_size']}, {kind}"
                + (f", order {order}" if isinstance(order, str) and row["method"] != "rtn" else "")
                + _options_text(row)
                + (f", {tokens:,} tokens" if (tokens := row.get("calibration_tokens")) else "")
                + (f", {seeds} seeds" if seeds > 1 else "")
                + (f" ({row['blocks']} blocks timed)" if "blocks" in row else ""),
                spread(group, "ppl_before", 3), spread(group, "ppl_after", 3),
                spread(group, "kl", 3), spread(group, "top1_agreement", 3),
                spread(group, "seconds_all_blocks" if "blocks" in row else "seconds", 0)
                + _beside(rows, row),
                measured(row),
            )
        )  # fmt: skip
    header = (
        "model", "library", "quantization", "perplexity before", "after", "KL", "same first token",
        "seconds", "measured",
    )  # fmt: skip
    return markdown(header, body) if body else ""


def _beside(rows: list[Row], peer: Row) -> str:
    """What ours took for the same in a peer's run: other runs may be of other processors."""
    if is_ours(peer):
        return ""
    keys = ("run", "method", "symmetric", "calibration_tokens", "seed")
    same = (r for r in rows if is_ours(r) and all(r.get(key) == peer.get(key) for key in keys))
    ours = next(same, None)
    return "" if ours is None else f" (ours in that run {ours['seconds']:.0f})"


def _library_text(row: Row) -> str:
    """Who quantized: this package, or another library and how it was asked."""
    impl, variant = row.get("impl", "ours"), row.get("variant")
    if impl.startswith("ours"):
        return "ours"
    return impl if variant in (None, row["method"]) else f"{impl}, {variant}"


def _options_text(row: Row) -> str:
    """What a row's method was told beside the layout, where it is not GPTQ's default."""
    options = row.get("options") or {}
    if row["method"] == "rtn":
        return ""
    return "".join(f", {name.replace('_', ' ')} {value}" for name, value in options.items())


def train_table(rows: list[Row]) -> str:
    """Training: tokens a second and the share of the arithmetic used."""
    keys = ("gpu_folder", "model", "impl", "layout", "state", "seqlen")
    timed = [row for row in rows if row["op"] != "train" or "mfu_noncausal" in row]
    body = [
        (
            row["model"], layout_text(row["layout"]), f"{row['state']}, {row['seqlen']:,}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{100 * row['mfu_noncausal']:.1f}% / {100 * row['mfu_causal']:.1f}%",
            f"{row['step_ms']['exposed_comm']:.0f} / {row['step_ms']['bubble']:.0f}"
            f" of {row['median_us'] / 1e3:,.0f} ms",
            f"{row['peak_memory_gib']:.0f} GiB", measured(row),
        )
        for row in (group[-1] for group in newest(timed, "train", keys))
    ]  # fmt: skip
    header = (
        "training", "layout", "state, seqlen", "tokens/s a device", "MFU non-causal / causal",
        "exposed communication / bubble of a step", "peak memory", "measured",
    )  # fmt: skip
    return markdown(header, body) if body else ""


def layout_text(layout: Row) -> str:
    """A row's layout in the short form of the command line."""
    sharded, tp, pp, cp = (layout[name] for name in ("dp_shard", "tp", "pp", "cp"))
    parts = [f"DP{layout['dp_replicate']}"] if layout["dp_replicate"] > 1 else []
    parts += [f"ZeRO-{layout['zero']} over {sharded}"] if sharded > 1 else []
    parts += [f"TP{tp}" + ("+SP" if layout["sequence_parallel"] else "")] if tp > 1 else []
    parts += [f"CP{cp}"] if cp > 1 else []
    if pp > 1:
        parts.append(f"PP{pp} {layout['schedule']}, {layout['num_microbatches']} micro-batches")
    if layout["async_tp"]:
        parts.append("async TP")
    recompute = layout["activation_checkpointing"]
    if recompute != "none":
        parts.append(f"{recompute} checkpointing")
    return ", ".join(parts) or "one device"


def serve_table(rows: list[Row]) -> str:
    """Serving: tokens a second by weights and batch."""
    keys = ("gpu_folder", "model", "impl", "weights", "batch", "load")
    timed = [row for row in rows if row["op"] != "serve" or "tokens_per_s" in row]
    body = [
        (
            row["model"], row.get("impl", "ours"), row["weights"],
            _load_text(row), f"{row['tokens_per_s']:,.0f}",
            f"{row['tbps']:.3g}" if row.get("tbps") else "-", measured(row),
        )
        for row in (group[-1] for group in newest(timed, "serve", keys))
    ]  # fmt: skip
    header = ("serving", "impl", "weights", "batch", "tokens/s", "TB/s", "measured")
    return markdown(header, body) if body else ""


def _load_text(row: Row) -> str:
    """The batch of a serving row, or its requests and how many ended where not all did."""
    if "load" not in row:
        return str(row["batch"])
    load = row["load"]
    text = f"{load['requests']} requests of {load['shortest']} to {load['longest']:,} tokens"
    if row["finished"] < load["requests"]:
        text += f", {row['finished']} ended in {row['limit_s']:.0f} s"
    return text
