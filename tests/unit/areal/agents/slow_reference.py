"""What a session should make of its requests, found by trying everything: slow and short."""

from __future__ import annotations

from typing import Any

from tests.unit.areal.workflows.chat_families import end_of_turn, tokenizer

from areal.agents.tree import Call


def merged(calls: list[Call]) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """(owned calls, whole ids) of each trajectory, and the orphans."""
    wholes = [c.response.input_tokens + c.response.output_tokens for c in calls]

    def extends(later: int, earlier: int) -> bool:
        whole = wholes[earlier]
        return (
            earlier < later
            and bool(calls[earlier].response.output_tokens)
            and calls[later].response.input_tokens[: len(whole)] == whole
        )

    parent: dict[int, int | None] = {}
    for i in range(len(calls)):
        options = [j for j in range(i) if extends(i, j)]
        parent[i] = max(options, key=lambda j: (len(wholes[j]), j)) if options else None
    used = set(parent.values())
    orphans: list[int] = []
    for i, c in enumerate(calls):
        options = [
            j
            for j in range(i)
            if calls[j].response.input_tokens == c.response.input_tokens
            and j not in used
            and j not in orphans
        ]
        options = [j for j in options if calls[j].reward is None and may_repeat(c, calls[j])]
        named = [j for j in options if c.key and calls[j].key == c.key]
        surely = [j for j in named if unseen(calls[j])]
        if options := surely or named or options:
            order = {
                j: (not calls[j].response.output_tokens, not calls[j].retry, j) for j in options
            }
            orphans.append(max(order, key=order.__getitem__))
    alive = [i for i, c in enumerate(calls) if c.response.output_tokens and i not in orphans]

    def path(i: int) -> list[int]:
        before = parent[i]
        return [i] if before is None else [*path(before), i]

    leaves = [i for i in alive if not any(parent[j] == i for j in alive)]
    owned: list[tuple[list[int], list[int]]] = []
    trained: set[int] = set()
    for one in sorted(path(i) for i in leaves):  # the first child of a fork comes first
        owned.append(([i for i in one if i not in trained], wholes[one[-1]]))
        trained.update(one)
    return sorted(owned, key=lambda each: each[0][0]), sorted(orphans)


def unseen(earlier: Call) -> bool:
    """Whether the agent may not have had its answer."""
    return not earlier.delivered or not earlier.response.output_tokens


def may_repeat(later: Call, earlier: Call) -> bool:
    """Whether one request may be another one again, with the same prompt."""
    if later.key and later.key == earlier.key:
        return later.retry or unseen(earlier)
    return later.retry and unseen(earlier) and not (later.key and earlier.key)


Message = dict[str, Any]


def seen(message: Message) -> tuple[str, str, list[Any]]:
    """What an agent may be trusted to send back as it was."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    named = [(call["name"], call["arguments"]) for call in calls]
    return message["role"], message["content"].strip(), named


class Transcript:
    """Every request and answer so far, and the prompt that the next request should have."""

    def __init__(self, family: str) -> None:
        self.family, self.tok = family, tokenizer(family)
        self.said: list[tuple[list[Message], Any, list[int] | None]] = []
        """By call: the messages that its answer ended, the tools, the ids; None: no answer."""

    def prompt(self, messages: list[Message], tools: Any) -> list[int]:
        """The ids that the model should be given."""
        answers = [i for i, m in enumerate(messages[:-1]) if m["role"] == "assistant"]
        if answers and messages[-1]["role"] != "assistant":
            asked = [seen(m) for m in messages[: answers[-1] + 1]]
            for ended, offered, ids in reversed(self.said):
                if ids and offered == tools and [seen(m) for m in ended] == asked:
                    return ids + self._between(ids[-1], messages, tools)
        return self.tok.apply_chat_template(messages, tools=tools, add_generation_prompt=True)

    def _between(self, last: int, messages: list[Message], tools: Any) -> list[int]:
        """The template's text after the last answer, with a plain word for each answer."""
        marked = [
            {"role": "assistant", "content": "XQQX"} if m["role"] == "assistant" else m
            for m in messages
        ]
        text = self.tok.render_chat(marked, tools=tools).rpartition("XQQX")[2]
        ids = self.tok.encode(text, add_special_tokens=False)
        if self.family == "glm-4.6":  # its turns have no end of their own
            return ids[last == ids[0] :]
        assert ids[0] == end_of_turn(self.family)
        return ids[last in self.tok.eos_token_ids :]
