"""SGLang's /generate: what a request may say, and what the response looks like.

Bad input raises `SchemaError` (the body is malformed) or `RequestError` (the engine cannot do it);
both become HTTP 400, in SGLang's two shapes. Messages are one line and name field and value.
"""

from __future__ import annotations

import base64
import binascii
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import getrandbits
from typing import TYPE_CHECKING, Any

from areal.request_fields import OutOfRange, WrongKind, get, number, shown, whole
from areal_inference.decode.grammar import KINDS, Grammar, GrammarError
from areal_inference.decode.request import Request, SamplingParams
from areal_inference.model.config import ServedModel

if TYPE_CHECKING:
    from areal_inference.model.adapters import Adapter
    from areal_inference.model.vision import See

MAX_SEQUENCES = 4096
"""Most sequences one /generate call may start."""

MAX_TOP_LOGPROBS = 128
"""Most ids that are returned for one position."""

RESERVED_POSITIONS = 6
"""Positions of the context that SGLang keeps from prompts; this engine does the same, because
clients would otherwise rely on them."""

Constrain = Callable[[str, str], Grammar]
"""Compiles a grammar, given its kind and value; raises GrammarError."""

_DEFAULT_MAX_NEW_TOKENS = 128
_MAX_STOP_TOKENS = 256

# Options of SGLang that this engine does not have, with the values that ask for nothing.
_UNSUPPORTED_PARAMS: dict[str, tuple[Any, ...]] = {
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "min_p": (0, 0.0, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "ebnf": (None,),
    "logit_bias": (None, {}),
}
_HARMLESS_PARAMS = {
    "spaces_between_special_tokens",
    "no_stop_trim",
    "custom_params",
}
_OWN_PARAMS = {
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "sampling_seed",
    "skip_special_tokens",
    "stream_interval",
    *KINDS,
}
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_embeds": (None,),
    "audio_data": (None, []),
    "video_data": (None, []),
    "token_ids_logprob": (None, []),
    "session_params": (None,),
    "return_hidden_states": (None, False),
    "return_sampling_mask": (None, False),
    "return_entropy": (None, False),
}


class SchemaError(WrongKind):
    """A field is missing, of the wrong type or unknown."""


class RequestError(OutOfRange):
    """A well-formed request that this engine refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request is checked against.

    Example:
        ``Limits(vocab_size=261, context_length=512, max_total_tokens=65536,
        eos_token_ids=frozenset({257}))``
    """

    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, model: ServedModel, context_length: int, max_total_tokens: int) -> Limits:
        """Limits of a model served with this context and cache."""
        return cls(
            vocab_size=model.vocab_size,
            context_length=context_length,
            max_total_tokens=max_total_tokens,
            eos_token_ids=model.eos_token_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """One parsed /generate body."""

    requests: list[Request]
    stream: bool
    return_logprob: bool
    return_text: bool
    """Put each token's text into the logprob triples."""
    as_list: bool
    """Answer with a JSON array (several inputs, or n > 1)."""


def parse_generate(
    body: Any,
    limits: Limits,
    encode: Callable[[str], list[int]] | None,
    see: See | None = None,
    constrain: Constrain | None = None,
    adapters: Mapping[str, Adapter] | None = None,
) -> GenerateCall:
    """Checks a decoded /generate body and makes its requests.

    Args:
        body: The decoded JSON value.
        limits: Limits of the running model.
        encode: The tokenizer, or None when there is none.
        see: Makes patches of images; None: the model sees nothing.
        constrain: Compiles a grammar; None: this server has no constrained decoding.
        adapters: Those that are loaded, by name.

    Raises:
        SchemaError: Malformed.
        RequestError: Refused.
    """
    if not isinstance(body, dict):
        raise SchemaError("body: expected a JSON object")
    for name, neutral in _UNSUPPORTED_FIELDS.items():
        if name in body and body[name] not in neutral:
            raise RequestError(f"{name}: not supported by this engine")
    prompts, batched = _prompts(body, encode)
    if not prompts:
        raise SchemaError("input_ids: expected at least one prompt")
    params_list = _per_prompt(body, "sampling_params", len(prompts), batched, dict, {})
    n = _integer(params_list[0], "n", 1, 1, MAX_SEQUENCES)
    if len(prompts) * n > MAX_SEQUENCES:
        raise RequestError(f"{len(prompts)} prompts x n={n}, expected at most {MAX_SEQUENCES}")
    return_logprob = _boolean(body, "return_logprob", default=False)
    start = _integer(body, "logprob_start_len", -1, -1, None)
    top = _integer(body, "top_logprobs_num", 0, 0, min(MAX_TOP_LOGPROBS, limits.vocab_size))
    if top and not (return_logprob and start >= 0):
        raise RequestError(
            "top_logprobs_num: only of prompts on this engine, expected return_logprob and "
            "logprob_start_len"
        )
    stream = _boolean(body, "stream", default=False)
    routed_from = _integer(body, "routed_experts_start_len", 0, 0, None)
    routed = _boolean(body, "return_routed_experts", default=False)
    rids = _per_prompt(body, "rid", len(prompts), batched, str, None)
    extra_keys = _per_prompt(body, "extra_key", len(prompts), batched, str, None)
    named = _per_prompt(body, "lora_path", len(prompts), batched, str, "")
    files = _images(body, len(prompts), batched, see)
    now = time.time()
    requests: list[Request] = []
    # One dictionary may be that of all prompts.
    constrained, grammar = None, None
    for given, raw, rid, extra_key, name, images in zip(
        prompts, params_list, rids, extra_keys, named, files, strict=True
    ):
        _check_prompt(given, limits)
        prompt, seen = given, None
        if images and see is not None:
            prompt, seen = see(given, images)
            _check_prompt(prompt, limits)
        if routed and routed_from > len(prompt):
            raise RequestError(
                f"routed_experts_start_len: {routed_from}, expected at most {len(prompt)}, the "
                "tokens of the prompt"
            )
        if raw is not constrained:
            constrained, grammar = raw, _grammar(raw, constrain)
        base = rid or f"{getrandbits(128):032x}"
        for index in range(n):
            requests.append(
                Request(
                    rid=base if n == 1 else f"{base}_{index}",
                    input_ids=prompt,
                    params=_sampling_params(raw, len(prompt), index, limits),
                    extra_key=extra_key,
                    logprob_start=min(start, len(prompt) - 1) if return_logprob else -1,
                    top_logprobs=top,
                    stream=stream,
                    received_at=now,
                    grammar=grammar.copy() if grammar is not None else None,
                    seen=seen,
                    adapter=_adapter(name, adapters or {}),
                    routed_from=routed_from if routed else None,
                )
            )
    return GenerateCall(
        requests=requests,
        stream=stream,
        return_logprob=return_logprob,
        return_text=_boolean(body, "return_text_in_logprobs", default=False),
        as_list=batched or n > 1,
    )


def _adapter(name: str, loaded: Mapping[str, Adapter]) -> Adapter | None:
    if name and name not in loaded:
        raise RequestError(
            f"lora_path {name[:200]!r}: expected an adapter that is loaded: "
            f"{', '.join(loaded) or 'there is none'}"
        )
    return loaded[name] if name else None


def _prompts(
    body: dict[str, Any], encode: Callable[[str], list[int]] | None
) -> tuple[list[list[int]], bool]:
    """The prompts as token ids, and whether they came as a list of prompts."""
    ids, text = body.get("input_ids"), body.get("text")
    if (ids is None) == (text is None):
        raise SchemaError("body: expected exactly one of input_ids and text")
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(item, str) for item in texts):
            raise SchemaError("text: expected a string or a list of strings")
        if encode is None:
            raise RequestError("text: this server has no tokenizer, expected input_ids")
        return [encode(item) for item in texts], isinstance(text, list)
    if not isinstance(ids, list):
        raise SchemaError("input_ids: expected a list of token ids or a list of such lists")
    batched = bool(ids) and isinstance(ids[0], list)
    return (ids if batched else [ids]), batched


def _images(body: dict[str, Any], count: int, batched: bool, see: See | None) -> list[list[bytes]]:
    """The files of each prompt's images: `image_data` is a list, or a list of one per prompt."""
    given = body.get("image_data") or []
    if not given:
        return [[] for _ in range(count)]
    if see is None:
        raise RequestError("image_data: this model does not take images")
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list):
        raise SchemaError("image_data: expected a list of images")
    nested = [each if isinstance(each, list) else [each] for each in given]
    if not batched:
        nested = [[file for each in nested for file in each]]
    if len(nested) != count:
        raise SchemaError(f"image_data: {len(nested)} values for {count} prompts")
    return [[_file(file) for file in each] for each in nested]


def _file(value: Any) -> bytes:
    """The bytes of an image: a data URL, or base64 alone."""
    if not isinstance(value, str):
        raise SchemaError("image_data: expected data URLs")
    if value.startswith(("http:", "https:", "file:", "/")):
        raise RequestError("image_data: this engine fetches nothing, expected a data URL")
    try:
        return base64.b64decode(value.rpartition(",")[2], validate=True)
    except binascii.Error as error:
        raise SchemaError(f"image_data: not base64: {error}") from None


def _check_prompt(ids: Any, limits: Limits) -> None:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise SchemaError("input_ids: expected a list of token ids or a list of such lists")
    if not ids:
        raise RequestError("input_ids: empty prompt, expected at least one token")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestError(
            f"input_ids: token id {shown(bad)} is out of vocabulary, expected "
            f"0..{limits.vocab_size - 1}"
        )
    if len(ids) >= limits.context_length:
        raise RequestError(
            f"The input ({len(ids)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    if len(ids) >= limits.context_length - RESERVED_POSITIONS:
        raise RequestError(
            f"Input length ({len(ids)} tokens) exceeds the maximum allowed length "
            f"({limits.context_length - RESERVED_POSITIONS} tokens)."
        )
    if len(ids) >= limits.max_total_tokens:
        raise RequestError(
            f"The input ({len(ids)} tokens) is longer than the KV cache "
            f"({limits.max_total_tokens} tokens)."
        )


def _sampling_params(
    raw: dict[str, Any], prompt_length: int, index: int, limits: Limits
) -> SamplingParams:
    for key, value in raw.items():
        if key in _OWN_PARAMS or key in _HARMLESS_PARAMS:
            continue
        if key not in _UNSUPPORTED_PARAMS:
            raise SchemaError(f"sampling_params.{key}: unknown field")
        if value not in _UNSUPPORTED_PARAMS[key]:
            raise RequestError(f"sampling_params.{key}: not supported by this engine")
    room = min(limits.context_length, limits.max_total_tokens) - prompt_length
    max_new = _integer(raw, "max_new_tokens", min(_DEFAULT_MAX_NEW_TOKENS, room), 1, None)
    if max_new > room:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of "
            f"{min(limits.context_length, limits.max_total_tokens)} tokens: {prompt_length} tokens "
            f"from the input and {shown(max_new)} for the completion (max_new_tokens)."
        )
    stop = raw.get("stop_token_ids") or []
    if not isinstance(stop, list) or not all(type(i) is int for i in stop):
        raise SchemaError("sampling_params.stop_token_ids: expected a list of token ids")
    if len(stop) > _MAX_STOP_TOKENS or any(not 0 <= i < limits.vocab_size for i in stop):
        raise RequestError(
            f"sampling_params.stop_token_ids: expected at most {_MAX_STOP_TOKENS} ids in "
            f"0..{limits.vocab_size - 1}"
        )
    ignore_eos = _boolean(raw, "ignore_eos", default=False)
    top_k = _integer(raw, "top_k", -1, -1, None)
    if top_k == 0:
        raise RequestError("sampling_params.top_k: 0, expected -1 (all) or at least 1")
    seed = _integer(raw, "sampling_seed", None, 0, None)
    return SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=_integer(raw, "min_new_tokens", 0, 0, max_new),
        temperature=_number(raw, "temperature", 1.0, low=0.0, high=1e6),
        top_p=_number(raw, "top_p", 1.0, low=1e-9, high=1.0),
        top_k=top_k,
        stop_ids=frozenset() if ignore_eos else limits.eos_token_ids.union(stop),
        # The n samples of a seeded request must differ.
        seed=None if seed is None else seed + index,
        skip_special_tokens=_boolean(raw, "skip_special_tokens", default=True),
        stream_interval=_integer(raw, "stream_interval", 1, 1, None),
    )


def _grammar(raw: dict[str, Any], constrain: Constrain | None) -> Grammar | None:
    """Returns the grammar of the answer."""
    given = [kind for kind in KINDS if raw.get(kind) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(f"sampling_params.{given[1]}: expected no {given[0]} as well")
    [kind] = given
    if not isinstance(raw[kind], str):
        raise SchemaError(f"sampling_params.{kind}: expected a string")
    try:
        if constrain is None:
            raise GrammarError("this server has no constrained decoding, since it has no tokenizer")
        return constrain(kind, raw[kind])
    except GrammarError as error:
        raise RequestError(f"sampling_params.{kind}: {error}") from None


def _per_prompt(
    body: dict[str, Any], name: str, count: int, batched: bool, kind: type, default: Any
) -> list[Any]:
    """A field that is one value for all prompts, or (rid apart) a list of one per prompt."""
    value = body.get(name)
    if isinstance(value, list) and batched:
        values = value
        if len(values) != count:
            raise SchemaError(f"{name}: {len(values)} values for {count} prompts")
    elif name == "rid" and value is not None and count > 1:
        raise SchemaError("rid: expected a list, one per prompt")
    else:
        values = [value] * count
    if not all(item is None or isinstance(item, kind) for item in values):
        raise SchemaError(f"{name}: expected {kind.__name__}, or a list of one per prompt")
    return [default if item is None else item for item in values]


def _boolean(body: dict[str, Any], name: str, *, default: bool) -> bool:
    value = get(body, name, bool)
    return default if value is None else value


def _integer(body: dict[str, Any], name: str, default: Any, low: int, high: int | None) -> Any:
    value = whole(body, name, low, high)
    return default if value is None else value


def _number(body: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = number(body, name, low, high, "sampling_params.")
    return default if value is None else value


# --- responses ----------------------------------------------------------------------------------


def render(
    request: Request,
    call: GenerateCall,
    decode: Callable[[list[int], bool], str] | None,
) -> dict[str, Any]:
    """SGLang's response (or cumulative stream event) for one request, as it stands now."""
    finish = request.finish  # read before the length: set means that no token follows
    count = len(request.logprobs)
    output_ids = request.output_ids[:count]
    now = time.time()
    versions = _version_spans(request.spans, count)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.input_ids),
        "weight_version": request.weight_version,
        "num_retractions": request.num_retractions,
        "queue_time": max(0.0, request.started_at - request.received_at),
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": request.cached_tokens,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": (request.finished_at or now) - request.received_at,
        "request_received_ts": request.received_at,
    }
    if finish is not None:
        meta["weight_versions"] = versions
        if request.routes and request.routed_from is not None:
            rows = request.routes[request.routed_from : len(request.input_ids) + count - 1]
            meta["routed_experts"] = b64encode(b"".join(row.tobytes() for row in rows)).decode()
        if request.first_token_at:
            elapsed = request.finished_at - request.first_token_at
            meta["first_token_latency"] = request.first_token_at - request.received_at
            meta["decode_throughput"] = (count - 1) / elapsed if elapsed > 0 else None
    if call.return_logprob:
        text = (lambda token: decode([token], False)) if call.return_text and decode else None
        meta["input_token_logprobs"] = _input_triples(request, text)
        if request.top_logprobs:
            meta["input_top_logprobs"] = _top_triples(request, text)
        meta["output_token_logprobs"] = [
            [logprob, token, text(token) if text else None]
            for logprob, token in zip(request.logprobs[:count], output_ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = count
    response: dict[str, Any] = {}
    if decode is not None:
        # The matched stop token stays in output_ids and is trimmed from the text.
        shown = output_ids[:-1] if finish and finish["type"] == "stop" else output_ids
        response["text"] = decode(shown, request.params.skip_special_tokens)
    response["output_ids"] = output_ids
    response["meta_info"] = meta
    return response


def _version_spans(spans: list[tuple[str, int]], count: int) -> list[dict[str, Any]]:
    ends = [start for _, start in spans[1:]] + [count]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(spans, ends, strict=False)
    ]


def _input_triples(request: Request, text: Callable[[int], str] | None) -> list[list[Any]]:
    if request.logprob_start < 0 or request.input_logprobs is None:
        return []
    ids = request.input_ids[request.logprob_start :]
    # The first position has no logprob: nothing before it was asked for.
    logprobs = [None, *request.input_logprobs]
    return [[lp, i, text(i) if text else None] for lp, i in zip(logprobs, ids, strict=True)]


def _top_triples(request: Request, text: Callable[[int], str] | None) -> list[Any]:
    """Returns triples of the likeliest ids of each position; none for the first."""
    if request.input_top_logprobs is None:
        return []
    found = [
        [[lp, i, text(i) if text else None] for lp, i in each]
        for each in request.input_top_logprobs
    ]
    return [None, *found]
