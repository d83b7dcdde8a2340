"""eval, generate, convert and quantize on a tiny model: figures, files, and every bad input."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from ridgeline.cli import main as cli
from ridgeline.cli.convert import ConvertConfig, convert
from ridgeline.cli.eval import EvalConfig
from ridgeline.cli.eval import eval as perplexity_of
from ridgeline.cli.generate import GenerateConfig, generate
from ridgeline.cli.quantize import QuantizeConfig, quantize
from ridgeline.core import files
from ridgeline.engine.load import open_model
from ridgeline.nn.hf import load_pretrained
from ridgeline.nn.tensorfile import TensorFolder


def _result(capsys, words: list[str]) -> dict:
    assert cli.main([*words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[-1]["event"] == "result"
    return events[-1]


@pytest.fixture
def broken(model_folder, tmp_path):
    """A copy of the model folder to damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "broken"))


# ---- eval ------------------------------------------------------------------------------------


def test_eval_is_the_mean_nll_of_its_windows(model_folder, text_file, capsys):
    said = _result(
        capsys,
        ["eval", "--model", str(model_folder), "--text", str(text_file), "--window", "100"],
    )
    opened = open_model(model_folder)
    ids = torch.tensor(opened.tokenizer.encode(text_file.read_text())[:2000]).view(20, 100)
    with torch.no_grad():
        logp = opened.model(ids)[:, :-1].double().log_softmax(-1)
    nll = -logp.gather(-1, ids[:, 1:, None]).mean().item()
    assert said["nll"] == pytest.approx(nll, rel=1e-5)
    assert said["ppl"] == pytest.approx(torch.tensor(nll).exp().item(), rel=1e-5)
    assert (said["tokens"], said["windows"], said["weights"]) == (20 * 99, 20, "float32")


def test_eval_stops_at_max_windows(model_folder, text_file):
    config = EvalConfig(model=model_folder, text=text_file, window=50, max_windows=3)
    assert perplexity_of(config)["tokens"] == 3 * 49


# ---- generate --------------------------------------------------------------------------------


def test_generate_is_greedy_and_streamed(model_folder, capsys):
    words = ["generate", "--model", str(model_folder), "--prompt", "Hi", "--max-new-tokens", "8"]
    assert cli.main([*words, "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    answer = events[-1]["answers"][0]
    pieces = [event["text"] for event in events if event["event"] == "text"]
    assert "".join(pieces) == answer["text"]
    opened = open_model(model_folder)
    ids = opened.tokenizer.encode("<user>Hi\n<assistant>")
    assert answer["prompt_tokens"] == len(ids)
    new: list[int] = []
    with torch.no_grad():
        for _ in range(answer["new_tokens"]):
            new.append(int(opened.model(torch.tensor([ids + new]))[0, -1].argmax()))
    assert answer["text"] == opened.tokenizer.decode(new)


def test_generate_reads_a_conversation_from_standard_input(model_folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    answers = generate(GenerateConfig(model=model_folder, max_new_tokens=2))["answers"]
    assert [answer["prompt"] for answer in answers] == ["first", "second"]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + len("second")


def test_a_chat_without_a_template_is_refused_before_the_weights(model_folder, tmp_path, capsys):
    names = shutil.ignore_patterns("chat_template.jinja", "*.safetensors")
    folder = shutil.copytree(model_folder, tmp_path / "model", ignore=names)
    assert cli.main(["generate", "--model", str(folder), "--prompt", "abc"]) == 2
    assert "must have a chat template, got none" in (err := capsys.readouterr().err)
    assert "--no-chat" in err


def test_generate_without_a_template_continues_the_text(model_folder):
    config = GenerateConfig(model=model_folder, prompt="abc", chat=False, max_new_tokens=1)
    assert generate(config)["answers"][0]["prompt_tokens"] == 3


# ---- convert ---------------------------------------------------------------------------------


def test_convert_keeps_every_bit_and_casts_on_request(model_folder, tmp_path, capsys):
    out = tmp_path / "same"
    said = _result(capsys, ["convert", "--source", str(model_folder), "--out", str(out)])
    before, after = load_pretrained(model_folder), load_pretrained(out)
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name]), name
    assert said["dtype"] == "float32" and said["parameters"] == before.num_params()
    assert (out / "tokenizer.json").read_text() == (model_folder / "tokenizer.json").read_text()
    convert(ConvertConfig(source=model_folder, out=tmp_path / "half", dtype="float16"))
    half = load_pretrained(tmp_path / "half").state_dict()
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor.half(), half[name]), name


# ---- quantize --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def quantized(model_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("quantized")
    text = root / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 45, encoding="utf-8")
    config = QuantizeConfig(
        model=model_folder, out=root / "out", text=text, group_size=32, sequences=4,
        sequence_tokens=64, device="cpu",
    )  # fmt: skip
    return quantize(config)


def test_quantize_writes_what_it_computed(quantized, model_folder):
    opened = open_model(quantized["out"])
    plain = load_pretrained(model_folder)
    assert opened.weights == "gptq 4-bit group 32"
    assert quantized["layers"] == 14 and quantized["calibration_tokens"] == 256
    assert quantized["bytes"] < quantized["bytes_16bit"]
    x = torch.tensor([opened.tokenizer.encode("The quick brown fox")])
    with torch.no_grad():
        want, got = plain(x), opened.model(x)
    assert 0 < (want - got).norm() / want.norm() < 0.3
    name = "model.layers.0.input_layernorm.weight"
    assert torch.equal(opened.model.state_dict()[name], plain.state_dict()[name])


def test_what_is_not_quantized_keeps_its_dtype_and_bits(model_folder, tmp_path):
    half, out = tmp_path / "half", tmp_path / "out"
    convert(ConvertConfig(source=model_folder, out=half, dtype="float16"))
    quantize(QuantizeConfig(model=half, out=out, method="rtn", group_size=32, device="cpu"))
    before, after = TensorFolder(half), TensorFolder(out)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert after.get(name).dtype == torch.float16
        assert torch.equal(before.get(name), after.get(name))


def test_quantize_report_lists_every_layer(quantized):
    report = json.loads((Path(quantized["out"]) / "quantize_report.json").read_text())
    assert len(report["modules"]) == 14 and report["config"]["group_size"] == 32
    assert all(0 < module["relative_error"] < 1 for module in report["modules"])


def test_a_quantized_folder_answers(quantized, capsys):
    said = _result(
        capsys,
        ["generate", "--model", quantized["out"], "--prompt", "Hi", "--max-new-tokens", "3"],
    )
    assert said["weights"] == "gptq 4-bit group 32" and said["answers"][0]["new_tokens"] >= 1


# ---- formats -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def in_formats(model_folder, tmp_path_factory):
    """The same model rounded into each format, symmetric."""
    root = tmp_path_factory.mktemp("formats")
    for name in ("gptq", "awq", "compressed-tensors"):
        quantize(
            QuantizeConfig(
                model=model_folder, out=root / name, method="rtn", format=name, group_size=32,
                device="cpu",
            )
        )  # fmt: skip
    return root


def _logits(folder) -> torch.Tensor:
    opened = open_model(folder)
    with torch.no_grad():
        return opened.model(torch.tensor([opened.tokenizer.encode("The quick brown fox")]))


@pytest.mark.parametrize("source", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("target", ["gptq", "awq", "compressed-tensors"])
def test_convert_between_formats(in_formats, tmp_path, capsys, source, target):
    out = tmp_path / "out"
    words = ["convert", "--source", str(in_formats / source), "--out", str(out)]
    said = _result(capsys, [*words, "--format", target])
    assert said["dtype"] == f"{target} 4-bit, from {source}" and said["layers"] == 14
    assert open_model(out).weights == f"{target} 4-bit group 32"
    assert torch.equal(_logits(out), _logits(in_formats / source))
    made, direct = TensorFolder(out), TensorFolder(in_formats / target)
    assert made.names == direct.names
    for name in made.names:
        assert made.get(name).dtype == direct.get(name).dtype
        assert torch.equal(made.get(name), direct.get(name)), name


def test_convert_refuses_what_a_format_cannot_hold(model_folder, text_file, tmp_path, capsys):
    words = ["quantize", "--model", str(model_folder), "--text", str(text_file), "--out"]
    words += [str(tmp_path / "act"), "--group-size", "32", "--act-order", "activation"]
    assert cli.main([*words, "--sequences", "4", "--sequence-tokens", "64"]) == 0
    convert = ["convert", "--source", str(tmp_path / "act"), "--out", str(tmp_path / "awq")]
    _fails(
        capsys, [*convert, "--format", "awq"], 1, "must fit awq as it is, got groups in activation"
    )
    assert not (tmp_path / "awq").exists()
    assert cli.main([*convert, "--format", "awq", "--lossy"]) == 0
    assert open_model(tmp_path / "awq").weights == "awq 4-bit group 32"


def test_convert_says_what_kind_of_folder_it_needs(model_folder, in_formats, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    plain = ["convert", "--source", str(model_folder), *out]
    packed = ["convert", "--source", str(in_formats / "awq"), *out]
    _fails(capsys, [*plain, "--format", "awq"], 1, "use ridgeline quantize --format awq")
    _fails(capsys, packed, 1, "name the format to write")
    _fails(capsys, [*packed, "--format", "gptq", "--dtype", "float16"], 2, "dtype must be keep")
    _fails(capsys, [*packed, "--lossy"], 2, "lossy must come with a format")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--bits", "3"], "bits must be 4 in awq, got 3"),
        (["--act-order", "activation"], "--act-order must be static or natural in awq"),
    ],
)
def test_quantize_refuses_what_awq_lacks(model_folder, text_file, tmp_path, capsys, flags, part):
    words = ["quantize", "--model", str(model_folder), "--text", str(text_file), "--format", "awq"]
    _fails(capsys, [*words, "--out", str(tmp_path / "out"), *flags], 2, part)


# ---- bad input -------------------------------------------------------------------------------


def _fails(capsys, words: list[str], code: int, *parts: str) -> None:
    assert cli.main(words) == code
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith("ridgeline: ") and "Traceback" not in said.err
    for part in parts:
        assert part in line, line


def _eval(folder, text) -> list[str]:
    return ["eval", "--model", str(folder), "--text", str(text), "--window", "64"]


def test_weights_that_are_missing_or_cut(broken, text_file, capsys):
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    _fails(capsys, _eval(broken, text_file), 1, "model.safetensors")
    weights.unlink()
    _fails(capsys, _eval(broken, text_file), 1, "safetensors", str(broken))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"auto_map": {"AutoModel": "model.Model"}}, "auto_map"),
        ({"num_attention_heads": 3}, "num_heads must be a multiple of num_kv_heads 2, got 3"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ],
)
def test_a_config_that_is_not_ours(broken, text_file, capsys, change, part):
    config = json.loads((broken / "config.json").read_text()) | change
    (broken / "config.json").write_text(json.dumps(config))
    _fails(capsys, _eval(broken, text_file), 1, part)


def test_a_missing_tokenizer(broken, text_file, capsys):
    (broken / "tokenizer.json").unlink()
    _fails(capsys, _eval(broken, text_file), 1, "tokenizer.json must exist")


def test_text_that_is_empty_foreign_short_or_missing(model_folder, tmp_path, capsys):
    text = tmp_path / "t.txt"
    _fails(capsys, _eval(model_folder, text), 1, "could not read")
    text.write_bytes(b"")
    _fails(capsys, _eval(model_folder, text), 1, "empty")
    text.write_bytes("caf\xe9 ".encode("latin-1") * 100)
    _fails(capsys, _eval(model_folder, text), 1, "must be UTF-8")
    text.write_bytes(b"short")
    _fails(capsys, _eval(model_folder, text), 2, "at least one window of 64 tokens, got 5 tokens")


def test_no_such_model(tmp_path, text_file, capsys):
    _fails(capsys, _eval(tmp_path / "nothing", text_file), 1, "must be a folder")


def test_a_window_beyond_the_context(model_folder, text_file, capsys):
    words = [*_eval(model_folder, text_file)[:-1], "300"]
    _fails(capsys, words, 2, "at most 256 tokens, the model's context, got 300")


def test_a_prompt_beyond_the_context(model_folder, capsys):
    words = ["generate", "--model", str(model_folder), "--prompt", "x" * 300]
    _fails(capsys, words, 2, "the model's context of 256 tokens")


def test_calibration_text_that_is_too_short(model_folder, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["quantize", "--model", str(model_folder), "--text", str(text_file), "--out", str(out)]
    _fails(capsys, [*words, "--group-size", "32"], 1, "32 x 512 = 16384 tokens, got 2025")
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            ["--group-size", "48"],
            "--group-size must divide the 64 inputs of self_attn.q_proj, got 48",
        ),
        (["--damp", "0"], "gptq: --damp must lie in (0, 1], got 0.0"),
        (["--skip", "("], "a pattern of --skip or --override must be a regular expression"),
        (["--sequences", "0"], "sequences must be at least 1, got 0"),
    ],
)
def test_quantize_refuses_before_it_works(model_folder, text_file, tmp_path, capsys, flags, part):
    words = ["quantize", "--model", str(model_folder), "--text", str(text_file)]
    words += ["--out", str(tmp_path / "out"), "--sequence-tokens", "50"]
    _fails(capsys, [*words, *flags], 2, part)


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_an_output_that_exists_is_not_touched(model_folder, text_file, tmp_path, capsys, command):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("keep")
    source = "--source" if command == "convert" else "--model"
    words = [command, source, str(model_folder), "--out", str(out)]
    words += ["--text", str(text_file)] if command == "quantize" else []
    _fails(capsys, words, 1, "exists", "--overwrite")
    assert (out / "mine").read_text() == "keep"


@pytest.mark.parametrize("command", ["convert", "quantize"])
def test_a_full_disk_leaves_nothing(
    model_folder, text_file, tmp_path, capsys, monkeypatch, command
):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    source = "--source" if command == "convert" else "--model"
    folder = tmp_path / "disk"
    words = [command, source, str(model_folder), "--out", str(folder / "out")]
    if command == "quantize":
        words += ["--method", "rtn", "--group-size", "32"]
    _fails(capsys, words, 1, "No space left on device", str(folder / "out"))
    assert list(folder.iterdir()) == []


def test_ctrl_c_in_the_middle_of_quantization(
    model_folder, text_file, tmp_path, capsys, monkeypatch
):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ridgeline.quant.block.quantize_layers", interrupt)
    folder = tmp_path / "q"
    words = ["quantize", "--model", str(model_folder), "--text", str(text_file)]
    words += ["--out", str(folder / "out"), "--group-size", "32", "--sequences", "2"]
    _fails(
        capsys, [*words, "--sequence-tokens", "64"], 1, "quantize: interrupted;", "as it was before"
    )
    assert not folder.exists() or list(folder.iterdir()) == []


def test_convert_refuses_what_is_no_gguf(tmp_path, capsys):
    source = tmp_path / "a.gguf"
    source.write_bytes(b"not a gguf file")
    out = tmp_path / "out"
    _fails(capsys, ["convert", "--source", str(source), "--out", str(out)], 1, "GGUF")
    _fails(capsys, ["convert", "--source", str(out), "--out", str(out)], 1, "must exist")
    assert not out.exists()
