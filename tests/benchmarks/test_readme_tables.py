"""The README's tables say what the result rows say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ridgeline.core import registry

_PATH = Path(__file__).parents[2] / "benchmarks" / "tables.py"
_spec = importlib.util.spec_from_file_location("tables", _PATH)
assert _spec is not None and _spec.loader is not None
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)

SHAPE = {"m": 1, "n": 4096, "k": 4096, "group_size": 128, "symmetric": True, "act_order": False}


def _row(impl: str, median_us: float, run: str = "r1", **more) -> dict:
    return {
        "op": "w4a16", "impl": impl, "run": run, "gpu": "H200", "dtype": "bfloat16",
        "shape": SHAPE, "median_us": median_us, "percent_of_ceiling": 71.4, "tbps": 3.1,
        "commit": "0123456789abcdef", "date": "2026-11-29T10:00:00", **more,
    }  # fmt: skip


@pytest.fixture
def written(tmp_path):
    def write(rows: list[dict], op: str = "w4a16") -> list[dict]:
        path = tmp_path / "h200" / f"{op}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tables.load(tmp_path)

    return write


def test_a_cell_is_the_newest_run_against_its_own_peers(written):
    rows = written(
        [
            _row("triton", 3.0), _row("marlin 1", 1.0),
            _row("triton", 2.5, run="r2"), _row("cute_sm90", 2.0, run="r2"),
            _row("machete 2", 2.5, run="r2"), _row("marlin 1", 4.0, run="r2"),
        ]
    )  # fmt: skip
    [(ours, peer)] = tables.cells(rows)
    assert (ours["impl"], ours["median_us"], peer["impl"]) == ("cute_sm90", 2.0, "machete 2")
    text = tables.results_tables(rows)
    assert "| H200 | w4a16 bfloat16 | m 1, n 4096, k 4096, group_size 128, symmetric |" in text
    assert "| cute_sm90 | 3.1 TB/s (2 us) | 71% | machete 2: 0.80x its time |" in text
    assert "| 2026-11-29, 01234567 |" in text


def test_no_peer_and_no_rows(written):
    assert "| - |" in tables.results_tables(written([_row("triton", 3.0)]))
    assert tables.results_tables([]) == "No result rows yet."


def test_the_headline_is_the_longest_cell_of_its_kind(written):
    wide = {**SHAPE, "n": 28672}
    many = {**SHAPE, "m": 4096}
    rows = written(
        [
            _row("triton", 2.0), _row("triton", 9.0, shape=wide),
            _row("triton", 500.0, shape=many, tflops=600.0),
        ]
    )  # fmt: skip
    shown = tables.headline(tables.cells(rows))
    assert sorted(row["median_us"] for row, _ in shown) == [9.0, 500.0]
    assert "600 TFLOP/s (500 us)" in tables.results_tables(rows)


def test_quantization_rows(written):
    row = {
        "op": "quantize", "gpu": "cpu", "model": "SmolLM2", "method": "gptq", "bits": 4,
        "group_size": 64, "symmetric": True, "act_order": True, "ppl_before": 14.5,
        "ppl_after": 17.25, "seconds": 93.4, "commit": "abcdef0123", "date": "2026-11-29",
    }  # fmt: skip
    text = tables.results_tables(written([row], "quantize"))
    assert "| gptq, 4 bits, group 64 | symmetric | 14.500 | 17.250 | 93 |" in text


def test_support_lists_every_implementation():
    text = tables.support_table()
    for op in ("attention", "w4a16"):
        for impl in registry.impls(op):
            assert f"| {op} | `{impl.name}` |" in text and impl.summary in text


def test_blocks_are_replaced_between_their_markers():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb"
    assert tables.replace_block(text, "x", "new\n") == (
        "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb"
    )
    with pytest.raises(ValueError, match="README.md must hold <!-- y:begin -->"):
        tables.replace_block(text, "y", "new")
