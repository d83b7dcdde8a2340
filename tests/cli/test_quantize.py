"""ridgeline quantize: kept blocks and kill -9, data, prediction, report and gates."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.cli import calibration, quantize_report
from ridgeline.cli import main as cli
from ridgeline.cli.calibration import Request, read_tokens
from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.cli.quantize_checks import journal_folder
from ridgeline.cli.quantize_work import recipe_of
from ridgeline.core import env, files, progress
from ridgeline.core.errors import UserError
from ridgeline.core.text import TextSplit
from ridgeline.engine.load import open_model
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_hf_config, load_pretrained, save_pretrained, state_tensors
from ridgeline.nn.perplexity import compare, perplexity
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.calibrate import Around, quantize_model
from ridgeline.quant.checkpoint import save_quantized
from ridgeline.quant.journal import Journal
from ridgeline.quant.linear import QuantizedLinear
from ridgeline.quant.predict import Rates
from ridgeline.quant.recipe import calibration_blocks

ROOT = Path(__file__).parents[2]


TEXT = "The quick brown fox jumps over the lazy dog. " * 45


def config_of(model: Path, text: Path, out: Path) -> QuantizeConfig:
    return QuantizeConfig(
        model=model, out=out, text=text, method="awq+gptq", group_size=32, sequences=8,
        sequence_tokens=64, batch_sequences=2, held_out_windows=3, device="cpu",
    )  # fmt: skip


@pytest.fixture
def config(model_folder, text_file, tmp_path) -> QuantizeConfig:
    assert text_file.read_text() == TEXT
    return config_of(model_folder, text_file, tmp_path / "out")


@pytest.fixture(autouse=True)
def _no_figures(request, monkeypatch):
    """Drawing takes longer than everything else here: one test looks at the page."""
    if request.function is not test_reports:
        monkeypatch.setattr(quantize_report, "page", lambda *_: None)
        monkeypatch.setattr(quantize_report, "render", lambda _: "")
        rates = Rates(flops=1e11, elements=1e9)
        monkeypatch.setattr(Rates, "measure", lambda *_: rates)


def weights(folder: Path) -> dict[str, bytes]:
    """Every file but the reports, which hold times."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.name.startswith("quantize_report") and path.name != "README.md"
    }


# ---- one run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "awq+gptq"])
def test_the_streamed_run_is_the_one_in_memory(config, method, tmp_path):
    """Blocks read, quantized and written one by one give the bytes of quantize_model on the whole
    model."""
    config = replace(config, method=method)
    said = quantize(config)
    assert not journal_folder(config.out).exists()
    recipe = replace(recipe_of(config), plain_dtype="float32")
    model = load_pretrained(config.model)
    ids = torch.tensor(Tokenizer(config.model).encode(config.text.read_text()))
    blocks = calibration_blocks(ids, sequences=8, length=64)
    done = quantize_model(model, blocks, recipe)
    save_quantized(
        tmp_path / "direct", load_hf_config(config.model), state_tensors(model), done.weights,
        recipe,
    )  # fmt: skip
    direct, streamed = weights(tmp_path / "direct"), weights(config.out)
    assert direct["config.json"] == streamed["config.json"]
    assert direct["model.safetensors"] == streamed["model.safetensors"]
    assert said["layers"] == 14 and said["bytes"] < said["bytes_16bit"]


def test_the_comparison_is_that_of_the_two_models(config):
    """Held-out windows are blocks of the text that calibration did not take."""
    said = quantize(config)["evaluation"]
    base, other = load_pretrained(config.model), open_model(config.out).model
    ids = torch.tensor(Tokenizer(config.model).encode(config.text.read_text()))
    blocks = ids[: len(ids) // 64 * 64].view(-1, 64)
    taken = {tuple(row.tolist()) for row in calibration_blocks(ids, sequences=8, length=64)}
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))[:8].tolist()
    free = [block for i, block in enumerate(blocks) if i not in order][:3]
    assert len(taken) <= 8
    rows = torch.cat(free)
    measured = compare(base, other, rows, window=64)
    assert said["kl"] == pytest.approx(measured.kl, rel=1e-2, abs=1e-6)
    assert said["ppl_before"] == pytest.approx(perplexity(base, rows, window=64).ppl, rel=1e-4)
    assert said["ppl_after"] == pytest.approx(perplexity(other, rows, window=64).ppl, rel=1e-3)
    assert said["tokens"] == 3 * 63


def test_reports(config):
    said = quantize(config)
    report = json.loads((config.out / "quantize_report.json").read_text())
    assert len(report["modules"]) == 14 and len(report["folds"]) == 8 and len(report["blocks"]) == 2
    assert all(block["held_out_error"] > 0 for block in report["blocks"])
    assert report["evaluation"] == said["evaluation"] and report["decode_speedup"] > 1
    assert report["measured"]["peak_bytes"] > 0 and report["predicted"]["device_bytes"] > 0
    with (config.out / "quantize_report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [module["name"] for module in report["modules"]]
    assert float(rows[0]["relative_error"]) == report["modules"][0]["relative_error"]
    page = (config.out / "quantize_report.html").read_text()
    worst = max(report["modules"], key=lambda module: module["relative_error"])
    assert f"<td>{worst['name'].removeprefix('model.layers.')}</td>" in page
    assert "by its name in model.layers;" in page
    assert page.count("<svg") == 3 and "http" not in page.split("<svg")[0]
    card = (config.out / "README.md").read_text()
    assert "awq+gptq, 4 bits, groups of 32, asymmetric, stored as gptq" in card
    assert f"{said['evaluation']['ppl_after']:.3f}" in card


def test_exceptions_by_pattern_and_a_sharded_folder(config):
    config = replace(
        config,
        method="gptq",
        override=(r"down_proj=bits:8,group:64", r"layers\.0\.mlp\.up_proj=skip"),
        max_shard_gb=1e-4,
    )
    said = quantize(config)
    assert said["skipped"] == ["model.layers.0.mlp.up_proj"] and said["layers"] == 13
    assert len(list(config.out.glob("model-*-of-*.safetensors"))) > 2
    opened = open_model(config.out)
    down = opened.model.get_submodule("model.layers.1.mlp.down_proj").layout
    assert (down.bits, down.group_size) == (8, 64)
    assert isinstance(opened.model.get_submodule("model.layers.0.mlp.up_proj"), torch.nn.Linear)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_widths(config, bits):
    quantize(replace(config, method="gptq", bits=bits, format="compressed-tensors"))
    assert open_model(config.out).weights == f"compressed-tensors {bits}-bit group 32"


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_too(config, tied, tmp_path, monkeypatch):
    """A tied head gets a weight of its own; stopped after it, a run goes on to the same bytes."""
    source = load_pretrained(config.model)
    raw = load_hf_config(config.model)
    if raw["tie_word_embeddings"] != tied:
        folder = tmp_path / "model"
        shape = replace(source.config, tie_embeddings=tied)
        save_pretrained(Decoder(shape, seed=2), folder, tokenizer_from=config.model)
        config = replace(config, model=folder)
    config = replace(config, method="gptq", lm_head=True, format="compressed-tensors")
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "remove", lambda self: None)
        first = quantize(replace(config, max_shard_gb=1.0))
    again = quantize(replace(config, overwrite=True))  # from the kept blocks and head
    assert first["layers"] == again["layers"] == 15
    assert first["evaluation"] == again["evaluation"]
    opened = open_model(config.out)
    head = opened.model.lm_head
    assert isinstance(head, QuantizedLinear) and not opened.model.tied
    base = load_pretrained(config.model)
    assert torch.equal(opened.model.model.embed_tokens.weight, base.model.embed_tokens.weight)
    wrong = (head.dequantize() - base.lm_head.weight).norm() / base.lm_head.weight.norm()
    assert 0 < wrong < 0.2
    assert first["worst"][0]["name"]


def test_methods_choose_their_symmetry(config):
    assert replace(config, method="gptq").symmetric and not replace(config, method="awq").symmetric
    assert replace(config, method="awq", symmetry="symmetric").symmetric
    assert not replace(config, method="rtn", symmetry="asymmetric").symmetric


# ---- kept blocks -----------------------------------------------------------------------------


class _KilledError(BaseException):
    pass


@pytest.fixture(scope="module")
def whole(model_folder, tmp_path_factory) -> dict[str, bytes]:
    """What `config`'s run gives when nothing stops it."""
    folder = tmp_path_factory.mktemp("whole")
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    quantize(config_of(model_folder, text, folder / "out"))
    return weights(folder / "out")


@pytest.mark.parametrize("moment", [2, 5, 8, 10])
def test_stopped_at_any_write_and_resumed(config, whole, monkeypatch, moment):
    """Stop at the n-th file that would appear (ten do): the next run redoes at most one block and
    gives the same bytes."""
    left, real = [moment], files.os.replace

    def replace_or_stop(*paths):
        left[0] -= 1
        if left[0] == 0:
            raise _KilledError
        real(*paths)

    monkeypatch.setattr(files.os, "replace", replace_or_stop)
    with pytest.raises(_KilledError):
        quantize(config)
    monkeypatch.setattr(files.os, "replace", real)
    folder = journal_folder(config.out)
    before = len(list(folder.glob("done-*"))) if folder.exists() else 0
    made: list[int] = []
    keep = Journal.keep

    def counted(self, model, result, *rest):
        made.append(result.index)
        keep(self, model, result, *rest)

    monkeypatch.setattr(Journal, "keep", counted)
    quantize(config)
    assert made == list(range(before, 2))
    assert weights(config.out) == whole
    assert not folder.exists()


END = """
import os, signal, sys
from ridgeline.cli import main
from ridgeline.quant.journal import Journal
from ridgeline.quant.linear import QuantizedLinear
keep = Journal.keep
def end(self, model, result, *rest):
    if result.index == 1:
        os.kill(os.getpid(), int(sys.argv[1]))
    keep(self, model, result, *rest)
Journal.keep = end
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_by_a_signal_and_resumed(config, whole, capsys, monkeypatch, number):
    """SIGTERM says what is kept; either way the next run's forecast is of the rest."""
    words = ["quantize", "--model", str(config.model), "--text", str(config.text)]
    words += ["--method", "awq+gptq", "--group-size", "32", "--sequences", "8", "--device", "cpu"]
    words += ["--sequence-tokens", "64", "--batch-sequences", "2", "--held-out-windows", "3"]
    words += ["--out", str(config.out)]
    ended = subprocess.run(
        [sys.executable, "-c", END, str(int(number)), *words], cwd=ROOT, text=True,
        env=env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"), capture_output=True,
    )  # fmt: skip
    folder = journal_folder(config.out)
    assert not config.out.exists() and len(list(folder.glob("done-*"))) == 1
    if number == signal.SIGTERM:
        assert ended.returncode == 143 and ended.stderr.splitlines()[-1] == (
            f"ridgeline: quantize: terminated; {config.out} is as it was before; 1 finished block "
            f"is kept in {folder}, the same command goes on from there"
        )
    else:
        assert ended.returncode == -number, ended.stderr
    slow = Rates(flops=1e7, elements=1e6)
    monkeypatch.setattr(Rates, "measure", lambda *_: slow)
    other = quantize(replace(config, out=config.out.with_name("other"), dry_run=True))
    capsys.readouterr()
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    left = int(re.search(r"predicted: .*, (\d+) s for 1 of 2 blocks, ", said).group(1))
    head = 2 * 2.0 * 192 * 64 * 257 / slow.flops  # the comparison's, once
    assert left - head == pytest.approx((other["predicted"]["seconds"] - head) / 2, abs=0.6)
    assert left > 20
    assert weights(config.out) == whole


def test_another_run_starts_over_and_says_why(config, whole, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "remove", lambda self: None)  # as if stopped at the very end
        quantize(replace(config, method="gptq", seed=1))
    progress.set_mode("lines")
    try:
        quantize(replace(config, overwrite=True))
    finally:
        progress.set_mode("quiet")
    assert "had another data, recipe; starting over" in capsys.readouterr().out
    assert weights(config.out) == whole


def test_a_foreign_folder_in_its_place_is_refused(config):
    folder = journal_folder(config.out)
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"must hold an unfinished run, got thesis.txt"):
        quantize(config)
    assert (folder / "thesis.txt").read_text() == "years of work"


# ---- prediction and gates --------------------------------------------------------------------


def test_a_dry_run_writes_nothing(config, capsys):
    words = ["quantize", "--model", str(config.model), "--text", str(config.text), "--dry-run"]
    words += ["--out", str(config.out), "--group-size", "32", "--sequences", "4"]
    assert cli.main([*words, "--sequence-tokens", "64"]) == 0
    said = capsys.readouterr().out
    assert "256 tokens in 4 sequences of up to 64" in said and "peak of the process" in said
    assert not config.out.exists() and not journal_folder(config.out).exists()


def test_gates(config, capsys):
    words = ["quantize", "--model", str(config.model), "--text", str(config.text), "--out"]
    words += [str(config.out), "--group-size", "32", "--sequences", "4", "--sequence-tokens", "64"]
    words += ["--bits", "2", "--method", "rtn", "--overwrite"]
    assert cli.main([*words, "--max-kl", "1000", "--max-ppl-increase", "100"]) == 0
    capsys.readouterr()
    assert cli.main([*words, "--max-kl", "1e-9", "--max-ppl-increase", "0"]) == 3
    said = capsys.readouterr().out
    assert "gate: KL must be at most 1e-09, got" in said
    assert "worst modules by output error: model.layers." in said
    assert (config.out / "model.safetensors").is_file()
    assert json.loads((config.out / "quantize_report.json").read_text())["gates"]


def test_a_gate_without_held_out_text_fails(config):
    """All text was taken for calibration."""
    blocks = len(config.text.read_text()) // 64
    said = quantize(replace(config, method="gptq", sequences=blocks, max_kl=10.0))
    assert said["gates"] == ["nothing was measured: no held-out text was left; give --held-out"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"max_kl": -1.0}, "max_kl must be 0 or more"),
        ({"max_kl": 0.1, "held_out_windows": 0}, "with held-out text, got no held-out windows"),
        ({"batch_sequences": 0}, "batch_sequences must be at least 1"),
        ({"max_shard_gb": 0.0}, "max_shard_gb must be above 0"),
        ({"override": ("down_proj",)}, "override must be PATTERN=bits:N,group:N or PATTERN=skip"),
        ({"override": ("down=bits:x",)}, "got 'down=bits:x'"),
    ],
)
def test_flags_that_make_no_sense(config, changes, part):
    with pytest.raises(ValueError, match=part.replace("(", r"\(")):
        replace(config, **changes)


# ---- data ------------------------------------------------------------------------------------


def asked(path: Path | None, **changes) -> Request:
    fields = {"text": path, "json_field": "text", "sequences": 3, "sequence_tokens": 32, "seed": 0}
    return Request(**(fields | {"held_out": None, "held_out_windows": 0} | changes))


def test_json_lines_of_texts_and_chats(model_folder, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [
        {"text": "a" * 20},
        {"text": "b" * 50},
        {"messages": [{"role": "user", "content": "c"}]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    found = read_tokens(asked(path), Tokenizer(model_folder))
    assert found.lengths_B is not None and found.ids_BS.shape == (3, 32)
    rows = {
        bytes(row[:length].tolist()).decode()
        for row, length in zip(found.ids_BS, found.lengths_B, strict=True)
    }
    assert rows == {"a" * 20, "b" * 32, "<user>c\n"} and found.count == 20 + 32 + 8


def test_the_built_in_set(model_folder, monkeypatch):
    """Calibration from its first half, held-out windows from its test part."""
    split = TextSplit(calibration="a" * 500, train=(), test="b" * 80)
    monkeypatch.setattr(calibration, "wiki_split", lambda: split)
    found = read_tokens(asked(None, held_out_windows=4), Tokenizer(model_folder))
    assert found.source == "built-in Wikipedia leads" and found.lengths_B is None
    assert torch.equal(found.ids_BS, torch.full((3, 32), ord("a")))
    assert found.held_out_WS is not None
    assert torch.equal(found.held_out_WS, torch.full((2, 32), ord("b")))


def test_padding_changes_nothing(config, tmp_path):
    """Documents of three lengths: the same as quantizing each packed beside the others."""
    path = tmp_path / "data.jsonl"
    words = config.text.read_text()
    lengths = [64, 20, 41, 64, 7, 33]
    texts = [words[7 * i : 7 * i + n] for i, n in enumerate(lengths)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = replace(config, text=path, sequences=6, held_out_windows=0, method="gptq")
    first = quantize(config)
    assert first["calibration_tokens"] == sum(lengths)
    padded = read_tokens(asked(path, sequences=6, sequence_tokens=64), Tokenizer(config.model))
    other = padded.ids_BS.clone()
    for row, length in zip(other, padded.lengths_B.tolist(), strict=True):
        row[length:] = 5  # whatever stands in the padding
    results = [
        quantize_model(
            load_pretrained(config.model), ids, recipe_of(config),
            around=Around(lengths_B=padded.lengths_B),
        )
        for ids in (padded.ids_BS, other)
    ]  # fmt: skip
    for name, weight in results[0].weights.items():
        assert torch.equal(weight.code_NK, results[1].weights[name].code_NK)


def test_little_text_is_said(model_folder, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "short"}\n')
    progress.set_mode("lines")
    try:
        read_tokens(asked(path), Tokenizer(model_folder))
    finally:
        progress.set_mode("quiet")
    said = capsys.readouterr().out
    assert "holds 1 documents where 3 were asked" in said
    assert "gives 5 calibration tokens where 96 were asked" in said


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 2 must be JSON"),
        ("[1]", "line 2 must be an object, got list"),
        ('{"body": "x"}', "line 2 must hold a text 'text' or chat messages, got body"),
        ('{"messages": [{"content": "x"}]}', "line 2"),
    ],
)
def test_lines_that_cannot_be_read(model_folder, tmp_path, line, part):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=part):
        read_tokens(asked(path), Tokenizer(model_folder))


def test_held_out_text_of_ones_own(model_folder, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("x" * 100)
    wanted = asked(text_file, held_out=other, held_out_windows=9)
    found = read_tokens(wanted, Tokenizer(model_folder))
    assert found.held_out_WS is not None and found.held_out_WS.shape == (3, 32)
    other.write_text("x" * 10)
    with pytest.raises(UserError, match="must hold 32 tokens, got 10"):
        read_tokens(wanted, Tokenizer(model_folder))
