"""The measured tables of docs/parallel.md, from benchmarks/results/<gpu>/train.jsonl."""

from __future__ import annotations

from collections.abc import Iterable

from readme_tables import layout_text, measured, newest
from result_rows import Row, gpu_text, markdown

PARTS = ("compute", "exposed_comm", "bubble", "data", "other")


def parallel_tables(rows: list[Row]) -> str:
    """Speed with a step's split, exactness, checkpoints and links, as there are rows."""
    ours = [row for row in rows if row["op"] == "train"]
    tables = (speed_table(ours), exact_table(ours), checkpoint_table(ours), links_table(ours))
    return "\n\n".join(table for table in tables if table) or "Nothing has been measured yet."


def latest(rows: Iterable[Row], keys: tuple[str, ...]) -> list[Row]:
    """Of rows with the same keys the last, in the order in which they first came."""
    found: dict[str, Row] = {}
    for row in rows:
        found[repr([row.get(key) for key in keys])] = row
    return list(found.values())


def speed_table(rows: list[Row]) -> str:
    """Tokens, MFU, memory and the split of a profiled step, percent of it."""
    timed = [row for row in rows if "mfu_noncausal" in row]
    body = []
    for row in latest(timed, ("gpu", "model", "layout", "state", "seqlen", "micro_batch")):
        split = row["step_ms"]
        whole = max(sum(split.values()), 1e-9)
        batch = f"{row['micro_batch']} x {row['layout']['num_microbatches'] or 1}"
        body.append(
            (
                row["model"], row["gpu"], layout_text(row["layout"]), row["state"],
                f"{row['seqlen']:,} x {batch}", f"{row['tokens_per_s_per_gpu']:,.0f}",
                f"{100 * row['mfu_noncausal']:.1f}%", f"{100 * row['mfu_causal']:.1f}%",
                f"{row['peak_memory_gib']:.0f} GiB", f"{row['median_us'] / 1e3:,.0f} ms",
                *(f"{100 * split.get(part, 0.0) / whole:.1f}%" for part in PARTS if part != "data"),
            )
        )  # fmt: skip
    header = (
        "model", "GPUs", "layout", "state", "tokens x samples x micro-batches",
        "tokens/s a GPU", "MFU", "MFU causal", "memory", "step", "compute", "exposed comm.",
        "bubble", "other",
    )  # fmt: skip
    return f"{markdown(header, body)}\n\n{origin(timed)}" if body else ""


def exact_table(rows: list[Row]) -> str:
    """How far each layout was from one process in fp32, and from data parallel in bf16; the worst
    of a run's seeds."""
    body = []
    for group in newest([r for r in rows if is_exact(r)], "train", ("gpu", "model", "layout")):
        kind = group[0]["model"]
        for attention in dict.fromkeys(row[kind].get("attention", "") for row in group):
            same = [row for row in group if row[kind].get("attention", "") == attention]
            row = max(same, key=lambda row: (not row[kind]["ok"], row[kind]["error"]))
            told = row[kind]
            if kind == "verify":
                text, of = f"{told['error']:.1e}", f"one process, fp32: {told['tensor']}"
            else:
                text = f"loss {told['error']:.1e}"
                of = f"DP in bf16, control {told['control']:.1e}"
                if "gradient" in told:
                    text += f", gradient {told['gradient_error']:.1e}"
                    of += f"; fp32, DP {told['gradient_control']:.1e} ({told['gradient']})"
            body.append(
                (
                    exact_gpus(row), layout_text(row["layout"]), text, of,
                    attention or "-", "yes" if told["ok"] else "**no**",
                    row["commit"][:8],
                )
            )  # fmt: skip
    header = ("GPUs", "layout", "largest difference", "against", "attention", "agrees", "commit")
    return markdown(header, body) if body else ""


def exact_gpus(row: Row) -> str:
    """Which GPUs, and where several ranks shared one."""
    ranks = row.get("ranks_on_a_gpu")
    return row["gpu"] if ranks is None else f"{row['gpu']}, shared by {ranks} ranks (gloo)"


def is_exact(row: Row) -> bool:
    """Whether a row is of a comparison."""
    return "verify" in row or "parity" in row


def checkpoint_table(rows: list[Row]) -> str:
    """Saved under one layout, read under another."""
    body = []
    found = [row | {"to": row["checkpoint"]["to"]} for row in rows if "checkpoint" in row]
    for row in latest(found, ("gpu", "model", "layout", "to")):
        told = row["checkpoint"]
        body.append(
            (
                row["model"], row["gpu"], layout_text(row["layout"]), layout_text(told["to"]),
                f"{told['bytes'] / 1e9:.1f} GB",
                f"{told['save_s']:.1f} s, {told['save_gbps']:.1f} GB/s",
                f"{told['load_s']:.1f} s, {told['load_gbps']:.1f} GB/s",
                "bitwise" if told["equal"] else "**differs**", row["commit"],
            )
        )  # fmt: skip
    header = (
        "model", "GPUs", "saved under", "read under", "size", "save", "load (page cache)",
        "parameters", "commit",
    )  # fmt: skip
    return markdown(header, body) if body else ""


def links_table(rows: list[Row]) -> str:
    """GB/s of the collectives between all ranks."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
    body = [
        (row["gpu"], *(f"{row['links_gbps'][kind]:.0f}" for kind in kinds), measured(row))
        for row in latest([row for row in rows if "links_gbps" in row], ("gpu",))
    ]
    header = ("links, GB/s a rank", *(kind.replace("_", "-") for kind in kinds), "measured")
    return markdown(header, body) if body else ""


def origin(rows: list[Row]) -> str:
    """Where timed rows come from."""
    seen = dict.fromkeys(
        f"{gpu_text(row)}, {row['date'][:10]}, {row['commit'][:8]}, PyTorch "
        f"{row['versions']['torch']}"
        f"{', attention ' + row['attention'] if 'attention' in row else ''}" for row in rows
    )  # fmt: skip
    return f"Measured: {'; '.join(seen)}. MFU over {rows[0]['ceiling']}."
