"""Ranks that the engine starts: the same tokens as one process and as Transformers, new weights on
every rank or on none, a rank's end told with its reason, nothing left running."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

from ridgeline.core import env
from ridgeline.core.errors import UserError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.errors import EngineDeadError, ReloadError
from ridgeline.engine.llm import LLM
from ridgeline.engine.memory import plan
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.tp_worker import GONE
from ridgeline.engine.workers import config_of, pack_order, read_order
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.nn.hf import copy_tokenizer, load_hf_config, load_pretrained, state_tensors
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import save_quantized
from ridgeline.quant.recipe import Recipe
from tests.engine.conftest import write_model

ROOT = Path(__file__).parents[2]
TWO = EngineConfig(tensor_parallel=2, num_pages=24, max_step_tokens=24)
PROMPTS = [[(i * i + 3 * n) % 250 for i in range(n)] for n in (1, 16, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [made.choices[0].token_ids for made in llm.generate(PROMPTS, GREEDY)]


def transformers_tokens(folder: Path, new: int = 12) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@contextmanager
def two_ranks(folder: Path, config: EngineConfig = TWO):
    llm = LLM(folder, config)
    assert llm.workers is not None
    processes = llm.workers.processes
    try:
        yield llm
    finally:
        llm.close()
    assert all(process.poll() is not None for process in processes)


@pytest.mark.dist
def test_the_same_tokens_and_new_weights_on_every_rank(tmp_path):
    old, new = (write_model(tmp_path / str(seed), seed) for seed in (1, 2))
    with two_ranks(old) as llm:
        assert tokens(llm) == tokens(LLM(old)) == transformers_tokens(old)
        assert llm.shard.ranks == 2 and llm.plan.ranks == 2
        with pytest.raises(ReloadError, match="same model"):
            llm.reload(write_model(tmp_path / "other", num_layers=3))
        llm.reload(new)
        assert tokens(llm) == tokens(LLM(new)) != tokens(LLM(old))
        # A folder that rank 0 can read and another cannot (it went meanwhile): nothing changes.
        llm.ask_ranks("load", str(tmp_path / "gone"))
        with pytest.raises(ReloadError, match="rank 1: .*gone must be a folder"):
            while not llm.ranks_loaded():
                time.sleep(0.01)
        llm.ask_ranks("drop")
        assert tokens(llm) == tokens(LLM(new))


def short_of_best(model: torch.nn.Module, made: list[list[int]]) -> float:
    """How far the logit of any generated token is below its step's best."""
    found = 0.0
    for prompt, ids in zip(PROMPTS, made, strict=True):
        steps_V = model(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1]
        chosen = steps_V.gather(1, torch.tensor(ids)[:, None])[:, 0]
        found = max(found, float((steps_V.amax(1) - chosen).max()))
    return found


@pytest.mark.dist
def test_four_bits_over_two_ranks(tmp_path):
    """In fp32 the tokens of one process. In the folder's own dtype, bfloat16 on some processors,
    each token within 0.1 of its step's best: the best two of a step are 0.015 apart and bfloat16
    errs by 0.05, on one rank as on two, so roundings decide there."""
    source = write_model(tmp_path / "plain")
    model = load_pretrained(source, dtype=torch.float32).requires_grad_(False)
    plain = {name: tensor.clone() for name, tensor in state_tensors(model).items()}
    recipe = Recipe(method="rtn", layout=CompressedTensorsFormat(group_size=32))
    weights = quantize_model(model, None, recipe).weights
    folder = tmp_path / "w4"
    save_quantized(folder, load_hf_config(source), plain, weights, recipe)
    copy_tokenizer(source, folder)
    for name, weight in weights.items():
        model.get_submodule(name).weight.copy_(weight.dequantize())
    with two_ranks(folder, dataclasses.replace(TWO, dtype="float32")) as llm:
        made = tokens(llm)
    assert made == tokens(LLM(folder, EngineConfig(dtype="float32")))
    assert short_of_best(model, made) == 0
    llm = LLM(folder, TWO)
    try:
        assert short_of_best(model, tokens(llm)) < 0.1
        told_of_a_kill_while_it_generates(llm)
    finally:
        llm.close(stop=False)


def told_of_a_kill_while_it_generates(llm: LLM) -> None:
    """The last of an engine of two ranks; without a thread that watches them."""
    workers, step, killed = llm.workers, llm.core.run, []
    assert workers is not None

    def run(batch):
        if not killed:
            killed.append(workers.processes[0].kill())
        return step(batch)

    llm.core.run = run
    with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.dist
def test_a_rank_that_ends_is_told(tmp_path):
    folder = write_model(tmp_path / "m")

    async def idle() -> None:
        engine = AsyncEngine(LLM(folder, TWO))
        workers = engine.llm.workers
        assert workers is not None
        workers.processes[0].kill()
        while engine.health().state != "dead":
            await asyncio.sleep(0.01)
        assert engine.health().reason == "rank 1 was killed by SIGKILL"
        with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
            engine.add_request([1], GREEDY)
        await engine.close()

    asyncio.run(idle())


def test_what_cannot_be_split_is_refused_before_anything_starts(tmp_path):
    folder = write_model(tmp_path / "m")
    with pytest.raises(ValueError, match="engine: ranks must divide num_heads 4, got 3"):
        LLM(folder, EngineConfig(tensor_parallel=3))
    with pytest.raises(ValueError, match="tensor_parallel must be a whole number in 1 .. 64"):
        EngineConfig(tensor_parallel=0)
    with pytest.raises(ValueError, match="tensor_parallel must be 1 with a model in memory"):
        LLM(load_pretrained(folder, dtype=torch.float32), EngineConfig(tensor_parallel=2))


def test_the_plan_of_two_ranks(tmp_path):
    folder = write_model(tmp_path / "m")
    one, two = (plan(folder, EngineConfig(memory_gib=1.0), ranks) for ranks in (1, 2))
    assert two.kv_bytes_per_token * 2 == one.kv_bytes_per_token
    assert one.weights_bytes / 2 < two.weights_bytes < one.weights_bytes * 3 / 4
    lines = "\n".join(two.lines())
    assert "2: each has 2 of 4 heads, 1 of 2 key-value heads" in lines
    assert "1.00 GiB for the engine on each rank" in lines
    # A CPU's memory is one for all ranks.
    whole, half = (plan(folder, EngineConfig(), ranks).memory_bytes for ranks in (1, 2))
    assert half == whole // 2


def test_an_order_goes_through_a_pipe():
    config = EngineConfig(tensor_parallel=2, kv_dtype="fp8", num_pages=9)
    order = {"rank": 1, "config": dataclasses.asdict(config)}
    for data, says in (
        (pack_order(order), None),
        (pack_order(order)[:-1], "be whole"),
        (b"\xff\xff\xff\xff", "at most"),
        ((1).to_bytes(4, "little") + b"\x01", "be a table"),
    ):
        read, write = os.pipe()
        os.write(write, data)
        os.close(write)
        if says is None:
            assert config_of(read_order(read)["config"]) == config
        else:
            with pytest.raises(ValueError, match=says):
                read_order(read)
        os.close(read)


@contextmanager
def served(folder: Path, *flags: str, device: str = "cpu"):
    """`ridgeline serve` with two ranks: (process, its address, where its stderr goes)."""
    words = ["serve", str(folder), "--port", "0", "--device", device, "--tensor-parallel", "2"]
    errors = folder.parent / "stderr"
    with open(errors, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "ridgeline", *words, *flags],
            cwd=ROOT,
            env=env.child_environment(),
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        assert process.stdout is not None
        said = ""
        while "OpenAI:" not in said:
            line = process.stdout.readline()
            assert line, said + errors.read_text()
            said += line
        yield process, re.search(r"http://[\d.:]+", said)[0], errors
    finally:
        process.kill()
        process.communicate()


def ask(address: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def workers_of(process: subprocess.Popen) -> list[int]:
    """Its child processes that are ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            stat = (entry / "stat").read_text()
            words = (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if b"tp_worker" in words and int(stat.rpartition(")")[2].split()[1]) == process.pid:
            found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_server_over_two_ranks(tmp_path):
    """Answers, reloads, drains; when a rank is killed it says so and ends with 1."""
    old = write_model(tmp_path / "runs" / "1", 1)
    write_model(tmp_path / "runs" / "2", 2)
    body = {"prompt": PROMPTS[1], "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    want = [LLM(tmp_path / "runs" / n).generate(PROMPTS[1:2], GREEDY)[0] for n in "12"]
    with served(old, "--reload-root", str(tmp_path / "runs")) as (process, address, _):
        (rank,) = workers_of(process)
        body["model"] = "1"
        answer = ask(address, "/v1/completions", body)
        assert answer["choices"][0]["text"] == want[0].choices[0].text
        assert ask(address, "/admin/reload", {"folder": "2"})["status"] == "reloaded"
        answer = ask(address, "/v1/completions", body)
        assert answer["choices"][0]["text"] == want[1].choices[0].text
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0 and not alive(rank)
    with served(old) as (process, _, errors):
        (rank,) = workers_of(process)
        os.kill(rank, signal.SIGKILL)
        assert process.wait(120) == 1
        said = " ".join(errors.read_text().split())
        assert "serve: the engine died: rank 1 was killed by SIGKILL; start" in said


@pytest.mark.dist
def test_a_rank_ends_with_rank_0(tmp_path):
    """However rank 0 ends, the pipe to its ranks closes."""
    order = {
        "rank": 1,
        "folder": str(write_model(tmp_path / "m")),
        "meeting": str(tmp_path),
        "device": "cpu",
        "threads": 1,
        "config": dataclasses.asdict(TWO),
    }
    command = [sys.executable, "-m", "ridgeline.engine.tp_worker"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(pack_order(order))
    process.stdin.flush()
    while not (tmp_path / "started.1").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.stdin.close()  # it waits for rank 0 to join now
    assert process.wait(60) == GONE


@pytest.mark.dist
def test_a_rank_that_cannot_start_is_told(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "m")
    wrong = tmp_path / "python"
    wrong.write_text("#!/bin/sh\nexit 7\n")
    wrong.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrong))
    with pytest.raises(UserError, match="engine: rank 1 ended with status 7"):
        LLM(folder, TWO)
