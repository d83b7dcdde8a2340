"""A model ready to generate: `LLM(folder).generate(prompts, SamplingParams())`.

Puts the pieces together: loaded weights, the memory plan, pages, runner, scheduler, core. Under
torchrun every process makes the same LLM; rank 0 generates and the others `follow()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.core.arch import detect
from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import bad_value
from ridgeline.engine import tp
from ridgeline.engine.blocks import BlockPool
from ridgeline.engine.client import ModelInfo, Pooling
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.core import EngineCore
from ridgeline.engine.counters import Counters
from ridgeline.engine.errors import ReloadError
from ridgeline.engine.load import OpenModel, choose_device, open_model, run_dtype
from ridgeline.engine.memory import MemoryPlan, kv_dtype_of, plan_sizes
from ridgeline.engine.outputs import FinishReason, RequestOutput, TokenLogprob, Usage
from ridgeline.engine.paged import FP8, PagedKV
from ridgeline.engine.params import MaskFactory, Request, SamplingParams
from ridgeline.engine.runner import Runner, StepBatch
from ridgeline.engine.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.weights import Shard, Weights, weights_of
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder


@dataclass(slots=True, kw_only=True)
class Choice:
    """One finished output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """What a prompt became."""

    prompt_ids: list[int]
    choices: list[Choice]
    usage: Usage | None = None
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Take what a step brought."""
        for delta in output.deltas:
            choice = self.choices[delta.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            if delta.logprobs is not None:
                choice.logprobs = [*(choice.logprobs or []), *delta.logprobs]
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            choice.stop_reason = delta.stop_reason or choice.stop_reason
        self.usage, self.error = output.usage, output.error or self.error


class LLM:
    """A loaded model with its cache.

    model: a Hugging Face folder, plain or quantized, or a Decoder or Weights in memory (with a
    tokenizer for text; without one prompts are token ids and outputs have no text).
    Raises: UserError for a folder that is not a model, or one that does not fit.
    """

    def __init__(
        self,
        model: Path | str | Decoder | Weights,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        name: str | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        opened = _open(Path(model), self.config) if isinstance(model, Path | str) else None
        self.folder = None if opened is None else opened.folder
        self.tokenizer = tokenizer if opened is None else opened.tokenizer
        source = model if opened is None else opened.model
        assert isinstance(source, Decoder | Weights)
        device = source.device if isinstance(source, Weights) else _device_of(source)
        self.group = tp.start(device)
        self.shard = _shard_of(self.group)
        weights = source if isinstance(source, Weights) else self._weights(source)
        self.shape = weights.config
        self.plan = plan_sizes(
            self.shape,
            _resident_bytes(weights) * self.shard.ranks,
            weights.dtype,
            device,
            self.config,
            self.shard.ranks,
        )
        self.runner = self._runner(weights)
        self.info = self._info(weights, opened, name)
        self.counters = Counters(
            weight_bytes=weights.read_bytes(),
            kv_token_bytes=self.plan.kv_bytes_per_token,
            read_ceiling=detect(device).ceilings.read_gbps * 1e9,
        )
        self.core = self._core()
        self._names = 0

    @property
    def rank(self) -> int:
        return self.shard.rank

    # ---- use ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        masks: Sequence[MaskFactory | None] | None = None,
    ) -> list[Generation]:
        """Outputs of all prompts (texts or token ids), batched as the cache allows.

        Raises: ValueError for a prompt or parameter that add_request would refuse.
        """
        asked: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        ids = [self.encode(prompt) for prompt in asked]
        each = params or SamplingParams()
        every = [each] * len(ids) if isinstance(each, SamplingParams) else list(each)
        if len(every) != len(ids):
            raise bad_value(
                "generate", "params", f"be one, or {len(ids)}", len(every), "one for each prompt"
            )
        for prompt_ids, one in zip(ids, every, strict=True):
            self.check(prompt_ids, one)
        made: dict[str, Generation] = {}
        for index, (prompt_ids, one) in enumerate(zip(ids, every, strict=True)):
            request = self.request(prompt_ids, one, mask=masks[index] if masks else None)
            made[request.request_id] = Generation(
                prompt_ids=prompt_ids, choices=[Choice(index=i) for i in range(one.n)]
            )
            self.core.add(request, self.max_tokens(request))
        while any(name in self.core.requests for name in made):
            for output in self.core.step():
                if output.request_id in made:
                    made[output.request_id].add(output)
        return list(made.values())

    def embed(
        self, prompts: Sequence[Sequence[int]], pooling: Pooling = "mean"
    ) -> list[list[float]]:
        """Unit vectors of prompts. Raises: ValueError as `check_prompt`."""
        if pooling not in ("mean", "last"):
            raise bad_value("embed", "pooling", "be mean or last", repr(pooling), "change it")
        for prompt_ids in prompts:
            self.check_prompt(prompt_ids, room=0)
        vectors: list[list[float]] = []
        for batch in _batches(prompts, self.plan.max_step_tokens):
            if self.group is not None:
                self.group.send("embed", [[list(ids) for ids in batch], pooling])
            vectors += self.runner.embed(batch, pooling).tolist()
        return vectors

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a text, with the special tokens that its tokenizer puts around it."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise bad_value(
                "generate", "prompts", "be token ids without a tokenizer", "text", "give one"
            )
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def request(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> Request:
        """A request with a name of its own."""
        self._names += 1
        name = options.pop("request_id", None) or f"request-{self._names}"
        return Request(request_id=name, prompt_ids=tuple(prompt_ids), params=params, **options)

    def max_tokens(self, request: Request) -> int:
        """New tokens at most: what was asked for, or what the context leaves."""
        return request.params.max_tokens or self.info.max_model_len - len(request.prompt_ids)

    # ---- checks ------------------------------------------------------------------------------

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what this model cannot do. Raises: ValueError, TypeError."""
        self.check_prompt(prompt_ids, room=params.max_tokens or 1)
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= self.info.vocab_size:
                    rule = f"hold tokens in 0 .. {self.info.vocab_size - 1}"
                    raise bad_value("request", name, rule, token_id, "use the model's tokenizer")
        if params.stop and self.tokenizer is None:
            raise bad_value("request", "stop", "be empty without a tokenizer", "text", "give ids")

    def check_prompt(self, prompt_ids: Sequence[int], *, room: int) -> None:
        """Refuse a prompt that is empty, foreign or too long for `room` new tokens."""
        if not len(prompt_ids):
            raise bad_value("request", "prompt", "have at least one token", 0, "give some text")
        for token_id in prompt_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                got = type(token_id).__name__
                raise bad_value("request", "prompt", "hold whole numbers", got, "give token ids")
            if not 0 <= token_id < self.info.vocab_size:
                rule = f"hold tokens in 0 .. {self.info.vocab_size - 1}"
                raise bad_value("request", "prompt", rule, token_id, "use the model's tokenizer")
        if len(prompt_ids) + room > self.info.max_model_len:
            arg = "prompt and max_tokens" if room > 1 else "prompt"
            rule = f"fit in the context of {self.info.max_model_len} tokens"
            got = f"{len(prompt_ids)} + {room}"
            raise bad_value("request", arg, rule, got, "shorten the prompt or ask for fewer tokens")

    # ---- weights -----------------------------------------------------------------------------

    def load_beside(self, folder: Path) -> Weights:
        """Weights of another folder of the same model, ready to be swapped in.

        Raises: ReloadError for another architecture, dtype or tokenizer; UserError as open_model.
        """
        opened = _open(Path(folder), replace(self.config, dtype=self.info.dtype))
        decoder = opened.model
        if decoder.config != self.shape:
            differ = _differences(decoder.config, self.shape)
            raise ReloadError(
                f"reload: {folder} must be the same model, got another {differ}; start a new server"
            )
        mine, other = (_vocabulary_bytes(f) for f in (self.folder, opened.folder))
        if mine is not None and mine != other:
            raise ReloadError(
                f"reload: {folder} must have the same tokenizer.json, got another; "
                "start a new server"
            )
        return self._weights(decoder)

    def swap(self, weights: Weights, folder: Path) -> None:
        """Run with other weights from the next step on: what is in the cache is computed anew."""
        if self.group is not None:
            self.group.send("reload", str(folder))
        self.runner.set_weights(weights)
        self.core.scheduler.preempt_all()
        self.counters.weight_bytes = weights.read_bytes()
        self.counters.reloaded()

    # ---- ranks -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Ranks other than 0: compute what rank 0 says until it closes."""
        assert self.group is not None and self.rank
        tp.follow(
            self.group,
            {
                "step": lambda body: self.runner.run(StepBatch.from_message(body)),
                "embed": lambda body: self.runner.embed(*body),
                "reload": lambda body: self.runner.set_weights(self.load_beside(Path(body))),
                "idle": lambda body: None,
            },
        )

    def close(self) -> None:
        """Let the other ranks go."""
        if self.group is not None and not self.rank:
            self.group.send("stop")
            self.group = None

    # ---- making ------------------------------------------------------------------------------

    def _weights(self, decoder: Decoder) -> Weights:
        return weights_of(decoder, self.shard, invariant=self.config.batch_invariant)

    def _runner(self, weights: Weights) -> Runner:
        cache = PagedKV(
            weights.config,
            num_pages=self.plan.num_pages,
            page_tokens=self.plan.page_tokens,
            kv_heads=weights.kv_heads,
            dtype=kv_dtype_of(self.config, weights.dtype, weights.device),
            device=weights.device,
        )
        return Runner(
            weights,
            cache,
            max_model_len=self.plan.max_model_len,
            group=self.group,
            invariant=self.config.batch_invariant,
            cuda_graphs=self.config.cuda_graphs,
        )

    def _core(self) -> EngineCore:
        plan = self.plan
        sizes = SchedulerConfig(
            max_num_seqs=plan.max_num_seqs,
            max_step_tokens=plan.max_step_tokens,
            speculate_tokens=self.config.speculate_tokens,
        )
        pool = BlockPool(
            plan.num_pages,
            plan.page_tokens,
            prefix_cache=self.config.prefix_cache,
            runs=not self.runner.on_gpu,
        )
        return EngineCore(
            self._run,
            Scheduler(sizes, pool),
            eos_token_ids=self.info.eos_token_ids,
            tokenizer=self.tokenizer,
            counters=self.counters,
        )

    def _run(self, batch: StepBatch) -> torch.Tensor:
        if self.group is not None:
            self.group.send("step", batch.to_message())
        return self.runner.run(batch)

    def _info(self, weights: Weights, opened: OpenModel | None, name: str | None) -> ModelInfo:
        eos = set(weights.config.eos_token_ids)
        if opened is not None and (role := opened.tokenizer.role_id("eos_token")) is not None:
            eos.add(role)
        stored = dtype_name(weights.dtype) if opened is None else opened.weights
        cache = self.runner.cache
        return ModelInfo(
            name=name or ("model" if opened is None else opened.folder.resolve().name),
            max_model_len=self.plan.max_model_len,
            vocab_size=weights.config.vocab_size,
            eos_token_ids=tuple(sorted(eos)),
            weights=stored,
            dtype=dtype_name(weights.dtype),
            device=weights.device.type,
            kv_dtype="fp8" if cache.dtype == FP8 else dtype_name(cache.dtype),
            page_tokens=cache.page_tokens,
            num_pages=cache.num_pages,
        )


def _open(folder: Path, config: EngineConfig) -> OpenModel:
    device = choose_device(config.device)
    if not folder.is_dir():  # says what is missing
        return open_model(folder, config.dtype, device.type)
    dtype = run_dtype(folder, config.dtype, device)
    return open_model(folder, dtype, device.type, prepare=False)


def _shard_of(group: tp.Group | None) -> Shard:
    return Shard() if group is None else Shard(rank=group.rank, ranks=group.ranks)


def _device_of(decoder: Decoder) -> torch.device:
    return next(decoder.parameters()).device


def _resident_bytes(weights: Weights) -> int:
    linears = [linear for layer in weights.layers for linear in layer.linears()]
    table = weights.embedding_VC
    embedding = table.numel() * table.element_size()
    head = 0 if weights.config.tie_embeddings else weights.head.resident_bytes()
    norms = [n for w in weights.layers for n in (w.input_norm, w.mlp_norm, w.q_norm, w.k_norm)]
    small = sum(n.numel() * n.element_size() for n in [*norms, weights.norm] if n is not None)
    return sum(linear.resident_bytes() for linear in linears) + embedding + head + small


def _batches(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[Sequence[int]]]:
    """Prompts in groups of at most so many tokens; a longer one alone."""
    batches: list[list[Sequence[int]]] = []
    tokens = max_tokens + 1
    for prompt in prompts:
        if tokens + len(prompt) > max_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(prompt)
        tokens += len(prompt)
    return batches


def _differences(new: DecoderConfig, old: DecoderConfig) -> str:
    names = [name for name in DecoderConfig.__slots__ if getattr(new, name) != getattr(old, name)]
    return ", ".join(names[:3])


def _vocabulary_bytes(folder: Path | None) -> bytes | None:
    return None if folder is None else (folder / "tokenizer.json").read_bytes()


__all__ = ["LLM", "Choice", "EngineConfig", "Generation", "MemoryPlan", "SamplingParams"]
