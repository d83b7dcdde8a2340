"""Each rule of sampling against a plain formula, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from ridgeline.engine.draw import NUM_CANDIDATES, uniform
from ridgeline.engine.params import SamplingParams
from ridgeline.engine.sampler import Row, SamplingState, sample


def state(choice: int = 0, seed: int = 7, prompt=(0,), stop_ids=(), mask=None, **params):
    return SamplingState(
        params=SamplingParams(**params),
        seed=seed,
        choice=choice,
        prompt_ids=prompt,
        stop_ids=stop_ids,
        mask=mask,
    )


def chosen(logits: torch.Tensor, one: SamplingState, output=()) -> int:
    return sample(logits[None], [Row(one, output)]).token_ids[0]


def drawn(logits: torch.Tensor, count: int = 4000, **params) -> torch.Tensor:
    """Shares of tokens over many positions."""
    one = state(**params)
    rows = [Row(one, range(position)) for position in range(count)]
    found = sample(logits.expand(count, -1), rows).token_ids
    return torch.bincount(torch.tensor(found), minlength=len(logits)) / count


LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5])


def test_uniform_numbers():
    values = torch.from_numpy(uniform([3] * 20000, [0] * 20000, range(20000)))
    assert 0 <= values.min() and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01 and abs(values.var() - 1 / 12) < 0.002
    every = [(s, c, p) for s in range(9) for c in range(9) for p in range(9)]
    assert len(set(uniform(*zip(*every, strict=True)).tolist())) == 729


def test_shares_follow_temperature():
    for temperature in (0.5, 1.0, 2.0):
        want = (LOGITS / temperature).softmax(-1)
        torch.testing.assert_close(drawn(LOGITS, temperature=temperature), want, atol=0.03, rtol=0)


def test_top_k_top_p_min_p():
    probs = LOGITS.softmax(-1)
    for params, kept in (
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 1}, [1]),
        ({"top_p": float(probs[1]) - 0.01}, [1]),
        ({"top_p": float(probs[1]) + 0.01}, [1, 4]),
        ({"min_p": math.exp(-1.01)}, [1, 2, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.6}, [1, 4]),
    ):
        want = torch.zeros(5)
        want[kept] = probs[kept] / probs[kept].sum()
        torch.testing.assert_close(drawn(LOGITS, **params), want, atol=0.03, rtol=0)


def test_a_wide_vocabulary_is_drawn_whole():
    """Flat probabilities reach beyond the candidates that are looked at first."""
    flat = torch.zeros(4 * NUM_CANDIDATES)
    shares = drawn(flat, count=3000)
    assert (shares[NUM_CANDIDATES:] > 0).sum() > NUM_CANDIDATES
    half = drawn(flat, count=3000, top_p=0.5)
    assert (half > 0).sum() > NUM_CANDIDATES and half[2 * NUM_CANDIDATES :].sum() == 0


def test_untouched_logits_are_drawn_by_token_id():
    """The token whose share of the distribution, in the order of ids, holds the row's number; not
    one of no probability, whatever else is in the batch."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, ::3] = -torch.inf
    rows = [Row(state(seed=i), range(i)) for i in range(64)]
    ends = logits.double().softmax(-1).cumsum(-1)
    numbers = torch.from_numpy(uniform(range(64), [0] * 64, range(64))).double()
    want = (ends <= numbers[:, None]).sum(-1).tolist()
    assert sample(logits, rows).token_ids == want and not any(i % 3 == 0 for i in want)
    narrowed = [Row(state(seed=i, top_k=9) if i % 2 else r.state, r.output_ids)
                for i, r in enumerate(rows)]  # fmt: skip
    mixed = sample(logits, narrowed).token_ids
    assert mixed[::2] == want[::2]
    assert all(logits[i, mixed[i]] >= logits[i].topk(9).values[-1] for i in range(1, 64, 2))


def test_penalties_and_bias():
    greedy = {"temperature": 0.0}
    assert chosen(LOGITS, state(**greedy)) == 1
    assert chosen(LOGITS, state(logit_bias={3: 100}, **greedy)) == 3
    assert chosen(LOGITS, state(presence_penalty=0.6, **greedy), [1, 1]) == 4
    assert chosen(LOGITS, state(presence_penalty=0.4, **greedy), [1, 1]) == 1
    assert chosen(LOGITS, state(frequency_penalty=0.4, **greedy), [1, 1]) == 4
    assert chosen(LOGITS, state(frequency_penalty=0.4, **greedy), [1]) == 1
    assert chosen(LOGITS, state(repetition_penalty=1.3, prompt=(1,), **greedy)) == 4
    assert chosen(-LOGITS, state(repetition_penalty=1.3, prompt=(3,), **greedy)) == 3
    assert chosen(-LOGITS - 2, state(repetition_penalty=9.0, prompt=(3,), **greedy)) == 0


def test_penalties_count_across_steps():
    """The counts are kept between steps and brought up to date."""
    one = state(temperature=0.0, frequency_penalty=0.3)
    output: list[int] = []
    for _ in range(8):
        output.append(chosen(LOGITS, one, output))
    counts = torch.zeros(5)
    for token in output:
        assert token == int((LOGITS - 0.3 * counts).argmax())
        counts[token] += 1


def test_min_tokens_holds_back_what_ends():
    one = state(temperature=0.0, min_tokens=2, stop_ids=(1, 4))
    assert [chosen(LOGITS, one, [0] * n) for n in range(4)] == [2, 2, 1, 1]


class Only:
    def __init__(self, tokens, refuse=False):
        self.tokens, self.refuse = tokens, refuse

    def allowed(self, bitmask):
        if self.refuse:
            raise RuntimeError("bad grammar")
        assert bitmask.dtype == torch.int32 and (bitmask == -1).all()
        bitmask.zero_()
        for token in self.tokens:
            word = int(bitmask[token // 32]) & 0xFFFFFFFF | 1 << token % 32
            bitmask[token // 32] = word - 2**32 if word >= 2**31 else word
        return True


def test_masks_of_many_words_and_their_errors():
    logits = torch.randn(100)
    for allowed in ([0], [31], [32, 63], [64, 99]):
        want = max(allowed, key=lambda token: float(logits[token]))
        assert chosen(logits, state(temperature=0.0, mask=Only(allowed))) == want
    rows = [Row(state(temperature=0.0, mask=m), ()) for m in (Only([5]), Only([], True), Only([]))]
    found = sample(logits.expand(3, -1), rows)
    assert found.token_ids[0] == 5 and set(found.errors) == {1, 2}
    assert found.errors[1] == "RuntimeError: bad grammar" and "no token" in found.errors[2]


def test_a_row_does_not_depend_on_its_company():
    logits = torch.randn(6, 1000)
    rows = [
        Row(state(choice=i, temperature=0.7 + i / 9, top_p=0.8 + i / 40, logprobs=i), range(i))
        for i in range(6)
    ]
    together = sample(logits, rows)
    for i, row in enumerate(rows):
        single = sample(logits[i : i + 1], [row])
        assert single.token_ids[0] == together.token_ids[i]
        assert single.logprobs[0] == together.logprobs[i]


def test_logprobs_are_of_raw_logits():
    one = state(temperature=0.3, logit_bias={0: 50}, logprobs=2)
    found = sample(LOGITS[None], [Row(one, ())])
    want = LOGITS.log_softmax(-1)
    assert found.token_ids == [0]
    told = found.logprobs[0]
    assert told.token_id == 0 and told.logprob == pytest.approx(float(want[0]), abs=1e-6)
    assert [t for t, _ in told.top] == [1, 4]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", 0, "be at least 1"),
        ("max_tokens", True, "be a whole number"),
        ("min_tokens", -1, "be at least 0"),
        ("temperature", -0.1, "lie in"),
        ("temperature", float("nan"), "lie in"),
        ("temperature", "1", "be a number"),
        ("top_k", 0, "be at least 1"),
        ("top_p", 0.0, r"lie in \(0, 1\]"),
        ("min_p", 1.1, "lie in"),
        ("presence_penalty", 2.1, "lie in"),
        ("frequency_penalty", -2.1, "lie in"),
        ("repetition_penalty", 0.0, "lie in"),
        ("logit_bias", {0: 101}, "lie in"),
        ("logit_bias", {-1: 1}, "be at least 0"),
        ("logit_bias", {i: 1 for i in range(301)}, "hold at most 300"),
        ("seed", -1, "lie in"),
        ("logprobs", 21, r"lie in 0 .. 20"),
        ("n", 9, r"lie in 1 .. 8"),
        ("stop", "text", "be a list"),
        ("stop", ("a",) * 5, "hold at most 4"),
        ("stop", ("",), r"1 .. 64 characters"),
        ("stop", ("a" * 65,), r"1 .. 64 characters"),
        ("stop", (1,), "hold strings"),
        ("stop_token_ids", (0,) * 65, "hold at most 64"),
        ("ignore_eos", 1, "be true or false"),
    ],
)
def test_parameters_out_of_range_are_named(name, value, message):
    with pytest.raises((ValueError, TypeError), match=f"sampling: {name} must .*{message}"):
        SamplingParams(**{name: value})


def test_more_min_than_max():
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens 2"):
        SamplingParams(max_tokens=2, min_tokens=3)
