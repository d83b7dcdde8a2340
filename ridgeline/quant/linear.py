"""A linear layer on packed weights, in the place of nn.Linear.

Its buffers are the checkpoint's own tensors under the format's names (GPTQ: qweight, qzeros,
scales, g_idx, bias), so state_dict() loads and saves a quantized checkpoint bit for bit. What a
kernel reads is a second layout, made from them at the first forward on a device and dropped when
they change or move. `release` gives up the checkpoint's codes where that layout gives them back bit
for bit: they are made again when asked for (state_dict, shard, a move to another device). Casting
the module (`.to(torch.bfloat16)`) changes the activations' dtype, never the stored scales.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from ridgeline.core.errors import bad_type, bad_value
from ridgeline.formats.base import QuantizedWeight
from ridgeline.formats.contract import WeightFormat
from ridgeline.kernels.w4a16.op import decode_bytes, prepare, restore_codes, w4a16_linear
from ridgeline.kernels.w4a16.prepared import Prepared


class QuantizedLinear(nn.Module):
    """out = x @ dequant(W)^T + bias, x [..., K] in `dtype`."""

    def __init__(
        self,
        layout: WeightFormat,
        n: int,
        k: int,
        *,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        impl: str = "auto",
    ) -> None:
        """Buffers of the right shapes, not yet filled (device "meta" holds no memory)."""
        super().__init__()
        self.layout, self.out_features, self.in_features = layout, n, k
        self.dtype, self.impl = dtype, impl
        self.bias: torch.Tensor | None
        self.register_buffer("bias", None)
        self._names: list[str] = []
        for name, spec in layout.tensor_specs(n, k, bias=bias).items():
            self._hold(name, torch.empty(spec.shape, dtype=spec.dtype, device=device))
        self._prepared: Prepared | None = None
        self._prepared_from: torch.Tensor | None = None
        self._released_bytes: int | None = None

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self.register_buffer(name, tensor)
        if name not in self._names:
            self._names.append(name)

    def keep_only(self, names: Collection[str]) -> None:
        """Drop tensors that a checkpoint does not hold (a GPTQ file without g_idx).

        Raises: ValueError for one that the form does not have.
        """
        foreign = sorted(set(names) - set(self._names))
        if foreign:
            raise bad_value(
                "quantized linear",
                "tensors",
                f"be among {', '.join(self._names)}",
                ", ".join(foreign),
                "the config does not describe these weights",
            )
        for name in [name for name in self._names if name not in names]:
            self._names.remove(name)
            if name == "bias":
                self.bias = None
            else:
                delattr(self, name)

    @classmethod
    def from_weight(
        cls,
        weight: QuantizedWeight,
        layout: WeightFormat,
        *,
        dtype: torch.dtype = torch.bfloat16,
        impl: str = "auto",
    ) -> Self:
        """Pack a quantized weight in a format's form.

        Raises: ValueError when the weight is not of that form.
        """
        return cls.from_tensors(layout.pack(weight), layout, dtype=dtype, impl=impl)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, torch.Tensor],
        layout: WeightFormat,
        *,
        dtype: torch.dtype = torch.bfloat16,
        impl: str = "auto",
    ) -> Self:
        """Take a checkpoint's tensors of one layer as they are."""
        n, k = layout.shape_of(tensors)
        linear = cls(layout, n, k, bias="bias" in tensors, dtype=dtype, device="meta", impl=impl)
        linear.keep_only(tensors)
        for name, tensor in tensors.items():
            setattr(linear, name, tensor.detach())
        return linear

    def tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint's tensors."""
        held = {name: getattr(self, name) for name in self._names}
        if self._released_bytes is not None:
            held[self.layout.codes_name] = self._made_again()
        return held

    def release(self) -> bool:
        """Give up the checkpoint's codes where the kernel's layout holds them too; whether it did.

        Half the memory of a layer; for inference on a GPU. Nothing changes for callers: what needs
        the codes makes them again.
        """
        if self._released_bytes is not None:
            return True
        prepared = self.prepare()
        codes = self._codes()
        restored = restore_codes(prepared)
        if restored is None:
            return False
        packed = self.layout.pack(replace(self.weight_of(), code_NK=restored))
        again = packed[self.layout.codes_name]
        if again.shape != codes.shape or not torch.equal(again, codes):
            return False
        self._released_bytes = codes.numel() * codes.element_size()
        self._buffers[self.layout.codes_name] = codes.new_empty(0)
        self._prepared_from = self._codes()
        return True

    def _made_again(self) -> torch.Tensor:
        """The released codes in the checkpoint's form."""
        prepared = self._prepared
        assert prepared is not None
        code_NK = restore_codes(prepared)
        assert code_NK is not None
        held = {name: getattr(self, name) for name in self._names}
        spec = self.layout.tensor_specs(self.out_features, self.in_features)[self.layout.codes_name]
        held[self.layout.codes_name] = torch.zeros(
            spec.shape, dtype=spec.dtype, device=code_NK.device
        )
        weight = replace(self.layout.unpack(held), code_NK=code_NK)
        return self.layout.pack(weight)[self.layout.codes_name]

    def _take_back(self) -> None:
        """Hold the codes again (before a move or a load)."""
        if self._released_bytes is not None:
            codes = self._made_again()
            self._released_bytes = None
            self._buffers[self.layout.codes_name] = self._prepared_from = codes

    def weight_of(self) -> QuantizedWeight:
        """The logical quantized weight. Raises: ValueError for damaged tensors."""
        return self.layout.unpack(self.tensors())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [N, K]."""
        return self.weight_of().dequantize(dtype)

    def prepare(self) -> Prepared:
        """The kernel's layout, made now if it is not at hand (call before torch.compile).

        Raises: NotImplementedError when no implementation takes the layer on its device.
        """
        source = self._codes()
        if source.device.type == "meta":
            raise bad_value(
                "quantized linear",
                self.layout.codes_name,
                "be loaded",
                "a meta tensor",
                "assign the checkpoint's tensors first",
            )
        if self._prepared is None or self._prepared_from is not source:
            self._prepared = prepare(self.weight_of(), self.dtype, impl=self.impl)
            self._prepared_from = source
            self._bias_N = None if self.bias is None else self.bias.to(self.dtype)
        return self._prepared

    def _codes(self) -> torch.Tensor:
        return getattr(self, self.layout.codes_name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] in self.dtype -> [..., N]."""
        prepared = self._prepared
        if prepared is None or self._prepared_from is not self._codes():
            prepared = self.prepare()
        return w4a16_linear(x, prepared, self._bias_N)

    def weight_bytes(self) -> int:
        """Bytes of stored tensors that a one-row forward needs: codes, scales, zero points where
        they are not all the middle one, the group table under act-order, bias."""
        names = [name for name in (*self.layout.forward_parts(), "bias") if name in self._names]
        held = (getattr(self, name) for name in names)
        return sum(t.numel() * t.element_size() for t in held) + (self._released_bytes or 0)

    def read_bytes(self) -> int:
        """Bytes that a one-row forward really reads: of the kernel's layout once it is made (a CPU
        may read the widened weight), else `weight_bytes()`, the checkpoint's."""
        if self._prepared is None:
            return self.weight_bytes()
        bias_bytes = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return decode_bytes(self._prepared) + bias_bytes

    def shard(self, axis: str, rank: int, ranks: int) -> QuantizedLinear:
        """This rank's part of the layer: axis "column" splits N, "row" splits K.

        A row part keeps the bias on rank 0 only, so that summing the parts' outputs adds it once.
        Raises: ValueError when the split does not fall on whole words and groups.
        """
        parts = self.layout.shard(self.tensors(), axis, rank, ranks)
        if axis == "row" and rank:
            parts.pop("bias", None)
        return type(self).from_tensors(parts, self.layout, dtype=self.dtype, impl=self.impl)

    def extra_repr(self) -> str:
        group = self.layout.group_of(self.in_features)
        return (
            f"{self.in_features}, {self.out_features}, bits={self.layout.bits}, group={group}, "
            f"bias={self.bias is not None}, dtype={self.dtype}"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move every buffer with fn; a cast changes the activations' dtype only."""
        self._take_back()
        self._prepared = None
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for name in self._names:
            old = self._buffers[name]
            assert old is not None
            moved = fn(old)
            self._buffers[name] = moved if moved.dtype == old.dtype else old.to(moved.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._released_bytes is not None:
            destination[prefix + self.layout.codes_name] = self._made_again()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._take_back()
        self._prepared = None
        super()._load_from_state_dict(*args, **kwargs)


def replace_linears(
    model: nn.Module,
    weights: Mapping[str, QuantizedWeight],
    layout_of: Callable[[str], WeightFormat | None],
    *,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
) -> nn.Module:
    """Put a QuantizedLinear in the place of each named nn.Linear; returns the model.

    weights: by full module name; layout_of: a Recipe's or a checkpoint config's method of that
    name; dtype: of activations, None keeps each linear's.
    Raises: ValueError for a name without a linear of that shape or without a layout. Nothing is
    replaced then.
    """
    made: dict[str, QuantizedLinear] = {}
    for name, weight in weights.items():
        linear = _linear(model, name)
        layout = layout_of(name)
        if layout is None or tuple(linear.weight.shape) != weight.shape_nk:
            raise bad_value(
                "replace_linears",
                name,
                f"have a layout and shape {list(weight.shape_nk)}",
                f"{layout}, {list(linear.weight.shape)}",
                "use the recipe and model of the weights",
            )
        made[name] = QuantizedLinear.from_weight(
            weight, layout, dtype=dtype or linear.weight.dtype, impl=impl
        )
        made[name].to(linear.weight.device)
    for name, quantized in made.items():
        model.set_submodule(name, quantized)
    return model


def empty_linears(
    model: nn.Module,
    names: Mapping[str, Collection[str]],
    layout_of: Callable[[str], WeightFormat | None],
    *,
    dtype: torch.dtype,
    stored_shape: Callable[[str], Sequence[int]] | None = None,
    impl: str = "auto",
) -> nn.Module:
    """Replace named linears of a (meta) model by unfilled QuantizedLinears for a checkpoint to
    fill.

    stored_shape: of a tensor in the checkpoint by its full name, where it may differ from what we
    would write (compressed-tensors' older 3-bit words); it is checked when the layer is prepared.
    names: full module name -> names of the tensors that the checkpoint holds for it.
    Raises: ValueError for a name without a linear, one that the config says is not quantized, or
    tensors that its form does not have.
    """
    for name, parts in names.items():
        linear = _linear(model, name)
        layout = layout_of(name)
        if layout is None:
            raise bad_value(
                "empty_linears",
                name,
                "be quantized by the config",
                "an exception for it",
                "the checkpoint contradicts its config",
            )
        n, k = linear.weight.shape
        device = linear.weight.device
        try:
            quantized = QuantizedLinear(
                layout, n, k, bias="bias" in parts, dtype=dtype, device=device, impl=impl
            )
            quantized.keep_only(parts)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if stored_shape is not None:
            for part in parts:
                shape = tuple(stored_shape(f"{name}.{part}"))
                setattr(quantized, part, getattr(quantized, part).new_empty(shape))
        model.set_submodule(name, quantized)
    return model


def quantized_linears(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """(full name, layer) of every quantized linear."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def prepare_linears(model: nn.Module) -> None:
    """Make every layer's kernel layout now rather than at its first forward, and on a GPU give up
    the codes that it makes superfluous.

    Raises: ValueError, with the layer's name, for tensors that are damaged.
    """
    for name, linear in quantized_linears(model):
        try:
            if linear.prepare().tensors[0].is_cuda:
                linear.release()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def concat_rows(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """One weight whose outputs are those of several on one input, in order (fused QKV, gate-up).

    Raises: ValueError when widths, groups or act-orders differ.
    """
    first = weights[0]
    for weight in weights[1:]:
        same = (
            weight.bits == first.bits
            and weight.group_size == first.group_size
            and weight.shape_nk[1] == first.shape_nk[1]
            and weight.scale_NR.dtype == first.scale_NR.dtype
            and torch.equal(weight.groups_K(), first.groups_K())
            and (weight.bias_N is None) == (first.bias_N is None)
        )
        if not same:
            raise bad_value(
                "concat_rows",
                "weights",
                "agree in inputs, bits, groups, scale dtype and having a bias",
                "ones that differ",
                "keep them as separate layers",
            )
    zeros = None
    if any(weight.zero_NR is not None for weight in weights):
        middle = 2 ** (first.bits - 1)
        zeros = torch.cat(
            [
                torch.full_like(w.scale_NR, middle, dtype=torch.uint8)
                if w.zero_NR is None
                else w.zero_NR
                for w in weights
            ]
        )
    biases = [weight.bias_N for weight in weights if weight.bias_N is not None]
    return QuantizedWeight(
        code_NK=torch.cat([weight.code_NK for weight in weights]),
        scale_NR=torch.cat([weight.scale_NR for weight in weights]),
        zero_NR=zeros,
        bits=first.bits,
        group_size=first.group_size,
        group_of_K=first.group_of_K,
        bias_N=torch.cat(biases) if biases else None,
    )


def _linear(model: nn.Module, name: str) -> nn.Linear:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise bad_type(
            "quantize", name, "name an nn.Linear", type(module).__name__, "check the layer's name"
        )
    return module
