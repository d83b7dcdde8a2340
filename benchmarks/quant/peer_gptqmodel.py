"""Runs in GPTQModel's environment: quantize a folder on given tokens (see peers.py).

python peer_gptqmodel.py '{"model": ..., "tokens": ..., "out": ..., "variant": "desc_act", ...}'
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file


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
    )
    start = time.perf_counter()
    model = GPTQModel.load(asked["model"], config, dtype=torch.float32, device="cpu")
    model.quantize(rows, batch_size=min(8, len(rows)))
    seconds = time.perf_counter() - start
    model.save(asked["out"])
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
