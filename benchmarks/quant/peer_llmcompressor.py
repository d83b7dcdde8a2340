"""Runs in llm-compressor's environment: quantize a folder on given tokens (see peers.py).

python peer_llmcompressor.py '{"model": ..., "tokens": ..., "out": ..., "variant": "gptq", ...}'
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig


def recipe(asked: dict) -> list:
    """The library's defaults, with our width, group size and symmetry."""
    weights = {
        "num_bits": asked["bits"],
        "type": "int",
        "symmetric": asked["symmetric"],
        "strategy": "group",
        "group_size": asked["group_size"],
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if asked["variant"] == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    if not torch.cuda.is_available():
        IntermediatesCache.pin_memory = lambda self, *args, **kwargs: None
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def own_weights(folder: str) -> dict[str, torch.Tensor]:
    """Every layer as the library's own code makes it of its file, fp16 [N, K]."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float16,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )  # fmt: skip
    return {
        name: module.weight.detach().half().contiguous()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    ids = load_file(asked["tokens"])["input_ids"]
    data = Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    )
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe(asked),
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids),
        batch_size=min(8, len(ids)),
        shuffle_calibration_samples=False,
    )
    seconds = time.perf_counter() - start
    model.half().save_pretrained(asked["out"], save_compressed=True)
    AutoTokenizer.from_pretrained(asked["model"]).save_pretrained(asked["out"])
    if asked.get("own"):
        save_file(own_weights(asked["out"]), asked["own"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    names = ("llmcompressor", "compressed-tensors", "transformers", "torch")
    said = {
        "seconds": round(seconds, 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
