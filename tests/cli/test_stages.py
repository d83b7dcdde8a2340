"""Every stage of the quickstart for real, on a tiny model and a made-up text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from ridgeline.cli.quickstart import quickstart
from ridgeline.cli.stage import QuickstartConfig
from ridgeline.cli.stages import parallel, perplexity, quantize, roofline, train, weights
from ridgeline.core.arch import Ceilings, detect, save_ceilings
from ridgeline.core.text import split_documents
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import load_config, load_pretrained, save_pretrained
from ridgeline.nn.tensorfile import TensorFolder

NAMES = "machine weights perplexity quantize generate serve train parallel roofline report".split()


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.words.append(data.strip())


@pytest.fixture(scope="module")
def tiny(model_folder, tmp_path_factory) -> Path:
    """The tiny model with a context that the stages' windows fit."""
    folder = tmp_path_factory.mktemp("stages") / "model"
    shape = replace(load_config(model_folder), max_seqlen=2048)
    save_pretrained(Decoder(shape, seed=2), folder, tokenizer_from=model_folder)
    return folder


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory):
    """The whole quickstart, small."""
    root = tmp_path_factory.mktemp("run")
    documents = [f"The {i} foxes jump over {i + 1} lazy dogs, then rest. " * 4 for i in range(90)]
    patch = pytest.MonkeyPatch()
    patch.setenv("RIDGELINE_CACHE", str(root / "cache"))
    kept = Ceilings(
        read_gbps=10.0, copy_gbps=10.0, matmul_tflops={"float32": 0.1, "bfloat16": 0.001},
        source="a test", measured=True,
    )  # fmt: skip
    save_ceilings(detect("cpu"), kept)
    patch.setattr("ridgeline.cli.doctor.measure_ceilings", lambda *_: kept)
    patch.setattr(weights, "model_folder", lambda: tiny)
    for stage in (perplexity, quantize, train, parallel):
        patch.setattr(stage, "wiki_split", lambda: split_documents(documents))
    patch.setattr(quantize, "GROUP", 32)
    for name, value in {"SEQLEN": 32, "SAMPLES": 2, "VOCAB": 280, "PRESET": "tiny"}.items():
        patch.setattr(train, name, value)
    patch.setattr(roofline, "BUDGET_S", 0.0)
    config = QuickstartConfig(
        out=root / "run", device="cpu", windows=2, calibration_sequences=2, train_steps=9,
        max_new_tokens=4,
    )  # fmt: skip
    done = quickstart(config)
    patch.undo()
    return done["stages"]


def test_every_stage_ran_and_its_result_is_kept(results):
    assert list(results) == NAMES
    folder = Path(results["report"]["path"]).parent / "results"
    for name in NAMES:
        assert json.loads((folder / f"{name}.json").read_text())["result"] == json.loads(
            json.dumps(results[name])
        )


def test_perplexities_are_of_the_same_tokens(results):
    before, after = results["perplexity"], results["quantize"]
    assert before["tokens"] == after["tokens"] == 2 * 1023
    assert before["ppl"] == pytest.approx(math.exp(before["nll"]))
    assert after["ppl_before"] == before["ppl"]
    rise = {name: after[f"ppl_{name}"] - before["ppl"] for name in ("rtn", "gptq")}
    assert rise["rtn"] != 0 and rise["gptq"] != 0
    assert after["increase_over_rtn"] == pytest.approx(rise["gptq"] / rise["rtn"])


def test_bytes_are_those_of_the_files(results, tiny):
    said = results["quantize"]
    plain, packed = TensorFolder(tiny), TensorFolder(said["folder"])
    assert said["bytes_before"] == plain.num_bytes() and said["bytes_after"] == packed.num_bytes()
    model = load_pretrained(tiny)
    assert said["bytes_per_token_before"] == 2 * model.weight_bytes() // 4
    read = sum(packed.get(name).nbytes for name in packed if name.endswith((".qweight", ".scales")))
    rest = sum(
        2 * packed.get(n).numel() for n in packed if n.endswith(("norm.weight", "tokens.weight"))
    )
    assert said["bytes_per_token_after"] == read + rest


def test_the_run_that_was_stopped_equals_the_one_that_was_not(results):
    said = results["train"]
    assert said["resumed_at"] == 3 and len(said["losses"]) == 9
    assert said["uninterrupted"] == said["losses"][3:5] and said["largest_difference"] == 0.0
    assert said["losses"][-1] < said["losses"][0]


def test_four_processes_equal_one_and_hand_over_to_one(results):
    said = results["parallel"]
    assert said["ranks"] == 4 and said["resumed_at"] == 4 and len(said["losses"]) == 6
    assert said["losses"] == pytest.approx(said["reference_losses"], rel=1e-5)
    assert said["largest_norm_difference"] < 1e-4
    assert said["step_ms"]["bubble"] > 0


def test_kernels_stand_under_their_floors(results):
    said = results["roofline"]
    assert [point["name"].split(",")[0] for point in said["points"]] == [
        "causal attention", "linears", "decode linears", "decode linears", "training step",
    ]  # fmt: skip
    for point in said["points"]:
        floor = max(point["flops"] / 0.1e6, point["bytes"] / 10e3)
        assert point["floor_us"] == pytest.approx(floor)
        assert point["percent_of_floor"] == pytest.approx(100 * floor / point["us"])
    linears, decode = said["points"][1], said["points"][2]
    assert linears["flops"] == 1024 * decode["flops"]
    config = results["weights"]
    assert config["parameters"] > decode["flops"] / 2 > 0


def test_the_answer_is_the_models(results):
    said = results["generate"]
    assert said["weights"] == "gptq 4-bit group 32" and 1 <= said["new_tokens"] <= 4
    assert said["dtype"] == "bfloat16" and said["prompt"].startswith("What is the capital")


def test_the_report_shows_the_data(results):
    text = Path(results["report"]["path"]).read_text(encoding="utf-8")
    page = _Page(text)
    for name in ("ppl_before", "ppl_rtn", "ppl_gptq"):
        assert f"{results['quantize'][name]:.3f}" in page.words
    assert page.tags.count("svg") == 3
    assert "resumed at step 3" in page.words
    assert f"{results['train']['eval_loss']:.3f}" in page.words
    for point in results["roofline"]["points"]:
        assert point["name"] in page.words
    assert results["machine"]["device"]["name"] in page.words
    assert any(torch.__version__.split("+")[0] in word for word in page.words)
