"""Transformers' loading of GPTQ folders, with our linears in the place of its own.

Transformers chooses a config class and a quantizer by quantization_config.quant_method and lets
nobody register "gptq" twice; take_over() replaces the two entries. A folder is then read by what
its config says (formats/gptq_config.py) and which layers its files hold, and runs on kernels/w4a16.
Neither optimum nor gptqmodel is needed.
"""

from __future__ import annotations

from typing import Any

from safetensors import safe_open

from ridgeline.core.errors import UserError, unsupported
from ridgeline.formats.gptq_config import read_config
from ridgeline.quant.checkpoint import packed_layers
from ridgeline.quant.linear import empty_linears, prepare_linears

METHOD = "gptq"


def take_over(auto: Any, base: Any, configs: Any) -> None:
    """Put our classes in Transformers' two tables.

    auto, base, configs: transformers.quantizers.auto, .quantizers.base, .utils.quantization_config.
    """

    class RidgelineGPTQConfig(configs.QuantizationConfigMixin):
        """quantization_config of a GPTQ folder, kept as it is written there."""

        def __init__(self, **entry: Any) -> None:
            self.quant_method = METHOD
            self.entry = {**entry, "quant_method": METHOD}
            read_config(self.entry)  # what cannot be read is refused here

        def to_dict(self) -> dict[str, Any]:
            return dict(self.entry)

    class RidgelineGPTQQuantizer(base.HfQuantizer):
        """Loads GPTQ tensors into our quantized linears."""

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            if not self.pre_quantized:
                raise unsupported(
                    "gptq", "quantization_config", "belong to a quantized folder", "a plain one",
                    "quantize it with ridgeline quantize",
                )  # fmt: skip

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            names = _tensor_names(kwargs.get("checkpoint_files"))
            layout_of = read_config(self.quantization_config.entry).layout_of
            empty_linears(model, packed_layers(names), layout_of, dtype=model.dtype)

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            prepare_linears(model)
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = RidgelineGPTQConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = RidgelineGPTQQuantizer


def _tensor_names(files: list[str] | None) -> list[str]:
    if not files or not all(str(file).endswith(".safetensors") for file in files):
        raise UserError("gptq: the folder must hold safetensors; pickled weights are not read")
    names: list[str] = []
    for file in files:
        with safe_open(file, framework="pt") as handle:
            names.extend(handle.keys())
    return names
