"""The cache of Hopper kernels compiled without a GPU: names, one build a kernel, loading."""

from __future__ import annotations

import re
from dataclasses import fields
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


@pytest.mark.parametrize(
    "records",
    [
        (bwd.BackwardTraits, bwd.BackwardConfig),
        (bwd.BackwardTraits, roles.RolesConfig),
        (cfg.ForwardTraits, cfg.ForwardConfig),
        (cached.CachedTraits, cached.CachedConfig),
    ],
)
def test_every_field_has_a_short_name_of_its_own(records: tuple[type, ...]) -> None:
    names = [cache.short_name(field.name) for record in records for field in fields(record)]
    assert len(names) == len(set(names)), sorted(names)


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


def test_a_compiled_kernel_loads_and_checks_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    problem = SHIPPED["64-causal"]
    arguments = cfg.forward_traits(problem), cfg.forward_config(problem, KNOWN["sm90"])
    kernel = library.kernel(*arguments)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        kernel(1, 2, 3)
