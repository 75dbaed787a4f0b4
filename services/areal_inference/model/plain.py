"""The plain back end: transformers computes architectures that the fast decoder does not know.

Slow, for tests and laptops, and correct first. Names, conversions and the head are the trainer's
(`areal_torch.engines.model`), so that weights come under the checkpoint's own names and logprobs
are the trainer's. Sequences are never padded, because layers with a state would read the padding:
those of one length are computed together, others one after the other. Their caches are in
`plain_cache`; a model whose cache is of no use computes each token from the whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from areal.chassis.logging import get_logger
from areal.errors import InvalidInput
from areal.tokenizer import longest_input
from areal.weights.manifest import weight_files
from areal.weights.safetensors import read_layout
from areal_inference.model.adapters import Adapter, Pairs
from areal_inference.model.config import ModelError, eos_ids, read_json, refuse_quantized
from areal_inference.model.plain_cache import PlainCache, Row, State, gathered
from areal_inference.model.vision import Seen
from areal_inference.model.weights import FLOAT_TYPES, CheckpointModel, View, WeightSet
from areal_torch.engines.model import guards, heads, hub_names, source
from areal_torch.engines.model.routes import Routes
from areal_torch.engines.model.tensor_directory import TensorDirectory

_UNLIMITED = 1 << 20
"""Positions of a model whose config names no limit; the cache's size limits requests."""
_TOKENS_AT_ONCE = 4096
"""Tokens of one batch when sequences are computed again."""
_CACHES = ("past_key_values", "cache_params")
"""Names that decoders use for their cache, as an argument and as a field of their output."""
_APART, _APART_16 = 1e-4, 5e-2
"""Largest difference of logits, relative to their size, that counts as rounding: in float32, and in
16 bits."""
_TRIED = (2, 12, 8)
"""Number of sequences of the trial at the start, of their tokens, and of tokens that are
prefilled."""


@dataclass(frozen=True, kw_only=True)
class PlainConfig(CheckpointModel):
    """A model as transformers knows it."""

    folder: Path
    dtype: str
    """float32 or bfloat16."""
    width: int
    """About how many numbers the cache keeps for a token."""

    @classmethod
    def from_folder(cls, folder: Path, dtype: str) -> PlainConfig:
        """Reads a folder's config.json.

        Raises:
            ModelError: transformers does not know the model, or it is quantized.
        """
        raw = read_json(folder / "config.json")
        refuse_quantized(folder, raw)
        try:
            from transformers import AutoConfig

            config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text = config.get_text_config()
            limits = (longest_input(text.to_dict()), guards.rope_limit(config))
            return cls(
                architecture=(raw.get("architectures") or ["?"])[0],
                model_type=str(config.model_type),
                vocab_size=int(text.vocab_size),
                max_position_embeddings=min(filter(None, limits), default=_UNLIMITED),
                eos_token_ids=eos_ids(folder, raw),
                folder=folder,
                dtype=dtype,
                width=2 * int(text.num_hidden_layers) * int(text.hidden_size),
            )
        # A folder is a stranger's: transformers raises anything.
        except Exception as error:
            named = raw.get("architectures") or "?"
            named = str(named[0] if isinstance(named, list) else named)[:100]
            raise ModelError(
                f"{folder / 'config.json'}: architecture {named}: "
                f"transformers cannot read it: {source.reason(error)}"
            ) from None

    @property
    def cache_values(self) -> int:
        """See `ServedModel`."""
        return self.width

    @cached_property
    def skeleton(self) -> Skeleton:
        """The model without weights; made once, which takes seconds.

        Raises:
            InvalidInput: transformers cannot build it, or the folder has other tensors.
        """
        return Skeleton.of(self)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `CheckpointModel`."""
        return {name: shape for name, (shape, _) in self.skeleton.tensors.items()}

    @property
    def repeated(self) -> Mapping[str, str]:
        """See `CheckpointModel`."""
        return self.skeleton.repeated

    def allocate(self) -> WeightSet:
        """See `CheckpointModel`."""
        computed = {name for step in self.skeleton.steps for name in step.names}
        return WeightSet(
            views={
                name: View(torch.empty(shape, dtype=dtype), shape, finite=name in computed)
                for name, (shape, dtype) in self.skeleton.tensors.items()
            }
        )


@dataclass(frozen=True)
class Skeleton:
    """A model on the meta device, and how a checkpoint's tensors become its own."""

    hf: Any
    steps: list[hub_names.Step]
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of all tensors of a version by its names, including those of unused
    towers."""
    repeated: dict[str, str]

    @classmethod
    def of(cls, config: PlainConfig) -> Skeleton:
        """See `PlainConfig.skeleton`."""
        folder = config.folder
        hf = source.build(str(folder), getattr(torch, config.dtype))
        if config.architecture not in ("?", type(hf).__name__):
            raise ModelError(
                f"model path {folder}: architecture {config.architecture}, but as a language model "
                f"transformers makes a {type(hf).__name__} of it"
            )
        live = hub_names.live_tensors(hf)
        with TensorDirectory(folder) as directory:
            try:
                steps, used = hub_names.import_steps(hf, directory)
            except InvalidInput as error:
                raise ModelError(f"model path {folder}: {error}") from None
            hub_names.remember(hf, steps, used)
            shapes, repeated = directory.shapes, hub_names.repeated(hf, directory.shapes)
        tensors = {
            name: (shapes[name], live[step.target].dtype) for step in steps for name in step.names
        }
        stored = {
            p.name: p.dtype for file in weight_files(folder) for p in read_layout(file).places
        }
        for name in hub_names.bystanders(hf, folder):
            if (dtype := FLOAT_TYPES.get(stored[name])) is None:
                raise ModelError(
                    f"model path {folder}: tensor {name} has dtype {stored[name]}, expected one of "
                    f"{sorted(FLOAT_TYPES)}"
                )
            tensors[name] = (shapes[name], dtype)
        return cls(hf, steps, tensors, repeated)


class PlainModel:
    """`runner.Decoder` with any architecture of transformers."""

    def __init__(self, config: PlainConfig, weights: WeightSet) -> None:
        """Gives the model its weights, and tries it.

        Raises:
            InvalidInput: It is no causal language model with a linear head.
        """
        self._skeleton = config.skeleton
        self._hf = config.skeleton.hf
        self._decoder = guards.decoder_of(self._hf)
        known = inspect.signature(self._decoder.forward).parameters
        self._has_positions = "position_ids" in known
        self._cache_name = next((name for name in _CACHES if name in known), "")
        self._places = _places(self._hf)
        self._keeps = False
        self.adapters: Sequence[Adapter | None] = ()
        self._adapter: Adapter | None = None  # of the sequences that are being computed
        self._hooked: set[str] = set()
        self._routes = Routes(self._hf, self._decoder)
        self.weights = weights
        self._try(config)

    @property
    def weights(self) -> WeightSet:
        """The weights that serve."""
        return self._weights

    @weights.setter
    def weights(self, weights: WeightSet) -> None:
        self._weights = weights
        made = dict[str, Tensor]()
        for step in self._skeleton.steps if weights.views else ():
            made |= step.run(self._hf, [weights.views[name].target for name in step.names])
        if made and (lacking := self._places.keys() - made.keys()):
            raise ModelError(f"the model's tensor {min(lacking)} is not made of its checkpoint's")
        for name, places in self._places.items():
            for tensors, key, empty in places:
                tensor = made.get(name, empty)
                parameter = isinstance(empty, nn.Parameter) and name in made
                tensors[key] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
        self._matrix = heads.wide_matrix(self._hf) if made else None

    def adapt(self, pairs: Pairs) -> Any:
        """See `runner.Decoder`: each layer asks for its pair by the name of its module."""
        modules = dict(self._hf.named_modules())
        for name, pair in pairs.items():
            linear, shape = modules.get(name), (pair.up.shape[1], pair.down.shape[0])
            if not isinstance(linear, nn.Linear) or tuple(linear.weight.shape) != shape:
                raise InvalidInput(f"adapter for {name}: this model has no such linear layer")
        for name in pairs.keys() - self._hooked:
            modules[name].register_forward_hook(partial(self._add, name))
            self._hooked.add(name)
        return pairs

    def _add(self, name: str, _: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        pair = None if self._adapter is None else self._adapter.parts.get(name)
        return output if pair is None else output + pair.of(given[0])

    def prefill(
        self,
        cache: PlainCache,
        rows: list[int],
        sequences: Sequence[list[int]],
        seen: Sequence[Seen | None] = (),
    ) -> list[Tensor]:
        """See `transformer.Model.prefill`: [length, hidden] of each sequence."""
        found = [torch.empty(0)] * len(rows)
        adapters = self.adapters or [None] * len(rows)
        alike: dict[tuple[int, Adapter | None], list[int]] = {}
        for number, ids in enumerate(sequences):
            cache.rows[rows[number]] = Row()
            if ids:
                alike.setdefault((len(ids), adapters[number]), []).append(number)
        for (_, self._adapter), members in alike.items():
            batch = torch.tensor([sequences[number] for number in members])
            hidden, kept, routes = self._forward(batch, None, 0)
            state = None if kept is None else State(kept, len(members), frozen=True)
            for index, number in enumerate(members):
                prompt = Row(sequences[number], state, index)
                own = [] if routes is None else list(routes[index])
                cache.rows[rows[number]] = Row(list(prompt.ids), state, index, prompt, own)
                found[number] = hidden[index]
        return found

    def decode(
        self,
        cache: PlainCache,
        tokens: Tensor,
        positions: Tensor,
        span: int,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """See `transformer.Model.decode`; rows beyond the given ones are forgotten."""
        given = zip(tokens.tolist(), positions.tolist(), strict=True)
        adapters = self.adapters or [None] * len(tokens)
        groups: dict[tuple[int, bool, Adapter | None], list[Row]] = {}
        rows = []
        for number, (token, position) in enumerate(given):
            row = cache.rows.get(number)
            if row is None or position == 0:  # a prompt of one token has no prefill
                row = Row()
            assert len(row.ids) == position, "each token but the last was computed"
            row.ids.append(token)
            rows.append(row)
            key = position, row.state is not None, adapters[number]
            groups.setdefault(key, []).append(row)
        cache.rows = dict(enumerate(rows))
        last = dict[int, Tensor]()
        for (position, kept, self._adapter), members in groups.items():
            size = len(members) if kept else max(1, _TOKENS_AT_ONCE // (position + 1))
            for begin in range(0, len(members), size):
                part = members[begin : begin + size]
                last |= zip(map(id, part), self._advance(part, position, kept), strict=True)
        return self.logits(torch.stack([last[id(row)] for row in rows]))

    def logits(self, hidden: Tensor) -> Tensor:
        """See `transformer.Model.logits`."""
        return heads.logits_of(self._hf, hidden, self._matrix).float()

    def _advance(self, rows: list[Row], position: int, kept: bool) -> Tensor:
        """Computes the last token of rows of one length; returns hidden states [rows, hidden]."""
        before = gathered(rows) if kept else None
        begin = position if before else 0
        ids = torch.tensor([row.ids[begin:] for row in rows])
        kept_before = None if before is None else before.cache
        hidden, cache, routes = self._forward(ids, kept_before, begin)
        state = None if cache is None else State(cache, len(rows), frozen=False)
        for index, row in enumerate(rows):
            row.state, row.index = state, index
            if routes is not None:
                row.routes.append(routes[index, -1])
        return hidden[:, -1]

    def routes(self, cache: PlainCache, row: int) -> Sequence[npt.NDArray[np.int32]]:
        """See `runner.Decoder`."""
        return cache.rows[row].routes

    def _forward(
        self, ids: Tensor, cache: Any, begin: int
    ) -> tuple[Tensor, Any, npt.NDArray[np.int32] | None]:
        """Hidden states [rows, tokens, hidden] of ids at `begin`, the cache after them, and routes.

        Routes are [rows, tokens, layers, k], with zeros for layers without experts; None: the model
        has no experts.
        """
        options: dict[str, Any] = {"use_cache": False}
        if self._has_positions:
            options["position_ids"] = torch.arange(begin, begin + ids.shape[1]).expand(len(ids), -1)
        if self._keeps:
            options |= {"use_cache": True, self._cache_name: cache}
        with self._routes.recorded() as chosen:
            output = self._decoder(input_ids=ids, **options)
        routes = None
        if chosen:
            most = max(each.shape[1] for each in chosen.values())
            routes = np.zeros((*ids.shape, self._routes.layers, most), dtype=np.int32)
            for layer, each in chosen.items():
                routes[:, :, layer, : each.shape[1]] = each.numpy().reshape(*ids.shape, -1)
        return output.last_hidden_state, getattr(output, self._cache_name, None), routes

    @torch.inference_mode()
    def _try(self, config: PlainConfig) -> None:
        """Compares with transformers, and see whether a cache gives the same as no cache.

        Rows are mixed on the way: the cache of one sequence must be of no consequence to another's.

        Raises:
            ModelError: transformers' own logits are others, or depend on later tokens.
        """
        count, length, known = _TRIED
        reserved = guards.placeholders(self._hf.config)
        tokens = [token for token in range(min(config.vocab_size, 4096)) if token not in reserved]
        generator = torch.Generator().manual_seed(0)
        picked = torch.randint(0, len(tokens), (count, length), generator=generator)
        ids = torch.tensor(tokens)[picked]
        try:
            whole = self._hf(input_ids=ids, use_cache=False).logits.float()
            parts = (self._forward(part, None, 0)[0] for part in (ids, ids[:, :known]))
            own, early = (self.logits(part.flatten(0, 1)) for part in parts)
        except Exception as error:  # whatever an architecture raises that is not made for this
            raise self._refusal(config, f"transformers cannot compute it: {error}") from error
        exact = config.dtype == "float32"
        limit = _APART if exact else _APART_16
        if not _apart(own, whole.flatten(0, 1), exact) <= limit:
            raise self._refusal(config, "its head is more than a linear layer")
        if not _apart(early, whole[:, :known].flatten(0, 1), exact) <= limit:
            raise self._refusal(config, "its logits depend on later tokens")
        how, apart = "each from its whole sequence, since it has no cache", None
        if self._cache_name:
            self._keeps = True
            try:
                apart = self._decoded_apart(ids, whole, known, exact)
                why = f"its cache gives other logits ({apart:.1e} apart)"
            except Exception as error:  # whatever a cache raises that cannot do this
                apart, why = float("inf"), " ".join(f"{type(error).__name__}: {error}".split())
            self._keeps = apart <= limit
            how = "from a cache" if self._keeps else f"each from its whole sequence, since {why}"
        get_logger(__name__).info(
            "plain_decoder", architecture=config.architecture, tokens=how[:300]
        )

    @staticmethod
    def _refusal(config: PlainConfig, why: str) -> ModelError:
        said = " ".join(why.split())[:300]
        return ModelError(f"model path {config.folder}: {config.architecture}: {said}")

    def _decoded_apart(self, ids: Tensor, whole: Tensor, known: int, exact: bool) -> float:
        """Returns how far logits over a cache are from the others; rows change places each step."""
        cache, order, worst = PlainCache(ids.shape[1]), [0, 1], 0.0
        for row in order:
            self.prefill(cache, [row], [ids[row, :known].tolist()])
        for position in range(known, ids.shape[1]):
            at = torch.full((len(order),), position)
            found = self.decode(cache, ids[order, position], at, 0)
            worst = max(worst, _apart(found, whole[order, position], exact))
            cache.rows, order = {0: cache.rows[1], 1: cache.rows[0]}, order[::-1]
        return worst


def _apart(found: Tensor, wanted: Tensor, exact: bool) -> float:
    """The largest difference of logits [N, vocabulary], relative to their size.

    In 16 bits that of the median row: rounding may choose other experts for a token.
    """
    differences = (found - wanted).abs().amax(-1) / wanted.abs().amax(-1).clamp(min=1.0)
    return float(differences.max() if exact else differences.median())


def _places(hf: Any) -> dict[str, list[tuple[dict[str, Any], str, Tensor]]]:
    """Returns the place of each of the model's own tensors: module dictionary, key, meta tensor."""
    found: dict[int, list[tuple[dict[str, Any], str, Tensor]]] = {}
    for module in hf.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                found.setdefault(id(tensor), []).append((tensors, key, tensor))
    return {name: found[id(tensor)] for name, tensor in hub_names.live_tensors(hf).items()}
