"""The fused operations of a step against plain PyTorch; on a CPU in Triton's interpreter."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_interpreted.py, or on a GPU", allow_module_level=True)

from ridgeline.kernels.step import ref, triton, triton_attend, triton_ends, triton_rows
from ridgeline.kernels.step.op import overlapped
from ridgeline.kernels.step.triton_ask import Asked

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (96, 1100), (1100, 48)


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    """One rounding of the dtype apart at most."""
    tolerance = 2 * torch.finfo(want.dtype).eps
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("P", "C"), [(1, 64), (3, 100), (2, 4096)])
def test_add_rms_norm(P, C, dtype):
    x, delta = torch.randn(2, P, C, dtype=dtype, device=DEVICE)
    weight = torch.randn(C, dtype=dtype, device=DEVICE)
    for change in (delta, None):
        mine, plain = x.clone(), x.clone()
        got = triton.add_rms_norm(mine, change, weight, 1e-5)
        agree(got, ref.add_rms_norm(plain, change, weight, 1e-5))
        agree(mine, plain)  # the interpreter cuts bf16 off where a GPU rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("P", "F"), [(1, 8), (3, 1000), (2, 1024), (1, 3001)])
def test_silu_mul(P, F, dtype):
    both = 3 * torch.randn(P, 2 * F, dtype=dtype, device=DEVICE)
    agree(triton.silu_mul(both), ref.silu_mul(both))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "G", "D"), [(4, 2, 16), (3, 1, 20), (2, 2, 128)])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_rope_append(H, G, D, dtype, integer):
    P, slots, T = 5, 40, 64
    qkv = torch.randn(P, H + 2 * G, D, dtype=dtype, device=DEVICE)
    angle = torch.rand(T, 1, D // 2, device=DEVICE) * 6
    cos = torch.cat((angle.cos(), angle.cos()), -1)
    sin = torch.cat((-angle.sin(), angle.sin()), -1)
    positions = torch.tensor([0, 63, 7, 7, 30], dtype=integer, device=DEVICE)
    where = torch.tensor([39, 0, 12, 5, 6], dtype=integer, device=DEVICE)
    kept = [torch.zeros(2, slots, G, D, dtype=dtype, device=DEVICE) for _ in range(2)]
    results = []
    for module, (k_flat, v_flat) in zip((triton, ref), kept, strict=True):
        q = module.rope_append(qkv, H, (cos, sin), positions, where, (k_flat, v_flat))
        results.append((q, k_flat, v_flat))
    for got, want in zip(*results, strict=True):
        agree(got, want)
    assert torch.equal(results[0][2][39], qkv[0, H + G :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("N", "K"), [(1, 64), (24, 100), (130, 576)])
def test_row_linear(N, K, bias, dtype):
    x, weight = (torch.randn(n, K, dtype=dtype, device=DEVICE) / K**0.5 for n in (1, N))
    bias_N = torch.randn(N, dtype=dtype, device=DEVICE) if bias else None
    agree(triton.row_linear(x, weight, bias_N), ref.row_linear(x, weight, bias_N))
    wide = triton.row_linear(x, weight, bias_N, dtype=torch.float32)
    want = ref.row_linear(x, weight, bias_N, dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("N", "K"), [(12, 64), (48, 1100)])
def test_norm_linear(N, K, has_delta, gated, dtype):
    x, delta = torch.randn(2, 1, K, dtype=dtype, device=DEVICE)
    before = x.clone()
    norm = torch.randn(K, dtype=dtype, device=DEVICE)
    weight = torch.randn(2 * N, K, dtype=dtype, device=DEVICE) / K**0.5
    bias = torch.randn(2 * N, dtype=dtype, device=DEVICE)
    args = (x, delta if has_delta else None, norm, 1e-5, weight, bias)
    kept, y = triton.norm_linear(*args, gated=gated)
    want_kept, want_y = ref.norm_linear(*args, gated=gated)
    agree(kept, want_kept)
    torch.testing.assert_close(y, want_y, atol=2e-5 if dtype == torch.float32 else 0.06, rtol=0.02)
    assert torch.equal(x, before)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
OVERLAPS = [False, pytest.param(True, marks=pytest.mark.skipif(not HOPPER, reason="a Hopper GPU"))]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("config", triton_rows.CANDIDATES)
def test_a_chain_in_every_config(config, overlap):
    """Norm, linear and linear, each on what the last one wrote, several times over."""
    config = replace(config, overlap=overlap)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x = torch.randn(1, 1100, dtype=dtype, device=DEVICE)
    norm = torch.rand(1100, dtype=dtype, device=DEVICE)
    up, down = (torch.randn(n, k, dtype=dtype, device=DEVICE) / k**0.5 for n, k in SIZES)
    mine, plain, delta, want = x, x, None, None
    for _ in range(3 if DEVICE == "cpu" else 20):
        mine, y = triton.norm_linear(mine, delta, norm, 1e-5, up, gated=True, config=config)
        delta = triton.row_linear(y, down, config=config)
        plain, y = ref.norm_linear(plain, want, norm, 1e-5, up, gated=True)
        want = ref.row_linear(y, down)
    gap = (mine - plain).float().abs().max() / plain.float().abs().max()
    assert gap < (1e-5 if dtype == torch.float32 else 0.05)


# ---- one token a sequence ------------------------------------------------------------------------

# Keys of each sequence, H, G, D, tokens a page, window, whether heads are normed, the cut: keys a
# tile, ranges, and keys a program where there are few (0: never one head alone).
ATTENDED = {
    "one key, many splits": ([1, 200], 8, 2, 128, 16, None, False, (16, 4, 0)),
    "at the edges of tiles": ([2, 32, 33, 65], 6, 2, 64, 32, None, True, (32, 16, 0)),
    "a window": ([100, 17, 21], 4, 4, 96, 16, 20, False, (16, 3, 0)),
    "several tiles a split": ([300], 9, 3, 64, 64, None, False, (32, 2, 0)),
    "one split": ([90], 4, 2, 128, 32, None, False, (32, 1, 0)),
    "near": ([1, 17, 18], 4, 2, 128, 16, None, True, (16, 4, 16)),
    "near and far": ([65, 66], 3, 1, 64, 32, None, False, (32, 4, 16)),
    "near, few parts": ([33, 34], 3, 1, 64, 32, None, False, (32, 2, 16)),
    "near, by a window": ([100, 17], 2, 2, 96, 16, 20, True, (16, 2, 16)),
}
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]


def attended(case, dtype):
    """Arguments of decode_attention but the scratch; (keys, values) of two equal caches."""
    keys, H, G, D, W, window, normed, _ = case
    B, U = len(keys), max(-(-k // W) for k in keys) + 2
    angle = torch.rand(max(keys) + 1, 1, D // 2, device=DEVICE) * 6
    cos, sin = (torch.cat(x, -1) for x in ([angle.cos()] * 2, [-angle.sin(), angle.sin()]))
    numbers = torch.zeros(B, 8 + U, dtype=torch.int32, device=DEVICE)  # rows far apart
    numbers[:, 3] = torch.tensor(keys, device=DEVICE)
    numbers[:, 8:] = torch.randperm(B * U, device=DEVICE).view(B, U)
    table = ref.DecodeTable(numbers[:, 3], numbers[:, 8:], W)
    qkv = torch.randn(B, H + 2 * G, D, device=DEVICE).to(dtype)
    kept = [torch.randn(B * U * W, G, D, device=DEVICE).to(dtype) for _ in range(2)]
    weights = [torch.rand(D, device=DEVICE).to(dtype) for _ in range(2)]
    options = {"window": window, "norms": (*weights, 1e-5) if normed else None}
    return (qkv, (cos, sin)), table, [kept, [x.clone() for x in kept]], options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENDED)
def test_decode_attention(name, dtype):
    torch.manual_seed(0)
    case = ATTENDED[name]
    args, table, (mine, plain), options = attended(case, dtype)
    block_n, splits, near = case[-1]
    config = triton_attend.AttendConfig(block_n=block_n, splits=splits, near=near)
    qkv, kept = args[0], mine[0]
    heads = (qkv.shape[1] - 2 * kept.shape[1], kept.shape[2])
    scratch = triton_attend.AttendScratch.of(len(qkv), *heads, qkv.device, config)
    for _ in range(2):  # counters are left as they were found
        got = triton_attend.decode_attention(*args, mine, table, scratch, **options)
    want = ref.decode_attention(*args, plain, table, **options)
    agree(mine[0], plain[0])
    assert torch.equal(mine[1], plain[1])
    # softmax's weights are rounded before the product with the values
    close = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, want, atol=close, rtol=close)


def test_ranges_have_parts_of_their_own():
    """On a GPU a range more than a sequence's parts would write into the next sequence's."""
    for splits, reach in ((1, 16), (2, 32), (4, 64), (16, 64)):
        config = triton_attend.AttendConfig(splits=splits, near=16)
        assert config.reach(2) == reach and -(-reach // config.near) <= splits
    assert triton_attend.AttendConfig(num_warps=8, near=256).reach(1) == 1024


def test_the_ends_of_a_step():
    table, weight = torch.randn(50, 100, device=DEVICE), torch.rand(100, device=DEVICE)
    numbers = torch.zeros(3, 12, dtype=torch.int32, device=DEVICE)
    numbers[:, 0] = torch.tensor([7, 49, 0])
    numbers[:, 1:4] = torch.tensor([5, 7, 6])
    numbers[:2, 4] = 1  # the last row is padding
    for got, want in zip(
        triton_ends.embed_norm(numbers[:, 0], table, weight, 1e-5),
        ref.embed_norm(numbers[:, 0], table, weight, 1e-5),
        strict=True,
    ):
        agree(got, want)
    logits = torch.randn(3, 5003, device=DEVICE)
    logits[1, [77, 4001]] = 9.0  # the first of equals
    mine, plain = numbers.clone(), numbers.clone()
    scratch = triton_ends.chooser(4, logits.device)
    for _ in range(2):
        tokens = triton_ends.choose(logits, mine, scratch)
        want = ref.choose(logits, plain)
    assert tokens[1] == 77 and torch.equal(tokens[::2], want[::2])
    plain[1, 0] = 77
    assert torch.equal(mine, plain) and mine[0, 1:5].tolist() == [7, 9, 8, 1]


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU")
@pytest.mark.parametrize("asking", [0, 512, 128])
@pytest.mark.parametrize("config", triton_attend.CANDIDATES, ids=str)
def test_overlapped_attention_is_the_same(config, asking):
    """Behind a kernel that writes what it reads, many times over, in a graph as the engine's, with
    weights asked for and without."""
    case = ([1, 64, 129, 700], 32, 8, 128, 64, None, False, None)
    args, table, (mine, plain), options = attended(case, torch.bfloat16)
    qkv, angles = args
    scratch = triton_attend.AttendScratch.of(len(qkv), 32, 128, qkv.device, config)
    sources = [
        torch.cat((torch.ones_like(qkv), torch.randn_like(qkv)), 1).flatten(1) for _ in range(40)
    ]

    def chain(module, kept, **options):
        return [
            triton_attend.decode_attention(
                module.silu_mul(x).view_as(qkv), angles, kept, table, scratch, **options
            )
            for x in sources
        ]

    want = chain(triton, plain)
    told = {"asked": asked_of(asking)} if asking else {}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        chain(overlapped(), mine, overlap=True, **told)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(overlapped(), mine, overlap=True, **told)
    for _ in range(3):
        graph.replay()
    for got, plainly in zip(found, want, strict=True):
        assert torch.equal(got, plainly)
    assert torch.equal(mine[0], plain[0]) and torch.equal(mine[1], plain[1])


def asked_of(piece: int) -> Asked:
    """Parts of other sizes than a round of requests, one that is less than a piece."""
    bytes_ = torch.zeros(2**24, dtype=torch.uint8, device=DEVICE)
    return Asked((bytes_[: 2**23 + 1040], bytes_[:400]), piece)


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU")
def test_overlapped_is_the_same():
    x, delta = torch.randn(2, 4, 4096, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.rand(4096, dtype=torch.bfloat16, device=DEVICE)
    mine, plain = x.clone(), x.clone()
    for turn in range(20):
        told = {"asked": asked_of(512)} if turn % 2 else {}
        y = overlapped().add_rms_norm(mine, delta, weight, 1e-5, **told)
        z = overlapped().silu_mul(y)
        want = triton.add_rms_norm(plain, delta, weight, 1e-5)
    assert torch.equal(y, want) and torch.equal(z, triton.silu_mul(want))
    assert torch.equal(mine, plain)
