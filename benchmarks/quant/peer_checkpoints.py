"""Small whole checkpoints written by other libraries, for tests/formats/peer_checkpoints.

    python benchmarks/quant/peer_checkpoints.py tests/formats/peer_checkpoints

A random Llama of one layer is quantized by each library in its own environment (peers.py), in every
form that it writes and we read, and loaded again by that library. A folder a case is kept: config
and weights as the library wrote them (less a temporary path), and `expected.safetensors`: token
ids, the logits that Transformers computes in fp32 from the library's own dequantized weights, and
in its metadata the library's version and the SHA-256 of each layer's dequantized fp16 bytes. Then
the folder is read here and compared, as the tests do on every run. Quality is no matter: the text
is random. GPTQModel packs in PyTorch here: its C++ packer is compiled for minutes at its first use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import torch
from peers import PEERS, quantize_with
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ridgeline.engine import load
from ridgeline.quant.checkpoint import load_quantized

CASES = (
    ("gptqmodel", "group-aware", "gptq", True),
    ("gptqmodel", "desc_act", "gptq_desc_act", True),
    ("gptqmodel", "group-aware", "gptq_asymmetric", False),
    ("gptqmodel", "v2", "gptq_v2_asymmetric", False),
    ("gptqmodel", "awq", "awq_gemm", False),
    ("llm-compressor", "gptq", "compressed_tensors_gptq", True),
    ("llm-compressor", "gptq", "compressed_tensors_gptq_asymmetric", False),
    ("llm-compressor", "awq", "compressed_tensors_awq", False),
)
"""(library, variant as its script knows it, folder, symmetric)."""
GROUP = 32
KEPT = ("config.json", "quantize_config.json", "model.safetensors")


def source(folder: Path) -> LlamaForCausalLM:
    """The model to quantize, in fp16's values, with a tokenizer that the libraries ask for."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.2)
            parameter.copy_(parameter.half().float())
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", bos_token="w1", eos_token="w2", pad_token="w0"
    ).save_pretrained(folder)
    return model


def digest(w_NK: torch.Tensor) -> str:
    return hashlib.sha256(w_NK.half().contiguous().numpy().tobytes()).hexdigest()


@torch.no_grad()
def logits_of(
    model: LlamaForCausalLM, folder: Path, own: dict[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """What Transformers computes from the library's weights: its own form of the linears, and the
    rest (norms that awq changed) from its file."""
    rest = {
        name: tensor.float()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name in model.state_dict() and name.removesuffix(".weight") not in own
    }
    packed = {f"{name}.weight": tensor.float() for name, tensor in own.items()}
    model.load_state_dict({**rest, **packed}, strict=False)
    model.tie_weights()
    return model(ids).logits


def forget_folder(file: Path) -> None:
    """Take the temporary folder of the run out of a config; the rest stays as it was written."""
    config = json.loads(file.read_text())
    for entry in (config, config.get("quantization_config", {})):
        entry.get("meta", {}).pop("offload_to_disk_path", None)
    file.write_text(json.dumps(config, indent=2) + "\n")


def compare(folder: Path) -> float:
    """Read a kept folder with our readers. Returns the largest difference of a logit."""
    with safe_open(folder / "expected.safetensors", "pt") as opened:
        expected, facts = opened.get_tensor("logits"), opened.metadata()
        ids = opened.get_tensor("ids")
    digests = json.loads(facts["sha256"])
    read = load_quantized(folder)
    weights = read.weights()
    assert weights.keys() == digests.keys(), folder
    for name, weight in weights.items():
        assert digest(weight.dequantize()) == digests[name], f"{folder}: {name}"
    with torch.no_grad():
        logits = load.load_quantized(folder, torch.float32, torch.device("cpu"))[0](ids)
    return float((logits - expected).abs().max())


def keep(
    model: LlamaForCausalLM, made: Path, own: dict[str, torch.Tensor], ids: torch.Tensor,
    kept: Path, impl: str,
) -> None:  # fmt: skip
    """What the tests need of a folder that a library made."""
    logits = logits_of(model, made, own, ids[:1, :16])
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for file in KEPT:
        if (made / file).is_file():
            shutil.copy(made / file, kept / file)
            if file.endswith(".json"):
                forget_folder(kept / file)
    facts = {
        "by": impl,
        "sha256": json.dumps({name: digest(w_NK) for name, w_NK in own.items()}),
    }
    tensors = {"ids": ids[:1, :16].contiguous(), "logits": logits}
    save_file(tensors, kept / "expected.safetensors", facts)


def write(out: Path, only: list[str]) -> None:
    ids = torch.randint(3, 64, (16, 64), generator=torch.Generator().manual_seed(1))
    for name, variant, case, symmetric in CASES:
        if only and case not in only:
            continue
        peer = next(peer for peer in PEERS if peer.name == name)
        kept = out / case
        with tempfile.TemporaryDirectory() as work:
            model = source(Path(work) / "source")
            made, own_file = Path(work) / "out", Path(work) / "own.safetensors"
            quantize_with(
                peer, variant, model=Path(work) / "source", token_ids=ids, out=made, bits=4,
                group_size=GROUP, symmetric=symmetric, own=str(own_file),
            )  # fmt: skip
            keep(model, made, load_file(own_file), ids, kept, peer.impl)
        print(f"{kept.name:40s} {peer.impl:26s} bit for bit, logits within {compare(kept):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[], choices=[case for _, _, case, _ in CASES])
    given = parser.parse_args()
    write(given.out, given.only)
