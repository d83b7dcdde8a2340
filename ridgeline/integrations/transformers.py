"""Hugging Face Transformers: attention for its models by name.

enable() registers two names:
- "ridgeline": our attention function and our mask function under one name. Training (padded or
  packed rows), generate() with any cache.
- "ridgeline_flash": our kernel package behind Transformers' own FlashAttention wrapper, which is
  what its continuous batching asks for: it takes no name without "flash" in it. Transformers loads
  such packages by name in one function; enable() puts ours in front of it.
- "ridgeline_flash2": the same. Its continuous batching reads a decode step's keys in their pages,
  not copied together first, where a 2 or 3 follows "flash" in the name.
Nothing is read from a checkpoint: an implementation is what the caller names.
Source: https://huggingface.co/docs/transformers/attention_interface (the two registries).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any

from ridgeline.core.errors import UserError, bad_value
from ridgeline.integrations import kernel_package
from ridgeline.integrations.hf_attention import ridgeline_attention
from ridgeline.integrations.hf_masks import make_mask_function
from ridgeline.integrations.hf_quantizer import METHODS, take_over

NAME = "ridgeline"
PACKAGE_NAME = "ridgeline_flash"
PAGES_NAME = "ridgeline_flash2"
PACKAGE_NAMES = (PACKAGE_NAME, PAGES_NAME)
PAGED_NAMES = tuple(f"paged|{name}" for name in PACKAGE_NAMES)
"""What continuous batching renames them to in the older of the versions taken."""
LOWEST, BELOW = (5, 17), (6, 0)


def enable() -> None:
    """Make attn_implementation="ridgeline" and "ridgeline_flash" (2) known to Transformers.

    Calling it again changes nothing. Raises: UserError where Transformers is missing or its version
    is not one that this was written for.
    """
    _check_version()
    masking = importlib.import_module("transformers.masking_utils")
    modeling = importlib.import_module("transformers.modeling_utils")
    if NAME in modeling.ALL_ATTENTION_FUNCTIONS:
        return
    modeling.AttentionInterface.register(NAME, ridgeline_attention)
    masking.AttentionMaskInterface.register(NAME, make_mask_function(masking))
    flash = importlib.import_module("transformers.integrations.flash_attention")
    for name in PACKAGE_NAMES:
        modeling.AttentionInterface.register(name, flash.flash_attention_forward)
        masking.AttentionMaskInterface.register(name, masking.flash_attention_mask)
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")
    if hasattr(utils, "lazy_import_paged_flash_attention"):
        paged = importlib.import_module("transformers.integrations.flash_paged")
        for name in PAGED_NAMES:
            modeling.AttentionInterface.register(name, paged.paged_attention_forward)
    _put_in_front(utils)
    _let_models_take_it(modeling.PreTrainedModel, utils)


def enable_quantized(methods: Sequence[str] = METHODS) -> None:
    """Make from_pretrained run quantized folders on our kernels, in the place of its own loaders.

    methods: which of gptq, awq and compressed-tensors. This replaces Transformers' entries for
    these in this process, openly and only here. Calling it again changes nothing.
    Raises: ValueError for another method; UserError as enable().
    """
    for method in methods:
        if method not in METHODS:
            raise bad_value(
                "transformers",
                "methods",
                f"be among {', '.join(METHODS)}",
                repr(method),
                "leave the others to Transformers",
            )
    _check_version()
    take_over(
        importlib.import_module("transformers.quantizers.auto"),
        importlib.import_module("transformers.quantizers.base"),
        importlib.import_module("transformers.utils.quantization_config"),
        methods,
    )


def enable_gptq() -> None:
    """enable_quantized(["gptq"])."""
    enable_quantized(["gptq"])


def _check_version() -> None:
    wanted = f"transformers >={LOWEST[0]}.{LOWEST[1]},<{BELOW[0]}"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"{wanted} is not installed; pip install 'ridgeline[transformers]'"
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not LOWEST <= found < BELOW:
        raise UserError(f"transformers {version} is installed, {wanted} is needed; change it")


def _put_in_front(flash_utils: Any) -> None:
    """Let Transformers' loader of FlashAttention packages answer our names with ours."""
    loader = flash_utils._lazy_imports

    @functools.wraps(loader)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation not in PACKAGE_NAMES + PAGED_NAMES:
            return loader(implementation, *args, **kwargs)
        return (
            kernel_package.flash_attn_func,
            kernel_package.flash_attn_varlen_func,
            kernel_package.flash_attn_with_kvcache,
            flash_utils._pad_input,
            flash_utils._unpad_input,
        )

    flash_utils._lazy_imports = lazy_imports


def _let_models_take_it(model_class: Any, flash_utils: Any) -> None:
    """Let models that list the packages they know (gpt-oss does) take ours beside them."""
    check = model_class._check_and_adjust_attn_implementation

    @functools.wraps(check)
    def check_and_adjust(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any):
        ours = attn_implementation in PACKAGE_NAMES + PAGED_NAMES
        if not ours or not self._supports_flash_attn:
            return check(self, attn_implementation, *args, **kwargs)
        flash_utils.lazy_import_flash_attention(attn_implementation)
        return attn_implementation

    model_class._check_and_adjust_attn_implementation = check_and_adjust
