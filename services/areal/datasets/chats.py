"""Turns chats into token ids, with the assistant's turns marked for fine-tuning.

If the template marks them itself (`{% generation %}`), its marks are used. Otherwise they are found
by rendering: an assistant's turn is the part of the conversation after the prompt for that turn. It
ends with the token that ends a generation:

    <|user|>2+2=<|assistant|>4<|end|><|user|>3+3=<|assistant|>6<|end|>
                             xxxxxxxx                         xxxxxxxx

A template may write a turn differently once others follow it (Qwen3 drops its reasoning). Such a
turn gets a sequence of its own, which ends with it, so that it is learned as the model samples it.
If the turn changes its own prompt (gpt-oss drops the reasoning before a call once the answer is
there), the sequence is the prompt without the turn, then the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.datasets.pairs import split_pair
from areal.errors import InvalidInput
from areal.tokenizer.chat_contents import check_chat
from areal.tokenizer.chat_template import REASONING, plain_messages

if TYPE_CHECKING:
    from areal.tokenizer import Tokenizer

Messages = Sequence[dict[str, Any]]
Tokens = dict[str, list[Any]]
Unit = list[Tokens]
"""What is trained on as one: the sequences {"input_ids", "loss_mask"} of a chat, or a `Pair`."""

# Names under which other tools keep what `weight` says here.
_OTHER_WEIGHTS = ("train", "training", "loss", "loss_mask", "trainable")


class Pair(list[Tokens]):
    """Two sequences: a chosen and a rejected one."""


def chat_unit(tokenizer: Tokenizer, messages: Messages, tools: Any = None) -> Unit:
    """Returns a tokenized conversation for `OfflineTrainer`; the loss covers all assistant turns.

    A turn of weight 0 is not in the loss: {"role": "assistant", "content": "…", "weight": 0}.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The {"role", "content"} objects of the conversation.
        tools: JSON schemas of the tools that the conversation offers (a row's `tools`), or their
            JSON text.

    Returns:
        One sequence. If the template writes an earlier turn differently once others follow it, one
        more for each such turn.

    Raises:
        InvalidInput: No assistant turn is to be learned, a weight is not 0 or 1, the template has
            no place for a part of the chat or ends a turn with no token that ends a generation, or
            the tokens of an assistant turn cannot be identified.
    """
    check_chat(tokenizer, messages, tools)
    chat = _Chat(tokenizer, messages, tools)
    return list(chat.sequences(chat.learned()))


def chat_units(tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """Returns the `chat_unit` of each row: of its `messages` and, if it has some, its `tools`.

    Raises:
        InvalidInput: As `chat_unit`, or a row has no `messages`, or more tokens or other ids than
            the model takes. The message begins with the row's number, from 1.
    """

    def unit(row: Mapping[str, Any]) -> Unit:
        if "messages" not in row:
            raise InvalidInput(f"no field 'messages' among {sorted(row)}")
        return chat_unit(tokenizer, row["messages"], row.get("tools"))

    return _of_rows(tokenizer, rows, unit)


def pair_unit(tokenizer: Tokenizer, row: Mapping[str, Any]) -> Unit:
    """Returns a chosen and a rejected conversation; the loss covers the turns that differ.

    | prompt                        | chosen and rejected                                     |
    |-------------------------------|---------------------------------------------------------|
    | text, or messages             | text, a message, or the messages after the prompt       |
    | text or messages of the chats | whole chats                                             |
    | missing                       | whole chats; what they begin with is the prompt         |

    Args:
        tokenizer: A tokenizer with a chat template.
        row: A row with `chosen`, `rejected`, usually `prompt`, and, if it has some, `tools`.

    Raises:
        InvalidInput: As `chat_unit`, or `chosen` or `rejected` is missing, is malformed or does not
            end with an assistant turn, or the two are not answers to one prompt.
    """
    both = split_pair(row)
    pair = Pair()
    for key, whole in (("chosen", both.chosen), ("rejected", both.rejected)):
        try:
            check_chat(tokenizer, whole, row.get("tools"))
            chat = _Chat(tokenizer, whole, row.get("tools"))
            turns = [turn for turn in chat.learned() if turn >= both.prompt]
            pair.append(chat.sequence(turns))
        except InvalidInput as error:
            raise InvalidInput(f"{key}: {error}") from None
    return pair


def pair_units(tokenizer: Tokenizer, rows: Sequence[Mapping[str, Any]]) -> list[Unit]:
    """Returns the `pair_unit` of each row.

    Raises:
        InvalidInput: As `pair_unit`, or a sequence has more tokens or other ids than the model
            takes. The message begins with the row's number, from 1.
    """
    return _of_rows(tokenizer, rows, lambda row: pair_unit(tokenizer, row))


def answer_ids(tokenizer: Tokenizer, messages: Messages, tools: Any = None) -> list[int]:
    """Returns the token ids of a conversation that ends with a sampled answer, as units have them.

    The answer may be any text: only the messages before it are checked.

    Raises:
        InvalidInput: The chat template refuses the messages, or has no place for a part of those
            before the answer or for the tools.
    """
    check_chat(tokenizer, messages[:-1], tools)
    chat = _Chat(tokenizer, messages, tools)
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=False)
    more = None if chat.ended(ids) else chat.next(len(messages) - 1)
    return ids if more is None else [*ids, more]


def check_units(units: Sequence[Unit], longest: int | None, vocabulary: int | None) -> None:
    """Raises an error for the first unit that a model cannot read.

    Args:
        units: The units; their numbers in the message count from 1.
        longest: The most tokens of a sequence; None: any number.
        vocabulary: The number of ids that the model knows; None: any.

    Raises:
        InvalidInput: A sequence is too long or has an id beyond the vocabulary.
    """
    for number, unit in enumerate(units, 1):
        for sequence in unit:
            ids = sequence["input_ids"]
            if longest is not None and len(ids) > longest:
                raise InvalidInput(
                    f"row {number}: {len(ids)} tokens, expected at most {longest} (the model's "
                    "max_position_embeddings)"
                )
            if vocabulary is not None and ids and max(ids) >= vocabulary:
                raise InvalidInput(
                    f"row {number}: token id {max(ids)}, expected less than {vocabulary} (the "
                    "model's vocab_size)"
                )


def _of_rows(
    tokenizer: Tokenizer,
    rows: Sequence[Mapping[str, Any]],
    make: Callable[[Mapping[str, Any]], Unit],
) -> list[Unit]:
    units = []
    for number, row in enumerate(rows, 1):
        try:
            units.append(make(row))
        except InvalidInput as error:
            raise InvalidInput(f"row {number}: {error}") from None
    check_units(units, tokenizer.longest, tokenizer.vocab_size)
    return units


class _Chat:
    """A conversation, and which of its tokens are sampled."""

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Any) -> None:
        self._tokenizer = tokenizer
        self._messages = messages
        self._tools = tools
        self.turns = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]

    def learned(self) -> list[int]:
        """The assistant's turns whose weight is not 0."""
        for index, message in enumerate(self._messages):
            weight, mine = message.get("weight"), index in self.turns
            if weight not in (None, 0, 1) or (weight and not mine):
                raise InvalidInput(
                    f"messages[{index}].weight {weight!r}: expected 0 or 1, and 1 only for the "
                    "assistant"
                )
            for name in _OTHER_WEIGHTS:
                if message.get(name) is not None:
                    raise InvalidInput(
                        f"messages[{index}].{name}: expected 'weight': 0 for a turn that is not "
                        "learned"
                    )
        turns = [n for n in self.turns if self._messages[n].get("weight") in (None, 1)]
        if not turns:
            raise InvalidInput(
                "messages: no assistant turn (of weight 1), so there is nothing to learn"
            )
        return turns

    def sequences(self, turns: Sequence[int]) -> Iterator[Tokens]:
        """Yields as few sequences as show each turn as it is sampled, the longest one last."""
        found, left = [], list(turns)
        upto = len(self._messages)
        while left:
            text, spans = self._spans(upto, left)
            if left[-1] in spans:
                found.append(self._tokens(upto, text, spans))
                left = [turn for turn in left if turn not in spans]
            elif upto == left[-1] + 1:
                if (served := self._served(left)) is not None:
                    found.append(self._tokens(upto, *served))
                    left = [turn for turn in left if turn not in served[1]]
                    upto = left[-1] + 1 if left else 0
                    continue
                raise InvalidInput(
                    f"messages[{left[-1]}]: the chat template changes the prompt of this turn when "
                    "the turn follows, so its tokens cannot be identified; expected a template "
                    "with {% generation %} marks"
                )
            # Templates rewrite the past, so a turn that comes last is as it was sampled.
            upto = left[-1] + 1 if left else 0
        yield from reversed(found)

    def sequence(self, turns: Sequence[int]) -> Tokens:
        """Returns one sequence with all of the turns."""
        if not turns:
            raise InvalidInput("messages: no assistant turn, so there is nothing to learn")
        text, spans = self._spans(len(self._messages), turns)
        lost = [turn for turn in turns if turn not in spans]
        last = turns[-1] + 1 == len(self._messages)
        if lost and last and (served := self._served(turns)) is not None:
            text, spans = served
            lost = [turn for turn in turns if turn not in spans]
        if lost:
            raise InvalidInput(
                f"messages[{lost[0]}]: the chat template changes this turn in the prompts of later "
                "turns (some templates drop earlier reasoning), so its tokens cannot be "
                "identified; expected answers that differ in the last turn, or a template with "
                "{% generation %} marks"
            )
        return self._tokens(len(self._messages), text, spans)

    def _spans(self, upto: int, turns: Sequence[int]) -> tuple[str, dict[int, tuple[int, int]]]:
        """The text of the first messages, and the characters of those turns that it shows."""
        parts = self._tokenizer.render_marked(self._messages[:upto], self._tools)
        if len(parts) > 1:
            return self._marked(parts, upto, turns)
        return parts[0], self._shown(parts[0], turns)

    def _shown(self, whole: str, turns: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Returns the places at which a text shows those turns as they are sampled."""
        spans = {}
        for turn in turns:
            after = self._render(self._messages[: turn + 1])
            before = self._before(turn, after)
            if before is not None and whole.startswith(after):
                spans[turn] = len(before), len(after)
        return spans

    def _served(self, turns: Sequence[int]) -> tuple[str, dict[int, tuple[int, int]]] | None:
        """The prompt of the last of these turns as a server gets it, and the turn.

        gpt-oss drops the reasoning before a call once the answer follows, but the prompt for that
        answer has it. None: where the turn's own text begins is not known.
        """
        turn = turns[-1]
        past = self._render(self._messages[:turn])
        prompt = self._render(self._messages[:turn], True)
        after = self._render(self._messages[: turn + 1])
        word = {"role": "assistant", "content": "ARRIVED"}
        header = _common(after, self._render([*self._messages[:turn], word]))
        opening = prompt[len(past) :] if prompt.startswith(past) else ""
        at = header.rfind(opening) if opening else -1
        # What comes before the turn must end as it does in the prompt.
        if at < 1 or _common(past[::-1], after[:at][::-1]).strip() == "":
            return None
        whole = prompt + after[at + len(opening) :]
        others = self._shown(whole, turns[:-1])
        return whole, others | {turn: (len(prompt), len(whole))}

    def _marked(
        self, parts: Sequence[str], upto: int, turns: Sequence[int]
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """The text and the turns that the template itself marks."""
        marked, length = [], 0
        for number, part in enumerate(parts):
            if number % 2:
                marked.append((length, length + len(part)))
            length += len(part)
        every = [turn for turn in self.turns if turn < upto]
        if len(marked) != len(every):
            raise InvalidInput(
                f"messages: the chat template marks {len(marked)} of {len(every)} assistant turns, "
                "expected all"
            )
        return "".join(parts), {turn: marked[every.index(turn)] for turn in turns}

    def _before(self, turn: int, after: str) -> str | None:
        """The prompt of a turn, whose text with it is `after`; None: it does not begin with it."""
        if turn == 0:
            raise InvalidInput("messages[0]: an assistant's turn, expected a prompt before it")
        prompt = self._render(self._messages[:turn], True)
        if after.startswith(prompt):
            return prompt
        # A prompt that opens the reasoning (MiniMax, DeepSeek), and a turn that has none.
        word = {"role": "assistant", "content": "ARRIVED"}
        with_word = self._render([*self._messages[:turn], word])
        header = _common(prompt, with_word)
        known = header.startswith(self._render(self._messages[:turn]))
        return header if known and after.startswith(header) else None

    def _render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        return self._tokenizer.render_chat(
            messages, tools=self._tools, add_generation_prompt=add_generation_prompt
        )

    def _tokens(self, upto: int, text: str, spans: Mapping[int, tuple[int, int]]) -> Tokens:
        encoded = self._tokenizer.backend.encode(text, add_special_tokens=False)
        ids, offsets = list(encoded.ids), encoded.offsets
        mask = [False] * len(ids)
        for turn, (begin, end) in sorted(spans.items()):
            inside = [n for n, (b, e) in enumerate(offsets) if begin <= b < e <= end]
            if not inside:
                raise InvalidInput(f"messages[{turn}]: no tokens are the assistant's own")
            last = self._end(ids, inside)
            if last is None and turn == upto - 1 and (more := self.next(turn)) is not None:
                last = len(ids)
                ids.append(more)
                mask.append(True)
            if last is None:
                last = self._last_resort(ids, inside, turn)
            for n in [*inside, last]:
                mask[n] = n <= last
        if mask[:1] == [True]:
            mask[0] = False  # nothing predicts a first token
        return {"input_ids": ids, "loss_mask": mask}

    def _end(self, ids: Sequence[int], inside: Sequence[int]) -> int | None:
        """Finds the token that ends a turn: the turn's last, or the next turn's first (GLM)."""
        ends = self._tokenizer.eos_token_ids
        # What a template puts behind the end of a turn, no server would wait for.
        if found := [n for n in self._tail(ids, inside) if ids[n] in ends]:
            return found[0]
        following = inside[-1] + 1
        return following if following < len(ids) and ids[following] in ends else None

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a sequence ends with a token that ends a generation, but for blanks."""
        tail = self._tail(ids, range(len(ids)))
        return any(ids[n] in self._tokenizer.eos_token_ids for n in tail)

    def _tail(self, ids: Sequence[int], inside: Sequence[int]) -> list[int]:
        """Returns the positions of the special tokens and blanks that end a turn."""
        tail: list[int] = []
        for n in reversed(inside):
            token = ids[n]
            special = self._tokenizer.is_special(token) or token in self._tokenizer.eos_token_ids
            if not special and self._tokenizer.decode([token]).strip():
                break
            tail.append(n)
        return tail[::-1]

    def next(self, turn: int) -> int | None:
        """The token that ends the last turn, where it is the first one of the next turn (GLM)."""
        # Reasoning may go when a turn follows, and with it what both texts begin with.
        before = [_without_thought(each) for each in plain_messages(self._messages)[: turn + 1]]
        answer = before[-1]
        following = {"role": "user", "content": "?"}
        if turn + 1 < len(self._messages):
            following = self._messages[turn + 1]
        elif calls := answer.get("tool_calls"):
            name = (calls[0].get("function") or calls[0]).get("name", "")
            known = calls[0].get("id", "")
            following = {"role": "tool", "content": "?", "name": name, "tool_call_id": known}
        try:
            text, longer = self._render(before), self._render([*before, following])
        except InvalidInput:
            return None  # nothing may follow this turn
        if not longer.startswith(text):
            return None
        more = self._tokenizer.encode(longer[len(text) :], add_special_tokens=False)
        return more[0] if more and more[0] in self._tokenizer.eos_token_ids else None

    def _last_resort(self, ids: Sequence[int], inside: Sequence[int], turn: int) -> int:
        """Finds the end of a turn if no token is known to end a generation."""
        ends = self._tokenizer.eos_token_ids
        if found := [n for n in self._tail(ids, inside) if self._tokenizer.is_special(ids[n])]:
            return found[-1]
        if found := [n for n in inside if ids[n] in ends]:
            return found[-1]
        if not ends:  # nothing is known of ends
            return inside[-1]
        raise InvalidInput(
            f"messages[{turn}]: the chat template ends this turn with none of the tokens that end "
            f"a generation ({', '.join(map(str, ends))}), so the model would not learn to stop"
        )


def _common(one: str, other: str) -> str:
    """Returns the text with which both texts begin."""
    pairs = zip(one, other, strict=False)
    return one[: next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))]


def _without_thought(message: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in REASONING}
    if message["role"] == "assistant" and isinstance(content := kept.get("content"), str):
        kept["content"] = content.rpartition("</think>")[2]
    return kept
