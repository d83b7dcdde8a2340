"""Checkpoints in and out: bitwise round trips, and every damaged folder refused in one line."""

from __future__ import annotations

import json
import resource

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ridgeline.core.errors import UserError
from ridgeline.nn import hf
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.tensorfile import TensorFolder

SHARD_BYTES = 30_000


@pytest.fixture
def folder(tmp_path, config):
    """A saved single-file checkpoint."""
    hf.save_pretrained(Decoder(config), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path, config):
    """A saved checkpoint of several shards."""
    hf.save_pretrained(Decoder(config), tmp_path / "sharded", max_shard_bytes=SHARD_BYTES)
    return tmp_path / "sharded"


def edit_config(folder, **change):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def refused(folder, match):
    with pytest.raises(UserError, match=match) as caught:
        hf.load_pretrained(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_bytes", [hf.MAX_SHARD_BYTES, SHARD_BYTES, 1])
def test_round_trip_is_bitwise(tmp_path, config, dtype, max_shard_bytes):
    model = Decoder(config, dtype=dtype, seed=3)
    hf.save_pretrained(model, tmp_path / "a", max_shard_bytes=max_shard_bytes)
    read = hf.load_pretrained(tmp_path / "a")
    assert read.config == config
    for (name, ours), (other, theirs) in zip(
        model.state_dict().items(), read.state_dict().items(), strict=True
    ):
        assert name == other and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    hf.save_pretrained(read, tmp_path / "b", max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_transformers_reads_our_shards(sharded, config):
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    token_ids = torch.randint(0, 101, (1, 9))
    with torch.no_grad():
        difference = (theirs(token_ids).logits - Decoder(config)(token_ids)).abs().max()
    assert difference < 1e-5


def test_tied_table_is_written_once_and_a_copy_is_accepted(folder):
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    model = hf.load_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "lm_head.weight must equal model.embed_tokens.weight")


def test_dtype_and_config_of_the_folder(tmp_path, config):
    hf.save_pretrained(Decoder(config, dtype=torch.bfloat16), tmp_path / "model")
    assert hf.load_pretrained(tmp_path / "model").lm_head.weight.dtype == torch.bfloat16
    wide = hf.load_pretrained(tmp_path / "model", dtype=torch.float32)
    assert wide.lm_head.weight.dtype == torch.float32
    assert hf.load_generation_config(tmp_path / "model") == {"bos_token_id": 1, "eos_token_id": 2}
    raw = hf.load_hf_config(tmp_path / "model")
    assert raw["torch_dtype"] == "bfloat16"
    del raw["torch_dtype"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    assert hf.load_pretrained(tmp_path / "model").lm_head.weight.dtype == torch.bfloat16


def test_tokenizer_files_go_along(tmp_path, config, tokenizer_folder):
    hf.save_pretrained(Decoder(config), tmp_path / "model", tokenizer_from=tokenizer_folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (tokenizer_folder / name).read_bytes()


def test_tensor_folder_is_lazy_and_named(sharded, config):
    tensors = TensorFolder(sharded)
    assert len(tensors) == len(tensors.names) == 2 * 9 + 2
    assert tensors.shape("model.embed_tokens.weight") == (101, 48)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(tensors.get(name), Decoder(config).get_parameter(name))
    assert name in tensors and "lm_head.weight" not in tensors
    assert tensors.num_bytes() > 4 * config.num_params()
    with pytest.raises(UserError, match="tensor nope must be in"):
        tensors.get("nope")


def test_a_replaced_linear_gets_its_tensors(folder):
    """What the quantized loader does: a skeleton, another module in place, weights assigned."""
    config = hf.load_config(folder)
    name = "model.layers.0.mlp.up_proj"

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.empty(3, 4, dtype=torch.int32, device="meta"))

    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{name}.weight"]
    tensors[f"{name}.qweight"] = torch.arange(12, dtype=torch.int32).view(3, 4)
    save_file(tensors, folder / "model.safetensors")
    model = hf.skeleton(config, torch.bfloat16)
    model.blocks[0].mlp.up_proj = Packed()
    hf.assign_weights(model, TensorFolder(folder))
    assert model.blocks[0].mlp.up_proj.qweight[2, 3] == 11
    assert model.blocks[0].mlp.gate_proj.weight.dtype == torch.bfloat16
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_no_folder_no_weights(folder, tmp_path):
    refused(tmp_path / "nowhere", "config.json must exist, got none in")
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors or model.safetensors.index.json must exist, got neither")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    refused(folder, "weights must be safetensors, got pytorch_model.bin")


@pytest.mark.parametrize("keep", [0, 4, 200, 20_000])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "must be a whole safetensors file")


def test_missing_and_lying_shards(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    other = shard.read_bytes()
    shard.unlink()
    refused(sharded, f"shard {shard.name} must exist, got none")
    save_file({"x": torch.zeros(1)}, shard)
    refused(sharded, f"{shard.name} must hold .* got none")
    shard.write_bytes(other)
    hf.load_pretrained(sharded)


def test_an_index_cannot_name_files_elsewhere(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../../etc/passwd"
    path.write_text(json.dumps(index))
    refused(sharded, "must name files of its own folder, got '../../etc/passwd'")
    path.write_text("{}")
    refused(sharded, "must hold a weight_map")


def test_missing_unexpected_and_misshapen_tensors(folder):
    whole = load_file(folder / "model.safetensors")
    path = folder / "model.safetensors"
    save_file({k: v for k, v in whole.items() if k != "model.norm.weight"}, path)
    refused(folder, "got none for model.norm.weight; fetch")
    save_file({k: v for k, v in whole.items() if ".layers.1." not in k}, path)
    refused(folder, "got none for model.layers.1.input_layernorm.weight, .* and 6 more")
    save_file(whole | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}, path)
    refused(folder, "got model.layers.0.self_attn.q_proj.bias; its configuration does not")
    save_file(whole | {"model.norm.weight": torch.zeros(47)}, path)
    refused(folder, r"model.norm.weight must have shape \[48\], got \[47\]")
    save_file(whole | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, path)
    hf.load_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "auto_map must be absent"),
        ({"architectures": ["GPT2LMHeadModel"]}, "got GPT2LMHeadModel"),
        ({"num_key_value_heads": 4}, "num_heads must be a multiple of num_kv_heads 4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "plain weights, got a gptq checkpoint"),
        ({"torch_dtype": "float12"}, "name must be one of"),
        ({"tie_word_embeddings": False}, "got none for lm_head.weight"),
    ],
)
def test_bad_config(folder, change, match):
    edit_config(folder, **change)
    refused(folder, match)


def test_code_of_a_checkpoint_does_not_run(folder, tmp_path):
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    refused(folder, "code of a checkpoint is never run")
    assert not (tmp_path / "ran").exists()


def test_malformed_json(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "config.json must be JSON, got")
    (folder / "config.json").write_text("[]")
    refused(folder, "must hold a JSON object, got list")
    (folder / "config.json").write_bytes(b"\xff\xfe")
    refused(folder, "config.json must be JSON, got")


def test_an_existing_folder_is_kept(folder, config):
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        hf.save_pretrained(Decoder(config, seed=1), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    hf.save_pretrained(Decoder(config, seed=1), folder, overwrite=True)
    assert (folder / "model.safetensors").read_bytes() != before


def test_a_full_disk_leaves_the_old_folder(folder, config):
    """A file-size limit stands for the full disk: the write fails in the middle of the tensors."""
    before = (folder / "model.safetensors").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(UserError, match="write: could not write"):
            hf.save_pretrained(Decoder(config, seed=1), folder, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_ctrl_c_leaves_nothing(tmp_path, config):
    def interrupted():
        yield "model.norm.weight", torch.zeros(48)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.write_folder(tmp_path / "model", config.to_hf(), interrupted(), max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.weights
def test_real_round_trip_is_bitwise(smollm, tmp_path):
    """All but the layers from the third on: whole, the copy would fill 260 MB of the disk."""
    model = hf.load_pretrained(smollm)
    layers = model.model.layers
    later = [f"model.layers.{index}." for index in layers.indices[2:]]
    for index in layers.indices[2:]:
        delattr(layers, str(index))
    hf.save_pretrained(model, tmp_path / "copy", tokenizer_from=smollm)
    before, after = TensorFolder(smollm), TensorFolder(tmp_path / "copy")
    assert len(later) == 28
    assert after.names == [name for name in before.names if not name.startswith(tuple(later))]
    for name in after:
        assert torch.equal(before.get(name), after.get(name)), name
