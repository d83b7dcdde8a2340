"""A model ready to generate: `LLM(folder).generate(prompts, SamplingParams())`.

Puts the pieces together: loaded weights, the memory plan, pages, runner, scheduler, core. With
tensor_parallel it starts the other ranks itself; under torchrun every process makes the same LLM,
rank 0 generates and the others `follow()`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.core import env
from ridgeline.core.arch import detect
from ridgeline.core.dtypes import dtype_name
from ridgeline.core.errors import bad_value
from ridgeline.engine import tp
from ridgeline.engine.blocks import BlockPool
from ridgeline.engine.client import ModelInfo, Pooling
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.core import EngineCore
from ridgeline.engine.counters import Counters
from ridgeline.engine.errors import EngineDeadError, ReloadError
from ridgeline.engine.follow import Follower
from ridgeline.engine.load import OpenModel, choose_device, open_model, run_dtype
from ridgeline.engine.memory import MemoryPlan, check_ranks, kv_dtype_of, plan, plan_sizes
from ridgeline.engine.outputs import Choice, Generation
from ridgeline.engine.paged import FP8, PagedKV
from ridgeline.engine.params import MaskFactory, Request, SamplingParams
from ridgeline.engine.runner import Runner, StepBatch
from ridgeline.engine.scheduler import Scheduler, SchedulerConfig
from ridgeline.engine.weights import Packed, Shard, Weights, weights_of
from ridgeline.engine.workers import Workers
from ridgeline.nn.config import DecoderConfig
from ridgeline.nn.decoder import Decoder

LOSS_S = 5.0
"""How long after a collective failed a rank's end may become known."""


class LLM:
    """A loaded model with its cache.

    model: a Hugging Face folder, plain or quantized, or a Decoder or Weights in memory (with a
    tokenizer for text; without one prompts are token ids and outputs have no text).
    config.tensor_parallel > 1: the other ranks are started here, from a folder; `close()` ends
    them. group: of a process that somebody else started as a rank.
    Raises: UserError for a folder that is not a model, one that does not fit, a rank that fails.
    """

    def __init__(
        self,
        model: Path | str | Decoder | Weights,
        config: EngineConfig | None = None,
        *,
        tokenizer: Any = None,
        name: str | None = None,
        group: tp.Group | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.workers: Workers | None = None
        self.group = group or self._start_ranks(model)
        try:
            self._make(model, tokenizer, name)
        except BaseException:
            if self.workers is not None:
                self.workers.end()
            raise

    def _make(
        self, model: Path | str | Decoder | Weights, tokenizer: Any, name: str | None
    ) -> None:
        folder = Path(model) if isinstance(model, Path | str) else None
        self.shard = self._shard(None if folder is None else choose_device(self.config.device))
        if folder is not None and folder.is_dir():
            plan(folder, self.config, self.shard.ranks)  # refused before it is read
        opened = None if folder is None else _open(folder, self.config, self.shard)
        self.folder = None if opened is None else opened.folder
        self.tokenizer = tokenizer if opened is None else opened.tokenizer
        source = model if opened is None else opened.model
        assert isinstance(source, Decoder | Weights)
        weights = source if isinstance(source, Weights) else self._weights(source)
        self.shape = weights.config
        self.plan = self._plan(weights)
        self.runner = self._runner(weights)
        self.info = self._info(weights, opened, name)
        self.counters = Counters(
            weight_bytes=weights.read_bytes(),
            kv_token_bytes=self.plan.kv_bytes_per_token,
            read_ceiling=detect(weights.device).ceilings.read_gbps * 1e9,
        )
        self.core = self._core()
        self._names = 0

    def _start_ranks(self, model: Path | str | Decoder | Weights) -> tp.Group | None:
        """The ranks that torchrun started, or those of config.tensor_parallel; None: this one."""
        ranks, world = self.config.tensor_parallel, env.world_size()
        in_memory = not isinstance(model, Path | str)
        if ranks > 1 and world > 1 and ranks != world:
            rule = f"be 1 or torchrun's {world} processes"
            raise bad_value("engine", "tensor_parallel", rule, ranks, "leave it out")
        if ranks == world == 1:
            return None
        if in_memory:
            if world == 1:
                rule = "be 1 with a model in memory"
                raise bad_value("engine", "tensor_parallel", rule, ranks, "save it and give a path")
            return tp.start(model.device if isinstance(model, Weights) else _device_of(model))
        device = choose_device(self.config.device)
        if world > 1:
            return tp.start(device)
        check_ranks(Path(model), ranks, device)
        self.workers = Workers(Path(model), self.config, device)
        return self.workers.group

    def _shard(self, device: torch.device | None) -> Shard:
        """device: where a model's parts go that was opened on the CPU."""
        group = self.group
        if group is None:
            return Shard()
        own = None if device is None or device.type == "cpu" else group.device
        return Shard(rank=group.rank, ranks=group.ranks, device=own)

    def _plan(self, weights: Weights) -> MemoryPlan:
        """What fits; with several ranks, what fits on each of them."""
        ranks = self.shard.ranks
        found = plan_sizes(
            weights.config,
            _resident_bytes(weights) * ranks,
            weights.dtype,
            weights.device,
            self.config,
            ranks,
            packed=any(isinstance(each, Packed) for each in weights.layers[0].linears()),
        )
        if self.group is None:
            return found
        self.group.meet()
        pages, longest = self.group.least([found.num_pages, found.max_model_len])
        return replace(found, num_pages=pages, max_model_len=longest)

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
        for batch in self.embed_batches(prompts):
            if self.group is not None:
                self.group.send("embed", [[list(ids) for ids in batch], pooling])
            vectors += self.runner.embed(batch, pooling).tolist()
        return vectors

    def embed_batches(self, prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
        """Prompts in the groups that `embed` computes at once."""
        return _batches(prompts, self.plan.max_step_tokens)

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
        count, most = len(prompt_ids), self.info.max_model_len
        if count + min(room, 1) > most:  # before a look at each of them
            rule = f"fit in the context of {most} tokens"
            got = f"{count}" + " and one to come" * min(room, 1)
            raise bad_value("request", "prompt", rule, got, "shorten it")
        for token_id in prompt_ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                got = type(token_id).__name__
                raise bad_value("request", "prompt", "hold whole numbers", got, "give token ids")
            if not 0 <= token_id < self.info.vocab_size:
                rule = f"hold tokens in 0 .. {self.info.vocab_size - 1}"
                raise bad_value("request", "prompt", rule, token_id, "use the model's tokenizer")
        if count + room > most:
            rule = f"fit in the context of {most} tokens, of which the prompt takes {count}"
            raise bad_value("request", "max_tokens", rule, room, "ask for fewer")

    # ---- weights -----------------------------------------------------------------------------

    def load_beside(self, folder: Path) -> Weights:
        """Weights of another folder of the same model, ready to be swapped in.

        Raises: ReloadError for another architecture, dtype or tokenizer, or where memory lacks;
        UserError as open_model.
        """
        try:
            return self._beside(Path(folder))
        except (MemoryError, torch.OutOfMemoryError) as error:
            why = (str(error) or "too little").splitlines()[0]
            raise ReloadError(
                f"reload: {folder} must fit in memory beside the weights that run, got {why}; "
                "start a new server"
            ) from error

    def _beside(self, folder: Path) -> Weights:
        opened = _open(folder, replace(self.config, dtype=self.info.dtype), self.shard)
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

    def reload(self, folder: Path) -> None:
        """Load another folder and run with it. Raises: as load_beside; the old weights go on."""
        self.ask_ranks("load", str(Path(folder).resolve()))
        try:
            weights = self.load_beside(folder)
            while not self.ranks_loaded():
                time.sleep(0.01)
        except BaseException:
            self.ask_ranks("drop")
            raise
        self.swap(weights)

    def ranks_loaded(self) -> bool:
        """Whether every other rank is ready to swap. Raises: ReloadError where one cannot."""
        if self.group is None:
            return True
        self.ask_ranks("loaded")
        states = self.group.report("ready")
        for rank, (state, text) in enumerate(states):
            if state == "failed":
                raise ReloadError(f"reload: rank {rank}: {text}")
        return all(state == "ready" for state, _ in states)

    def ask_ranks(self, kind: str, body: object = None) -> None:
        """Tell the other ranks something, between two steps."""
        if self.group is not None:
            self.group.send(kind, body)

    def swap(self, weights: Weights) -> None:
        """Run with other weights from the next step on, on every rank: what is in the cache is
        computed anew."""
        self.ask_ranks("swap")
        self.runner.set_weights(weights)
        self.core.scheduler.preempt_all()
        self.counters.weight_bytes = weights.read_bytes()
        self.counters.reloaded()

    # ---- ranks -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Ranks other than 0: compute what rank 0 says until it closes."""
        assert self.group is not None and self.rank
        Follower(self).run()

    def why_lost(self, within_s: float = 0.0) -> str | None:
        """Why a rank is gone, where one is (or is within so many seconds)."""
        return None if self.workers is None else self.workers.why(within_s)

    def close(self, stop: bool = True) -> None:
        """Let the other ranks go, and wait for those that were started here.

        stop: they listen; False: a step of theirs may never end, so started ones are killed.
        """
        group, self.group = self.group, None
        stop = stop and self.why_lost() is None
        if group is not None and stop:
            self.runner.forget()
        if group is not None and not self.rank and stop:
            with contextlib.suppress(RuntimeError):  # a rank that is gone just now
                group.send("stop")
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.end(stop)

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
        if self.config.whole_cache:
            cache.take_memory()
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
            start=lambda *asked: self.runner.start(*asked),
        )

    def _run(self, batch: StepBatch) -> torch.Tensor | list[int]:
        if self.group is None:
            return self.runner.run(batch)
        try:
            self.group.send("step", batch.to_message())
            return self.runner.run(batch)
        except RuntimeError as error:
            if (why := self.why_lost(LOSS_S)) is None:
                raise
            raise EngineDeadError(f"engine: {why}") from error

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
            kv_bytes=self.plan.kv_bytes,
        )


def _open(folder: Path, config: EngineConfig, shard: Shard) -> OpenModel:
    """The whole model, on the CPU where only this rank's part goes to the device."""
    device = choose_device(config.device)
    if not folder.is_dir():  # says what is missing
        return open_model(folder, config.dtype, device.type)
    dtype = run_dtype(folder, config.dtype, device)
    where = device.type if shard.device is None else "cpu"
    return open_model(folder, dtype, where, prepare=False)


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
