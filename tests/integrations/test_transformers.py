"""Transformers' models with our attention against the same models with `eager`."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch

from ridgeline.core.errors import UserError
from ridgeline.integrations import hf_attention
from ridgeline.integrations import transformers as plugin
from tests.integrations.models import (
    FAMILIES,
    VOCAB,
    WINDOW,
    model_of,
    wide_softmax,
    with_attention,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
B, S = 2, 19


@pytest.fixture(scope="module", autouse=True)
def _enabled():
    plugin.enable()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, device):
    return model_of(request.param).to(device)


def _moved(inputs: dict, device: torch.device) -> dict:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def _tokens(rows: int = B, length: int = S) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def _run(model, keep, inputs):
    """Logits where `keep`, and every parameter's gradient of a loss over them."""
    model.zero_grad()
    logits = model(**_moved(inputs, model.device)).logits[keep.to(model.device)]
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weight.to(logits)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def _assert_like_eager(model, inputs, keep=None):
    """max |ours - eager64| <= 2 max |eager32 - eager64| + floor: logits and every gradient."""
    keep = torch.ones_like(inputs["input_ids"], dtype=torch.bool) if keep is None else keep
    with wide_softmax():
        exact = _run(with_attention(model, "eager", torch.float64), keep, inputs)
    same = _run(with_attention(model, "eager"), keep, inputs)
    ours = _run(with_attention(model, "ridgeline"), keep, inputs)
    assert ours.keys() == exact.keys()
    for name, want in exact.items():
        limit = 2 * (same[name] - want).abs().max() + 4e-6 * (1 + want.abs().max())
        error = (ours[name] - want).abs().max()
        assert torch.isfinite(limit)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"


def _padding(side: str) -> torch.Tensor:
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(S - 5, S)] = 0
    return mask


def test_plain_batches(model):
    _assert_like_eager(model, {"input_ids": _tokens()})


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(model, side):
    mask = _padding(side)
    _assert_like_eager(model, {"input_ids": _tokens(), "attention_mask": mask}, mask.bool())


def test_a_hole_in_the_padding(model):
    mask = _padding("left")
    mask[1, 8:10] = 0
    _assert_like_eager(model, {"input_ids": _tokens(), "attention_mask": mask}, mask.bool())


def _packed_positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def test_packed_rows_by_positions(model):
    positions = torch.cat((_packed_positions(3, 9, 7), _packed_positions(10, 1, 8)))
    inputs = {"input_ids": _tokens(), "position_ids": positions, "use_cache": False}
    _assert_like_eager(model, inputs)


@pytest.mark.parametrize("how", ["positions, with a cache", "cu_seq_lens"])
def test_packed_rows_are_their_sequences(model, how):
    lengths, tokens = (3, 9, 7), _tokens(1)
    ours = with_attention(model, "ridgeline")
    alone = with_attention(model, "eager")
    inputs = {"input_ids": tokens, "position_ids": _packed_positions(*lengths)}
    if how == "cu_seq_lens":
        starts = torch.tensor([0, 3, 12, 19])
        inputs.update(use_cache=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
        inputs.update(max_length_q=9, max_length_k=9)
    with torch.no_grad():
        packed = ours(**_moved(inputs, model.device)).logits
        each = [alone(part).logits for part in tokens.to(model.device).split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(each, 1), rtol=2e-5, atol=2e-5)


def test_masks_that_a_caller_makes(model):
    """4-D masks, bool and additive, are everything that masks."""
    allowed = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(3)) < 0.5
    allowed |= torch.eye(S, dtype=torch.bool)
    additive = torch.zeros(B, 1, S, S).masked_fill(~allowed, torch.finfo(torch.float32).min)
    eager, ours = with_attention(model, "eager"), with_attention(model, "ridgeline")
    tokens, additive, allowed = (x.to(model.device) for x in (_tokens(), additive, allowed))
    with torch.no_grad():
        want = eager(tokens, attention_mask=_mapping(model, additive)).logits
        for mask in (additive, allowed):
            got = ours(tokens, attention_mask=_mapping(model, mask)).logits
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def _mapping(model, mask):
    """Models with several kinds of layers take a mask a kind."""
    kinds = getattr(model.config, "layer_types", None)
    return mask if kinds is None else dict.fromkeys(kinds, mask)


CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


@pytest.mark.parametrize("cache", CACHES)
def test_generate(model, cache):
    mask = _padding("left").to(model.device)
    found = []
    for name in ("eager", "ridgeline"):
        found.append(
            with_attention(model, name).generate(
                _tokens().to(model.device),
                attention_mask=mask,
                max_new_tokens=2 * WINDOW,
                min_new_tokens=2 * WINDOW,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
                disable_compile=True,
                **CACHES[cache],
            )
        )
    want, got = found
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision(family, device):
    model, tokens = model_of(family).to(device), _tokens().to(device)
    exact = with_attention(model, "eager", torch.float64)(tokens).logits
    same = with_attention(model, "eager", torch.bfloat16)(tokens).logits
    ours = with_attention(model, "ridgeline", torch.bfloat16)(tokens).logits
    assert (ours - exact).abs().max() <= 2 * (same - exact).abs().max()


def test_nothing_as_large_as_a_mask_is_made(monkeypatch):
    """Padding, packing and windows reach the kernel without a bias."""
    biases = []
    dense = hf_attention.flash_attn_func

    def spy(*args, **kwargs):
        biases.append(kwargs["bias"])
        return dense(*args, **kwargs)

    monkeypatch.setattr(hf_attention, "flash_attn_func", spy)
    for family in FAMILIES:
        ours = with_attention(model_of(family), "ridgeline")
        with torch.no_grad():
            ours(_tokens())
            ours(_tokens(), attention_mask=_padding("left"))
            ours(_tokens(), attention_mask=_padding("right"))
            ours(_tokens(1), position_ids=_packed_positions(3, 9, 7), use_cache=False)
    assert len(biases) == 3 * 2 * len(FAMILIES) and all(bias is None for bias in biases)


def test_gradient_checkpointing():
    model = model_of("mistral").train()
    inputs = {"input_ids": _tokens(), "attention_mask": _padding("left")}
    keep = inputs["attention_mask"].bool()
    plain = _run(with_attention(model, "ridgeline"), keep, inputs)
    model.gradient_checkpointing_enable()
    again = _run(with_attention(model, "ridgeline"), keep, inputs)
    for name, want in plain.items():
        torch.testing.assert_close(again[name], want)


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "ridgeline_flash"), ("gpt_oss", "ridgeline_flash2")]
)
def test_continuous_batching(family, name, device):
    """Our kernel package behind Transformers' paged cache."""
    from transformers import ContinuousBatchingConfig
    from transformers import modeling_flash_attention_utils as flash

    if hasattr(flash, "lazy_import_paged_flash_attention") and device == "cpu":
        pytest.skip("the continuous batching of this version counts GPU memory only")
    model = model_of(family).to(device)
    prompts = [_tokens(1, n)[0].tolist() for n in (5, 12, 9)]
    want = [
        with_attention(model, "eager").generate(
            torch.tensor([prompt], device=device),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
        )[0, len(prompt) :]
        for prompt in prompts
    ]
    ours = with_attention(model, name)
    config = ours.generation_config
    config.max_new_tokens, config.do_sample, config.eos_token_id = 8, False, -1
    graphs = None if family == "llama" else False  # gpt-oss's eager experts ask the host
    sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, use_cuda_graph=graphs)
    answers = ours.generate_batch(prompts, config, sizes)
    got = [answer.generated_tokens for answer in answers.values()]
    assert got == [tokens.tolist() for tokens in want]


def test_enable_changes_nothing_the_second_time():
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers import modeling_flash_attention_utils as flash

    before = (
        AttentionInterface()[plugin.NAME],
        AttentionMaskInterface()[plugin.NAME],
        flash._lazy_imports,
    )
    plugin.enable()
    after = (
        AttentionInterface()[plugin.NAME],
        AttentionMaskInterface()[plugin.NAME],
        flash._lazy_imports,
    )
    assert before == after


@pytest.mark.parametrize("version", ["4.57.3", "5.16.9", "6.0.0", None])
def test_other_versions_are_refused(monkeypatch, version):
    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(UserError, match=r"transformers >=5\.17,<6") as refused:
        plugin.enable()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("output_attentions", True, "output_attentions must be False"),
        ("block_table", torch.zeros(1, 1), "block_table must be None"),
        ("cu_seq_lens_q", torch.zeros(2), "cu_seq_lens_q must come with"),
        ("attention_mask", torch.zeros(1, 1, 2, 2, dtype=torch.int64), "attention_mask must be"),
    ],
)
def test_refusals_name_the_option(name, value, words):
    q = torch.randn(1, 2, 2, 16)
    options = {"attention_mask": None, name: value}
    with pytest.raises((ValueError, NotImplementedError), match=words):
        hf_attention.ridgeline_attention(torch.nn.Module(), q, q, q, **options)


def test_importing_the_plugin_does_not_import_transformers():
    code = (
        "import sys, ridgeline.integrations.transformers, ridgeline.integrations.sdpa\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
