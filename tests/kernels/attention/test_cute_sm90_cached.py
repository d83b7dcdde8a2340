"""The host's side of the Hopper forward over caches: what a launch is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.kernels.attention import cute_sm90, cute_sm90_cached
from ridgeline.kernels.attention.cute.blocks import UNBOUNDED
from ridgeline.kernels.attention.cute_sm90_cached_config import CachedTraits
from ridgeline.kernels.attention.problem import AttentionExtras, AttentionOptions

from .test_cute_sm90 import launches  # noqa: F401  a fixture

OPTIONS = AttentionOptions(softmax_scale=0.1)


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_UNVERIFIED", "1")
    monkeypatch.setattr(cute_sm90_cached, "_lengths", {})


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_decode_over_a_cache_with_lengths(launches: list[tuple]) -> None:  # noqa: F811
    q, k = _bf16(2, 3, 8, 128), _bf16(5, 4096, 2, 128)
    v = k[..., :64]
    extras = AttentionExtras(seqused_k=_ints(100, 4096), kv_batch_idx=_ints(4, 0))
    for _ in range(2):  # the second from a kept plan
        out, lse = cute_sm90.forward(q, k, v, OPTIONS, extras)
        (traits, config), given = launches.pop()
        assert isinstance(traits, CachedTraits) and traits.kv_rows and traits.seqused
        assert traits.split and not traits.has_left and config.num_warpgroups == 1
        assert given[0] is q and given[1] is k and given[3] is out and given[4] is lse
        count = given[-2]
        assert given[5].shape == (6, 8, count, 64) and given[5].dtype == torch.float32
        assert given[6].shape == (6, 8, count) and given[7:10] == (None,) * 3
        assert given[10].tolist() == [2**31 - 1] * 2 and given[11] is extras.seqused_k
        assert given[12] is None and given[13] is extras.kv_batch_idx and given[14] is None
        assert given[15:19] == (0.1, 0.0, UNBOUNDED, UNBOUNDED) and given[-1] == 1
        assert out.shape == (2, 3, 8, 64) and lse.shape == (2, 8, 3)


def test_padding_bounds_the_left_and_one_part_has_no_buffers(launches: list[tuple]) -> None:  # noqa: F811
    q, k = _bf16(2, 300, 8, 64), _bf16(2, 500, 2, 64)
    extras = AttentionExtras(leftpad_k=_ints(3, 0), seqused_q=_ints(300, 5))
    cute_sm90.forward(q, k, k, OPTIONS, extras)
    (traits, config), given = launches.pop()
    assert traits.has_left and traits.leftpad and not traits.split
    assert given[5:7] == (None, None) and given[10] is extras.seqused_q
    assert given[11].tolist() == [2**31 - 1] * 2 and given[12] is extras.leftpad_k
    assert given[17] == UNBOUNDED and config.num_warpgroups == 2
    assert given[-2:] == (1, -(-300 * 4 // 128))


def test_pages_of_packed_queries(launches: list[tuple]) -> None:  # noqa: F811
    q, pages = _bf16(9, 8, 128), _bf16(40, 16, 2, 128)
    table = torch.arange(16, dtype=torch.int32).view(8, 2).T
    starts = _ints(0, 4, 9)
    extras = AttentionExtras(
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=5,
        max_seqlen_k=5,
        seqused_k=_ints(100, 128),
        page_ids_BU=table,
    )
    options = AttentionOptions(softmax_scale=0.1, num_splits=3)
    out, lse = cute_sm90.forward(q, pages, pages, options, extras)
    (traits, _), given = launches.pop()
    assert traits.page_rows == 16 and traits.varlen and traits.split
    assert given[5].shape == (9, 8, 3, 128) and given[8] is starts and given[-2:] == (3, 1)
    assert given[9] is None
    assert torch.equal(given[14], table) and given[14].stride(1) == 1
    assert out.shape == (9, 8, 128) and lse.shape == (8, 9)

    extras = replace(extras, seqused_k=None, cu_seqlens_k=_ints(0, 30, 62))
    cute_sm90.forward(q, pages, pages, options, extras)
    (again, _), given = launches.pop()
    assert again == traits and given[11].tolist() == [30, 32] and given[9] is None
    assert given[10].tolist() == [2**31 - 1] * 2
    # As an engine calls it: nothing but the lengths.
    extras = replace(extras, seqused_k=_ints(30, 32), cu_seqlens_k=None, max_seqlen_k=None)
    cute_sm90.forward(q, pages, pages, options, extras)
    (engines, _), given = launches.pop()
    assert engines == traits and given[11].tolist() == [30, 32] and given[9] is None


def test_a_wish_for_parts_yields_to_what_was_compiled(
    launches: list[tuple],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = _bf16(64, 1, 8, 128), _bf16(64, 64, 8, 128)
    monkeypatch.setattr(
        cute_sm90_cached.cache, "why_missing", lambda traits, config: "no" if traits.split else None
    )
    options = AttentionOptions(softmax_scale=0.1, num_splits=4)
    cute_sm90.forward(q, k, k, options, AttentionExtras())
    (traits, _), given = launches.pop()
    assert not traits.split and given[-2] == 1
