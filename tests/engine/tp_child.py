"""A rank of the tensor-parallel test: `python -m tests.engine.tp_child FOLDER OTHER [recorded]`
under torchrun's variables; rank 0 prints what it generated as one JSON line. recorded: decode steps
go as they do where they are recorded, the next ones started ahead."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ridgeline.engine.device_forward import DeviceForward
from ridgeline.engine.graphs import DecodeGraphs
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.weights import Weights

PROMPTS = [[(i * i + 3 * n) % 256 for i in range(n)] for n in (1, 16, 40)]


def generate(llm: LLM) -> dict[str, object]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    made = llm.generate(PROMPTS, params)
    return {
        "tokens": [each.choices[0].token_ids for each in made],
        "logprobs": [[t.logprob for t in each.choices[0].logprobs or []] for each in made],
        "embedding": llm.embed(PROMPTS[1:2])[0],
    }


def record(llm: LLM) -> None:
    """Decode steps through DecodeGraphs, as plain calls."""
    runner, group = llm.runner, llm.group
    assert group is not None
    taken = runner.set_weights

    def set_weights(weights: Weights) -> None:
        taken(weights)
        runner.host_decoder = None
        runner.forward = DeviceForward(weights, runner.max_model_len, group.all_reduce)

    runner.set_weights = set_weights
    set_weights(runner.weights)
    runner.graphs = DecodeGraphs(runner)


def main(folder: str, other: str, recorded: str = "") -> None:
    torch.set_num_threads(1)
    llm = LLM(Path(folder), EngineConfig(max_step_tokens=24))
    if recorded:
        record(llm)
    if llm.rank:
        llm.follow()
        return
    found = generate(llm)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found["long"] = [made.choices[0].token_ids for made in llm.generate(PROMPTS, greedy)]
    graphs = llm.runner.graphs
    found["ahead"] = 0 if graphs is None else graphs.used_ahead
    llm.reload(Path(other))
    found["reloaded"] = generate(llm)["tokens"]
    llm.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
