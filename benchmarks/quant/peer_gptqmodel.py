"""Runs in GPTQModel's environment: quantize a folder on given tokens (see peers.py).

python peer_gptqmodel.py '{"model": ..., "tokens": ..., "out": ..., "variant": "desc_act", ...}'
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.cpp import load_pack_block_extension
from safetensors.torch import load_file, save_file

FORMS = {
    "v2": {"format": FORMAT.GPTQ_V2},
    "awq": {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM},
}
"""What variants ask for beside the default (GPTQ, v1)."""


def own_weights(folder: str) -> dict[str, torch.Tensor]:
    """Every layer as the library's own PyTorch code makes it of its file, fp16 [N, K]."""
    awq = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    backend = BACKEND.AWQ_TORCH if awq["quant_method"] == "awq" else BACKEND.TORCH
    model = GPTQModel.load(folder, device="cpu", backend=backend, dtype=torch.float16).model
    torch.compiler.set_stance("force_eager")  # loading has made `dequantize_weight` a compiled one
    weights = {}
    for name, module in model.named_modules():
        if hasattr(module, "qweight"):
            if backend is BACKEND.AWQ_TORCH:
                w_KN = dequantize_gemm(
                    qweight=module.qweight, qzeros=module.qzeros, scales=module.scales,
                    bits=module.bits, group_size=module.group_size,
                )  # fmt: skip
            else:
                w_KN = module.dequantize_weight()
            weights[name] = w_KN.half().T.contiguous()
    return weights


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    ids = load_file(asked["tokens"])["input_ids"]
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    config = QuantizeConfig(
        bits=asked["bits"],
        group_size=asked["group_size"],
        sym=asked["symmetric"],
        desc_act=asked["variant"] == "desc_act",
        **FORMS.get(asked["variant"], {}),
        **({"pack_impl": "original"} if asked.get("own") else {}),
    )
    # Its AWQ takes no fp32 on a CPU.
    awq = asked["variant"] == "awq"
    dtype = torch.bfloat16 if awq else torch.float32
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.AUTO
    if not asked.get("own"):
        load_pack_block_extension()  # compiled at the first use, for minutes: no part of the time
    start = time.perf_counter()
    model = GPTQModel.load(asked["model"], config, dtype=dtype, device="cpu")
    model.quantize(rows, batch_size=min(8, len(rows)), backend=backend)
    seconds = time.perf_counter() - start
    model.save(asked["out"])
    if asked.get("own"):
        save_file(own_weights(asked["out"]), asked["own"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    names = ("gptqmodel", "transformers", "torch")
    said = {
        "seconds": round(seconds, 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "versions": {name: importlib.metadata.version(name) for name in names},
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
