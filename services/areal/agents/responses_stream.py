"""`/v1/responses` as the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputRefusal,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

from areal.agents.chat import Answer
from areal.agents.openai_responses import as_json, message_item, reasoning_item
from areal.agents.partial import AnswerDelta

Item = ResponseReasoningItem | ResponseOutputMessage | ResponseFunctionToolCall


class Events:
    """Writes reasoning, text and calls as items, one after another."""

    def __init__(self, answer_id: str, whole: Callable[[Answer | None], Response]) -> None:
        """`whole` returns the response for the complete answer, or for none (None) at the start."""
        self._id, self._whole = answer_id, whole
        self._number = 0
        self._items = 0
        self._open: Item | None = None
        self._text = ""

    def begin(self, delta: AnswerDelta | None = None) -> Iterator[dict[str, Any]]:
        """Yields the first events of the stream."""
        begun = self._whole(None)
        yield self._made(ResponseCreatedEvent, response=begun)
        yield self._made(ResponseInProgressEvent, response=begun)

    def more(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yields the events for new text of the unfinished answer."""
        if delta.reasoning:
            if self._open is None:
                yield from self._begin(reasoning_item(self._id, ""))
            yield self._delta(ResponseReasoningTextDeltaEvent, delta.reasoning)
        if delta.content:
            if isinstance(self._open, ResponseReasoningItem):
                yield from self._end(reasoning_item(self._id, self._text))
            if self._open is None:
                yield from self._begin(message_item(self._id, ""))
            yield self._delta(ResponseTextDeltaEvent, delta.content, logprobs=[])

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yields the events for everything that `more` has not written."""
        [answer] = answers
        response = self._whole(answer)
        for item in response.output:
            if isinstance(item, ResponseFunctionToolCall):
                yield from self._call(item)
            elif isinstance(item, ResponseReasoningItem):
                if answer.streamed[0] and not isinstance(self._open, ResponseReasoningItem):
                    continue  # already complete
                if self._open is None:
                    yield from self._begin(reasoning_item(self._id, ""))
                yield from self._remaining(ResponseReasoningTextDeltaEvent, answer.reasoning)
                yield from self._end(item)
            elif isinstance(item, ResponseOutputMessage):
                if self._open is None:
                    yield from self._begin(message_item(self._id, ""))
                [part] = item.content
                assert isinstance(part, ResponseOutputText)
                logprobs = [each.model_dump() for each in part.logprobs or []]
                yield from self._remaining(
                    ResponseTextDeltaEvent, answer.content, logprobs=logprobs
                )
                yield from self._end(item, logprobs=logprobs)
        ended = ResponseIncompleteEvent if answer.truncated else ResponseCompletedEvent
        yield self._made(ended, response=response)

    # ------------------------------------------------------------ items

    def _begin(self, item: Item) -> Iterator[dict[str, Any]]:
        self._open, self._text = item, ""
        bare = item.model_copy(update={"content": [], "status": "in_progress"})
        yield self._made(ResponseOutputItemAddedEvent, item=bare, output_index=self._items)
        [part] = item.content or []  # type: ignore[union-attr]
        yield self._made(ResponseContentPartAddedEvent, part=part.model_dump(), **self._at())

    def _delta(self, event: Any, text: str, **more: Any) -> dict[str, Any]:
        self._text += text
        return self._made(event, delta=text, **more, **self._at())

    def _remaining(self, event: Any, text: str, **more: Any) -> Iterator[dict[str, Any]]:
        if text.startswith(self._text) and text != self._text:
            yield self._delta(event, text[len(self._text) :], **more)

    def _end(self, item: Item, **more: Any) -> Iterator[dict[str, Any]]:
        [part] = item.content or []  # type: ignore[union-attr]
        assert not isinstance(part, ResponseOutputRefusal)
        if isinstance(item, ResponseReasoningItem):
            yield self._made(ResponseReasoningTextDoneEvent, text=part.text, **self._at())
        else:
            more = {"logprobs": [], **more}
            yield self._made(ResponseTextDoneEvent, text=part.text, **more, **self._at())
        yield self._made(ResponseContentPartDoneEvent, part=part.model_dump(), **self._at())
        yield self._made(ResponseOutputItemDoneEvent, item=item, output_index=self._items)
        self._items += 1
        self._open, self._text = None, ""

    def _call(self, item: ResponseFunctionToolCall) -> Iterator[dict[str, Any]]:
        empty = item.model_copy(update={"arguments": "", "status": "in_progress"})
        at = {"output_index": self._items, "item_id": item.id}
        yield self._made(ResponseOutputItemAddedEvent, item=empty, output_index=self._items)
        yield self._made(ResponseFunctionCallArgumentsDeltaEvent, delta=item.arguments, **at)
        yield self._made(
            ResponseFunctionCallArgumentsDoneEvent, arguments=item.arguments, name=item.name, **at
        )
        yield self._made(ResponseOutputItemDoneEvent, item=item, output_index=self._items)
        self._items += 1

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"output_index": self._items, "item_id": self._open.id, "content_index": 0}

    def _made(self, event: Any, **fields: Any) -> dict[str, Any]:
        kind = event.model_fields["type"].annotation.__args__[0]
        made = as_json(event(type=kind, sequence_number=self._number, **fields))
        self._number += 1
        return made
