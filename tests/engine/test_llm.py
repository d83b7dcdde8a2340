"""The engine's outputs against Transformers' and the trainer's, however they were batched."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.engine.llm import LLM, EngineConfig
from ridgeline.engine.params import SamplingParams
from ridgeline.nn.hf import save_pretrained
from tests.engine.conftest import CONTEXT, tiny_decoder, write_model

FAMILIES = {
    "llama": {},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 32, "tie_embeddings": False},
    "mistral": {"family": "mistral", "sliding_window": 20, "windowed_layers": (0, 1)},
}
NEW = 20
PROMPTS = [[(i * i + 3 * n) % 256 for i in range(n)] for n in (1, 2, 15, 16, 17, 40, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@cache
def expected(family: str, folder) -> list[list[int]]:
    """Greedy tokens of Transformers, one prompt at a time."""
    import transformers

    save_pretrained(tiny_decoder(**FAMILIES[family]), folder, overwrite=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("hf")
    return {family: base / family for family in FAMILIES}


def tokens(llm: LLM, prompts=PROMPTS, params=GREEDY) -> list[list[int]]:
    return [each.choices[0].token_ids for each in llm.generate(prompts, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, folders):
    """Batched prefill and decode, in every family; most outputs differ from each other."""
    want = expected(family, folders[family])
    assert len({tuple(w) for w in want}) > len(want) // 2
    llm = LLM(tiny_decoder(**FAMILIES[family]))
    assert tokens(llm) == want
    assert tokens(llm) == want, "with a warm prefix cache"
    assert llm.core.scheduler.prefix_hit_tokens >= 64


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 1},
        {"max_step_tokens": 7, "max_num_seqs": 5},
        {"num_pages": 12, "max_model_len": 96, "page_tokens": 8},
        {"speculate_tokens": 5},
        {"batch_invariant": True},
        {"prefix_cache": False, "page_tokens": 64},
    ],
    ids=lambda config: next(iter(config)),
)
def test_greedy_tokens_in_any_configuration(family, config, folders):
    """Alone, in chunks, preempted, drafted: the same tokens."""
    llm = LLM(tiny_decoder(**FAMILIES[family]), EngineConfig(**config))
    order = [3, 0, 6, 5, 1, 4, 2]
    want = expected(family, folders[family])
    assert tokens(llm, [PROMPTS[i] for i in order]) == [want[i] for i in order]
    if "num_pages" in config:
        assert llm.core.scheduler.preemptions > 0
    if "speculate_tokens" in config:
        assert llm.counters.snapshot(0.0).spec_accepted > 0
    llm.core.scheduler.pool.check([])


def test_logprobs_are_the_trainers(decoder):
    """fp32: within 1e-5 nats of the decoder's own forward over the whole text."""
    llm = LLM(decoder)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=NEW, logprobs=3, ignore_eos=True)
    for made in llm.generate(PROMPTS, params):
        choice = made.choices[0]
        text = torch.tensor([made.prompt_ids + choice.token_ids])
        with torch.no_grad():
            want = decoder(text).log_softmax(-1)[0, len(made.prompt_ids) - 1 : -1]
        assert choice.logprobs is not None and len(choice.logprobs) == NEW
        for row, (token_id, told) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            assert told.token_id == token_id
            assert abs(told.logprob - float(want[row, token_id])) < 1e-5
            top = want[row].topk(3)
            assert [t for t, _ in told.top] == top.indices.tolist()
            assert (
                max(abs(a - b) for (_, a), b in zip(told.top, top.values.tolist(), strict=True))
                < 1e-5
            )


SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.95, seed=11, max_tokens=NEW, ignore_eos=True, logprobs=0, n=2
)


def sampled(config: dict, prompts) -> list:
    llm = LLM(tiny_decoder(), EngineConfig(**config))
    made = llm.generate(prompts, SAMPLED)
    return [[(c.token_ids, c.logprobs) for c in each.choices] for each in made]


def test_batch_invariant_mode_is_bitwise():
    """Tokens and log-probabilities, to the last bit: alone, in company, in chunks, preempted."""
    company = sampled({"batch_invariant": True}, PROMPTS)
    for config in (
        {"max_num_seqs": 1},
        {"max_step_tokens": 9, "max_num_seqs": 7, "speculate_tokens": 3},
        {"num_pages": 13, "max_model_len": 96, "page_tokens": 8},
    ):
        again = sampled({"batch_invariant": True, **config}, PROMPTS[::-1])
        assert again[::-1] == company


def test_a_seed_repeats_and_choices_differ(decoder):
    llm = LLM(decoder)
    first, again = (llm.generate([PROMPTS[2]], SAMPLED)[0].choices for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert first[0].token_ids != first[1].token_ids
    unseeded = SamplingParams(max_tokens=NEW, ignore_eos=True)
    one, two = (llm.generate([PROMPTS[2]], unseeded)[0].choices[0].token_ids for _ in range(2))
    assert one != two


def test_fp8_cache_is_near(decoder):
    """E4M3 keys and values with a scale a head: log-probabilities a few percent off, not more."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    wide = LLM(decoder).generate(PROMPTS, params)
    llm = LLM(decoder, EngineConfig(kv_dtype="fp8", max_step_tokens=16))
    narrow = llm.generate(PROMPTS, params)
    assert llm.info.kv_dtype == "fp8"
    assert llm.runner.cache.num_bytes() < LLM(decoder).runner.cache.num_bytes() / 2
    gaps = [
        abs(a.choices[0].logprobs[0].logprob - b.choices[0].logprobs[0].logprob)
        for a, b in zip(wide, narrow, strict=True)
    ]
    assert 0 < max(gaps) < 0.3


def test_embeddings(decoder):
    """The mean or last of the normed final states, unit length; not changed by the company."""
    llm = LLM(decoder, EngineConfig(max_step_tokens=32))
    for pooling in ("mean", "last"):
        vectors = llm.embed(PROMPTS, pooling)
        for prompt, vector in zip(PROMPTS, vectors, strict=True):
            with torch.no_grad():
                states = decoder.model.norm(decoder.hidden(torch.tensor([prompt])))[0]
            want = states.mean(0) if pooling == "mean" else states[-1]
            torch.testing.assert_close(torch.tensor(vector), want / want.norm())


def test_text_stops_and_end_tokens(model_folder):
    llm = LLM(model_folder)
    assert llm.info.eos_token_ids == (256,) and llm.info.name == "tiny"
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    whole = llm.generate("Hello", params)[0].choices[0]
    assert whole.text == llm.tokenizer.decode(whole.token_ids) and whole.finish_reason == "length"
    stop = next(whole.text[i : i + 3] for i in range(5, 20) if whole.text[i : i + 3].isascii())
    cut = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,))
    short = llm.generate("Hello", cut)[0].choices[0]
    assert short.text == whole.text[: whole.text.index(stop)]
    assert (short.finish_reason, short.stop_reason) == ("stop", stop)
    ends = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(whole.token_ids[4],))
    ended = llm.generate("Hello", ends)[0].choices[0]
    first = whole.token_ids.index(whole.token_ids[4])
    assert ended.token_ids == whole.token_ids[: first + 1]
    assert ended.text == llm.tokenizer.decode(whole.token_ids[:first])
    assert (ended.finish_reason, ended.stop_reason) == ("stop", whole.token_ids[4])


def test_what_is_refused(decoder, model_folder, tmp_path):
    llm = LLM(decoder)
    for prompts, message in (
        ([[]], "request: prompt must have at least one token"),
        ([[0, 257]], r"request: prompt must hold tokens in 0 .. 256, got 257"),
        ([[0, -1]], "request: prompt must hold tokens"),
        ([[True]], "request: prompt must hold whole numbers"),
        (
            [[1] * CONTEXT],
            f"must fit in the context of {CONTEXT} tokens, got {CONTEXT} and one to come",
        ),
        (["text"], "generate: prompts must be token ids without a tokenizer"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, SamplingParams())
    with pytest.raises(ValueError, match="max_tokens must fit in the context"):
        llm.generate([[1]], SamplingParams(max_tokens=CONTEXT))
    with pytest.raises(ValueError, match="request: logit_bias must hold tokens in 0 .. 256"):
        llm.generate([[1]], SamplingParams(logit_bias={257: 1.0}))
    with pytest.raises(ValueError, match="request: stop must be empty without a tokenizer"):
        llm.generate([[1]], SamplingParams(stop=("a",)))
    with pytest.raises(ValueError, match="embed: pooling must be mean or last"):
        llm.embed([[1]], "max")
    with pytest.raises(UserError, match="must be a folder"):
        LLM(tmp_path / "nothing")
    with pytest.raises(UserError, match="the model must fit in .* got .*weights"):
        LLM(model_folder, EngineConfig(memory_gib=0.0005))
    with pytest.raises(ValueError, match="engine: num_pages must hold 128 tokens"):
        LLM(decoder, EngineConfig(num_pages=7, max_model_len=128))
    assert not llm.core.requests


def test_new_weights_go_on_with_the_text(tmp_path):
    """A swap midway: the rest is what the new weights say of everything so far."""
    old, new = (write_model(tmp_path / str(seed), seed) for seed in (1, 2))
    llm = LLM(old)
    request = llm.request(PROMPTS[4], GREEDY)
    llm.core.add(request, NEW)
    got: list[int] = []
    swapped = None
    while llm.core.has_work:
        for output in llm.core.step():
            got += [t for delta in output.deltas for t in delta.token_ids]
        if len(got) == 7 and swapped is None:
            swapped = llm.load_beside(new)
            llm.swap(swapped)
    before = tokens(LLM(old), [PROMPTS[4]])[0][:7]
    rest = SamplingParams(temperature=0, max_tokens=NEW - 7, ignore_eos=True)
    after = tokens(LLM(new), [PROMPTS[4] + before], rest)[0]
    assert got == before + after and before + after != tokens(LLM(old), [PROMPTS[4]])[0]


def test_a_reload_that_does_not_fit_changes_nothing(model_folder, monkeypatch):
    from ridgeline.engine.errors import ReloadError

    llm = LLM(model_folder)
    want = tokens(llm)

    def full(*asked):
        raise torch.OutOfMemoryError("no more\nof it")

    monkeypatch.setattr(llm, "_weights", full)
    with pytest.raises(ReloadError, match="must fit in memory beside .* got no more; start"):
        llm.reload(model_folder)
    assert tokens(llm) == want


def test_a_reload_of_another_model_is_refused(tmp_path, model_folder):
    from ridgeline.engine.errors import ReloadError

    llm = LLM(model_folder)
    other = write_model(tmp_path / "other", num_layers=3)
    with pytest.raises(ReloadError, match="must be the same model, got another num_layers"):
        llm.load_beside(other)
    same = write_model(tmp_path / "same")
    (same / "tokenizer.json").write_bytes((same / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(ReloadError, match="same tokenizer.json"):
        llm.load_beside(same)
