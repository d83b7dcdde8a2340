"""What Transformers says about a mask, as tensors that our attention function reads back.

Transformers builds one mask a forward pass from a mask function (causal, window, packed rows, and
their combinations) and a padding mask [B, T], and hands it unchanged to every layer. Nothing S x T
is made where a few integers say the same:
- None: causal (or full) attention of all keys, nothing else;
- spans, int32 [B, 1, W, 2]: sequence b has keys first..end-1, the last S of them are the queries';
- packed rows, int32 [1, 2, W, N + 1]: starts of N sequences in the B * S tokens of the batch;
- window only, int32 [B, 0, W, 2]: no element, the window is in the shape.
W is the sliding window + 1 (1: none), a dimension of stride 0. Being 4-D, they pass through the
code of Transformers that takes an early-made mask as it is; int32 tells them from bool and float
masks. Anything else becomes the bool mask [B, 1, S, T] of Transformers, and then a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch

from ridgeline.core.errors import unsupported

MaskFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A mask function that is understood: the intersection of these."""

    causal: bool = False
    window: int | None = None
    """Keys a query sees, itself included; None is unbounded."""
    packed_BS: torch.Tensor | None = None
    """A number a token, equal inside a sequence and different between neighbours."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A coded mask read back."""

    window: int | None
    spans_B2: torch.Tensor | None = None
    """int32 [B, 2]: first key, end of keys."""
    starts_N: torch.Tensor | None = None
    """int32 [N + 1], starts of packed sequences."""
    longest: int | None = None
    """The longest packed sequence."""


class MaskReader:
    """Recognises the mask functions of the installed Transformers by their code objects."""

    def __init__(self, masking_utils: Any) -> None:
        m, some = masking_utils, torch.zeros(1, 1, dtype=torch.int64)
        self.causal: MaskFunction = m.causal_mask_function
        self.full: MaskFunction = m.bidirectional_mask_function
        self.both: CodeType = m.and_masks(m.causal_mask_function).__code__
        self.window: CodeType = m.sliding_window_overlay(1).__code__
        self.packed: CodeType = m.packed_sequence_mask_function(some).__code__
        remap = getattr(m, "remap_positions_for_packed_sequence", None)
        self.remapped = None if remap is None else remap(self.causal, some).__code__

    def read(self, function: MaskFunction) -> Pattern | None:
        """The pattern of a mask function, or None where it is not one that is known."""
        if function is self.causal:
            return Pattern(causal=True)
        if function is self.full:
            return Pattern()
        if torch.compiler.is_compiling():  # functions made while tracing have no cells to look into
            return None
        code = getattr(function, "__code__", None)
        if code is None or function.__closure__ is None:
            return None
        names = dict(zip(code.co_freevars, function.__closure__, strict=True))
        if code is self.window:
            return Pattern(window=names["sliding_window"].cell_contents)
        if code is self.packed:
            return Pattern(packed_BS=names["packed_sequence_mask"].cell_contents)
        if code is self.remapped:  # positions count within a sequence: the same mask there
            return self.read(names["mask_function"].cell_contents)
        if code is self.both:
            return _intersection([self.read(f) for f in names["mask_functions"].cell_contents])
        return None


def _intersection(patterns: list[Pattern | None]) -> Pattern | None:
    whole = Pattern()
    for one in patterns:
        if one is None:
            return None
        if whole.packed_BS is not None and one.packed_BS is not None:
            return None
        windows = [w for w in (whole.window, one.window) if w is not None]
        packed = one.packed_BS if whole.packed_BS is None else whole.packed_BS
        whole = Pattern(whole.causal or one.causal, min(windows, default=None), packed)
    return whole


def make_mask_function(masking_utils: Any) -> Callable[..., torch.Tensor | None]:
    """The mask function to register: coded where possible, else Transformers' own bool mask."""
    reader = MaskReader(masking_utils)

    def ridgeline_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | torch.Tensor = 0,
        kv_offset: int | torch.Tensor = 0,
        mask_function: MaskFunction = reader.causal,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        pattern = reader.read(mask_function)
        size = (batch_size, q_length, kv_length)
        known, coded = False, None
        if pattern is not None:
            device = torch.device(kwargs.get("device", "cpu"))
            known, coded = _coded(pattern, size, (q_offset, kv_offset), attention_mask, device)
        if known:
            return coded
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        return masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )

    return ridgeline_mask


def _coded(
    pattern: Pattern,
    size: tuple[int, int, int],
    offsets: tuple[int | torch.Tensor, int | torch.Tensor],
    padding_BT: torch.Tensor | None,
    device: torch.device,
) -> tuple[bool, torch.Tensor | None]:
    """(whether the mask has a code, the code or None)."""
    batch, S, T = size
    q_offset, kv_offset = offsets
    window = pattern.window if pattern.window is not None and pattern.window < T else None
    if not pattern.causal:
        plain = padding_BT is None and window is None and pattern.packed_BS is None
        return plain, None
    if pattern.packed_BS is not None:
        if padding_BT is not None or S != T or torch.compiler.is_compiling():
            return False, None
        return True, _packed(pattern.packed_BS, batch, window)
    end = q_offset + S - kv_offset
    first_B = None
    if padding_BT is not None:
        if torch.compiler.is_compiling():
            return False, None
        known, first_B = _first_keys(padding_BT, kv_offset)
        if not known:
            return False, None
        first_B = None if first_B is None else first_B.clamp_max(T)
    if isinstance(end, int) and end == T and first_B is None:
        if window is None:
            return True, None
        return True, torch.empty(batch, 0, window + 1, 2, dtype=torch.int32, device=device)
    spans_B2 = torch.zeros(batch, 2, dtype=torch.int32, device=device)
    if first_B is not None:
        spans_B2[:, 0] = first_B
    spans_B2[:, 1] = end
    return True, _with_window(spans_B2[:, None, None, :], window)


def _with_window(code: torch.Tensor, window: int | None) -> torch.Tensor:
    return code if window is None else code.expand(-1, -1, window + 1, -1)


def _first_keys(
    padding_BT: torch.Tensor, kv_offset: int | torch.Tensor
) -> tuple[bool, torch.Tensor | None]:
    """(whether each row is zeros, ones, zeros; keys before the first one, or None where none).

    Zeros after the ones are right padding: a causal query that is not padding never sees them.
    """
    present = padding_BT != 0
    rises = (present[:, 1:] & ~present[:, :-1]).sum(1) + present[:, 0]
    index = torch.arange(present.shape[1], device=present.device)
    first_B = torch.where(present, index, present.shape[1]).amin(1)
    one_run, some_first = torch.stack(((rises <= 1).all(), (first_B > 0).any())).tolist()
    if not one_run:
        return False, None
    return True, (first_B - kv_offset).clamp_min(0) if some_first else None


def starts_of(segment_BS: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Starts of sequences in the flattened tokens, and the longest length, from segment numbers.

    Shapes: [B, S] -> int32 [N + 1]. Reads the longest on the host: a sync on a GPU.
    """
    starting = torch.ones_like(segment_BS, dtype=torch.bool)
    starting[:, 1:] = segment_BS[:, 1:] != segment_BS[:, :-1]
    starts = starting.flatten().nonzero().flatten()
    starts_N = torch.nn.functional.pad(starts, (0, 1), value=segment_BS.numel()).to(torch.int32)
    return starts_N, int(starts_N.diff().max())


def _packed(segment_BS: torch.Tensor, batch: int, window: int | None) -> torch.Tensor:
    starts_N, longest = starts_of(segment_BS.expand(batch, -1))
    code_2N = torch.stack((starts_N, torch.full_like(starts_N, longest)))
    code = _with_window(code_2N[None, :, None, :], window)
    code.ridgeline_longest = longest  # type: ignore[attr-defined]  # saves a sync a layer
    return code


def is_coded(mask: torch.Tensor) -> bool:
    """Whether a mask is one of ours."""
    return mask.dim() == 4 and mask.dtype == torch.int32


def is_window_only(mask: torch.Tensor) -> bool:
    """Whether a mask is the code of a window alone."""
    return is_coded(mask) and mask.shape[1] == 0


def decode(mask: torch.Tensor) -> Decoded:
    """Read a coded mask back. Raises: NotImplementedError for another int32 mask."""
    kind, width, last = mask.shape[1], mask.shape[2], mask.shape[3]
    window = width - 1 if width > 1 else None
    if kind == 0 and last == 2:
        return Decoded(window)
    if kind == 1 and last == 2:
        return Decoded(window, spans_B2=mask[:, 0, 0])
    if kind == 2 and mask.shape[0] == 1:
        longest = getattr(mask, "ridgeline_longest", None)
        if longest is None:  # a copy of the mask, moved to another device
            longest = int(mask[0, 1, 0, 0])
        return Decoded(window, starts_N=mask[0, 0, 0], longest=longest)
    raise unsupported(
        "attention", "attention_mask", "be bool or float", "int32", "convert it with mask.bool()"
    )
