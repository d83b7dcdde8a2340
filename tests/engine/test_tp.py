"""Two ranks over gloo generate what one does; messages are msgpack of a known kind, or refused.
Ranks that the engine starts itself: test_workers.py."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import torch

from ridgeline.core import env
from ridgeline.engine import tp
from ridgeline.engine.llm import LLM
from ridgeline.engine.paged import Span
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.runner import StepBatch
from ridgeline.engine.weights import Shard, weights_of
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.linear import replace_linears
from ridgeline.quant.recipe import Recipe
from tests.engine.conftest import tiny_decoder, write_model
from tests.engine.tp_child import PROMPTS, generate

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.dist
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_two_ranks_generate_what_one_does(recorded, tmp_path):
    """Also where both start steps ahead of their tokens, rank 1 by what it is told of batches."""
    folders = [write_model(tmp_path / str(seed), seed) for seed in (1, 2)]
    way = ["recorded"] if recorded else []
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.tp_child", *map(str, folders), *way],
            cwd=ROOT,
            env=env.child_environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=240)
        assert ranks[1].wait(timeout=60) == 0 and ranks[0].returncode == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    found = json.loads(out.splitlines()[-1])
    want = generate(LLM(folders[0]))
    assert found["tokens"] == want["tokens"]
    for got, told in zip(found["logprobs"], want["logprobs"], strict=True):
        torch.testing.assert_close(got, told, atol=1e-5, rtol=0)
    torch.testing.assert_close(found["embedding"], want["embedding"], atol=1e-5, rtol=0)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    long = LLM(folders[0]).generate(PROMPTS, greedy)
    assert found["long"] == [made.choices[0].token_ids for made in long]
    assert found["ahead"] > 20 if recorded else found["ahead"] == 0
    assert found["reloaded"] == generate(LLM(folders[1]))["tokens"] != found["tokens"]


def sums(model, x: torch.Tensor) -> list[torch.Tensor]:
    """Per layer: the sum over two ranks of (down of gated, out of qkv's first part)."""
    found = []
    for index in range(2):
        total = torch.zeros_like(x)
        for rank in range(2):
            layer = weights_of(model, Shard(rank=rank, ranks=2)).layers[index]
            both = layer.gate_up(x)
            if not layer.gated:
                gate, up = both.chunk(2, -1)
                both = torch.nn.functional.silu(gate) * up
            heads = layer.qkv(x)[:, : x.shape[1] // 2]
            total += layer.down(both) + layer.out(heads)
        found.append(total)
    return found


def test_shards_of_packed_weights_add_up():
    """A quantized model's ranks sum to the sum of its widened weights' ranks."""
    model, wide = tiny_decoder(), tiny_decoder()
    recipe = Recipe(method="rtn", layout=CompressedTensorsFormat(group_size=32))
    made = quantize_model(model, None, recipe).weights
    with torch.no_grad():
        for name, weight in made.items():
            wide.get_submodule(name).weight.copy_(weight.dequantize(torch.float32))
    replace_linears(model, made, recipe.layout_of)
    x = torch.randn(3, 64)
    for got, want in zip(sums(model, x), sums(wide, x), strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="engine: ranks must divide num_kv_heads 2, got 3"):
        weights_of(tiny_decoder(), Shard(rank=0, ranks=3))


def test_messages_go_round():
    step = StepBatch([1, 2, 3], [Span(0, 1, [4], 9), Span(1, 2, [5, 6], 18)], 1, [0, 2])
    kind, body = tp.decode(tp.encode("step", step.to_message()))
    assert kind == "step" and StepBatch.from_message(body) == step


@pytest.mark.parametrize("extra", [-1, 0, 1, 3 * tp.FRAME_BYTES])
def test_messages_of_any_length_go_in_pieces(extra):
    """One of fixed size, and the rest of longer ones."""
    count = tp.FRAME_BYTES - tp.LENGTH_BYTES + extra
    packed = bytes(i % 251 for i in range(count))
    first, *rest = tp.frames(packed)
    assert len(first) == tp.FRAME_BYTES and len(rest) == int(extra > 0)
    start, missing = tp.opened(bytes(first))
    assert missing == max(0, extra) and start + b"".join(map(bytes, rest)) == packed
    for length in (0, tp.MAX_MESSAGE_BYTES + 1):
        with pytest.raises(ValueError, match="engine: message must be at most"):
            tp.opened(length.to_bytes(tp.LENGTH_BYTES, "little") + bytes(first[8:]))


@pytest.mark.parametrize(
    "packed",
    [
        pickle.dumps(["step", None]),
        b"",
        b"\xc1",
        msgpack.packb(["exec", "rm"]),
        msgpack.packb({"step": 1}),
        msgpack.packb(["step"]),
        tp.encode("step", [1]) + b"\0",
        msgpack.packb(msgpack.ExtType(1, b"x")),
    ],
)
def test_other_bytes_are_refused(packed):
    with pytest.raises(ValueError, match="engine: message must be"):
        tp.decode(packed)


def test_no_pickle_in_the_engine():
    """CVE-2025-32444 and its kin: nothing here may unpickle."""
    for path in (ROOT / "ridgeline" / "engine").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("import pickle", "import dill", "cloudpickle", "torch.load(", "object_list("):
            assert word not in text, f"{path}: {word}"
