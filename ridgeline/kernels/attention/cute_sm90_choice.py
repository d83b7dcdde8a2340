"""Which of the two Hopper forward kernels a problem runs on this machine; needs no DSL."""

from __future__ import annotations

from ridgeline.core.arch import Arch
from ridgeline.kernels.attention.cute import cache
from ridgeline.kernels.attention.cute_sm90_cached_config import (
    CachedTraits,
    forward_key,
    needs_lengths,
)
from ridgeline.kernels.attention.cute_sm90_config import (
    ForwardConfig,
    ForwardTraits,
    forward_config,
    forward_traits,
)
from ridgeline.kernels.attention.cute_sm90_tail_config import settled
from ridgeline.kernels.attention.problem import AttentionProblem


def forward_kernel(problem: AttentionProblem, arch: Arch) -> tuple[ForwardTraits, ForwardConfig]:
    """(traits, config): the choice of `forward_key`, but where only speed speaks for the kernel of
    caches and this machine cannot have it, the other. The last tiles are cut only where it pays."""
    traits, config = forward_key(problem, arch)
    optional = isinstance(traits, CachedTraits) and not needs_lengths(problem)
    if optional and not arch.pretended and cache.why_missing(traits, config) is not None:
        traits, config = forward_traits(problem), forward_config(problem, arch)
    return traits, settled(problem, config, arch)
