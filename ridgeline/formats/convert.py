"""From one form of a quantized layer to another, without rounding anything unless asked.

GPTQ (v2 or symmetric) and compressed-tensors hold the same words, transposed, so those two are
exchanged without unpacking a code. Every other pair goes through QuantizedWeight: codes, scales and
zero points are repacked as they are. What the target cannot hold (act-order or a short last group
in AWQ, zero points in a symmetric form, scales beyond its dtype) is refused with the reason; with
lossy=True scales are rounded, or, where that is not enough, the layer's values are rounded anew on
the target's grid.
Bytes: one read and one write of the packed layer for a transpose; the unpacked codes (one byte
each) pass through memory otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import bad_value
from ridgeline.formats.awq import AWQFormat
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.compressed_tensors import CompressedTensorsFormat
from ridgeline.formats.contract import WeightFormat
from ridgeline.formats.gptq import GPTQFormat

FORMATS = ("gptq", "awq", "compressed-tensors")
_KEEPS_ANY_DTYPE = ("compressed-tensors",)
"""Forms whose readers take scales in the model's dtype, whichever it is; the others' want fp16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """What the layers of a checkpoint have in common, seen in the tensors."""

    symmetric: bool = True
    """No layer has a zero point other than the middle one (an AWQ config cannot say)."""
    desc_act: bool = False
    """Some layer's groups follow a table."""
    scale_dtype: str = "float16"


def target_layout(source: WeightFormat, target: str, facts: SourceFacts) -> WeightFormat:
    """The form `target` that holds what a layer in form `source` holds, as far as it can.

    Raises: ValueError for a width that the target lacks.
    """
    bits, group_size, symmetric = source.bits, source.group_size, facts.symmetric
    if target == "gptq":
        return GPTQFormat(
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            desc_act=facts.desc_act,
            checkpoint_format="gptq" if symmetric else "gptq_v2",
        )
    if target == "awq":
        return AWQFormat(bits=bits, group_size=group_size, symmetric=symmetric)
    if target == "compressed-tensors":
        return CompressedTensorsFormat(
            bits=bits,
            group_size=group_size,
            symmetric=symmetric,
            desc_act=facts.desc_act,
            scale_dtype=facts.scale_dtype,
        )
    raise bad_value(
        "convert", "format", f"be one of {', '.join(FORMATS)}", repr(target), "choose one of these"
    )


def convert_tensors(
    tensors: dict[str, torch.Tensor],
    source: WeightFormat,
    target: WeightFormat,
    *,
    lossy: bool = False,
) -> dict[str, torch.Tensor]:
    """One layer's tensors in another form.

    Raises: ValueError for damaged tensors, and for what the target cannot hold unless `lossy`.
    """
    moved = _transposed(tensors, source, target)
    return convert_weight(source.unpack(tensors), target, lossy=lossy) if moved is None else moved


def convert_weight(
    weight: QuantizedWeight, target: WeightFormat, *, lossy: bool = False
) -> dict[str, torch.Tensor]:
    """A quantized weight's tensors in some form; see convert_tensors."""
    target.tensor_specs(*weight.shape_nk)  # a shape that cannot be packed is refused in any case
    changed = loss_of(weight, target)
    if changed and not lossy:
        raise bad_value(
            "convert",
            "the weight",
            f"fit {target.method} as it is",
            changed,
            "choose another format, or allow a lossy conversion",
        )
    if _form_loss(weight, target):
        rounded = target.quantize_ref(weight.dequantize())
        weight = replace(rounded, bias_N=weight.bias_N)
    return target.pack(_with_scales(weight, target))


def loss_of(weight: QuantizedWeight, target: WeightFormat) -> str | None:
    """What a form cannot hold of a weight, in words; None: it holds every bit."""
    return _form_loss(weight, target) or _scale_loss(weight, target)


def _form_loss(weight: QuantizedWeight, target: WeightFormat) -> str | None:
    group = target.group_of(weight.shape_nk[1])
    if weight.bits != target.bits:
        return f"{weight.bits} bits where it has {target.bits}"
    if weight.group_of_K is not None and not target.desc_act:
        return "groups in activation order (act-order), for which it has no table"
    if weight.group_size != group:
        return f"groups of {weight.group_size} inputs where it has {group}"
    if weight.zero_NR is not None and target.symmetric:
        return "zero points, for which a symmetric form has no place"
    return None


def _scale_loss(weight: QuantizedWeight, target: WeightFormat) -> str | None:
    for tensor, what in ((weight.scale_NR, "scales"), (weight.bias_N, "a bias")):
        if tensor is None:
            continue
        dtype = _stored_dtype(tensor, target)
        if not torch.equal(tensor.to(dtype).double(), tensor.double()):
            return f"{what} in {dtype_name(tensor.dtype)} that {dtype_name(dtype)} cannot hold"
    return None


def _with_scales(weight: QuantizedWeight, target: WeightFormat) -> QuantizedWeight:
    """The weight with scales and bias in the target's dtype; no scale becomes 0 or infinite."""
    dtype = _stored_dtype(weight.scale_NR, target)
    info = torch.finfo(dtype)
    size = weight.scale_NR.double().abs().clamp(min=info.tiny * info.eps, max=info.max)
    bias_N = weight.bias_N
    return replace(
        weight,
        scale_NR=torch.copysign(size, weight.scale_NR.double()).to(dtype),
        bias_N=None if bias_N is None else bias_N.to(_stored_dtype(bias_N, target)),
    )


def _stored_dtype(tensor: torch.Tensor, target: WeightFormat) -> torch.dtype:
    kept = target.method in _KEEPS_ANY_DTYPE
    return tensor.dtype if kept else torch_dtype(target.scale_dtype)


# ---- words ------------------------------------------------------------------------------------


def _transposed(
    tensors: dict[str, torch.Tensor], source: WeightFormat, target: WeightFormat
) -> dict[str, torch.Tensor] | None:
    """The target's tensors by transposing words; None where that is not all there is to do."""
    if isinstance(source, GPTQFormat) and isinstance(target, CompressedTensorsFormat):
        gptq, convert = source, _from_gptq
    elif isinstance(source, CompressedTensorsFormat) and isinstance(target, GPTQFormat):
        gptq, convert = target, _to_gptq
    else:
        return None
    fields = ("bits", "group_size", "symmetric", "desc_act")
    if any(getattr(source, field) != getattr(target, field) for field in fields):
        return None
    source.check_tensors(tensors)
    if source.symmetric and source.zeros_of(tensors) is not None:
        return None
    if not source.symmetric and gptq.checkpoint_format != "gptq_v2":
        return None
    return convert(tensors, source, target)  # pyright: ignore[reportArgumentType]


def _from_gptq(
    tensors: dict[str, torch.Tensor], source: GPTQFormat, target: CompressedTensorsFormat
) -> dict[str, torch.Tensor] | None:
    n, k = source.shape_of(tensors)
    natural = torch.arange(k, device=tensors["qweight"].device) // source.group_of(k)
    table = tensors.get("g_idx", natural)
    if not source.desc_act and not torch.equal(table.long(), natural):
        return None
    moved = {
        "weight_packed": tensors["qweight"].T.contiguous(),
        "weight_scale": tensors["scales"].T.contiguous(),
        "weight_shape": torch.tensor([n, k], device=natural.device),
    }
    if not source.symmetric:
        moved["weight_zero_point"] = tensors["qzeros"].T.contiguous()
    if source.desc_act:
        moved["weight_g_idx"] = table.to(torch.int32)
    if "bias" in tensors:
        moved["bias"] = tensors["bias"]
    return moved


def _to_gptq(
    tensors: dict[str, torch.Tensor], source: CompressedTensorsFormat, target: GPTQFormat
) -> dict[str, torch.Tensor] | None:
    n, k = source.shape_of(tensors)
    specs = target.tensor_specs(n, k, bias="bias" in tensors)
    scale_RN = tensors["weight_scale"].T.contiguous()
    natural = torch.arange(k, device=scale_RN.device) // source.group_of(k)
    table = tensors.get("weight_g_idx", natural)
    if not source.desc_act and not torch.equal(table.long(), natural):
        return None
    moved = {
        "qweight": tensors["weight_packed"].T.contiguous(),
        "scales": scale_RN,
        "g_idx": table.to(torch.int32),
    }
    if source.symmetric:
        middle = torch.full_like(scale_RN, 2 ** (source.bits - 1), dtype=torch.uint8)
        moved["qzeros"] = target.zero_words(middle)
    else:
        moved["qzeros"] = tensors["weight_zero_point"].T.contiguous()
    if "bias" in tensors:
        moved["bias"] = tensors["bias"]
    # Words that are not the dense stream, or scales of another dtype: not a matter of words.
    fits = all(
        tuple(moved[name].shape) == spec.shape and moved[name].dtype == spec.dtype
        for name, spec in specs.items()
    )
    return moved if fits else None
