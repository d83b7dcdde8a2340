"""The tables of README.md and docs/results.md say what the result rows say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ridgeline.core import registry

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import parallel_page  # noqa: E402
import readme_tables  # noqa: E402
import result_rows  # noqa: E402
import results_page  # noqa: E402
import tables  # noqa: E402

LINEAR = {"m": 1, "n": 4096, "k": 4096, "group_size": 128, "symmetric": True, "act_order": False}
SQUARE = {
    "batch": 1, "seqlen_q": 16384, "seqlen_k": 16384, "heads": 16, "kv_heads": 16,
    "head_dim": 128, "causal": True, "window": None,
}  # fmt: skip


def _row(impl: str, median_us: float, run: str = "r1", **more) -> dict:
    row = {
        "op": "w4a16", "impl": impl, "run": run, "gpu": "NVIDIA H200", "dtype": "bfloat16",
        "shape": LINEAR, "median_us": median_us, "p20_us": median_us, "p80_us": median_us,
        "percent_of_ceiling": 71.4, "tbps": 3.1, "tflops": 600.0, "ceiling": 790.0,
        "commit": "0123456789abcdef", "date": "2026-11-29T10:00:00", **more,
    }  # fmt: skip
    return row


def _attention(impl: str, median_us: float, direction: str = "fwd", run: str = "r1", **more):
    shape = {**SQUARE, **more.pop("shape", {})}
    more = {"op": "attention", "direction": direction, "shape": shape, **more}
    return _row(impl, median_us, run, **{"tflops": 1e6 / median_us, **more})


@pytest.fixture
def written(tmp_path):
    def write(rows: list[dict], op: str = "w4a16") -> list[dict]:
        path = tmp_path / "h200" / f"{op}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return result_rows.load(tmp_path)

    return write


def test_a_cell_is_the_newest_run_against_its_own_peers(written):
    rows = written(
        [
            _row("triton", 3.0), _row("marlin 1", 1.0),
            _row("ridgeline cute_sm90 lean", 1.5, run="r2"), _row("cute_sm90", 2.0, run="r2"),
            _row("machete 2", 2.5, run="r2"), _row("marlin 1", 4.0, run="r2"),
        ]
    )  # fmt: skip
    triton, cute = result_rows.current(rows)
    assert (triton.impl, triton.best_peer_us()) == ("triton", 1.0)
    assert (cute.impl, cute.row["median_us"], cute.best_peer_us()) == ("cute_sm90", 2.0, 2.5)
    assert list(cute.peers) == ["Marlin", "Machete"] and list(cute.variants) == ["lean"]
    assert readme_tables.ratio(cute) == "1.25"
    newer = result_rows.current([*rows, {**rows[3], "run": "r3", "median_us": 1.9}])[1]
    assert (newer.row["median_us"], newer.peers, newer.variants) == (1.9, {}, {})


def test_shapes_are_compared_in_one_spelling():
    one = _attention("triton", 1.0, shape={"window": 1024, "deterministic": False})
    other = _attention("fa3 1", 1.0, shape={"window": [1023, 0], "head_dim_v": 128})
    assert result_rows.shape_of(one) == result_rows.shape_of(other)
    [cell] = result_rows.current([{**row, "gpu_folder": "h200"} for row in (one, other)])
    assert list(cell.peers) == ["FlashAttention-3"]


def test_the_hopper_table(written):
    rows = written(
        [
            _attention("cute_sm90", 1000.0), _attention("fa3 vllm 1", 1250.0),
            _attention("cudnn 91900", 2000.0),
            _attention("cute_sm90", 500.0, shape={"seqlen_q": 4096, "seqlen_k": 4096}),
        ],
        "attention",
    )  # fmt: skip
    text = readme_tables.results_tables(rows)
    assert "| `cute_sm90` | FlashAttention-3 | cuDNN | ours : best peer |" in text  # who was there
    assert "| forward | 128 | causal | 1000 | 800 | 500 | 1.25 |" in text
    assert "| forward | 64 |" not in text
    assert "H200, 2026-11-29, commit 01234567, run r1. Peers: fa3 vllm 1, cudnn 91900." in text
    assert "backward" not in text and "2000" not in text


def test_the_triton_table(written):
    rows = written(
        [
            _attention("triton", 2000.0), _attention("triton", 4000.0, "bwd"),
            _attention("triton", 9000.0, "bwd", shape={"deterministic": True}),
            _attention("flexattention (t)", 2500.0), _attention("fa2 t", 8000.0, "bwd"),
        ],
        "attention",
    )  # fmt: skip
    text = readme_tables.results_tables(rows)
    assert "| 128 | causal | 500 / 250 | 400 / - | - / - | - / 125 | 1.25 / - |" in text


def test_the_decode_table(written):
    def row(tbps: float, **shape) -> dict:
        kind = {"seqlen_q": 1, "seqlen_k": 8192, "batch": 32, "heads": 32, "kv_heads": 8, **shape}
        return _attention("triton", 10.0, "decode", shape=kind, tbps=tbps)

    rows = written([row(4.0), row(3.5, page_size=16), row(2.0, batch=1)], "attention")
    text = readme_tables.results_tables(rows)
    assert "| batch x keys | queries | contiguous | pages of 16 |" in text
    assert "| 32 x 8k | 1 | 4.00 (71%) | 3.50 (71%) |\n" in text + "\n"
    assert "| 1 x 8k | 1 | 2.00 (71%) | - |" in text


def test_the_w4a16_table_shows_no_variant(written):
    rows = written(
        [
            _row("ridgeline cute_sm90", 2.0), _row("ridgeline cute_sm90 lean", 1.0),
            _row("cublas bf16", 5.0), _row("marlin 1", 4.0), _row("machete 1", 3.0),
            _row("ridgeline cute_sm90", 20.0, shape={**LINEAR, "m": 64}),
            _row("ridgeline cute_sm90", 20.0, shape={**LINEAR, "m": 4}),
        ]
    )  # fmt: skip
    text = readme_tables.results_tables(rows)
    assert "| 4,096 -> 4,096 | 2.00 / 3.00 / 5.00 (71%) | - | - | 20.0 / - / - (71%) | - |" in text


def test_the_page_has_every_current_row(written):
    rows = written(
        [
            _row("ridgeline cute_sm90", 2.0, error=0.002), _row("cublas bf16", 5.0),
            _row("ridgeline cute_sm90 batch-invariant", 3.0),
            _row("ridgeline cute_sm90", 4.0, shape={**LINEAR, "act_order": True, "m": 3}),
        ]
    )  # fmt: skip
    text = results_page.page(rows)
    assert "## w4a16, `cute_sm90`, bfloat16, H200" in text
    assert "| batch-invariant, us | cuBLAS, us | ours : best peer |" in text
    line = "| 4,096 | 4,096 | 1 | 128 | - | 2.00 | 2.00 to 2.00 | 600 | 71% | 0.002 | 3.00 | 5.00 |"
    assert f"{line} 2.50 |" in text
    assert "| 4,096 | 4,096 | 3 | 128 | act order | 4.00 |" in text


def test_the_page_holds_the_measured_rows():
    """Every row of the newest run of each cell is a line of docs/results.md."""
    rows = result_rows.load(ROOT / "benchmarks" / "results")
    kernels = [row for row in rows if row["op"] in ("attention", "w4a16")]
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    cells = result_rows.current(kernels)
    lines = [line for line in text.splitlines() if line.startswith("| ") and " to " in line]
    assert len([line for line in lines if "p20" not in line]) >= len(cells) > 100
    for cell in cells:
        assert f" {result_rows.us_text(cell.row['median_us'])} |" in text


def test_no_peer_and_no_rows(written):
    text = readme_tables.results_tables(written([_row("cute_sm90", 3.0)]))
    assert "3.00 / - / - (71%)" in text and "Peers" not in text
    assert readme_tables.results_tables([]) == "No result rows yet."


def test_quantization_rows(written):
    row = {
        "op": "quantize", "gpu": "cpu", "model": "SmolLM2", "method": "gptq", "bits": 4,
        "group_size": 64, "symmetric": True, "act_order": "static", "ppl_before": 14.5,
        "ppl_after": 17.25, "seconds": 93.4, "commit": "abcdef0123", "date": "2026-11-29",
        "run": "r1", "kl": 0.1, "top1_agreement": 0.8,
    }  # fmt: skip
    theirs = {k: v for k, v in row.items() if k != "act_order"} | {
        "impl": "gptqmodel 7.6.0", "variant": "group-aware", "calibration_tokens": 16384,
    }  # fmt: skip
    other = theirs | {"impl": "llm-compressor 0.14.0.1", "variant": "gptq"}
    half = {**row, "calibration_tokens": 8192}
    rows = written([row, {**row, "ppl_after": 17.5}, theirs, other, half], "quantize")
    text = readme_tables.results_tables(rows)
    assert "| ours | gptq, 4 bits, group 64, symmetric, order static, 2 seeds | 14.500 |" in text
    assert "| 17.250 to 17.500 | 0.100 | 0.800 | 93 | CPU, 2026-11-29, abcdef01 |" in text
    assert "| ours | gptq, 4 bits, group 64, symmetric, order static, 8,192 tokens |" in text
    end = "gptq, 4 bits, group 64, symmetric, 16,384 tokens | 14.500 |"
    assert f"| gptqmodel 7.6.0, group-aware | {end}" in text
    assert f"| llm-compressor 0.14.0.1 | {end}" in text


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
    with pytest.raises(ValueError, match="the text must hold <!-- y:begin -->"):
        tables.replace_block(text, "y", "new")


def test_training_rows_say_their_layout_and_what_is_no_speed_is_left_out(written):
    layout = {
        "dp_replicate": 1, "dp_shard": 2, "tp": 2, "pp": 2, "cp": 1, "zero": 3,
        "schedule": "zbv", "num_microbatches": 8, "sequence_parallel": True,
        "activation_checkpointing": "full", "async_tp": False,
    }  # fmt: skip
    speed = _row(
        "ridgeline", 2e6, op="train", model="llama-8b", layout=layout, state="float32",
        seqlen=8192, tokens_per_s_per_gpu=9554.1, mfu_noncausal=0.559, mfu_causal=0.497,
        peak_memory_gib=101.4, step_ms={"exposed_comm": 28.6, "bubble": 3.2},
    )  # fmt: skip
    parity = _row("ridgeline", 0, op="train", model="verify", verify={"error": 1e-7}, layout=layout)
    lines = readme_tables.train_table(written([speed, parity], "train")).splitlines()
    assert len(lines) == 3
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:5] == [
        "llama-8b",
        "ZeRO-3 over 2, TP2+SP, PP2 zbv, 8 micro-batches, full checkpointing",
        "float32, 8,192", "9,554", "55.9% / 49.7%",
    ]  # fmt: skip
    assert cells[5:7] == ["29 / 3 of 2,000 ms", "101 GiB"]


def test_a_peers_seconds_stand_beside_ours_of_the_same_run(written):
    same = {
        "op": "quantize", "model": "small", "method": "gptq", "bits": 4, "group_size": 64,
        "symmetric": True, "calibration_tokens": 16384, "seed": 1, "ppl_before": 15.3,
        "ppl_after": 17.6, "kl": 0.15, "top1_agreement": 0.8,
    }  # fmt: skip
    rows = [
        _row("ours gptq", 0, run="r1", seconds=86.2, **same),
        _row("peer 1", 0, run="r1", seconds=280.9, **same),
        _row("ours gptq", 0, run="r2", seconds=40.7, **same),
    ]
    lines = readme_tables.quantize_table(written(rows, "quantize")).splitlines()
    seconds = [[cell.strip() for cell in line.split("|")][-3] for line in lines[2:]]
    assert seconds == ["41", "281 (ours in that run 86)"]


def test_the_parallel_page_shows_where_steps_go_and_the_newest_comparison(written):
    layout = {
        "dp_replicate": 1, "dp_shard": 1, "tp": 2, "pp": 1, "cp": 1, "zero": 3, "schedule": "1f1b",
        "num_microbatches": 2, "sequence_parallel": True, "activation_checkpointing": "none",
        "async_tp": False,
    }  # fmt: skip
    common = {"op": "train", "layout": layout, "gpu": "h200x2"}
    step = {"compute": 750.0, "exposed_comm": 150.0, "bubble": 0.0, "data": 0.0, "other": 100.0}
    speed = _row(
        "ridgeline", 9e5, model="llama-8b", state="float32", seqlen=8192, micro_batch=1,
        tokens_per_s_per_gpu=9126.0, mfu_noncausal=0.534, mfu_causal=0.475, peak_memory_gib=90.0,
        step_ms=step, versions={"torch": "2.11"}, **common,
    )  # fmt: skip
    wrong = {"error": 2.2, "tensor": "gradient of a", "ok": False}
    right = [wrong | {"error": e, "ok": True, "attention": "triton"} for e in (1e-7, 3e-7)]
    rows = [speed, _row("ridgeline", 0, model="verify", verify=wrong, run="old", **common)]
    rows += [_row("ridgeline", 0, model="verify", verify=x, run="new", **common) for x in right]
    text = parallel_page.parallel_tables(written(rows, "train"))
    assert "| 900 ms | 75.0% | 15.0% | 0.0% | 10.0% |" in text
    assert "| 53.4% | 47.5% |" in text and "8,192 x 1 x 2" in text
    assert "3.0e-07" in text and "2.2e+00" not in text and text.count("one process, fp32") == 1
    assert parallel_page.parallel_tables([]) == "Nothing has been measured yet."
    shared = {"gpu": "h200", "ranks_on_a_gpu": 2, "transfers": "gloo"}
    rows = [_row("ridgeline", 0, model="verify", verify=right[0], **common | shared)]
    rows.append(speed | {"gpu": "h200", "attention": "cute_sm90"})
    text = parallel_page.parallel_tables(written(rows, "train"))
    assert "| h200, shared by 2 ranks (gloo) | TP2+SP |" in text
    assert "PyTorch 2.11, attention cute_sm90. MFU" in text
