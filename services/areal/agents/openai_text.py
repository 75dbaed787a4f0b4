"""OpenAI's completions and the route of tokens in, tokens out that vLLM and `renderers` share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from openai.types.completion import Completion
from openai.types.completion_choice import CompletionChoice, Logprobs

from areal.agents.allowed import SAMPLING_PARAMS
from areal.agents.chat import Answer
from areal.agents.fields import count, texts, usage_wanted
from areal.agents.openai_chat import MAX_N, id_of, usage_of
from areal.agents.partial import AnswerDelta
from areal.errors import InvalidInput
from areal.request_fields import get, need, shown, whole
from areal.tokenizer import Tokenizer


def read_text_request(body: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns arguments of `Session.complete`; raises InvalidInput."""
    usage_wanted(body)
    whole(body, "logprobs", 0)
    prompt = body.get("prompt")
    return {
        "prompt": tokenizer.encode(prompt) if isinstance(prompt, str) else _ids(body, "prompt"),
        "n": count(body, "n", MAX_N) or 1,
        "max_new_tokens": count(body, "max_tokens"),
        "stop": texts(body, "stop"),
    }


def read_token_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of `Session.complete` from vLLM's body; raises InvalidInput."""
    sampling = get(body, "sampling_params", dict) or {}
    SAMPLING_PARAMS.check(sampling, "sampling_params.")
    return {
        "prompt": _ids(body, "token_ids"),
        "n": count(sampling, "n", MAX_N) or 1,
        "max_new_tokens": count(sampling, "max_tokens"),
        "stop": texts(sampling, "stop"),
    }


def _ids(body: Mapping[str, Any], name: str) -> list[int]:
    ids = need(body, name, list)
    if not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidInput(f"{name}: expected token ids, got {shown(ids)}")
    return ids


def write_text(
    answer_id: str,
    model: str,
    answers: Sequence[Answer],
    body: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The answer to a completion request."""
    choices = []
    for index, answer in enumerate(answers):
        reason: Literal["length", "stop"] = "length" if answer.truncated else "stop"
        choice = CompletionChoice(index=index, text=answer.content, finish_reason=reason)
        if body.get("logprobs") is not None:
            ids = answer.response.output_tokens
            choice.logprobs = Logprobs(
                tokens=[tokenizer.decode([i]) for i in ids],
                token_logprobs=list(answer.response.output_logprobs),
            )
        choices.append(choice)
    whole = Completion(
        id=answer_id,
        object="text_completion",
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage_of(answers),
    ).model_dump(mode="json", exclude_unset=True)
    for made in whole["choices"]:
        made["id"] = id_of(answer_id, made["index"])
    return whole


class TextEvents:
    """Writes answers as the chunks of a stream."""

    def __init__(
        self, answer_id: str, model: str, body: Mapping[str, Any], tokenizer: Tokenizer
    ) -> None:
        """`body` is the request."""
        self._id, self._model, self._body, self._tokenizer = answer_id, model, body, tokenizer
        self._created = int(time.time())

    def begin(self, delta: AnswerDelta | None = None) -> Iterator[dict[str, Any]]:
        """Returns nothing: a stream of texts has no first chunk of its own."""
        return iter(())

    def more(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yields the chunks for new text of an unfinished answer."""
        choice = {"index": delta.index, "text": delta.content, "finish_reason": None}
        yield {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [{**choice, "logprobs": None}],
        }

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yields what `more` has not written: a chunk per answer, and the usage if requested."""
        whole = write_text(self._id, self._model, answers, self._body, self._tokenizer)
        whole["created"] = self._created
        usage = whole.pop("usage")
        for choice, answer in zip(whole["choices"], answers, strict=True):
            yield {**whole, "choices": [{**choice, "text": answer.unsent[1]}]}
        if usage_wanted(self._body):
            yield {**whole, "choices": [], "usage": usage}


def write_tokens(answer_id: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the ids and logprobs of every answer."""
    return {
        "request_id": answer_id,
        "choices": [
            {
                "index": index,
                "id": id_of(answer_id, index),
                "token_ids": answer.response.output_tokens,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
                        for token, logprob in zip(
                            answer.response.output_tokens,
                            answer.response.output_logprobs,
                            strict=True,
                        )
                    ]
                },
                "finish_reason": "length" if answer.truncated else "stop",
            }
            for index, answer in enumerate(answers)
        ],
        "usage": usage_of(answers).model_dump(mode="json", exclude_unset=True),
    }
