"""`ridgeline quantize`: a Hugging Face folder in, a folder in 4 bits out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ridgeline.cli.command import Command, Result
from ridgeline.cli.overwrite import check_out
from ridgeline.cli.tables import bytes_text, table
from ridgeline.core.errors import bad_value
from ridgeline.core.text import read_text
from ridgeline.engine.load import Device, choose_device
from ridgeline.formats.convert import SourceFacts, target_layout
from ridgeline.formats.gptq import GPTQFormat
from ridgeline.nn.decoder import Decoder
from ridgeline.nn.hf import (
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    load_hf_config,
    load_pretrained,
    state_tensors,
)
from ridgeline.nn.overwrite import QUANTIZE_REPORT
from ridgeline.nn.tensorfile import TensorFolder
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.calibrate import quantize_model
from ridgeline.quant.checkpoint import Extras, save_quantized
from ridgeline.quant.gptq import GPTQOptions
from ridgeline.quant.recipe import Override, Recipe, calibration_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig:
    """Quantize a Hugging Face folder to 4 bits with GPTQ."""

    model: Path
    """A Hugging Face folder with plain weights."""
    out: Path
    """The folder to write; it appears whole or not at all."""
    text: Path | None = None
    """A UTF-8 text file to calibrate on; needed by gptq."""
    method: Literal["gptq", "rtn"] = "gptq"
    """gptq, or rtn: round to nearest, no calibration."""
    bits: Literal[2, 3, 4, 8] = 4
    """Of a weight."""
    format: Literal["gptq", "awq", "compressed-tensors"] = "gptq"
    """What to write it as; awq has 4 bits and no act-order by activation."""
    group_size: int = 128
    """Inputs that share a scale; must divide what the kernels need (64 for widths like 576)."""
    symmetric: bool = True
    """No zero points."""
    act_order: Literal["static", "natural", "activation"] = "static"
    """Columns by descending activation with groups as stored (static, free at run time), as they
    are stored (natural), or with groups along that order (activation: a g_idx table)."""
    damp: float = 0.02
    """Added to the Hessian's diagonal as a fraction of its mean, in (0, 1]."""
    sequences: int = 32
    """Calibration sequences, at least 1."""
    sequence_tokens: int = 512
    """Tokens of a calibration sequence, from 2 to the model's context."""
    seed: int = 0
    """Of the choice of calibration sequences."""
    skip: tuple[str, ...] = ()
    """Regular expressions; linears whose full name matches one stay as they are."""
    overwrite: bool = False
    """Replace `out` where it is a model folder with nothing else in it."""
    device: Device = "auto"
    """auto: the GPU where there is one."""

    def __post_init__(self) -> None:
        recipe_of(self)
        if self.method == "gptq" and self.text is None:
            raise bad_value("quantize", "text", "be given for gptq", "none", "name a text file")


def recipe_of(config: QuantizeConfig) -> Recipe:
    """What the flags say, for quant. Raises: ValueError for values out of range."""
    by_activation = config.method == "gptq" and config.act_order == "activation"
    facts = SourceFacts(symmetric=config.symmetric, desc_act=by_activation)
    layout = target_layout(
        GPTQFormat(bits=config.bits, group_size=config.group_size), config.format, facts
    )
    if by_activation and not layout.desc_act:
        raise bad_value(
            "quantize",
            "act_order",
            f"be static or natural in {config.format}",
            "activation",
            "use static, or another format",
        )
    return Recipe(
        method=config.method,
        layout=layout,
        gptq=GPTQOptions(order=config.act_order, damping=config.damp),
        overrides=tuple(Override(pattern=pattern, skip=True) for pattern in config.skip),
    )


def quantize(config: QuantizeConfig) -> Result:
    """Quantize every linear of every block and write the folder, all or nothing.

    Raises: UserError for a model or text that cannot be used, text too short, an `out` that exists,
    a disk that refuses; ValueError for widths that the group size does not fit.
    """
    check_out("quantize", config.out, config.model, overwrite=config.overwrite)
    recipe = recipe_of(config)
    raw = load_hf_config(config.model)
    token_ids = _calibration(config)
    device = choose_device(config.device)
    model = load_pretrained(config.model, dtype=torch.float32, device=device)
    model.eval().requires_grad_(False)
    _check_layers(model, recipe)
    done = quantize_model(model, None if token_ids is None else token_ids.to(device), recipe)
    summary = done.summary() | {"config": _plain(config)}
    size = save_quantized(
        config.out,
        raw,
        _stored(model, config.model),
        done.weights,
        recipe,
        extras=Extras(
            files=tuple(_companions(config.model)),
            texts=((QUANTIZE_REPORT, json.dumps(summary, indent=1)),),
        ),
        overwrite=config.overwrite,
    )
    return {
        "model": str(config.model),
        "out": str(config.out),
        "method": config.method,
        "format": config.format,
        "bits": config.bits,
        "group_size": config.group_size,
        "symmetric": config.symmetric,
        "act_order": config.act_order,
        "layers": len(done.reports),
        "skipped": done.skipped,
        "calibration_tokens": done.calibration_tokens,
        "quantize_seconds": done.seconds,
        "bytes": size.total_bytes,
        "bytes_16bit": size.unquantized_bytes,
        "worst": [asdict(report) for report in done.worst()],
    }


def _calibration(config: QuantizeConfig) -> torch.Tensor | None:
    if config.method != "gptq":
        return None
    assert config.text is not None
    text = read_text(config.text)
    return calibration_blocks(
        torch.tensor(Tokenizer(config.model).encode(text)),
        sequences=config.sequences,
        length=config.sequence_tokens,
        seed=config.seed,
    )


def _check_layers(model: Decoder, recipe: Recipe) -> None:
    """Refuse widths that cannot be packed before minutes of work."""
    for index in range(len(model.blocks)):
        for name in (name for group in model.linear_groups() for name in group):
            layout = recipe.layout_of(f"{model.block_prefix(index)}.{name}")
            weight = model.blocks[index].get_parameter(f"{name}.weight")
            n, k = weight.shape
            if layout is None:
                continue
            layout.tensor_specs(n, k)
            if layout.group_size is not None and k % layout.group_size:
                raise bad_value(
                    "quantize",
                    "group_size",
                    f"divide the {k} inputs of {name}",
                    layout.group_size,
                    "choose a divisor, for example 64, or skip the layer",
                )


def _stored(model: Decoder, folder: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in the dtype of the source's files (what is plain stays bit for bit)."""
    source = TensorFolder(folder)
    tensors = {}
    for name, tensor in state_tensors(model).items():
        tensors[name] = tensor.to(source.get(name).dtype) if name in source else tensor
    return tensors


def _companions(folder: Path) -> list[Path]:
    names = (*TOKENIZER_FILES, GENERATION_CONFIG)
    return [folder / name for name in names if (folder / name).is_file()]


def _plain(config: QuantizeConfig) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}


def show(result: Result) -> str:
    """Sizes and the worst layers."""
    rows = [
        (worst["name"], f"{worst['relative_error']:.4f}")
        for worst in result["worst"]
        if worst["relative_error"] is not None
    ]
    lines = [
        f"{result['out']}: {result['layers']} layers in {result['bits']} bits, group "
        f"{result['group_size']}, {bytes_text(result['bytes'])} (16-bit: "
        f"{bytes_text(result['bytes_16bit'])}), {result['quantize_seconds']:.0f} s"
    ]
    if rows:
        lines += ["", table(("worst layers", "relative output error"), rows)]
    return "\n".join(lines)


def kept(config: QuantizeConfig) -> str:
    """After Ctrl-C."""
    return f"{config.out} is as it was before"


COMMAND = Command(run=quantize, config=QuantizeConfig, show=show, kept=kept)
