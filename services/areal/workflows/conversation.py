"""A conversation as the model has seen it: token ids that are only ever appended to.

Rendering the whole chat again for each turn would turn sampled ids into text and back. That changes
them if the model sampled a special token, or split a word differently from the tokenizer; then
training would use other tokens than those sampled. Here the ids, logprobs and versions of each
answer are kept as sampled, and only the text between two answers is rendered:

    | opening messages | answer | end of turn, new messages, header | answer | ...
      loss_mask 0        1        0                                   1
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.errors import InvalidInput, WorkflowError
from areal.tokenizer import Tokenizer
from areal.types import LLMResponse, Trajectory
from areal.workflows.base import assemble_trajectory
from areal.workflows.rendering import ChatRenderer, Message, Reply, TemplateRenderer


class Conversation:
    """Keeps an episode's chat, with token ids exactly as sampled, and turns it into a trajectory.

    Example:
        >>> chat = Conversation(engine.tokenizer, [{"role": "user", "content": "12+34="}])
        >>> reply = chat.add_response(await engine.agenerate(LLMRequest(chat.input_ids, gconfig)))
        >>> chat.add_messages({"role": "user", "content": "That is wrong, try again."})
        >>> chat.add_response(await engine.agenerate(LLMRequest(chat.input_ids, gconfig)))
        >>> chat.trajectory(reward=1.0)
    """

    def __init__(
        self,
        renderer: ChatRenderer | Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
    ) -> None:
        """Converts the opening messages to token ids.

        Args:
            renderer: A `ChatRenderer`, or a tokenizer, whose chat template is used. To set template
                variables, pass
                `areal.workflows.rendering.TemplateRenderer(tokenizer, enable_thinking=False)`.
            messages: The messages before the model's first answer.
            tools: JSON schemas of the functions offered to the model.

        Raises:
            InvalidInput: There are no messages, or the chat template refuses them or omits the
                model's answers.
        """
        self._renderer = TemplateRenderer(renderer) if isinstance(renderer, Tokenizer) else renderer
        self._tools = tools
        self._messages: list[Message] = []
        self._responses: list[LLMResponse] = []
        self._starts: list[int] = []
        self._ids: list[int] = []  # up to the end of the last answer
        self._pending: list[Message] = []
        self._context: list[int] = []  # what follows them
        self._thinking = False  # whether the last answer ended within its reasoning
        self.add_messages(*messages)
        # Refused now rather than after the first answer.
        self._renderer.bridge(self._context, [{"role": "user", "content": "?"}], tools)

    @property
    def input_ids(self) -> list[int]:
        """All token ids so far: the prompt of the next request."""
        return self._ids + self._context

    @property
    def messages(self) -> list[Message]:
        """The chat as text: the added messages, and the `Reply.message` of each answer."""
        return [*self._messages, *self._pending]

    def add_messages(self, *messages: Message) -> None:
        """Adds messages that the model reads before its next answer, such as a user's.

        Raises:
            InvalidInput: There are no messages, a message has no role, a message has the role
                `assistant` (allowed only before the model's first answer), or the chat template
                refuses or omits a message.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or "role" not in message:
                raise InvalidInput(
                    f"messages[{index}]: expected an object with 'role' and 'content', "
                    f"got {type(message).__name__}"
                )
            if message["role"] == "assistant" and self._responses:
                raise InvalidInput(
                    f"messages[{index}]: role 'assistant' after the opening: expected 'user', "
                    f"'tool' or 'system'; use add_response for the model's answers"
                )
        if not messages:
            raise InvalidInput("messages: expected at least one")
        pending = [*self._pending, *messages]
        self._context = (
            self._renderer.bridge(self._ids, pending, self._tools)
            if self._responses
            else self._renderer.render(pending, self._tools, add_generation_prompt=True)
        )
        self._pending = pending

    def add_response(self, response: LLMResponse) -> Reply:
        """Appends the model's answer to `input_ids` and returns it as text.

        To continue an answer that was cut off, send another request without adding messages.

        Raises:
            WorkflowError: The response was sampled for a prompt other than `input_ids`.
        """
        if list(response.input_tokens) != self.input_ids:
            raise WorkflowError(
                f"Conversation: answer {len(self._responses)} was sampled for ids other than "
                f"input_ids; a rewritten history needs a new Conversation"
            )
        # An answer that was cut off may continue within its reasoning.
        opened = None if self._context else self._thinking
        prompt, ids = response.input_tokens, response.output_tokens
        reply = self._renderer.parse(ids, self._tools, prompt, opened)
        self._thinking = reply.thinking
        self._ids = [*self.input_ids, *response.output_tokens]
        self._starts.append(len(response.input_tokens))
        self._responses.append(response)
        self._messages += [*self._pending, reply.message]
        self._pending, self._context = [], []
        return reply

    def trajectory(self, reward: float | Sequence[float], completion_text: str = "") -> Trajectory:
        """Returns the turns up to the last answer as a trajectory; only sampled tokens have a loss.

        Args:
            reward: One number for the whole conversation, placed on the last sampled token; or one
                number per answer, each placed on that answer's last token.
            completion_text: The text shown to people. If empty, the last answer's text is shown.

        Raises:
            WorkflowError: No token was sampled, or the number of rewards is neither 1 nor the
                number of answers.
        """
        text = completion_text or (self._messages[-1]["content"] if self._responses else "")
        turns = list(zip(self._starts, self._responses, strict=True))
        return assemble_trajectory(self._ids, turns, reward, text)
