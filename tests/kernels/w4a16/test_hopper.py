"""The Hopper kernels: launches that fit the machine (CPU), values, exactness, repeats (GPU)."""

import dataclasses
import functools
import importlib.util
import itertools

import pytest
import torch

from ridgeline.core.arch import pretend
from ridgeline.kernels.w4a16 import config as configs
from ridgeline.kernels.w4a16.problem import W4A16Problem
from ridgeline.kernels.w4a16.schedule import head_steps

from .test_layout import make

SMEM_BYTES = 227 * 1024
SMS = 132
HAS_RUNTIME = importlib.util.find_spec("tvm_ffi") is not None

# (dtype, scale dtype, group, asymmetric, act_order)
TRAITS = [
    ("bfloat16", "bfloat16", 128, False, False),
    ("bfloat16", "float16", 128, True, True),
    ("float16", "float16", 64, True, False),
    ("float16", "float16", None, False, False),
    ("bfloat16", "float16", 32, False, False),
]


def traits(group, symmetric=True, kind="bf16", scale="f16"):
    return configs.Traits(kind=kind, scale=scale, symmetric=symmetric, packed_group=group)


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize("scale", ["f16", "f32"])
def test_decode_launches_fit(group, scale):
    for n, k in itertools.product((32, 1024, 28672), (256, 4096, 14336, 53248)):
        for m, invariant in itertools.product((1, 5, 8, 9, 16), (False, True)):
            kind = traits(group, False, "f16", scale)
            lean = m % 2 == 1
            launch = configs.decode_launch(kind, m, n, k, SMS, invariant, lean)
            config = launch.config
            rows = 16 if invariant else m
            assert config.needs_bytes(rows, launch.max_units) <= config.smem_bytes <= SMEM_BYTES
            assert 8 * config.nt >= rows
            assert launch.max_units * launch.splits * config.warps * config.stage_k >= k
            assert 1 <= launch.blocks * launch.splits <= SMS
            assert config.full_barriers % config.reducers == 0
            assert config.full_barriers >= config.red_buffers
            assert config.ring_offset % 128 == config.slot_bytes % 128 == 0


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize(("kind", "scale"), [("bf16", "bf16"), ("f16", "f32")])
def test_matmul_launches_fit_and_cover(group, kind, scale):
    for n, k in itertools.product((32, 1056, 28672), (256, 4096, 14336)):
        for m in (9, 17, 32, 33, 64, 100, 128, 1000, 16384):
            launch = configs.matmul_launch(traits(group, kind == "bf16", kind, scale), m, n, k, SMS)
            config = launch.config
            tiles = -(-m // config.block_m) * -(-n // config.block_n)
            rest = tiles - launch.waves * launch.blocks
            assert launch.head == head_steps(launch.waves, rest, launch.blocks, k // 128)
            assert config.smem_bytes <= SMEM_BYTES // config.blocks_per_sm and config.stages > 1
            assert 1 <= launch.blocks <= SMS * config.blocks_per_sm and rest >= 0
            # every block has a share of the rest, or none is needed
            assert rest == 0 or rest * (k // 128 - launch.head) >= launch.blocks
            assert rest * config.consumers * 4 <= 8192  # counters
            assert rest * (k // 128) * launch.blocks < 2**31
            in_memory = rest > 0 and config.cluster == 1
            assert (launch.workspace_floats > 0) == in_memory
            if config.split > 1:
                assert launch.blocks == tiles * config.split and launch.waves == 0


def test_measured_plans_give_every_block_work():
    """Parts of a tile are blocks that run at once, each with a step of K; two that share
    activations walk tiles of the same rows in step."""
    for (k, n, m), (shape, plan) in configs._MEASURED.items():
        launch = configs.matmul_launch(traits(128, scale="bf16"), m, n, k, SMS)
        config = launch.config
        assert (config.block_m, config.stages) == (shape[0], shape[3])
        assert (config.cluster, config.parts, config.cast) == (plan.cluster, plan.parts, plan.cast)
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        assert launch.waves * launch.blocks <= tiles
        assert launch.blocks <= SMS * config.blocks_per_sm
        assert launch.blocks % config.cast == 0 and (config.cast == 1 or config.cluster == 1)
        if config.split > 1:
            # more blocks repeat the first tiles (in a cluster's place, or each with its counters)
            assert launch.blocks >= tiles * config.split and launch.blocks % config.split == 0
            assert config.split <= k // 128
            # a counter for each warp of each tile
            assert launch.blocks // config.split * config.consumers * 4 <= 4096


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize(("kind", "scale"), [("bf16", "bf16"), ("f16", "f32")])
def test_streams_fit_and_cover(group, kind, scale):
    for k, n, rows in configs._MEASURED_STREAMS:
        plain = configs.stream_launch(traits(128, scale="bf16"), rows, n, k, SMS)
        assert plain is not None, (k, n, rows)
        found = configs.stream_launch(traits(group, kind == "bf16", kind, scale), rows, n, k, SMS)
        for launch in (plain, found) if found is not None else (plain,):
            config = launch.config
            assert config.smem_bytes <= SMEM_BYTES // config.blocks_per_sm
            assert config.nt == -(-rows // 8) and 1 <= config.cluster * config.cast <= 8
            assert launch.columns * config.block_n >= n and n % config.block_n == 0
            assert launch.columns % config.cast == 0
            assert config.block_k * config.cluster == k
            assert config.box_rows * config.cast == rows and config.is_valid
            assert launch.columns * config.cluster <= SMS * config.blocks_per_sm
            # a warp's sums of a tile find room where its codes lay; TMA's swizzle, bulk copies
            assert config.slot_bytes >= 1024 * config.nt and config.slot_bytes % 1024 == 0
            assert config.dynamic_offset % 1024 == config.act_slot_bytes % 1024 == 0
        assert configs.stream_launch(traits(group), rows, n, k, SMS - 1) is None


@pytest.mark.parametrize("group", [0, 32, 64, 128, 256])
@pytest.mark.parametrize(("kind", "scale"), [("bf16", "bf16"), ("f16", "f32")])
def test_trimmed_tiles_fit_and_cover(group, kind, scale):
    """Every unit's rows are computed: two units a tile, the second's last quarter by another
    block, all at once."""
    for (k, n, rows), stages in configs._MEASURED_TRIMMED.items():
        assert configs.trimmed_launch(traits(128, scale="bf16"), rows, n, k, SMS) is not None
        launch = configs.trimmed_plan(traits(group, True, kind, scale), rows, n, stages)
        if launch is None:
            continue
        config = launch.config
        assert config.smem_bytes <= SMEM_BYTES and launch.blocks <= SMS
        assert launch.tiles * config.whole.block_n == n
        assert config.whole.block_m == config.rows and rows <= config.rows
        assert config.trimmed.block_m + config.rest.block_m == config.rows
        rest = (launch.blocks - launch.tiles) * config.rest.block_n
        assert launch.tiles * 64 <= rest < launch.tiles * 64 + config.rest.block_n
        # both kinds' halves of the same block lie in one stage
        assert config.whole.slot_bytes == config.trimmed.slot_bytes
        for m in (rows // 4 * 3, rows + 1):  # nothing left for the others, too many
            assert configs.trimmed_launch(traits(128, scale="bf16"), m, n, k, SMS) is None
    assert configs.trimmed_plan(traits(128, False), 128, 14336, (4, 5)) is None


def test_measured_choices():
    """The plan of a layer that another would cost most on (docs/log/w4a16.md)."""
    kind = traits(128, scale="bf16")
    found = configs.matmul_launch(kind, 32, 4096, 4096, SMS)
    assert (found.config.block_m, found.config.cluster, found.blocks) == (32, 4, 128)
    found = configs.matmul_launch(kind, 128, 8192, 28672, SMS)
    assert (found.config.block_m, found.config.cluster, found.blocks) == (128, 2, 128)
    for m in (9, 16, 33, 64):  # K in two parts of a cluster
        found = configs.matmul_launch(kind, m, 14336, 4096, SMS)
        assert (found.config.cluster, found.blocks, found.waves) == (2, 224, 0)
        assert found.config.stages == (6 if m <= 16 else 3)
    for m, parts in ((16, 4), (32, 8), (64, 8), (128, 4)):  # added in shares, without a cluster
        found = configs.matmul_launch(kind, m, 4096, 14336, SMS)
        assert (found.config.cluster, found.config.parts) == (1, parts)
    found = configs.matmul_launch(kind, 128, 28672, 8192, SMS)
    assert (found.config.block_n, found.waves, found.blocks, found.head) == (128, 0, 132, 0)
    assert found.workspace_floats == 132 * 128 * 128 and found.config.cast == 2
    found = configs.matmul_launch(kind, 16, 4096, 14336, SMS)  # 33 columns for 32: one an SM
    assert found.blocks == 132 and found.config.told
    for m, trimmed in ((192, False), (193, True), (256, True), (257, False)):
        found = configs.rows_launch(kind, m, 14336, 4096, SMS, False)
        assert isinstance(found, configs.TrimmedLaunch) == trimmed
    assert (found := configs.trimmed_launch(kind, 256, 14336, 4096, SMS)) is not None
    assert (found.tiles, found.blocks) == (112, 131)
    for m in (1, 4):  # by rows: TMA fills the rows that there are not
        found = configs.decode_launch(kind, m, 4096, 4096, SMS, False)
        assert (found.config.lean, found.splits, found.blocks) == (False, 2, 66)
    assert configs.decode_launch(kind, 8, 4096, 4096, SMS, False).config.lean
    assert configs.decode_launch(kind, 16, 10240, 8192, SMS, False).splits == 2
    # elsewhere, and where the kernel's traits want more shared memory, the model decides
    assert configs.matmul_launch(kind, 64, 14336, 4096, 100).blocks <= 200
    assert not configs.uses_decode(16, 14336, 4096) and configs.uses_decode(8, 14336, 4096)
    found = configs.matmul_launch(kind, 16, 28672, 8192, SMS)
    assert (found.config.block_n, found.waves, found.blocks) == (256, 1, 112)
    assert configs.uses_decode(16, 4096, 4096) and not configs.uses_decode(16, 28672, 8192)
    assert configs.uses_decode(8, 28672, 8192) and not configs.uses_decode(17, 4096, 4096)


def test_kernels_brought_from_elsewhere_count(cache, monkeypatch):
    """Without the DSL, a cache folder with kernels and the runtime they stand on is enough."""
    from ridgeline.kernels.w4a16 import cute_cache

    monkeypatch.setattr(cute_cache.importlib.util, "find_spec", lambda name: None)
    assert not cute_cache.can_run()
    folder = cute_cache.cache_folder()
    assert folder.parent == cache / "cute"
    folder.mkdir(parents=True)
    (folder / "w4a16_decode_0.so").touch()
    assert not cute_cache.can_run()
    (cache / "cute" / cute_cache.RUNTIME).touch()
    assert cute_cache.can_run()


def test_scales_beyond_the_range_are_refused():
    pytest.importorskip("tvm_ffi")
    from ridgeline.kernels.w4a16 import cute_sm90

    weight = make(32, 256, 64, asymmetric=False, act_order=False, dtype=torch.bfloat16)
    weight.scale_NR[3, 1] = 2.0**40
    with pytest.raises(NotImplementedError, match=r"scale_NR must lie between .*impl='triton'"):
        cute_sm90.prepare(weight, torch.bfloat16)
    cute_sm90.prepare(weight, torch.float16)


def test_invariant_launch_ignores_rows():
    found = {configs.decode_launch(traits(128), m, 4096, 4096, SMS, True) for m in range(1, 17)}
    assert len(found) == 1
    kind = traits(128, scale="bf16")
    for n, k in ((4096, 4096), (14336, 4096)):
        found = {configs.rows_launch(kind, m, n, k, SMS, True) for m in range(1, 40)}
        assert len(found) == 1
    small = [configs.rows_launch(kind, m, 4096, 4096, SMS, False) for m in (4, 8, 16, 17)]
    assert [type(launch) for launch in small] == [
        configs.StreamLaunch,
        configs.DecodeLaunch,
        configs.StreamLaunch,
        configs.MatmulLaunch,
    ]


def test_explain_gives_the_launch():
    small = W4A16Problem(m=8, n=14336, k=4096, group_size=128)
    large = W4A16Problem(m=512, n=4096, k=4096, group_size=128)
    arch = pretend("sm90")
    assert isinstance(configs.launch_for(small, arch), configs.DecodeLaunch)
    assert isinstance(configs.launch_for(large, arch), configs.MatmulLaunch)


@functools.cache
def on_gpu(dtype, scale, group, asymmetric, act_order, n, k, silu_mul=False):
    """A weight on the GPU, what the implementation prepared of it, and its forward."""
    from ridgeline.kernels.w4a16 import cute_sm90
    from ridgeline.kernels.w4a16.prepared import Prepared

    weight = make(
        n, k, group, asymmetric=asymmetric, act_order=act_order, dtype=getattr(torch, scale)
    )
    moved = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    weight = type(weight)(
        **{name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in moved.items()}
    )
    tensors = cute_sm90.prepare(weight, getattr(torch, dtype), silu_mul=silu_mul)
    prepared = Prepared(
        impl="cute_sm90",
        n=n,
        k=k,
        bits=4,
        group_size=weight.group_size,
        dtype=getattr(torch, dtype),
        symmetric=not asymmetric,
        act_order=act_order,
        silu_mul=silu_mul,
        tensors=tensors,
    )
    return weight, prepared, cute_sm90.forward


def check(out, act, weight, bias, dtype):
    """max |out - exact| <= 2 max |same-dtype PyTorch - exact| + a floor."""
    w64 = weight.dequantize(torch.float64)
    exact = act.double() @ w64.T + (bias.double() if bias is not None else 0)
    plain = torch.nn.functional.linear(act, w64.to(dtype), bias).double()
    limit = 2 * (plain - exact).abs().max() + 1e-3 * exact.abs().max()
    assert (out.double() - exact).abs().max() <= limit


def check_one_hot(weight, prepared, forward, m, k):
    """Rows of one 1 each give the weight's columns bit for bit, the last one among them."""
    picked = torch.randint(0, k, (m,))
    picked[-1] = k - 1
    hot = torch.zeros(m, k, device="cuda", dtype=prepared.dtype)
    hot[torch.arange(m), picked] = 1
    want = weight.dequantize(prepared.dtype)[:, picked.cuda()].T
    found = forward(hot, prepared, None)  # not in the assertion: see pretended_hopper.py
    assert torch.equal(found, want)


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (HAS_RUNTIME and torch.cuda.is_available()), reason="needs a Hopper GPU and tvm_ffi"
    ),
]


# rows of a tile, and how four tiles of 16 steps are shared
SHARED = [
    (16, {"waves": 0, "blocks": 20, "parts": 4}),
    (16, {"waves": 0, "blocks": 28, "parts": 7}),
    (32, {"waves": 0, "blocks": 28, "parts": 7}),
    (64, {"waves": 0, "blocks": 28, "cluster": 7}),
    (64, {"waves": 0, "blocks": 16, "parts": 4}),
    (64, {"waves": 0, "blocks": 20, "parts": 4}),
    (64, {"waves": 0, "blocks": 24, "parts": 6, "cast": 2}),
    (64, {"waves": 1, "blocks": 4, "cast": 2}),
    (64, {"waves": 0, "blocks": 6, "cast": 2}),
    (64, {"waves": 1, "blocks": 3}),
    (128, {"waves": 1, "blocks": 3}),
    (128, {"waves": 0, "blocks": 7}),
    (128, {"waves": 0, "blocks": 6, "cast": 2}),
]


@pytest.mark.parametrize("kind", TRAITS)
class TestOnHopper:
    pytestmark = gpu

    @pytest.mark.parametrize("m", [1, 8, 13, 17, 33, 100, 257])
    @pytest.mark.parametrize(("n", "k"), [(64, 256), (1000, 2056), (1544, 4096)])
    def test_values_and_repeats(self, kind, m, n, k):
        weight, prepared, forward = on_gpu(*kind, n, k)
        act = torch.randn(m, k, device="cuda").to(prepared.dtype)
        bias = torch.randn(n, device="cuda").to(prepared.dtype)
        out = forward(act, prepared, bias)
        check(out, act, weight, bias, prepared.dtype)
        assert torch.equal(out, forward(act, prepared, bias))

    @pytest.mark.parametrize("m", [1, 16, 40, 130])
    def test_one_hot_returns_the_weight(self, kind, m):
        n, k = 520, 1096
        weight, prepared, forward = on_gpu(*kind, n, k)
        check_one_hot(weight, prepared, forward, m, k)

    def test_batch_invariant(self, kind):
        _, prepared, forward = on_gpu(*kind, 512, 2048)
        act = torch.randn(40, 2048, device="cuda").to(prepared.dtype)
        whole = forward(act, prepared, None, batch_invariant=True)
        for row in (0, 15, 16, 39):
            one = forward(act[row : row + 1], prepared, None, batch_invariant=True)
            assert torch.equal(whole[row : row + 1], one)
        some = forward(act[3:12], prepared, None, batch_invariant=True)
        assert torch.equal(whole[3:12], some)

    @pytest.mark.parametrize(
        "plan",
        [
            (4, 2, 2, 2, 2, 2, 1, False),
            (2, 1, 1, 4, 2, 2, 1, False),
            (4, 1, 2, 2, 2, 1, 2, False),
            (4, 1, 2, 2, 2, 2, 1, True),
            (4, 1, 2, 2, 2, 2, 2, True),
        ],
    )
    def test_clusters_along_k(self, kind, plan, monkeypatch):
        n, k = 508, 2048
        monkeypatch.setattr(
            configs, "_MEASURED_SMS", torch.cuda.get_device_properties(0).multi_processor_count
        )
        rows = (16,) if plan[6] > 1 else (1, 4, 8, 16)
        monkeypatch.setattr(configs, "_MEASURED_STREAMS", {(k, 512, r): plan for r in rows})
        configs.stream_launch.cache_clear()
        weight, prepared, forward = on_gpu(*kind, n, k)
        for m in (1, 3, 8, 13, 16):
            act = torch.randn(m, k, device="cuda").to(prepared.dtype)
            bias = torch.randn(n, device="cuda").to(prepared.dtype)
            out = forward(act, prepared, bias)
            check(out, act, weight, bias, prepared.dtype)
            assert torch.equal(out, forward(act, prepared, bias))
            check_one_hot(weight, prepared, forward, m, k)
        whole = forward(act, prepared, None, batch_invariant=True)
        assert torch.equal(whole[3:4], forward(act[3:4], prepared, None, batch_invariant=True))
        configs.stream_launch.cache_clear()

    @pytest.mark.parametrize(("rows", "plan"), SHARED)
    def test_shared_tiles(self, kind, rows, plan, monkeypatch):
        """K in parts of a cluster and of none, activations brought by two, uneven shares too."""
        n, k = 508, 2048
        monkeypatch.setattr(
            configs, "_MEASURED_SMS", torch.cuda.get_device_properties(0).multi_processor_count
        )
        shape = (rows, 2, 1, 2, 2, 1 if rows == 128 else 2)
        monkeypatch.setattr(configs, "_MEASURED", {(k, 512, rows): (shape, configs.Plan(**plan))})
        configs.matmul_launch.cache_clear()
        weight, prepared, forward = on_gpu(*kind, n, k)
        for m in (rows // 2 + 1, rows):
            act = torch.randn(m, k, device="cuda").to(prepared.dtype)
            bias = torch.randn(n, device="cuda").to(prepared.dtype)
            out = forward(act, prepared, bias)
            check(out, act, weight, bias, prepared.dtype)
            for _ in range(3):
                assert torch.equal(out, forward(act, prepared, bias))
        configs.matmul_launch.cache_clear()

    @pytest.mark.parametrize(("rows", "stages"), [(128, (3, 3)), (256, (3, 4))])
    def test_trimmed_tiles(self, kind, rows, stages, monkeypatch):
        """Second units of tiles without their last rows, which other blocks compute."""
        n, k = 1528, 1024
        if kind[3]:
            pytest.skip("zero points: other kernels")
        monkeypatch.setattr(
            configs, "_MEASURED_SMS", torch.cuda.get_device_properties(0).multi_processor_count
        )
        monkeypatch.setattr(configs, "_MEASURED_TRIMMED", {(k, 1536, rows): stages})
        configs.trimmed_launch.cache_clear()
        weight, prepared, forward = on_gpu(*kind, n, k)
        for m in (rows // 4 * 3 + 1, rows):
            act = torch.randn(m, k, device="cuda").to(prepared.dtype)
            bias = torch.randn(n, device="cuda").to(prepared.dtype)
            out = forward(act, prepared, bias)
            check(out, act, weight, bias, prepared.dtype)
            for _ in range(3):
                assert torch.equal(out, forward(act, prepared, bias))
            check_one_hot(weight, prepared, forward, m, k)
        configs.trimmed_launch.cache_clear()

    def test_strided_rows_and_graph(self, kind):
        weight, prepared, forward = on_gpu(*kind, 256, 512)
        wide = torch.randn(5, 1024, device="cuda").to(prepared.dtype)
        check(forward(wide[:, 512:], prepared, None), wide[:, 512:], weight, None, prepared.dtype)
        check(forward(wide[:, 3:515], prepared, None), wide[:, 3:515], weight, None, prepared.dtype)
        act = torch.randn(4, 512, device="cuda").to(prepared.dtype)
        eager = forward(act, prepared, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward(act, prepared, None)
        graph.replay()
        assert torch.equal(captured, eager)

    @pytest.mark.parametrize("m", [3, 40])
    def test_silu_mul_is_rounded_once(self, kind, m):
        weight, prepared, forward = on_gpu(*kind, 256, 512, silu_mul=True)
        act = torch.randn(m, 512, device="cuda").to(prepared.dtype) / 16
        bias = torch.randn(256, device="cuda").to(prepared.dtype)
        both = act.double() @ weight.dequantize(torch.float64).T + bias.double()
        gate, up = both.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
        out = forward(act, prepared, bias)
        if m <= 8:
            # exact weights: the bits of the exact result but where it lies next to a tie; another
            # rounding before the product would change every fourth
            assert (out != want.to(out.dtype)).double().mean() < 0.02
        unit = 2.0 ** (-8 if prepared.dtype == torch.bfloat16 else -11)
        limit = 1.02 * unit * want.abs() + 2 * unit * want.abs().max()
        assert ((out.double() - want).abs() <= limit).all()
