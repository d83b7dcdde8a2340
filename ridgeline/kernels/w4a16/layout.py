"""The one packed layout of a 4-bit weight, from batch 1 to prefill.

A lane of a tensor-core instruction (mma.sync m16n8k16 or wgmma m64nNk16, weights as the A operand)
holds 8 weights of a 16 x 16 block: exactly one 32-bit word. A lane's words of four consecutive
16-wide steps lie together, so one 128-bit load brings its operand for 64 inputs, and a block of 32
outputs x 64 inputs is 1 KiB of consecutive bytes. Nothing is moved between lanes after the load.

Formula. Let slot be the position of an input along the padded, group-sorted K (see below), and

    T = n // 32   rt = n // 16 % 2   hr = n // 8 % 2   g = n % 8
    C = slot // 64   i = slot // 16 % 4   hk = slot // 8 % 2   t = slot // 2 % 4   e = slot % 2

then the code of (n, slot) is

    word_TCrli[T, C, rt, 4 g + t, i] >> (8 hk + 4 hr + 16 e) & 15

so that `word & 0x000F000F` after a shift of 0, 4, 8, 12 is the pair (e = 0, 1) of the operand
registers a0 (hr 0, hk 0), a1 (hr 1, hk 0), a2 (hr 0, hk 1), a3 (hr 1, hk 1). Scales and zero points
are stored once a group in the order in which a lane needs its four rows:

    scale_TRgj[T, r, g, 2 rt + hr] = scale of (n, packed group r),   zero_TRgj likewise (uint8)

Padding. N to a multiple of 32 with scale 0. K to a multiple of lcm(128, group) with code 0; the
kernels read zeros for activations there. Bytes: N K / 2 for the codes, as in the file.

Act-order. Inputs are sorted by group (stably) and `source_K` says which input sits in a slot, so
the activations are gathered once and the weights never. Where groups are of uneven size (a tensor-
parallel rank holds an arbitrary subset of the inputs), each group's run is padded to a multiple of
a smaller packed group (128, 64 or 32, whichever moves fewest bytes) that repeats the group's scale;
`group_of_R` says which group a packed group belongs to. Groups that no input of this shard uses
keep a column behind the others, so that `unpack(pack(w)) == w` also for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from ridgeline.core.errors import bad_value, unsupported
from ridgeline.formats.base import QuantizedWeight

ROWS = 32
"""Outputs of a block."""
COLS = 64
"""Inputs of a block."""
K_ALIGN = 128
"""Slots along K come in multiples of this (and of the group): a stage of the decode kernel."""
SYMMETRIC_ZERO = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedW4:
    """A weight in the layout above; what every GPU kernel takes."""

    word_TCrli: torch.Tensor
    """int32 [N / 32, K / 64, 2, 32, 4] (padded N and K)."""
    scale_TRgj: torch.Tensor
    """fp16, bf16 or fp32 [N / 32, R, 8, 4], the file's dtype."""
    zero_TRgj: torch.Tensor | None
    """uint8 [N / 32, R, 8, 4]; None: symmetric, 8."""
    source_K: torch.Tensor | None
    """int32 [K padded], the input in each slot, -1 for padding; None: slot k is input k."""
    group_of_R: torch.Tensor | None
    """int32 [R], the original group of each packed group; None: the same."""
    bias_N: torch.Tensor | None
    n: int
    """Outputs before padding."""
    k: int
    """Inputs before padding."""
    group_size: int
    """Of the original weight; k for whole-channel."""
    packed_group: int
    """Slots that share a scale; the padded K for whole-channel."""
    num_groups: int
    """R of the original weight."""

    @property
    def k_padded(self) -> int:
        """Slots along K."""
        return self.word_TCrli.shape[1] * COLS

    @property
    def n_padded(self) -> int:
        """Outputs with padding."""
        return self.word_TCrli.shape[0] * ROWS

    @property
    def symmetric(self) -> bool:
        """No stored zero points."""
        return self.zero_TRgj is None

    @property
    def per_channel(self) -> bool:
        """One scale for the whole of K."""
        return self.packed_group == self.k_padded

    def to(self, device: torch.device | str) -> PackedW4:
        """The same weight on another device."""
        moved = {
            f.name: value.to(device)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **moved)


def pack(weight: QuantizedWeight) -> PackedW4:
    """Bring a quantized weight into the packed layout, on the weight's device.

    Shapes: code_NK uint8 [N, K], any N and K; groups of a multiple of 32 inputs, or whole-channel.
    Numerics: bit-exact; `unpack` inverts it.
    Raises: NotImplementedError for other than 4 bits or such a group size.
    """
    if weight.bits != 4:
        raise unsupported("w4a16", "bits", "be 4", weight.bits, "use the ref implementation")
    N, K = weight.shape_nk
    group = weight.group_size
    if group != K and group % 32:
        raise unsupported(
            "w4a16", "group_size", "be a multiple of 32 or K", group, "use the ref implementation"
        )
    if N == 0 or K == 0:
        raise bad_value("w4a16", "weight", "have outputs and inputs", f"[{N}, {K}]", "drop it")
    slots = _slots(weight)
    R = slots.num_packed_groups
    code = _gather_columns(weight.code_NK, slots.source, slots.k_padded)
    scale = _gather_groups(weight.scale_NR, slots.group_of_R, R)
    zero = None if weight.zero_NR is None else _gather_groups(weight.zero_NR, slots.group_of_R, R)
    pad_n = -N % ROWS
    return PackedW4(
        word_TCrli=_pack_codes(torch.nn.functional.pad(code, (0, 0, 0, pad_n))),
        scale_TRgj=_order_rows(torch.nn.functional.pad(scale, (0, 0, 0, pad_n))),
        zero_TRgj=None
        if zero is None
        else _order_rows(torch.nn.functional.pad(zero, (0, 0, 0, pad_n))),
        source_K=slots.source,
        group_of_R=slots.group_of_R,
        bias_N=weight.bias_N,
        n=N,
        k=K,
        group_size=group,
        packed_group=slots.packed_group,
        num_groups=weight.scale_NR.shape[1],
    )


def unpack(packed: PackedW4) -> QuantizedWeight:
    """The quantized weight that `pack` was given, bit for bit."""
    slot_code = _unpack_codes(packed.word_TCrli)[: packed.n]
    slot_scale = _restore_rows(packed.scale_TRgj)[: packed.n]
    slot_zero = None if packed.zero_TRgj is None else _restore_rows(packed.zero_TRgj)[: packed.n]
    group_of_K = None
    code = _codes_in_order(slot_code, packed)
    if packed.source_K is not None:
        used = packed.source_K >= 0
        source = packed.source_K[used].long()
        assert packed.group_of_R is not None
        slot_group = packed.group_of_R.repeat_interleave(packed.packed_group)[: used.numel()]
        group_of_K = torch.empty(packed.k, dtype=torch.int32, device=code.device)
        group_of_K[source] = slot_group[used]
    return QuantizedWeight(
        code_NK=code,
        scale_NR=_scatter_groups(slot_scale, packed.group_of_R, packed.num_groups),
        zero_NR=None
        if slot_zero is None
        else _scatter_groups(slot_zero, packed.group_of_R, packed.num_groups),
        bits=4,
        group_size=packed.group_size,
        group_of_K=group_of_K,
        bias_N=packed.bias_N,
    )


def interleave(weight: QuantizedWeight) -> QuantizedWeight:
    """Rows of a fused gate-up pair as the Hopper kernels' silu_mul epilogue wants them: 8 gates,
    then their 8 ups.

    Each half is padded to a multiple of 8 rows with scale 0. The bias is left out: it is given to
    `forward` in the original order.
    """
    half = weight.shape_nk[0] // 2
    rows = torch.arange(half, device=weight.code_NK.device)
    rows = torch.nn.functional.pad(rows, (0, -half % 8), value=-1).view(-1, 1, 8)
    order = torch.cat((rows, torch.where(rows >= 0, rows + half, -1)), 1).flatten()

    def pick(table: torch.Tensor) -> torch.Tensor:
        found = table[order.clamp_min(0)]
        return torch.where((order >= 0)[:, None], found, found.new_zeros(()))

    return replace(
        weight,
        code_NK=pick(weight.code_NK),
        scale_NR=pick(weight.scale_NR),
        zero_NR=None if weight.zero_NR is None else pick(weight.zero_NR),
        bias_N=None,
    )


def to_tensors(packed: PackedW4) -> tuple[torch.Tensor, ...]:
    """The weight as a tuple of tensors of one device: words, scales, zeros, sources, group mark.

    What is absent is an empty tensor; the mark is an empty tensor whose width is the packed group.
    """
    device = packed.word_TCrli.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    mark = torch.empty(0, packed.packed_group, dtype=torch.uint8, device=device)
    zero = none if packed.zero_TRgj is None else packed.zero_TRgj
    source = none if packed.source_K is None else packed.source_K
    return packed.word_TCrli, packed.scale_TRgj, zero, source, mark


def from_tensors(tensors: Sequence[torch.Tensor], *, n: int, k: int) -> PackedW4:
    """What `to_tensors` was given, as far as kernels need it (not what only `unpack` needs)."""
    word, scale, zero, source, mark = tensors[:5]
    packed_group = mark.shape[1]
    return PackedW4(
        word_TCrli=word,
        scale_TRgj=scale,
        zero_TRgj=zero if zero.numel() else None,
        source_K=source if source.numel() else None,
        group_of_R=None,
        bias_N=None,
        n=n,
        k=k,
        group_size=packed_group,
        packed_group=packed_group,
        num_groups=scale.shape[1],
    )


def restore_codes(tensors: Sequence[torch.Tensor], *, n: int, k: int) -> torch.Tensor:
    """code_NK uint8 [N, K] of the weight that was packed (without interleaved rows)."""
    packed = from_tensors(tensors, n=n, k=k)
    return _codes_in_order(_unpack_codes(packed.word_TCrli)[:n], packed)


def _codes_in_order(slot_code: torch.Tensor, packed: PackedW4) -> torch.Tensor:
    """Codes by slot to codes by input."""
    if packed.source_K is None:
        return slot_code[:, : packed.k].contiguous()
    used = packed.source_K >= 0
    code = torch.empty(packed.n, packed.k, dtype=torch.uint8, device=slot_code.device)
    code[:, packed.source_K[used].long()] = slot_code[:, used]
    return code


def gather_inputs(act_MK: torch.Tensor, packed: PackedW4) -> torch.Tensor:
    """Activations in slot order: [M, K padded] for act-order, else the input itself."""
    if packed.source_K is None:
        return act_MK
    if packed.k_padded == packed.k:
        return act_MK.index_select(1, packed.source_K)
    padded = torch.nn.functional.pad(act_MK, (0, 1))
    return padded.index_select(1, packed.source_K.long() % padded.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    source: torch.Tensor | None
    group_of_R: torch.Tensor | None
    k_padded: int
    packed_group: int
    num_packed_groups: int


def _slots(weight: QuantizedWeight) -> _Slots:
    """Which input sits in which slot, and the groups along them."""
    _, K = weight.shape_nk
    group, R = weight.group_size, weight.scale_NR.shape[1]
    if weight.group_of_K is None:
        whole = group == K
        k_padded = K + -K % (K_ALIGN if whole else math.lcm(K_ALIGN, group))
        return _Slots(
            source=None,
            group_of_R=None,
            k_padded=k_padded,
            packed_group=k_padded if whole else group,
            num_packed_groups=1 if whole else k_padded // group,
        )
    counts = torch.bincount(weight.groups_K(), minlength=R).tolist()
    best = min(_group_choices(group, K), key=lambda size: _moved_bytes(counts, size))
    order = torch.argsort(weight.groups_K(), stable=True).to(torch.int32)
    source, owners, start = [], [], 0
    for index, count in enumerate(counts):
        run = order[start : start + count]
        start += count
        source.append(torch.nn.functional.pad(run, (0, -count % best), value=-1))
        owners += [index] * (-(-count // best))
    filled = sum(len(s) for s in source)
    source.append(order.new_full((-filled % math.lcm(K_ALIGN, best),), -1))
    slots = torch.cat(source)
    owners += [0] * (slots.numel() // best - len(owners))
    owners += [index for index, count in enumerate(counts) if count == 0]
    return _Slots(
        source=slots,
        group_of_R=torch.tensor(owners, dtype=torch.int32, device=slots.device),
        k_padded=slots.numel(),
        packed_group=best,
        num_packed_groups=len(owners),
    )


def _group_choices(group: int, K: int) -> list[int]:
    if group == K:
        return [size for size in (128, 64, 32) if size <= max(K, 32)]
    return [size for size in {group, 128, 64, 32} if size <= group and group % size == 0]


def _moved_bytes(counts: list[int], size: int) -> float:
    """Bytes an output row costs with packed groups of `size`: codes and 2-byte scales."""
    groups = sum(-(-count // size) for count in counts)
    return groups * (size / 2 + 2)


def _gather_columns(code_NK: torch.Tensor, source: torch.Tensor | None, k: int) -> torch.Tensor:
    if source is None:
        return torch.nn.functional.pad(code_NK, (0, k - code_NK.shape[1]))
    gathered = code_NK[:, source.long().clamp_min(0)]
    return torch.where(source >= 0, gathered, gathered.new_zeros(()))


def _gather_groups(value_NR: torch.Tensor, owners: torch.Tensor | None, R: int) -> torch.Tensor:
    if owners is not None:
        return value_NR[:, owners.long()]
    return torch.nn.functional.pad(value_NR, (0, R - value_NR.shape[1]))


def _scatter_groups(value_NR: torch.Tensor, owners: torch.Tensor | None, R: int) -> torch.Tensor:
    if owners is None:
        return value_NR[:, :R].contiguous()
    out = torch.empty(value_NR.shape[0], R, dtype=value_NR.dtype, device=value_NR.device)
    out[:, owners.long()] = value_NR
    return out


def _pack_codes(code_NK: torch.Tensor) -> torch.Tensor:
    """uint8 [N, K] (padded) -> int32 [N/32, K/64, 2, 32, 4]."""
    N, K = code_NK.shape
    #             T   rt  hr  g   C   i  hk  t  e
    shape = (N // 32, 2, 2, 8, K // 64, 4, 2, 4, 2)
    x = code_NK.view(shape).permute(0, 4, 1, 3, 7, 5, 8, 6, 2)
    # now T C rt g t i | e hk hr: nibble 4 e + 2 hk + hr, two nibbles a byte, low byte first
    nibbles = x.reshape(N // 32, K // 64, 2, 32, 4, 4, 2)
    byte = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return byte.contiguous().view(torch.int32).squeeze(-1)


def _unpack_codes(word_TCrli: torch.Tensor) -> torch.Tensor:
    """The inverse of `_pack_codes`."""
    T, C = word_TCrli.shape[:2]
    byte = word_TCrli.contiguous().view(torch.uint8).view(T, C, 2, 32, 4, 4)
    nibbles = torch.stack((byte & 15, byte >> 4), -1)
    x = nibbles.view(T, C, 2, 8, 4, 4, 2, 2, 2).permute(0, 2, 8, 3, 1, 5, 7, 4, 6)
    return x.reshape(T * 32, C * 64)


def _order_rows(value_NR: torch.Tensor) -> torch.Tensor:
    """[N, R] -> [N/32, R, 8, 4]: a lane's rows g, g + 8, g + 16, g + 24 side by side."""
    N, R = value_NR.shape
    return value_NR.view(N // 32, 4, 8, R).permute(0, 3, 2, 1).contiguous()


def _restore_rows(value_TRgj: torch.Tensor) -> torch.Tensor:
    """The inverse of `_order_rows`."""
    T, R = value_TRgj.shape[:2]
    return value_TRgj.permute(0, 3, 2, 1).reshape(T * 32, R)
