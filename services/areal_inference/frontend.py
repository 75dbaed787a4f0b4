"""The server's shared state on the event loop: engine, tokenizer, limits, who is being served."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal.chassis.collector import collector_paused
from areal.chassis.logging import get_logger
from areal.chassis.waits import Wait
from areal.errors import ConfigError, Unavailable
from areal.model_directory import serving_dtype
from areal_inference.api import GenerateCall, Limits, RequestError
from areal_inference.config import InferenceConfig
from areal_inference.decode.engine import Engine, EngineError
from areal_inference.decode.grammar import Grammar, Grammars
from areal_inference.decode.scheduler import Scheduler
from areal_inference.metrics import Metrics
from areal_inference.model.config import ModelConfig, ModelError, ServedModel, UnknownModel

if TYPE_CHECKING:
    from areal_inference.decode.runner import Cache, Decoder, ModelRunner
    from areal_inference.model.adapters import Adapter
    from areal_inference.model.vision import See
    from areal_torch.models.cpu_matmul import Storage

_DEFAULT_CACHE_BYTES = 1 << 30
_STUCK_AFTER_S = 60.0


class Frontend:
    """Everything a route needs. Created on the event loop, before the model is loaded.

    Args:
        config: The server's configuration.
        model: The checkpoint's config.json.
        on_failure: Called when the engine thread dies.
    """

    def __init__(
        self,
        config: InferenceConfig,
        model: ServedModel,
        on_failure: Callable[[Exception], None],
    ):
        dtype = serving_dtype(config.dtype, Path(config.model_path), gpu=False)
        self.config = config = config.model_copy(update={"dtype": dtype})
        self.model = model
        self.model_path = config.model_path
        self.storage = _storage(config, model)
        self.context_length = _context_length(config, model)
        element = self.storage.dtype.itemsize
        self.max_total_tokens = _max_total_tokens(config, model, self.context_length, element)
        self.tokenizer = _load_tokenizer(config)
        self.see = _sight(config, model)
        self.constrain = None if self.tokenizer is None else self._grammar
        self.limits = Limits.of(model, self.context_length, self.max_total_tokens)
        self.boot_id = uuid.uuid4().hex
        self.started_at = time.time()
        self.metrics = Metrics(config.served_model_name or config.model_path)
        self.live: set[str] = set()
        self.adapters: dict[str, Adapter] = {}
        self.weights_lock = asyncio.Lock()
        self.draining = False
        self.ready = False
        self.engine = Engine(self._build, on_failure)
        self.metrics.waits.watch(self._oldest_requests)

    def _build(self) -> Scheduler:
        """Loads the model; runs in the engine's thread."""
        import torch

        from areal_inference.decode.runner import ModelRunner

        torch.set_num_threads(1)
        config = self.config
        model, cache = self._decoder()
        runner = ModelRunner(
            model,
            cache,
            max_total_tokens=self.max_total_tokens,
            max_prefill_tokens=config.max_prefill_tokens,
            seed=config.random_seed,
        )
        return Scheduler(
            runner,
            max_running=config.max_running_requests,
            max_prefill_tokens=config.max_prefill_tokens,
            weight_version=config.weight_version,
        )

    def _decoder(self) -> tuple[Decoder, Cache]:
        """The model with its weights, and an empty cache."""
        import torch

        from areal_inference.model.weights import Weights, load_weights

        config, model = self.config, self.model
        dtype: torch.dtype = getattr(torch, config.dtype)
        weights = load_weights(config.model_path, model, dtype, storage=self.storage)
        if not isinstance(model, ModelConfig):
            from areal_inference.model.plain import PlainConfig, PlainModel
            from areal_inference.model.plain_cache import PlainCache

            assert isinstance(model, PlainConfig), "no third kind"
            return PlainModel(model, weights), PlainCache(self.context_length)
        from areal_inference.model.kv_cache import KVCache
        from areal_inference.model.transformer import Model

        assert isinstance(weights, Weights), "of the fast decoder"
        cache = KVCache(
            model,
            self.storage.dtype,
            max_rows=config.max_running_requests,
            max_length=self.context_length,
        )
        return Model(model, weights, self.context_length), cache

    def _oldest_requests(self) -> Iterator[Wait]:
        scheduler = self.engine.scheduler
        if scheduler is None:
            yield Wait("start", "the model's files", time.time() - self.started_at)
            return
        paused = scheduler.pause_mode is not None
        asleep = scheduler.asleep
        for kind, requests, whom in (
            ("request", scheduler.running, "continue_generation" if paused else "its next tokens"),
            (
                "queued_request",
                scheduler.waiting,
                "resume_memory_occupation" if asleep else "a row of the cache",
            ),
            ("held_request", scheduler.held, "a weight update"),
        ):
            # A copy: the engine's thread changes them.
            oldest = min(list(requests), key=lambda r: r.received_at, default=None)
            if oldest is not None:
                yield Wait(kind, whom, max(0.0, time.time() - oldest.received_at), oldest.rid)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for reading its state.

        Raises:
            Unavailable: The model is still being loaded.
        """
        if self.engine.scheduler is None:
            raise Unavailable("server is starting: the model is being loaded")
        return self.engine.scheduler

    @property
    def runner(self) -> ModelRunner:
        """The model runner, for reading."""
        return cast("ModelRunner", self.scheduler.runner)

    def check_health(self) -> None:
        """Passes, or says why not.

        Raises:
            Unavailable: starting, shutting down, failed, or stuck in a step.
        """
        if self.draining:
            raise Unavailable("server is shutting down")
        if self.engine.failure is not None:
            raise Unavailable(self.engine.failure)
        if not self.ready:
            raise Unavailable("server is starting: the model is being loaded")
        if self.engine.stuck_for > _STUCK_AFTER_S:
            raise Unavailable(f"engine: in one step for {self.engine.stuck_for:.0f} s")

    def check_ready(self) -> None:
        """Passes once the model is loaded; raises Unavailable before."""
        if not self.ready:
            raise Unavailable("server is starting: the model is being loaded")

    def start(self, call: GenerateCall) -> None:
        """Hands the call's requests to the engine.

        Raises:
            RequestError: A request id is in use.
            Unavailable: starting, shutting down, failed, or too many requests queued.
        """
        self.check_health()
        rids = [r.rid for r in call.requests]
        if self.live.intersection(rids) or len(set(rids)) != len(rids):
            taken = next((r for r in rids if r in self.live), rids[0])
            raise RequestError(f"rid: {taken!r} is already in use by a running request")
        limit = self.config.max_running_requests + self.config.max_queued_requests
        # A call larger than the whole queue is let in when it is alone.
        if self.live and len(self.live) + len(rids) > limit:
            raise Unavailable(
                f"The request queue is full: {len(self.live)} in progress, expected at most {limit}"
            )
        self.live.update(rids)
        self.engine.submit(call.requests)

    def finished(self, call: GenerateCall) -> None:
        """Forgets the call's request ids and counts it."""
        self.live.difference_update(r.rid for r in call.requests)
        for request in call.requests:
            self.metrics.observe(request)

    async def abort(self, rid: str | None, message: str = "Aborted") -> int:
        """Finishes a request (and its n samples), or all (None), with the tokens they have.

        An empty id is no one's.
        """
        rids = None
        if rid is not None:
            named = {r for r in self.live if r == rid or r.rpartition("_")[0] == rid}
            rids = named if rid else set()
        timeout = self.config.command_timeout_s
        return await self.engine.call(lambda s: s.abort(rids, message), timeout)

    async def drain(self, deadline_s: float) -> None:
        """Refuses new requests and finishes the running ones with what they have."""
        self.draining = True
        if self.ready and self.engine.failure is None:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(deadline_s):
                    await self.abort(None, "server is shutting down")

    @cached_property
    def _grammars(self) -> Grammars:
        """Creates the grammars at the first request that asks, because it reads the vocabulary."""
        limits = self.limits
        return Grammars(self.tokenizer.to_str(), limits.vocab_size, sorted(limits.eos_token_ids))

    def _grammar(self, kind: str, value: str) -> Grammar:
        return self._grammars.compile(kind, value)

    def encode(self) -> Callable[[str], list[int]] | None:
        """Returns a text's token ids, or None without a tokenizer."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else lambda text: list(tokenizer.encode(text).ids)

    def decode(self) -> Callable[[list[int], bool], str] | None:
        """Returns the text of token ids, or None without a tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))


def read_model(config: InferenceConfig) -> ServedModel:
    """Reads what is to be served: for the fast decoder, or else for transformers.

    Raises:
        ModelError: Neither can, or the folder is no model's.
    """
    folder = Path(config.model_path)
    try:
        return ModelConfig.from_folder(folder)
    except UnknownModel as error:
        why = str(error)
    try:
        with collector_paused():
            import transformers  # noqa: F401 - the back end imports it when it needs it

            from areal_inference.model.plain import PlainConfig
    except ImportError as error:
        raise ModelError(f"{why}; others need transformers: {error}") from None
    return PlainConfig.from_folder(folder, serving_dtype(config.dtype, folder, gpu=False))


def _context_length(config: InferenceConfig, model: ServedModel) -> int:
    asked, most = config.context_length, model.max_position_embeddings
    if asked is not None and asked > most:
        get_logger(__name__).warning(
            "context_length_clamped", asked=asked, max_position_embeddings=most
        )
    return min(asked or most, most)


def _storage(config: InferenceConfig, model: ServedModel) -> Storage:
    """Describes how this machine multiplies the model's matrices fast."""
    with collector_paused():  # the first to import torch
        from areal_inference.model.weights import model_shapes
        from areal_torch.models.cpu_matmul import FLOAT32, choose_here

    if config.dtype == "float32" or not isinstance(model, ModelConfig):
        return FLOAT32
    choice = choose_here(sum(math.prod(shape) for shape in model_shapes(model).values()))
    get_logger(__name__).info(
        "matrices_stored", dtype=config.dtype, stored=str(choice.storage), why=choice.why
    )
    return choice.storage


def _max_total_tokens(
    config: InferenceConfig, model: ServedModel, context_length: int, element: int
) -> int:
    if config.max_total_tokens is not None:
        return config.max_total_tokens
    per_token = model.cache_values * element
    return min(config.max_running_requests * context_length, _DEFAULT_CACHE_BYTES // per_token)


def _sight(config: InferenceConfig, model: ServedModel) -> See | None:
    if not isinstance(model, ModelConfig) or model.vision is None:
        return None
    from areal_inference.model.vision import make_see

    return make_see(Path(config.model_path), model)


def _load_tokenizer(config: InferenceConfig) -> Any:
    file = Path(config.model_path) / "tokenizer.json"
    if config.skip_tokenizer_init or not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file}: not a tokenizer: {error}") from None
