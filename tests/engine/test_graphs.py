"""Decode graphs, run here as plain calls: the eager step's tokens, with steps started ahead and
without, across pages, ends, arrivals, padding and new weights."""

from __future__ import annotations

import pytest
import torch

from ridgeline.engine.config import EngineConfig
from ridgeline.engine.device_forward import DeviceForward, RowForward
from ridgeline.engine.graphs import AHEAD_SIZE, DecodeGraphs, fastest, is_alike
from ridgeline.engine.llm import LLM
from ridgeline.engine.paged import DeviceAttention
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.weights import weights_of
from tests.engine.conftest import tiny_decoder
from tests.engine.test_paged import filled

PROMPTS = [[(i * i + 3 * n) % 250 for i in range(n)] for n in (1, 5, 16, 30)]


def llm_of(model, *, graphs: bool = True) -> LLM:
    """An engine whose decode steps go through DecodeGraphs on this CPU."""
    llm = LLM(model, EngineConfig(max_num_seqs=8, page_tokens=8, num_pages=80))
    runner = llm.runner
    runner.host_decoder = None
    if graphs:
        runner.forward = DeviceForward(runner.weights, runner.max_model_len)
        runner.graphs = DecodeGraphs(runner)
    return llm


def tokens(llm: LLM, params, prompts=PROMPTS) -> list[list[int]]:
    return [made.choices[0].token_ids for made in llm.generate(prompts, params)]


def greedy(count: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def model():
    return tiny_decoder()


@pytest.mark.parametrize("count", [1, 3, 4])
def test_greedy_tokens_are_the_eager_ones(model, count):
    """Three rows are padded to four; lengths differ, so rows end one after the other."""
    params = [greedy(20 + 9 * i) for i in range(count)]
    llm = llm_of(model)
    assert tokens(llm, params, PROMPTS[:count]) == tokens(
        llm_of(model, graphs=False), params, PROMPTS[:count]
    )
    graphs = llm.runner.graphs
    assert graphs.started_ahead > 10 and graphs.used_ahead == graphs.started_ahead
    # a page has 8 tokens: the first token of each is never started ahead
    assert graphs.used_ahead <= 7 / 8 * (20 + 9 * (count - 1))


def test_a_sequence_that_ends_loses_one_step(model):
    """Its stop token is only seen after the next step was started."""
    want = tokens(llm_of(model, graphs=False), greedy(40), PROMPTS[1:2])[0]
    stop = want[21]
    llm = llm_of(model)
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,), ignore_eos=True)
    found = tokens(llm, params, PROMPTS[1:2])[0]
    assert found == want[: want.index(stop) + 1]
    assert tokens(llm, greedy(40), PROMPTS[1:2])[0] == want  # over the pages that it left
    graphs = llm.runner.graphs
    assert graphs.started_ahead - 1 <= graphs.used_ahead <= graphs.started_ahead


def test_others_come_and_go_meanwhile(model):
    llm, plain = llm_of(model), llm_of(model, graphs=False)

    def run(engine: LLM) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for step in range(200):
            if step % 9 == 0 and step < 60:
                name = f"r{step}"
                request = engine.request(PROMPTS[step % 4], greedy(25), request_id=name)
                engine.core.add(request, 25)
            if step == 31:
                engine.core.abort("r18")
            for output in engine.core.step():
                for delta in output.deltas:
                    found.setdefault(output.request_id, []).extend(delta.token_ids)
        return found

    got, want = run(llm), run(plain)
    got.pop("r18"), want.pop("r18")
    assert got == want and len(got) == 6
    assert llm.runner.graphs.used_ahead > 20


def test_what_needs_logits_gets_them(model):
    """Sampling, log-probabilities and penalties do not start ahead, and agree with eager steps."""
    llm, plain = llm_of(model), llm_of(model, graphs=False)
    for params in (
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True),
        greedy(20, logprobs=2),
        greedy(20, repetition_penalty=1.3),
    ):
        assert tokens(llm, params) == tokens(plain, params)
    assert llm.runner.graphs.started_ahead == 0 and len(llm.runner.graphs.recorded) == 1


def test_large_batches_are_not_started_ahead(model):
    prompts = [[i + 1, i + 2] for i in range(AHEAD_SIZE + 1)]
    config = EngineConfig(max_num_seqs=16, page_tokens=8, num_pages=80)
    llm = LLM(model, config)
    llm.runner.forward = DeviceForward(llm.runner.weights, llm.runner.max_model_len)
    llm.runner.graphs = DecodeGraphs(llm.runner)
    assert tokens(llm, greedy(12), prompts) == tokens(LLM(model, config), greedy(12), prompts)
    assert llm.runner.graphs.started_ahead == 0 and 16 in llm.runner.graphs.recorded


def test_new_weights_drop_what_was_started(model):
    llm, other = llm_of(model), weights_of(tiny_decoder(seed=5))
    request = llm.request(PROMPTS[1], greedy(30))
    llm.core.add(request, 30)
    got: list[int] = []
    while llm.core.has_work:
        for output in llm.core.step():
            got += [t for delta in output.deltas for t in delta.token_ids]
        if len(got) == 9:
            assert llm.runner.graphs.ahead is not None
            graphs = llm.runner.graphs
            llm.swap(other)
            assert llm.runner.graphs is graphs and graphs.ahead is None
            llm.runner.forward = DeviceForward(other, llm.runner.max_model_len)
            llm.runner.host_decoder = None
    new = llm_of(tiny_decoder(seed=5), graphs=False)
    assert got[9:] == tokens(new, greedy(21), [PROMPTS[1] + got[:9]])[0]


FAMILIES = {
    "llama": {},
    "qwen3": {"qk_norm": True, "family": "qwen3"},
    "mistral": {"family": "mistral", "sliding_window": 6, "windowed_layers": (0, 1)},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [False, True])
def test_a_joined_step_has_the_same_tokens(family, rows):
    """Numbers as they lie, attention as one operation; one and several sequences."""
    model = tiny_decoder(**FAMILIES[family])
    llm = llm_of(model)
    forward = llm.runner.forward
    made = (RowForward.of(forward) if rows else forward).joining(8)
    prompts = PROMPTS[:1] if rows else PROMPTS[:3]
    llm.runner.graphs._best = lambda size: llm.runner.graphs._record(size, made)
    want = tokens(llm_of(model, graphs=False), greedy(30), prompts)
    assert tokens(llm, greedy(30), prompts) == want
    recorded = llm.runner.graphs.recorded
    assert recorded and all(each.forward is made for each in recorded.values())
    assert llm.runner.graphs.used_ahead > 15


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "family": "qwen3"}])
def test_row_by_row_is_the_fused_forward(changes):
    weights = weights_of(tiny_decoder(**changes))
    forward = DeviceForward(weights, 128)
    rows = RowForward.of(forward)
    assert rows is not None
    found = []
    for each in (forward, rows):
        torch.manual_seed(0)
        cache, _ = filled(torch.float32)
        batch = one_row(cache)
        x = each.hidden(torch.tensor([7]), torch.tensor([9]), DeviceAttention(cache, batch))
        found.append((x, each.logits(x), cache.k.clone(), cache.v.clone()))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def one_row(cache):
    from ridgeline.engine.paged import DeviceBatch

    slot = 2 * cache.page_tokens + 9 % cache.page_tokens
    return DeviceBatch(
        slots_P=torch.tensor([slot]),
        num_decoding=1,
        decode_seqlens_B=torch.tensor([9 % cache.page_tokens + 1], dtype=torch.int32),
        decode_table_BU=torch.tensor([[2]], dtype=torch.int32),
    )


# ---- ways to compute a step ----------------------------------------------------------------------


def test_the_fastest_right_way_by_a_margin():
    times = {"matmuls": 1.0, "rows": 0.99, "overlapped": 0.9}
    assert fastest(times, set(times)) == "overlapped"
    assert fastest(times, {"matmuls", "rows"}) == "matmuls"  # 1 % is not worth it
    assert fastest(times, set()) == "matmuls"


def test_alike():
    torch.manual_seed(0)
    logits = torch.randn(1, 500)
    assert is_alike(logits + 0.01 * torch.randn(1, 500), logits)
    assert not is_alike(torch.randn(1, 500), logits)
    assert not is_alike(torch.full_like(logits, torch.nan), logits)


class _Another(DeviceForward):
    """Another way to compute a step; wrong where its logits are shifted by one token."""

    shift = 0

    def _head(self, y_RC):
        return super()._head(y_RC).roll(self.shift, -1)


def _way(runner, shift: int):
    def make():
        if shift < 0:
            raise RuntimeError("no room")
        made = _Another(runner.weights, runner.max_model_len)
        made.shift = shift
        return made

    return make


class _Ways(DecodeGraphs):
    """Recording as on a GPU, by plain calls: the later a way, the faster."""

    def _best(self, size):
        self.on_gpu = True
        try:
            return super()._best(size)
        finally:
            self.on_gpu = False

    def _record(self, size, forward):
        return self._plain(size, forward)

    def _other_ways(self, size):
        runner = self.runner
        yield from (("right", _way(runner, 0)), ("wrong", _way(runner, 1)))
        yield "failing", _way(runner, -1)

    def _time_ms(self, recorded):
        return {DeviceForward: 3.0, _Another: 2.0 - getattr(recorded.forward, "shift", 0)}[
            type(recorded.forward)
        ]


def test_a_way_that_fails_or_errs_is_not_taken(model):
    llm = llm_of(model)
    graphs = llm.runner.graphs = _Ways(llm.runner)
    found = tokens(llm, greedy(20), PROMPTS[:1])
    assert found == tokens(llm_of(model, graphs=False), greedy(20), PROMPTS[:1])
    assert graphs.recorded[1].forward.shift == 0 and type(graphs.recorded[1].forward) is _Another
    assert (
        graphs.refused["failing"] == "RuntimeError: no room" and "logits" in graphs.refused["wrong"]
    )
    assert graphs.times_ms[1] == {"matmuls": 3.0, "right": 2.0, "wrong": 1.0}
