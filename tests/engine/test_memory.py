"""The plan adds up, agrees with what is then allocated, and says what would fit."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.arch import pretend
from ridgeline.core.errors import UserError
from ridgeline.engine import llm, memory
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.llm import LLM
from ridgeline.engine.memory import GIB, kv_dtype_of, plan, plan_sizes
from ridgeline.train.presets import preset
from tests.engine.conftest import CONTEXT, tiny_decoder

CPU = torch.device("cpu")


def test_the_plan_is_what_is_allocated(model_folder):
    before = plan(model_folder, EngineConfig())
    llm = LLM(model_folder)
    assert before == llm.plan
    page_bytes = before.page_tokens * before.kv_bytes_per_token
    assert llm.runner.cache.num_bytes() == before.kv_bytes + page_bytes  # one page for padding
    assert before.weights_bytes == sum(
        p.numel() * p.element_size()
        for p in {id(p): p for p in tiny_decoder().parameters()}.values()
    )
    assert before.num_pages == 16 * CONTEXT // 16 and before.concurrency() == 16
    text = "\n".join(before.lines())
    assert "pages of 16 tokens = 2,048 tokens" in text and "requests     16 of 128 tokens" in text


def test_an_8b_model_on_a_small_budget():
    """bf16 Llama-3-8B: 15 GiB of weights; 20 GiB leave room, 8 do not, 4 bits would."""
    shape = preset("llama-8b")
    weights = shape.num_params() * 2
    config = EngineConfig(
        memory_gib=20.0, max_num_seqs=32, max_step_tokens=1024, kv_dtype="bfloat16"
    )
    made = plan_sizes(shape, weights, torch.bfloat16, CPU, config)
    used = made.weights_bytes + made.activation_bytes + made.graph_bytes + made.kv_bytes
    page_bytes = made.page_tokens * made.kv_bytes_per_token
    assert 20 * GIB - page_bytes < used <= 20 * GIB
    assert made.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert made.concurrency() == made.num_pages * 16 // 8192
    halved = plan_sizes(
        shape,
        weights,
        torch.bfloat16,
        CPU,
        EngineConfig(memory_gib=20.0, max_num_seqs=32, max_step_tokens=1024, kv_dtype="fp8"),
    )
    assert 1.8 < halved.num_pages / made.num_pages < 2.0
    with pytest.raises(UserError, match=r"fit in 8.00 GiB, got 15.* quantize it to 4 bits"):
        plan_sizes(shape, weights, torch.bfloat16, CPU, EngineConfig(memory_gib=8.0))


@pytest.mark.parametrize(
    ("packed", "gib", "advice"),
    [
        (False, 3.0, "; quantize it to 4 bits, raise memory_gib (--memory-gib) or use a GPU"),
        (True, 3.0, "; take a smaller model, raise memory_gib (--memory-gib) or use a GPU"),
        (True, 5.05, "; lower max_step_tokens or max_num_seqs, take a smaller model, raise"),
        (True, 5.7, "; lower max_step_tokens or max_num_seqs, lower max_model_len, raise"),
    ],
)
def test_what_would_help(packed, gib, advice):
    """Nobody is told to quantize what is quantized, or to shorten what is too large anyway."""
    shape = preset("llama-8b")
    config = EngineConfig(memory_gib=gib, max_model_len=8192, max_num_seqs=4)
    with pytest.raises(UserError, match=re.escape(advice)):
        plan_sizes(shape, 5 * GIB, torch.bfloat16, CPU, config, packed=packed)


CACHE_OF_A_SERVER = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import torch
from ridgeline.engine import paged
from ridgeline.train.presets import preset

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

if sys.argv[1] == "touch":
    paged.populate = lambda *args, **options: False
shape = replace(preset("tiny"), num_layers=2, num_kv_heads=2, head_dim=64)
sizes = {"num_pages": 2**12, "page_tokens": 16, "kv_heads": 2, "dtype": torch.float32}
before = resident_bytes()
cache = paged.PagedKV(shape, **sizes, device=torch.device("cpu"))
assert cache.num_bytes() > 2**27 and resident_bytes() - before < 0.1 * cache.num_bytes()
thread = cache.take_memory()
cache.k[:, ::7] = 3.0
if thread is not None:
    thread.join()
assert resident_bytes() - before > 0.9 * cache.num_bytes()
assert bool((cache.k[:, ::7] == 3.0).all()) and not cache.k[:, 1::7].any()
assert not cache.v.any()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads /proc")
@pytest.mark.parametrize("how", ["populate", "touch"])
def test_a_servers_cache_is_there_from_the_start(how):
    """One that is taken as it is first used looks like a leak for hours. What others write while
    its memory comes stays. In a process of its own: this one's heap may be taken already."""
    command = [sys.executable, "-c", CACHE_OF_A_SERVER, how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_cache_smaller_than_the_context_shortens_it(model_folder):
    made = LLM(model_folder, EngineConfig(num_pages=4, page_tokens=16))
    assert made.info.max_model_len == 64
    with pytest.raises(ValueError, match="fit in the context of 64 tokens"):
        made.generate([[1] * 64])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kv_dtype": "int3"}, "engine: kv_dtype must be auto"),
        ({"page_tokens": 7}, "engine: page_tokens must be 8"),
        ({"max_model_len": 0}, "engine: max_model_len must be a whole number"),
        ({"memory_gib": 0}, "engine: memory_gib must be above 0"),
        ({"speculate_tokens": 17}, "engine: speculate_tokens must lie in 0 .. 16"),
    ],
)
def test_options_that_cannot_be(option, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**option)


def test_a_cpu_that_emulates_bf16_keeps_fp32(monkeypatch):
    """By itself, or when asked; not for batch-invariance, whose attention is the trainer's."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for fast, by_itself in ((False, fp32), (True, bf16)):
        monkeypatch.setattr(memory, "has_fast_bf16", lambda fast=fast: fast)
        assert kv_dtype_of(EngineConfig(), bf16, CPU) == by_itself
        assert kv_dtype_of(EngineConfig(kv_dtype="bfloat16"), bf16, CPU) == bf16
        assert kv_dtype_of(EngineConfig(kv_dtype="float32"), bf16, CPU) == fp32
        assert kv_dtype_of(EngineConfig(batch_invariant=True), bf16, CPU) == bf16
        assert kv_dtype_of(EngineConfig(), bf16, torch.device("cuda")) == bf16
    with pytest.raises(UserError, match="kv_dtype must be"):
        kv_dtype_of(EngineConfig(kv_dtype="float32"), bf16, torch.device("cuda"))


def test_a_cache_in_another_wide_dtype_is_refused(model_folder):
    with pytest.raises(UserError, match="kv_dtype must be fp8 or the activations' float32"):
        LLM(model_folder, EngineConfig(kv_dtype="bfloat16"))


def test_a_model_that_does_not_fit_is_not_read(model_folder, monkeypatch):
    """Its config and headers tell."""
    monkeypatch.setattr(llm, "_open", lambda *asked: pytest.fail("it was read"))
    with pytest.raises(UserError, match="the model must fit in .* got .*weights"):
        llm.LLM(model_folder, EngineConfig(memory_gib=0.0005))


@pytest.mark.parametrize(
    ("others_gib", "left_gib"), [(0, 90), (9, 90), (30, 70)], ids=["none", "spare", "more"]
)
def test_what_others_hold_of_a_gpu_is_not_there(others_gib, left_gib, monkeypatch):
    gpu = replace(pretend("sm90"), pretended=False, memory_bytes=100 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    free = (100 - others_gib - 20) * GIB  # 20 are this process's own
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * GIB)
    assert memory._budget(gpu, EngineConfig(), 1) == pytest.approx(left_gib * GIB, abs=2)
