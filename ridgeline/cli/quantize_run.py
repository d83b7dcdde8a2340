"""The work behind `ridgeline quantize`: open, predict, run with a journal, assemble, compare the
prediction with what happened."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ridgeline
from ridgeline.cli.calibration import Request, Tokens, read_tokens
from ridgeline.cli.quantize_checks import journal_folder
from ridgeline.cli.tables import bytes_text
from ridgeline.core import env, progress
from ridgeline.core.dtypes import dtype_name, torch_dtype
from ridgeline.core.errors import UserError, common
from ridgeline.core.host_memory import give_back_freed_memory
from ridgeline.engine.load import choose_device, choose_dtype
from ridgeline.engine.stream import StreamedDecoder
from ridgeline.nn.hf import GENERATION_CONFIG, TOKENIZER_FILES, load_config, load_hf_config
from ridgeline.nn.tensorfile import TensorFolder
from ridgeline.nn.tokenizer import Tokenizer
from ridgeline.quant.assemble import assemble
from ridgeline.quant.block import HEAD, block_indices
from ridgeline.quant.calibrate import Around, quantize_model
from ridgeline.quant.checkpoint import CheckpointSize, Extras, config_of
from ridgeline.quant.evaluate import Evaluation
from ridgeline.quant.journal import Journal, finished_blocks
from ridgeline.quant.mixed import choose_widths, measure_widths, with_widths
from ridgeline.quant.predict import Prediction, Rates, RunShape, Stored, packed_bytes, predict
from ridgeline.quant.ranks import Ranks
from ridgeline.quant.recipe import Recipe
from ridgeline.quant.report import QuantizedModel

if TYPE_CHECKING:
    from ridgeline.cli.quantize import QuantizeConfig

Texts = Callable[[QuantizedModel, dict[str, Any]], tuple[tuple[str, str], ...]]
_HASHED_CHUNK, _HASHED_CHUNKS = 2**16, 64


@dataclass(slots=True, kw_only=True)
class Job:
    """One run, opened step by step."""

    config: QuantizeConfig
    recipe: Recipe
    model: StreamedDecoder = field(init=False)
    device: torch.device = field(init=False)
    ranks: Ranks = field(default_factory=Ranks)
    tokens: Tokens | None = None
    rates: Rates = field(init=False)
    prediction: Prediction = field(init=False)
    finished: int = 0
    """Blocks that an earlier run has finished, as the prediction knows."""

    @classmethod
    def of(cls, config: QuantizeConfig, recipe: Recipe) -> Job:
        return cls(config=config, recipe=recipe)

    def said(self) -> dict[str, Any]:
        """The prediction, for a result."""
        return {"predicted": asdict(self.prediction)}


def prepare(job: Job) -> Job:
    """Open the model and the text, and predict. Raises: UserError as `quantize`."""
    config = job.config
    try:
        load_config(config.model)  # refuses another architecture before a text is read
    except UserError as error:
        raise common(error) from error.__cause__
    job.device = choose_device(config.device)
    if job.device.type == "cuda":
        job.device = torch.device("cuda", env.local_rank())
        torch.cuda.set_device(job.device)
    dtype = torch_dtype(choose_dtype(config.dtype, job.device))
    job.ranks = Ranks.join(job.device)
    if job.ranks.rank:
        progress.set_mode("quiet")
    texts = (config.text, config.held_out)
    if job.recipe.method != "rtn" or any(text is not None for text in texts):
        job.tokens = read_tokens(_request(config), Tokenizer(config.model))
        give_back_freed_memory()
        if job.tokens.held_out_WS is None and config.held_out_windows:
            progress.say("quantize: no text is left to compare the models on; give --held-out")
    job.model = StreamedDecoder(config.model, dtype, job.device)
    norm = job.model.tensors.get("model.norm.weight").dtype
    job.recipe = replace(job.recipe, plain_dtype=dtype_name(norm))
    check_layers(job.model, job.recipe)
    job.rates = Rates.measure(job.device, dtype)
    predict_job(job)
    return job


def predict_job(job: Job) -> None:
    """What is left to do will take, given the blocks that lie finished beside `out`. Where widths
    are chosen first, the run that they belong to is known, and this asked again, only then."""
    job.finished = finished_blocks(journal_folder(job.config.out), fingerprint(job))
    shape = replace(_shape(job), finished=job.finished)
    guess = predict(shape, job.recipe, job.device.type, job.rates)
    if job.device.type == "cpu":  # reading a text may have taken more than the run will
        guess = replace(guess, device_bytes=max(guess.device_bytes, _process_peak()))
    job.prediction = guess


def _process_peak() -> float:
    """The most memory that the process has held so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _request(config: QuantizeConfig) -> Request:
    return Request(
        text=config.text,
        json_field=config.json_field,
        sequences=config.sequences,
        sequence_tokens=config.sequence_tokens,
        seed=config.seed,
        held_out=config.held_out,
        held_out_windows=config.held_out_windows,
        calibrate=config.method != "rtn",
    )


def check_layers(model: StreamedDecoder, recipe: Recipe) -> None:
    """Refuse before minutes of work what cannot be packed or described.

    Raises: UserError naming the layer; ValueError for an exception that the format's config cannot
    state.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for index in block_indices(model):
        for name in (name for group in model.linear_groups() for name in group):
            n, k = model.blocks[index].get_parameter(f"{name}.weight").shape
            shapes[f"{model.block_prefix(index)}.{name}"] = n, k
    if recipe.lm_head:
        shapes[HEAD] = model.config.vocab_size, model.config.hidden_size
    for name, (n, k) in shapes.items():
        layout = recipe.layout_of(name)
        if layout is None:
            continue
        try:
            layout.tensor_specs(n, k)
        except ValueError as error:
            raise UserError(f"quantize: {name}: {error}") from error
        if layout.group_size is not None and k % layout.group_size:
            raise UserError(
                f"quantize: {name}: group_size must divide its {k} inputs, got "
                f"{layout.group_size}; choose a divisor, for example 64, or skip the layer"
            )
    packed = [name for name in shapes if recipe.layout_of(name) is not None]
    if packed:
        config_of(recipe, packed, [name for name in shapes if name not in set(packed)])


# ---- prediction ------------------------------------------------------------------------------


def _shape(job: Job) -> RunShape:
    model, tokens, config = job.model, job.tokens, job.config
    indices = block_indices(model)
    block = model.blocks[indices[0]]
    groups = tuple(
        tuple(tuple(block.get_parameter(f"{name}.weight").shape) for name in group)
        for group in model.linear_groups()
    )
    outer = sum(math.prod(model.tensors.shape(name)) for name in model.outer_names())
    held_out = None if tokens is None else tokens.held_out_WS
    return RunShape(
        groups=groups,  # pyright: ignore[reportArgumentType]
        blocks=len(indices),
        width=model.config.hidden_size,
        outer_parameters=outer,
        head_parameters=model.config.vocab_size * model.config.hidden_size,
        block_parameters=sum(p.numel() for p in block.parameters()),
        tokens=0 if tokens is None else -(-tokens.count // job.ranks.world),
        sequence_tokens=config.sequence_tokens,
        batch_tokens=config.batch_sequences * config.sequence_tokens,
        held_out_tokens=0 if held_out is None else -(-held_out.numel() // job.ranks.world),
        itemsize=model.dtype.itemsize,
        stored_itemsize=torch_dtype(job.recipe.plain_dtype or "float16").itemsize,
        stored=_stored(job, outer),
        widths=0 if config.target_bits is None else len(config.widths),
    )


def _stored(job: Job, outer: int) -> Stored:
    """What the folder will hold: layer by layer, since exceptions may change or skip any."""
    model, recipe, target = job.model, job.recipe, job.config.target_bits
    packed, plain = 0.0, outer

    def add(name: str, n: int, k: int) -> int:
        """Parameters that stay plain."""
        nonlocal packed
        layout = recipe.layout_of(name)
        if layout is None:
            return n * k
        packed += packed_bytes(n, k, layout) if target is None else target * n * k / 8
        return 0

    for index in block_indices(model):
        plain += sum(parameter.numel() for parameter in model.blocks[index].parameters())
        for name in (name for group in model.linear_groups() for name in group):
            n, k = model.blocks[index].get_parameter(f"{name}.weight").shape
            plain += add(f"{model.block_prefix(index)}.{name}", n, k) - n * k
    if recipe.lm_head and (layout := recipe.layout_of(HEAD)) is not None:
        n, k = model.config.vocab_size, model.config.hidden_size
        packed += packed_bytes(n, k, layout)
        plain -= 0 if model.config.tie_embeddings else n * k
    return Stored(packed_bytes=packed, plain_parameters=plain)


def plan_text(job: Job) -> str:
    """What will be done and what it will take."""
    guess = job.prediction
    if job.tokens is None or job.recipe.method == "rtn":
        data = "no calibration"
    else:
        rows, longest = job.tokens.ids_BS.shape
        data = f"{job.tokens.count:,} tokens in {rows} sequences of up to {longest} from " + (
            job.tokens.source
        )
    where = "process" if job.device.type == "cpu" else "device"
    blocks = len(block_indices(job.model))
    left = f" for {max(blocks - job.finished, 0)} of {blocks} blocks" if job.finished else ""
    return (
        f"quantize: {job.recipe.method}, {data}\n"
        f"predicted: {bytes_text(guess.device_bytes)} peak of the {where}, {guess.seconds:.0f} s"
        f"{left}, "
        f"{bytes_text(guess.out_bytes)} in {job.config.out}, "
        f"{bytes_text(guess.work_bytes)} beside it while it runs"
    )


def compared(job: Job, done: QuantizedModel) -> dict[str, Any]:
    """What really was, beside the prediction."""
    if job.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(job.device)
    else:
        peak = int(_process_peak())
    guess = job.prediction
    progress.say(
        f"predicted {bytes_text(guess.device_bytes)} and {guess.seconds:.0f} s, took "
        f"{bytes_text(peak)} and {done.seconds:.0f} s"
    )
    return {"peak_bytes": peak}


def choose_job_widths(job: Job) -> None:
    """Put the widths that target_bits comes to into the recipe, and say how many layers got which.

    Raises: ValueError for a budget that cannot be met.
    """
    config = job.config
    if config.target_bits is None:
        return
    assert job.tokens is not None, "the config wants calibration"
    measured = measure_widths(
        job.model, job.tokens.ids_BS.to(job.device), job.recipe, config.widths,
        lengths_B=job.tokens.lengths_B, ranks=job.ranks,
    )  # fmt: skip
    widths = choose_widths(measured, config.target_bits)
    counts = sorted(Counter(widths.values()).items())
    said = ", ".join(f"{count} layers in {bits} bits" for bits, count in counts)
    progress.say(f"quantize: {config.target_bits:g} bits a weight: {said}")
    job.recipe = with_widths(job.recipe, widths)
    predict_job(job)


# ---- the run ---------------------------------------------------------------------------------


def run_job(job: Job, texts: Texts) -> tuple[QuantizedModel, CheckpointSize, dict[str, Any]]:
    """Quantize with a journal, then write the folder: (result, size, what was measured).

    texts(result, measured): files that go into the folder beside the tensors.
    """
    config, ranks = job.config, job.ranks
    folder = journal_folder(config.out)
    journal = _journal(job, folder)
    try:
        done = quantize_model(
            job.model, None if job.tokens is None else job.tokens.ids_BS.to(job.device),
            job.recipe, around=_around(job, journal),
        )  # fmt: skip
    except BaseException as error:
        if journal.finished == 0:
            journal.remove()
        elif not isinstance(error, KeyboardInterrupt):  # the command says it then
            progress.say(
                f"quantize: {journal.finished} finished blocks are kept in {folder}; the same "
                "command goes on from there"
            )
        raise
    seen = compared(job, done)
    size = CheckpointSize(total_bytes=0, quantized_bytes=0, plain_bytes=0, unquantized_bytes=0)
    if ranks.rank == 0:

        def extras(size: CheckpointSize) -> Extras:
            return Extras(
                files=tuple(_companions(config.model)),
                texts=texts(done, seen | {"size": asdict(size)}),
                max_shard_bytes=int(config.max_shard_gb * 1e9),
            )

        size = assemble(
            config.out, load_hf_config(config.model), TensorFolder(config.model), journal,
            job.recipe, extras=extras, overwrite=config.overwrite,
        )  # fmt: skip
        journal.remove()
    ranks.wait()
    ranks.leave()
    return done, size, seen


def _journal(job: Job, folder: Path) -> Journal:
    try:
        return Journal(folder, fingerprint(job), job.recipe, job.ranks, job.device)
    except OSError as error:
        raise UserError(
            f"write: could not write {job.config.out}: {error.strerror or error}"
        ) from error


def _around(job: Job, journal: Journal) -> Around:
    windows = None if job.tokens is None else job.tokens.held_out_WS
    evaluation = None
    if windows is not None:
        evaluation = Evaluation(job.model, windows.to(job.device), job.ranks)
    return Around(
        lengths_B=None if job.tokens is None else job.tokens.lengths_B,
        journal=journal,
        evaluation=evaluation,
        ranks=job.ranks,
    )


def fingerprint(job: Job) -> dict[str, Any]:
    """What a finished block depends on: model, recipe, data, ranks, versions."""
    data = hashlib.sha256()
    if job.tokens is not None:
        for tensor in (job.tokens.ids_BS, job.tokens.lengths_B, job.tokens.held_out_WS):
            data.update(b"none" if tensor is None else tensor.numpy().tobytes())
    return {
        "model": _model_hash(job.config.model),
        "recipe": repr(job.recipe),
        "data": data.hexdigest(),
        "ranks": job.ranks.world,
        "device": job.device.type,
        "dtype": dtype_name(job.model.dtype),
        "versions": {
            "ridgeline": ridgeline.__version__,
            "torch": torch.__version__,
            "machine": platform.machine(),
        },
    }


def _model_hash(folder: Path) -> str:
    """config.json whole; of every shard its size and evenly spaced chunks (the header among
    them)."""
    digest = hashlib.sha256(json.dumps(load_hf_config(folder), sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for chunk in range(_HASHED_CHUNKS):
                file.seek(size * chunk // _HASHED_CHUNKS)
                digest.update(file.read(_HASHED_CHUNK))
    return digest.hexdigest()


def _companions(folder: Path) -> list[Path]:
    names = (*TOKENIZER_FILES, GENERATION_CONFIG)
    return [folder / name for name in names if (folder / name).is_file()]
