"""One session: answers an agent's requests, and records each call as it was sampled.

request ── messages ──> does it extend an earlier answer?
                          yes: that answer's own ids, then the messages since (the bridge)
                          no:  rendered from the start: a new root of the tree
             ids ──> the model ──> ids, recorded ──> text, thought, calls ──> the agent
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from areal.agents.calls import CallStore
from areal.agents.chat import (
    Answer,
    ChatRequest,
    History,
    Kept,
    cut_at_stop,
    cut_where,
    read_answer,
)
from areal.agents.headers import Repeats
from areal.agents.outlines import Outline
from areal.agents.partial import AnswerDelta, OnDelta, PartialAnswer
from areal.chassis.logging import get_logger
from areal.errors import (
    ArealError,
    CapacityExceeded,
    InvalidInput,
    PromptTooLong,
    Unavailable,
    WaitTimeout,
)
from areal.tokenizer import Tokenizer
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.workflows.answer_text import AnswerText
from areal.workflows.large_text import apart, size_of, strings, texts_shown
from areal.workflows.reasoning import opens_reasoning
from areal.workflows.rendering import ChatRenderer, Message, Reply

OnBug = Callable[[Exception], None]
"""Called with an exception that no one expected."""
_CHARS_PER_TOKEN = 4
Generate = Callable[[LLMRequest], Awaitable[list[LLMResponse]]]
"""Answers a prompt `gconfig.n_samples` times."""


_ONCE = Repeats()


def report_bug(error: Exception) -> None:
    """Logs an unexpected exception with its traceback."""
    get_logger(__name__).error("agent_call_failed", exc_info=error)


@dataclass(frozen=True)
class Model:
    """The model as a session sees it."""

    name: str
    generate: Generate
    tokenizer: Tokenizer
    renderer: ChatRenderer
    gconfig: GenerationHyperparameters
    """How to sample, whatever agents ask for: training assumes it. `n_samples` is theirs."""
    context_length: int | None = None
    """The most tokens of prompt and answer; None: what the tokenizer says, if it says anything."""
    on_bug: OnBug = report_bug
    """Called with exceptions that the agent sees as an error with status 500."""


@dataclass(frozen=True)
class _Start:
    """Where an answer starts."""

    ids: list[int]
    """The prompt."""
    extends: int | None = None
    """The answer that the prompt continues."""
    old: int = 0
    """Number of messages up to the end of that answer."""
    kept: int | None = None
    """The same answer, if its conversation is kept and has the same lead."""


class Session:
    """Serves an agent's calls, any number of them at once."""

    def __init__(self, session_id: str, model: Model, calls: CallStore) -> None:
        """Creates the session, whose requests all prefer the same server."""
        self.id = session_id
        self.model = model
        self.calls = calls
        self.failure: ArealError | None = None
        """Why the model did not answer the latest call, where that was no fault of the agent's."""

    def bug(self, error: Exception) -> None:
        """Notes an unexpected exception: the agent is not charged with it."""
        self.model.on_bug(error)
        self.failure = Unavailable(f"a model call failed: {type(error).__name__}: {error}")

    async def chat(
        self,
        request: ChatRequest,
        *,
        repeats: Repeats = _ONCE,
        on_delta: OnDelta | None = None,
    ) -> list[Answer]:
        """Answers a chat request `n` times.

        Args:
            request: The agent's request.
            repeats: How the request can be recognized if it is sent again.
            on_delta: Called with new text while the answers are sampled.

        Raises:
            InvalidInput: The chat template refuses the messages, or they leave no room.
            Unavailable: No server could answer. The other errors of `agenerate` are raised, too.
        """
        rest = _size_of_rest(request)
        size = size_of(request.messages) + rest
        await self.refuse_longer([*texts_shown(request.messages), request.begun])
        history = await apart(size, History.of, request.messages, request.tools, request.variables)
        renderer = self.model.renderer
        if request.variables:
            renderer = renderer.with_variables(request.variables)
        offered = request.tools if request.may_call and request.tools else []
        if offered:
            renderer.check_tools(request.messages, offered)
        start = await self._prompt(request, history, renderer, rest)
        prompt = start.ids
        limit = request.max_new_tokens
        opened = opens_reasoning(prompt, self.model.tokenizer, request.begun)
        begun = bool(request.begun)
        partials = [
            PartialAnswer(
                self.model.tokenizer,
                request.stop,
                opened=opened,
                calls=bool(offered),
                begun=begun,
            )
            for _ in range(request.n)
        ]
        grammar = request.required.grammar(
            offered,
            parallel=request.parallel,
            opened=opened,
            prompt=prompt,
            renderer=renderer,
            tokenizer=self.model.tokenizer,
        )
        first, responses = await self._sample(prompt, partials, limit, repeats, on_delta, grammar)
        answers = []
        for number, whole in enumerate(responses, first):
            answer, text = await apart(
                _CHARS_PER_TOKEN * len(whole.output_tokens),
                self._read,
                number,
                whole,
                request,
                offered=bool(offered),
                opened=opened,
            )
            partial = partials[number - first]
            answer = replace(answer, streamed=(partial.reasoning, partial.content))
            turns = history.ends(answer, request.begun)
            kept = ""
            if request.keep:
                first_new = request.lead if start.kept is None else max(start.old, request.lead)
                new = [*request.messages[first_new:], answer.message]
                kept = Kept(start.kept, request.lead, new).write()
            outline = Outline.of(request, start.extends, request.messages[start.old :], answer)
            await self.calls.record(number, answer.response, text, turns, kept, outline.write())
            answers.append(answer)
        return answers

    def _read(
        self, number: int, whole: LLMResponse, request: ChatRequest, *, offered: bool, opened: bool
    ) -> tuple[Answer, str]:
        """Returns what an agent reads of an answer, and the answer's text; never raises."""

        def parse(ids: Sequence[int]) -> Reply:
            return self.model.renderer.parse(ids, request.tools, opened=opened)

        texts = AnswerText(self.model.tokenizer)
        response, stopped_by = cut_at_stop(whole, request.stop, texts)
        reply = parse(response.output_tokens)
        if offered and not request.parallel and len(reply.tool_calls) > 1:
            response = cut_where(response, lambda ids: bool(parse(ids).tool_calls))
            reply = parse(response.output_tokens)
        answer = read_answer(
            number,
            response,
            reply,
            offered=offered,
            opened=opened,
            stopped_by=stopped_by,
            begun=bool(request.begun),
        )
        return answer, reply.text

    async def refuse_longer(self, texts: Sequence[str]) -> None:
        """Refuses texts that cannot fit, before a template or a digest is made of them.

        Raises:
            PromptTooLong: They are too long.
        """
        tokenizer = self.model.tokenizer
        if (most := self.model.context_length or tokenizer.longest) is not None:
            await apart(sum(map(len, texts)), tokenizer.refuse_longer, texts, most)

    def _check(self, prompt: Sequence[int]) -> None:
        """Refuses ids before they are recorded: the ledger has no place for others."""
        tokenizer = self.model.tokenizer
        if prompt and not 0 <= min(prompt) <= max(prompt) < tokenizer.vocab_size:
            bad = next(token for token in prompt if not 0 <= token < tokenizer.vocab_size)
            raise InvalidInput(f"token id {bad}: expected 0 to {tokenizer.vocab_size - 1}")
        most = self.model.context_length or tokenizer.longest
        if most is not None and len(prompt) >= most:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens leaves no room in a context of {most}",
                tokens=len(prompt),
                limit=most,
            )

    async def conversation(self, number: int) -> list[Message]:
        """Returns the messages up to and including an answer; empty if they were not kept."""
        parts: list[list[Message]] = []
        at: int | None = number
        while at is not None:
            content = await self.calls.kept(at)
            if not content:
                return []
            kept = Kept.read(content)
            parts.append(kept.messages)
            at = kept.after
        return [message for part in reversed(parts) for message in part]

    def count_tokens(self, request: ChatRequest) -> int:
        """Returns the length of a request's prompt, rendered from its start; raises InvalidInput.

        In a conversation that continues, the prompt may differ by the few tokens by which sampled
        answers differ from rendered ones.
        """
        renderer = self.model.renderer.with_variables(request.variables)
        return len(renderer.render(request.messages, request.tools, begun=request.begun))

    async def answer_of(self, number: int) -> Message | None:
        """Returns an answer as a message; None: it was not kept."""
        content = await self.calls.kept(number)
        return Kept.read(content).messages[-1] if content else None

    async def complete(
        self,
        prompt: Sequence[int],
        n: int = 1,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        *,
        repeats: Repeats = _ONCE,
        on_delta: OnDelta | None = None,
    ) -> list[Answer]:
        """Answers token ids `n` times: tokens in, tokens out. Raises the errors of `chat`."""
        partials = [PartialAnswer(self.model.tokenizer, stop, plain=True) for _ in range(n)]
        first, responses = await self._sample(
            list(prompt), partials, max_new_tokens, repeats, on_delta
        )
        answers, texts = [], AnswerText(self.model.tokenizer, plain=True)
        for number, whole in enumerate(responses, first):
            response, stopped_by = cut_at_stop(whole, stop, texts)
            text = texts.of(response.output_tokens)
            await self.calls.record(number, response, text, ())
            shown = text.partition(stopped_by)[0] if stopped_by else text
            streamed = "", partials[number - first].content
            answers.append(
                Answer(number, response, shown, stopped_by=stopped_by, streamed=streamed)
            )
        return answers

    async def _sample(
        self,
        prompt: list[int],
        partials: Sequence[PartialAnswer],
        max_new_tokens: int | None,
        repeats: Repeats,
        on_delta: OnDelta | None,
        grammar: str = "",
    ) -> tuple[int, list[LLMResponse]]:
        """Returns the number of the first answer, and all answers, one for each of `partials`."""
        self._check(prompt)
        n = len(partials)
        limit = self.model.gconfig.max_new_tokens
        limit = min(limit, max_new_tokens or limit)
        gconfig = replace(self.model.gconfig, n_samples=n, max_new_tokens=limit)
        first = await self.calls.begin(prompt, n, repeats)

        def on_tokens(index: int, ids: Sequence[int]) -> None:
            reasoning, content = partials[index].update(ids)
            if on_delta is not None and (reasoning or content):
                on_delta(AnswerDelta(first, len(prompt), index, reasoning, content))

        # With a grammar, an interrupted answer starts again: what was streamed could not be taken
        # back.
        live = on_delta is not None and not grammar
        request = LLMRequest(
            prompt,
            gconfig,
            affinity_key=self.id,
            grammar=grammar,
            on_tokens=on_tokens if live else None,
        )
        try:
            responses = await self.model.generate(request)
            if any(response.stop_reason is StopReason.ABORT for response in responses):
                raise Unavailable("the model was interrupted; try again in 1 s")
            ends = zip(partials, responses, strict=True)
            if not all(each.agrees_with(response.output_tokens) for each, response in ends):
                raise Unavailable("the server failed while streaming the answer; try again in 1 s")
        except (Unavailable, WaitTimeout, CapacityExceeded) as error:
            self.failure = error
            raise
        self.failure = None
        return first, responses

    async def _prompt(
        self, request: ChatRequest, history: History, renderer: ChatRenderer, rest: int
    ) -> _Start:
        """Renders what the model has not seen; `rest` is that of `_size_of_rest`."""
        messages = request.messages
        # Only what an answer ended can be extended, and only by what the model has not said.
        said = [i for i, message in enumerate(messages[:-1]) if message["role"] == "assistant"]
        if said and messages[-1]["role"] != "assistant":
            old = said[-1] + 1
            number = await self.calls.find(history.turns[old - 1], request.extends)
            if number is not None:
                whole = await self.calls.whole(number)
                new = named_results(messages[old:], messages[old - 1])
                whole += await apart(
                    rest + size_of(new), renderer.bridge, whole, new, request.tools, request.begun
                )
                content = await self.calls.kept(number) if request.keep else ""
                same = bool(content) and Kept.read(content).lead == request.lead
                return _Start(whole, number, old, number if same else None)
        rendered = await apart(
            rest + size_of(messages),
            renderer.render,
            messages,
            request.tools,
            begun=request.begun,
        )
        return _Start(rendered)


def named_results(messages: Sequence[Message], answer: Message) -> list[Message]:
    """The messages after an answer, with the names of the functions whose results they are.

    Most APIs leave them out; templates take them from the answer's calls, which a bridge has not.
    """
    calls = answer.get("tool_calls") or []
    names = {call["id"]: call["function"]["name"] for call in calls if call.get("id")}
    return [
        {"name": names[message["tool_call_id"]], **message}
        if message["role"] == "tool" and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _size_of_rest(request: ChatRequest) -> int:
    """Returns about how many characters a request has besides its messages."""
    values = request.tools, request.variables, request.begun
    return sum(map(len, strings(values)))
