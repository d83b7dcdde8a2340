"""A rank of the tensor-parallel test: `python -m tests.engine.tp_child FOLDER` under torchrun's
variables; rank 0 prints what it generated as one JSON line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams

PROMPTS = [[(i * i + 3 * n) % 256 for i in range(n)] for n in (1, 16, 40)]


def generate(llm: LLM) -> dict[str, object]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    made = llm.generate(PROMPTS, params)
    return {
        "tokens": [each.choices[0].token_ids for each in made],
        "logprobs": [[t.logprob for t in each.choices[0].logprobs or []] for each in made],
        "embedding": llm.embed(PROMPTS[1:2])[0],
    }


def main(folder: str, other: str) -> None:
    torch.set_num_threads(1)
    llm = LLM(Path(folder), EngineConfig(max_step_tokens=24))
    if llm.rank:
        llm.follow()
        return
    found = generate(llm)
    llm.reload(Path(other))
    found["reloaded"] = generate(llm)["tokens"]
    llm.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
