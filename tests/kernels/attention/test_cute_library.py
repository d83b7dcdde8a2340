"""Hopper kernels compiled without a GPU: names, cache, and what the machine code holds."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (pip install ridgeline[hopper]) is not here")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi (pip install ridgeline[hopper]) is not here")

from ridgeline.core.arch import KNOWN
from ridgeline.kernels.attention import cute_sm90_backward_config as bwd
from ridgeline.kernels.attention import cute_sm90_cached_config as cached
from ridgeline.kernels.attention import cute_sm90_config as cfg
from ridgeline.kernels.attention import cute_sm90_roles_config as roles
from ridgeline.kernels.attention.cute import cache, library
from ridgeline.kernels.attention.problem import AttentionProblem


def _problem(head_dim: int, **changes: object) -> AttentionProblem:
    fields = dict(batch=1, seqlen_q=4096, seqlen_k=4096, heads=4, kv_heads=4)
    return AttentionProblem(**fields, head_dim=head_dim, head_dim_v=head_dim, **changes)


SHIPPED = {
    "64-causal": _problem(64, causal=True),
    "64-window": _problem(64, causal=True, window_left=128, sinks=True),
    "128": _problem(128),
    "128-softcap-fp16": _problem(128, softcap=30.0, dtype="float16"),
    "128-causal-packed": _problem(128, causal=True, varlen=True),
    "192-causal": _problem(192, causal=True),
    "256-causal": _problem(256, causal=True),
}


def _cuobjdump() -> str:
    if found := shutil.which("cuobjdump"):
        return found
    triton = pytest.importorskip("triton", reason="no cuobjdump here, and no Triton, which has one")
    return str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")


def _dump(cubin: Path, what: str) -> str:
    done = subprocess.run([_cuobjdump(), what, cubin], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_machine_code(name: str, tmp_path: Path) -> None:
    """No spills, every product there once a place, and waits only where they are written: when
    ptxas cannot prove the pipeline sound it serialises it and waits after each HGMMA."""
    problem = SHIPPED[name]
    traits, config = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
    library.trace(traits, config, tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    assert "STACK:0" in _dump(cubin, "-res-usage")
    sass = _dump(cubin, "-sass")
    assert not re.search(r"\b(LDL|STL)\b", sass)
    qk, pv = traits.head_dim // 16, config.block_k // 16
    steps = 3 if traits.has_left else 2  # masked, unmasked, and the window's left edge
    products, waits = 2 * qk + steps * (qk + pv) + pv, 3 * steps + 4
    assert len(re.findall(r"\bHGMMA\b", sass)) == products
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= waits
    assert len(re.findall(r"\bUSETMAXREG\b", sass)) == 2
    assert re.search(r"\bUTMALDG\b", sass) and re.search(r"\bUTMASTG\b", sass)


CACHED = {
    "128-decode-split-pages-of-16": dict(head_dim=128, seqlen_q=1, page_size=16, seqused=True),
    "64-causal-leftpad": dict(head_dim=64, causal=True, leftpad=True, kv_batch_idx=True),
    "256-sinks": dict(head_dim=256, seqlen_q=2, sinks=True, seqused=True, batch=64),
    "128-packed-pages-of-256": dict(head_dim=128, causal=True, varlen=True, page_size=256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_machine_code_over_caches(name: str, tmp_path: Path) -> None:
    """As the forward's; TMA reads K and V only, box by box where there are pages."""
    fields = dict(batch=1, seqlen_q=1024, seqlen_k=4096, heads=8, kv_heads=2) | CACHED[name]
    problem = AttentionProblem(**fields, head_dim_v=fields["head_dim"])  # type: ignore[arg-type]
    traits = cached.cached_traits(problem, KNOWN["sm90"])
    config = cached.cached_config(problem, KNOWN["sm90"])
    library.trace(traits, config, tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    assert set(re.findall(r"STACK:(\d+)", _dump(cubin, "-res-usage"))) == {"0"}
    sass = _dump(cubin, "-sass")
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert len(re.findall(r"Function :", sass)) == 1 + traits.split
    qk, pv = traits.head_dim // 16, config.block_k // 16
    steps = 3 if traits.has_left else 2
    assert len(re.findall(r"\bHGMMA\b", sass)) == qk + steps * (qk + pv) + pv
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= 3 * steps + 2
    moved = 0 if cached.moved_registers(config) is None else 2
    assert len(re.findall(r"\bUSETMAXREG\b", sass)) == moved
    boxes = config.block_k // traits.page_rows if traits.page_rows else 1
    columns = traits.head_dim // 64 + traits.head_dim_v // 64
    assert len(re.findall(r"\bUTMALDG\b", sass)) == 2 * boxes * columns
    # Q by 16 bytes into swizzled shared memory.
    vectors = traits.head_dim // 16
    assert len(re.findall(r"\bSTS\.128\b", sass)) == vectors


BACKWARD = {
    "64-causal": _problem(64, causal=True, direction="bwd"),
    "64-deterministic": _problem(64, causal=True, deterministic=True, direction="bwd"),
    "128": _problem(128, direction="bwd"),
    "128-causal": _problem(128, causal=True, direction="bwd"),
    "128-window-deterministic": _problem(
        128, causal=True, window_left=128, deterministic=True, direction="bwd"
    ),
    "128-packed": _problem(128, causal=True, varlen=True, direction="bwd"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKWARD)
def test_machine_code_of_the_backward(name: str, tmp_path: Path) -> None:
    """As the forward's. Seven waits: two of the dQ warpgroup's halves, the first S, four a step."""
    problem = BACKWARD[name]
    traits, config = bwd.backward_traits(problem), bwd.backward_config(problem, KNOWN["sm90"])
    library.trace(traits, config, tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    assert set(re.findall(r"STACK:(\d+)", _dump(cubin, "-res-usage"))) == {"0"}
    sass = _dump(cubin, "-sass")
    assert not re.search(r"\b(LDL|STL)\b", sass)
    dim, block_q = traits.head_dim, config.block_q
    keys, serving = bwd.KEYS // 16 * config.num_warpgroups, config.dq_parts
    scores, sums = dim // 16, block_q // 16
    products = 3 * scores + 2 * sums + serving * keys
    assert len(re.findall(r"\bHGMMA\b", sass)) == products
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= 7
    assert len(re.findall(r"\bUSETMAXREG\b", sass)) == (3 if config.helpers else 2)
    vectors = block_q * dim // 128 // 4
    assert len(re.findall(r"\bREDG?\.E\.ADD\.F32x4|\bREDG?\b.*\.128", sass)) == vectors
    assert re.search(r"\bUTMALDG\b", sass) and re.search(r"\bUTMASTG\b", sass)


ROLES = {
    "256": (256, 256, {}),
    "192-128-causal-deterministic": (192, 128, dict(causal=True, deterministic=True)),
    "256-causal-packed": (256, 256, dict(causal=True, varlen=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROLES)
def test_machine_code_of_the_backward_by_roles(name: str, tmp_path: Path) -> None:
    """No spills, no serialised products, the registers of all four roles moved. Waits: one a part
    of dQ; of scores and gradients the first product, two a step and the last."""
    dim, dim_v, options = ROLES[name]
    problem = replace(_problem(dim, direction="bwd", **options), head_dim_v=dim_v)
    traits, config = bwd.backward_traits(problem), bwd.backward_config(problem, KNOWN["sm90"])
    assert isinstance(config, roles.RolesConfig) and config.pair
    library.trace(traits, config, tmp_path)
    (cubin,) = tmp_path.glob("*.cubin")
    assert set(re.findall(r"STACK:(\d+)", _dump(cubin, "-res-usage"))) == {"0"}
    sass = _dump(cubin, "-sass")
    assert not re.search(r"\b(LDL|STL)\b", sass)
    parts = dim // roles.dq_columns(traits)
    halves = (1 + (dim > 192)) + (1 + (dim_v > 192))
    products = 2 * (dim + dim_v) // 16 + 4 * halves + 8 * parts
    assert len(re.findall(r"\bHGMMA\b", sass)) == products
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) <= parts + 2 * 4
    assert len(re.findall(r"\bUSETMAXREG\b", sass)) == 4
    assert re.search(r"\bUTMALDG[^;]*MULTICAST", sass) and re.search(r"\bUCGABAR", sass)
    # Among them one bulk copy to the other block.
    assert len(re.findall(r"\bUBLKCP\b", sass)) == 2


def test_names_tell_kernels_apart() -> None:
    names = set()
    for problem in SHIPPED.values():
        traits, config = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
        name = cache.kernel_name(traits, config)
        assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        names.add(name)
    for problem in BACKWARD.values():
        key = bwd.backward_traits(problem), bwd.backward_config(problem, KNOWN["sm90"])
        names.add(cache.kernel_name(*key))
    assert len(names) == len(SHIPPED) + len(BACKWARD)
    options = (dict(softcap=3.0), dict(sinks=True), dict(seqused=True), dict(causal=True))
    traits = [cfg.forward_traits(_problem(64, **changes)) for changes in options]
    tile = cfg.forward_config(SHIPPED["64-causal"], KNOWN["sm90"])
    assert len({cache.kernel_name(one, tile) for one in traits}) == len(options)


def test_cache_builds_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    built = []

    def build(traits: object, config: object, target: Path) -> None:
        built.append(target)
        target.write_bytes(b"library")

    monkeypatch.setattr(library, "_build", build)
    problem = SHIPPED["128"]
    arguments = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
    first, second = library.compile_kernel(*arguments), library.compile_kernel(*arguments)
    assert first == second == cache.kernel_path(*arguments)
    assert first.read_bytes() == b"library" and first.is_relative_to(tmp_path)
    assert len(built) == 1
    assert [p.suffix for p in sorted(first.parent.iterdir())] == [".lock", ".so"]


@pytest.mark.slow
def test_a_compiled_kernel_loads_and_checks_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    problem = SHIPPED["64-causal"]
    arguments = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
    kernel = library.kernel(*arguments)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        kernel(1, 2, 3)
