"""The engine on GPUs (pytest -m gpu): its outputs against Transformers' and its own on a CPU, with
decode steps recorded, and two ranks over NCCL where there are two GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ridgeline.core import env
from ridgeline.core.errors import UserError
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.errors import EngineDeadError, ReloadError
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams
from tests.engine.conftest import write_model
from tests.engine.test_workers import alive, ask, served, transformers_tokens, workers_of

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[2]
PROMPTS = [[(i * i + 3 * n) % 250 for i in range(n)] for n in (1, 16, 40)]
NEW = 40
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
needs_two = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="two GPUs"
)


def config(**more) -> EngineConfig:
    given = {"device": DEVICE, "dtype": "float32", "num_pages": 40, "page_tokens": 16}
    return EngineConfig(**{**given, **more})


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [made.choices[0].token_ids for made in llm.generate(PROMPTS, params)]


def recorded(llm: LLM) -> bool:
    """Whether decode steps are graphs; where there is no GPU nothing is recorded."""
    graphs = llm.runner.graphs
    return DEVICE == "cpu" or (graphs is not None and bool(graphs.recorded))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    return [write_model(base / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def want(folders) -> list[list[int]]:
    found = transformers_tokens(folders[0], NEW)
    assert len({tuple(each) for each in found}) == len(found)
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_step_tokens": 8, "max_num_seqs": 3},
        {"num_pages": 6, "max_model_len": 96},
        {"speculate_tokens": 4},
        {"batch_invariant": True},
        {"cuda_graphs": False},
    ],
    ids=lambda more: next(iter(more), "plain"),
)
def test_greedy_tokens_are_those_of_transformers(more, folders, want):
    """fp32: batched, in chunks, preempted, drafted, recorded, from a warm cache."""
    llm = LLM(folders[0], config(**more))
    assert [tokens(llm) for _ in range(3)] == [want] * 3
    if more in ({}, {"max_step_tokens": 8, "max_num_seqs": 3}):
        assert recorded(llm)
    if "num_pages" in more:
        assert llm.core.scheduler.preemptions > 0
    if "speculate_tokens" in more:
        assert llm.counters.snapshot(0.0).spec_accepted > 0
    llm.core.scheduler.pool.check([])


def test_a_seed_gives_the_same_tokens_in_other_company(folders):
    """Sampled steps, which are started ahead of their tokens."""
    params = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=24, ignore_eos=True)
    llm = LLM(folders[0], config())
    together = tokens(llm, params)
    alone = [llm.generate([p], params)[0].choices[0].token_ids for p in PROMPTS]
    assert alone == together and recorded(llm)
    assert DEVICE == "cpu" or llm.core.used_ahead > 0


def test_an_fp8_cache_is_near(folders):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    wide, narrow = (
        LLM(folders[0], config(kv_dtype=kind)).generate(PROMPTS, params) for kind in ("auto", "fp8")
    )
    gaps = [
        abs(a.choices[0].logprobs[0].logprob - b.choices[0].logprobs[0].logprob)
        for a, b in zip(wide, narrow, strict=True)
    ]
    assert 0 < max(gaps) < 0.3


def test_embeddings_are_those_of_a_cpu(folders):
    got, there = (LLM(folders[0], config(device=d)).embed(PROMPTS) for d in (DEVICE, "cpu"))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(there), atol=1e-4, rtol=0)


def test_new_weights_between_recorded_steps(folders, want):
    llm = LLM(folders[0], config())
    for _ in range(3):
        assert tokens(llm) == want
    llm.reload(folders[1])
    after = [tokens(llm) for _ in range(3)]
    assert after == [tokens(LLM(folders[1], config()))] * 3 and after[0] != want


@contextmanager
def two_ranks(folder: Path, **more):
    llm = LLM(folder, config(tensor_parallel=2, **more))
    try:
        yield llm
    finally:
        processes = llm.workers.processes if llm.workers is not None else []
        llm.close()
    assert all(process.poll() is not None for process in processes)


@needs_two
@pytest.mark.dist
def test_two_ranks_are_one(folders, want):
    """Tokens, graphs, embeddings, new weights; a folder of another model is refused by both."""
    one = LLM(folders[0], config()).embed(PROMPTS)
    with two_ranks(folders[0]) as llm:
        assert [tokens(llm) for _ in range(3)] == [want] * 3 and recorded(llm)
        found = torch.tensor(llm.embed(PROMPTS))
        torch.testing.assert_close(found, torch.tensor(one), atol=1e-4, rtol=0)
        with pytest.raises(ReloadError, match="same model"):
            llm.reload(write_model(folders[0].parent / "other", num_layers=3))
        llm.reload(folders[1])
        assert [tokens(llm) for _ in range(3)] == [tokens(LLM(folders[1], config()))] * 3


@needs_two
@pytest.mark.dist
def test_a_rank_that_is_killed_while_it_computes_is_told(folders):
    """Rank 0 waits in a collective then; the engine is dead, nothing waits for it."""

    async def run() -> None:
        engine = AsyncEngine(LLM(folders[0], config(tensor_parallel=2)))
        workers = engine.llm.workers
        assert workers is not None
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        streams = [engine.add_request(PROMPTS[1], params) for _ in range(3)]
        await anext(aiter(streams[0]))
        workers.processes[0].kill()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
                async for _ in stream:
                    pass
        assert engine.health().state == "dead"
        await engine.close()

    # A process of its own: a collective that never ends may hold the GPU as long as it lives.
    if os.environ.get("RIDGELINE_TEST_CHILD") == "1":
        asyncio.run(run())
        os._exit(0)
    case = f"{__file__}::test_a_rank_that_is_killed_while_it_computes_is_told"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    child = subprocess.run(
        [*command, "-W", "default", case],
        cwd=ROOT,
        env=env.child_environment(RIDGELINE_TEST_CHILD="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stdout[-3000:]


@needs_two
@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["drain", "lost"])
def test_the_server_over_two_ranks(end, folders, want):
    """Answers, ends well on SIGTERM; when its rank is killed, says so and ends with 1."""
    flags = ["--dtype", "float32", "--memory-gib", "2"]
    with served(folders[0], *flags, device=DEVICE) as (process, address, errors):
        (rank,) = workers_of(process)
        body = {"model": "1", "temperature": 0, "max_tokens": NEW, "ignore_eos": True}
        tokenizer = LLM(folders[0], config(device="cpu")).tokenizer
        for prompt, ids in zip(PROMPTS, want, strict=True):
            answer = ask(address, "/v1/completions", {**body, "prompt": prompt})
            assert answer["choices"][0]["text"] == tokenizer.decode(ids)
        start = time.monotonic()
        os.kill(process.pid if end == signal.SIGTERM else rank, end)
        assert process.wait(120) == (0 if end == signal.SIGTERM else 1)
        assert not alive(rank) and time.monotonic() - start < 100
        if end == signal.SIGKILL:
            said = " ".join(errors.read_text().split())
            assert "serve: the engine died: rank 1 was killed by SIGKILL; start" in said


@pytest.mark.skipif(DEVICE == "cpu", reason="counts GPUs")
def test_more_ranks_than_gpus_are_refused(folders):
    with pytest.raises((UserError, ValueError), match="GPU"):
        LLM(folders[0], config(tensor_parallel=torch.cuda.device_count() * 2, num_pages=None))
