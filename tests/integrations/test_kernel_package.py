"""The kernel-package form: three functions by the names and parameters that Transformers reads."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch

from ridgeline.integrations import kernel_package
from ridgeline.kernels import attention

NAMES = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
READ = {
    "flash_attn_func": "dropout_p window_size softcap s_aux deterministic",
    "flash_attn_varlen_func": (
        "dropout_p window_size softcap s_aux deterministic block_table max_seqlen_q max_seqlen_k"
    ),
    "flash_attn_with_kvcache": "window_size softcap s_aux block_table cache_seqlens",
}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_have_the_names_that_are_read(name):
    parameters = inspect.signature(getattr(kernel_package, name)).parameters
    assert set(READ[name].split()) <= set(parameters)
    ours = list(inspect.signature(getattr(attention, name)).parameters.values())
    positional = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(parameters)[: len(positional)] == positional  # FlashAttention's, in its order


def test_a_folder_that_re_exports_it_is_a_package(tmp_path, monkeypatch):
    folder = tmp_path / "torch_universal_kernel"
    folder.mkdir()
    (folder / "__init__.py").write_text("from ridgeline.integrations.kernel_package import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module(folder.name)
    try:
        assert [name for name in dir(package) if name.startswith("flash")] == NAMES
    finally:
        del sys.modules[folder.name]


def test_values_are_those_of_our_functions():
    q, k, v = (torch.randn(1, 8, heads, 16) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    got = kernel_package.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), s_aux=sinks)
    want = attention.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), sinks=sinks)
    assert torch.equal(got, want)
    starts = torch.tensor([0, 3, 8])  # int64, and longest lengths as tensors, as it hands them over
    got = kernel_package.flash_attn_varlen_func(
        q[0], k[0], v[0], starts, starts, torch.tensor(5), torch.tensor(5), causal=True, s_aux=sinks
    )
    each = [
        attention.flash_attn_func(q[:, a:b], k[:, a:b], v[:, a:b], causal=True, sinks=sinks)
        for a, b in ((0, 3), (3, 8))
    ]
    torch.testing.assert_close(got, torch.cat(each, 1)[0])


def test_the_paged_step_appends_and_attends():
    q, k, v = (torch.randn(1, 3, heads, 16) for heads in (4, 2, 2))
    pages = [torch.zeros(3, 16, 2, 16) for _ in range(2)]
    table = torch.tensor([[2, -1]], dtype=torch.int32)  # Transformers pads with -1
    used = torch.zeros(1, dtype=torch.int32)
    got = kernel_package.flash_attn_with_kvcache(
        q, *pages, k, v, cache_seqlens=used, block_table=table, causal=True
    )
    torch.testing.assert_close(got, attention.flash_attn_func(q, k, v, causal=True))
    assert torch.equal(pages[0][2, :3], k[0]) and not pages[0][:2].any()
