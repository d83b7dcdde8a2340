"""W4A16 on Hopper: the host side of three CuTe DSL kernels over the one packed layout.

Up to 8 rows, and up to 16 of all but large layers: cute_decode (bound by the bytes of the packed
weight), or cute_stream where it was timed faster. Else cute_matmul (WGMMA with the weights as the
register operand). `batch_invariant`: one of the first two for any number of rows, 16 at a time,
launched alike whatever their number, so a row's bits depend on that row alone.

Kernels are compiled once per config and kept in the user cache (cute_library).
"""

from __future__ import annotations

import ctypes
import functools

import torch

from ridgeline.core import arch as arches
from ridgeline.core.errors import unsupported
from ridgeline.formats.base import QuantizedWeight
from ridgeline.kernels.w4a16 import cute_library, layout
from ridgeline.kernels.w4a16.config import (
    DECODE_ROWS,
    DecodeLaunch,
    MatmulLaunch,
    StreamLaunch,
    Traits,
    TrimmedLaunch,
    rows_launch,
    traits_of,
)
from ridgeline.kernels.w4a16.layout import (
    PackedW4,
    from_tensors,
    gather_inputs,
    interleave,
    pack,
    to_tensors,
)
from ridgeline.kernels.w4a16.prepared import Prepared

_MAX_COUNTERS = 8192


def prepare(
    weight: QuantizedWeight | PackedW4, dtype: torch.dtype, *, silu_mul: bool = False
) -> tuple[torch.Tensor, ...]:
    """The packed layout (layout.to_tensors) and the zeroed counters of split tiles."""
    if isinstance(weight, PackedW4):
        packed = weight
    else:
        packed = pack(interleave(weight) if silu_mul else weight)
    if packed.symmetric and dtype == torch.bfloat16:
        _check_scales(packed)
    device = packed.word_TCrli.device
    tiles = max(packed.word_TCrli.shape[0], _MAX_COUNTERS)
    counters = torch.zeros(tiles, dtype=torch.int32, device=device)
    if device.type == "cuda":
        # Kernels ask for weights before the previous kernel of the stream has ended.
        torch.cuda.synchronize(device)
    return (*to_tensors(packed), counters)


def _check_scales(packed: PackedW4) -> None:
    """bf16 scales outside 2^-93 to 2^27 leave the range of the WGMMA kernel's factors."""
    size = packed.scale_TRgj.abs()
    if size.device.type == "meta" or size.dtype != torch.bfloat16:
        return
    if bool(((size > 2.0**27) | ((size < 2.0**-93) & (size > 0))).any()):
        raise unsupported(
            "w4a16",
            "scale_NR",
            "lie between 2^-93 and 2^27 in size",
            "a bf16 scale beyond",
            "pass impl='triton'",
        )


def restore_codes(prepared: Prepared) -> torch.Tensor:
    """code_NK of the weight that was prepared (without silu_mul, which reorders rows)."""
    return layout.restore_codes(prepared.tensors, n=prepared.n, k=prepared.k)


def forward(
    act_MK: torch.Tensor,
    prepared: Prepared,
    bias_N: torch.Tensor | None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """out_MN in the activation's dtype.

    Shapes: act_MK [M, K] contiguous in K. Numerics: fp32 accumulation; up to 16 rows the scale
    multiplies fp32 group sums, above the weight is rounded once to the activation's dtype.
    """
    packed = from_tensors(prepared.tensors, n=prepared.n, k=prepared.k)
    counters = prepared.tensors[5]
    act_MK = aligned_rows(gather_inputs(act_MK, packed))
    M = act_MK.shape[0]
    # Rows of the output start at multiples of 16 bytes, as TMA stores want them.
    columns = prepared.columns
    out_MN = act_MK.new_empty(M, columns + -columns % 8)[:, :columns]
    bias_N = bias_N.contiguous() if bias_N is not None else None
    traits = traits_of(packed, act_MK.dtype, prepared.silu_mul)
    sms = num_sms(act_MK.device.index)
    launch = rows_launch(traits, M, packed.n_padded, packed.k_padded, sms, batch_invariant)
    with torch.cuda.device(act_MK.device):
        if isinstance(launch, MatmulLaunch):
            matmul(act_MK, packed, bias_N, out_MN, counters, launch)
        elif isinstance(launch, TrimmedLaunch):
            trimmed(act_MK, packed, bias_N, out_MN, launch)
        else:
            for first in range(0, M, DECODE_ROWS):
                act_mK, out_mN = act_MK[first : first + DECODE_ROWS], out_MN[first:]
                if isinstance(launch, StreamLaunch):
                    stream(act_mK, packed, bias_N, out_mN, launch)
                else:
                    decode(act_mK, packed, bias_N, out_mN, counters, launch)
    return out_MN.contiguous()


def aligned_rows(act_MK: torch.Tensor) -> torch.Tensor:
    """Rows that start at multiples of 16 bytes, as bulk copies want them."""
    fits = act_MK.data_ptr() % 16 == 0 and act_MK.stride(0) % 8 == 0 and act_MK.stride(1) == 1
    if fits and act_MK.shape[1] % 8 == 0:
        return act_MK
    return torch.nn.functional.pad(act_MK, (0, -act_MK.shape[1] % 8)).contiguous()


def decode(
    act_MK: torch.Tensor,
    packed: PackedW4,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    counters: torch.Tensor,
    launch: DecodeLaunch,
) -> None:
    """Write out_MN for at most 16 rows."""
    M, K = act_MK.shape
    config = launch.config
    workspace = act_MK.new_empty(launch.workspace_floats, dtype=torch.float32)
    cute_library.kernel(config)(
        packed.word_TCrli.data_ptr(),
        packed.scale_TRgj.data_ptr(),
        _address(packed.zero_TRgj),
        act_MK.data_ptr(),
        out_MN.data_ptr(),
        _address(bias_N),
        workspace.data_ptr(),
        counters.data_ptr(),
        M,
        packed.n,
        K,
        packed.word_TCrli.shape[0],
        packed.word_TCrli.shape[1],
        packed.scale_TRgj.shape[1],
        act_MK.stride(0),
        out_MN.stride(0),
        config.act_pitch(launch.max_units),
        launch.max_units,
        launch.blocks,
        launch.splits,
        act_MK if config.lean else None,
        _stream(),
    )


def stream(
    act_MK: torch.Tensor,
    packed: PackedW4,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    launch: StreamLaunch,
) -> None:
    """Write out_MN for at most 16 rows."""
    cute_library.kernel(launch.config)(
        packed.word_TCrli.data_ptr(),
        packed.scale_TRgj.data_ptr(),
        _address(packed.zero_TRgj),
        out_MN.data_ptr(),
        _address(bias_N),
        act_MK.shape[0],
        packed.n,
        packed.word_TCrli.shape[1],
        packed.scale_TRgj.shape[1],
        out_MN.stride(0),
        launch.columns,
        act_MK,
        _stream(),
    )


def matmul(
    act_MK: torch.Tensor,
    packed: PackedW4,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    counters: torch.Tensor,
    launch: MatmulLaunch,
) -> None:
    """Write out_MN for any number of rows."""
    workspace = act_MK.new_empty(launch.workspace_floats, dtype=torch.float32)
    T = packed.word_TCrli.shape[0]
    scale = packed.scale_TRgj.view(T, -1)
    zero = packed.zero_TRgj.view(T, -1) if packed.zero_TRgj is not None else None
    cute_library.kernel(launch.config)(
        act_MK,
        packed.word_TCrli.view(T, -1),
        scale,
        zero if zero is not None else packed.word_TCrli.view(torch.uint8).view(T, -1),
        out_MN,
        _address(bias_N),
        out_MN.data_ptr(),
        workspace.data_ptr(),
        counters.data_ptr(),
        launch.waves,
        launch.head,
        launch.blocks,
        _stream(),
    )


def trimmed(
    act_MK: torch.Tensor,
    packed: PackedW4,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    launch: TrimmedLaunch,
) -> None:
    """Write out_MN for at most as many rows as the config has."""
    T = packed.word_TCrli.shape[0]
    cute_library.kernel(launch.config)(
        act_MK,
        packed.word_TCrli.view(T, -1),
        packed.scale_TRgj.view(T, -1),
        out_MN,
        _address(bias_N),
        out_MN.data_ptr(),
        launch.tiles,
        launch.blocks,
        _stream(),
    )


def kernels_for(traits: Traits, n: int, k: int, rows: range, sms: int) -> set:
    """Configs that a layer can ask for with these numbers of rows (to compile them ahead)."""
    return {rows_launch(traits, m, n, k, sms, False).config for m in rows}


@functools.cache
def num_sms(index: int | None) -> int:
    """Streaming multiprocessors of a device."""
    return arches.detect(torch.device("cuda", index or 0)).num_units


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
