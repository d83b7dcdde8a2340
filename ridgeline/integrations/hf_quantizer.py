"""Transformers' loading of quantized folders, with our linears in the place of its own.

Transformers chooses a config class and a quantizer by quantization_config.quant_method and lets
nobody register a method twice; take_over() replaces the entries of gptq, awq and
compressed-tensors. A folder is then read by what its config says (formats/registry.py) and which
layers its files hold, and runs on kernels/w4a16. None of optimum, gptqmodel, autoawq or
compressed-tensors is needed. Of a config only names, numbers and bounded patterns are used: no code
named in it is imported, and no tensor is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from safetensors import safe_open

from ridgeline.core.errors import UserError, unsupported
from ridgeline.formats.registry import READERS
from ridgeline.quant.checkpoint import packed_layers
from ridgeline.quant.linear import empty_linears, prepare_linears

METHODS = tuple(READERS)
"""What can be taken over: gptq, awq, compressed-tensors."""


def take_over(auto: Any, base: Any, configs: Any, methods: Sequence[str]) -> None:
    """Put our classes in Transformers' two tables, for some of METHODS.

    auto, base, configs: transformers.quantizers.auto, .quantizers.base, .utils.quantization_config.
    """
    for method in methods:
        config, quantizer = _classes(method, base, configs)
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
        auto.AUTO_QUANTIZER_MAPPING[method] = quantizer


def _classes(method: str, base: Any, configs: Any) -> tuple[type, type]:
    """A config class and a quantizer of one method."""

    class RidgelineConfig(configs.QuantizationConfigMixin):
        """quantization_config of a quantized folder, kept as it is written there."""

        def __init__(self, **entry: Any) -> None:
            self.quant_method = method
            self.entry = {**entry, "quant_method": method}
            READERS[method](self.entry, "quantization_config")  # what cannot be read ends here

        def to_dict(self) -> dict[str, Any]:
            return dict(self.entry)

    class RidgelineQuantizer(base.HfQuantizer):
        """Loads packed tensors into our quantized linears."""

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            if not self.pre_quantized:
                raise unsupported(
                    method, "quantization_config", "belong to a quantized folder", "a plain one",
                    "quantize it with ridgeline quantize",
                )  # fmt: skip

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            names, shape_of = _stored(method, kwargs.get("checkpoint_files"))
            stated = READERS[method](self.quantization_config.entry, "quantization_config")
            empty_linears(
                model,
                packed_layers(names),
                stated.layout_of,
                dtype=model.dtype,
                stored_shape=shape_of,
            )

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            prepare_linears(model)
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

    return RidgelineConfig, RidgelineQuantizer


def _stored(method: str, files: list[str] | None) -> tuple[list[str], Callable[[str], list[int]]]:
    """Names of the tensors in a folder's files, and the shape of one by its name."""
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise UserError(f"{method}: the folder must hold safetensors; pickled weights are not read")
    shapes: dict[str, list[int]] = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118
                shapes[name] = handle.get_slice(name).get_shape()
    return list(shapes), shapes.__getitem__
