"""Kept rollouts as a log of inspect_ai, which `inspect view` opens and `read_eval_log` reads.

A trajectory becomes a sample: its turns become messages, its reward and the reward's parts become
scores, and everything else becomes metadata. The log has inspect_ai's JSON format, version 2, which
can be written without the package.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, TextIO

from areal.errors import InvalidInput
from areal.runs.rollouts.reader import Kept, RolloutFolder
from areal.tokenizer import Tokenizer
from areal.workflows.rendering import TemplateRenderer

_MARK = "AREAL-CONTENT"
_STOP = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}
_METADATA = (
    "step",
    "incarnation",
    "trajectory_id",
    "outcome",
    "cause",
    "advantage",
    "head_version",
)
# What comes before a message of a role, so that the template accepts it.
_PROBES: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "BEFORE"}],
    "tool": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "BEFORE"}],
    "system": [],
}
_TIMES = ("generation_s", "queued_s", "episode_s", "score_s")


class Messages:
    """Converts turns of tokens into messages with roles, by the model's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Finds how the template begins and ends a message of each role."""
        self._renderer = TemplateRenderer(tokenizer)
        self._special = sorted(filter(None, tokenizer.special_tokens.values()), key=len)[::-1]
        self._heads: dict[str, str] = {}  # what a message begins with -> its role
        self._tails: dict[str, str] = {}  # role -> what it ends with
        if not tokenizer.chat_template:
            return
        question = [{"role": "user", "content": "?"}]
        asked = tokenizer.render_chat(question, add_generation_prompt=False)
        heads = tokenizer.render_chat(question, add_generation_prompt=True).removeprefix(asked)
        if heads.strip():
            self._heads[heads.strip()] = "assistant"
        for role, before in _PROBES.items():
            try:
                _, opens = _cut(tokenizer, before, "BEFORE")
                head, tail = _cut(tokenizer, [*before, {"role": role, "content": _MARK}], _MARK)
            except InvalidInput:  # the template leaves this role out
                continue
            head = head.rpartition("BEFORE")[2].removeprefix(opens) if before else head
            if head.strip():
                self._heads.setdefault(head.strip(), role)
                self._tails[role] = tail.strip()

    def of(self, one: Kept, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the trajectory's messages in inspect_ai's form."""
        found: list[dict[str, Any]] = []
        segments = [ids for _, ids in one.segments()]
        before: list[int] = []
        for turn, ids in zip(turns, segments, strict=True):
            if turn["sampled"]:
                found.append(self._sampled(ids, before, len(found)))
            else:
                found += self._given(turn)
            before = ids
        return found

    def _sampled(self, ids: list[int], before: list[int], number: int) -> dict[str, Any]:
        reply = self._renderer.parse(ids, prompt=before)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "source": "generate"}
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{number}-{index}",
                    "function": call.name,
                    "arguments": call.arguments,
                    "type": "function",
                }
                for index, call in enumerate(reply.tool_calls)
            ]
        return message

    def _given(self, turn: dict[str, Any]) -> list[dict[str, Any]]:
        """Splits text that was not sampled where messages begin; other text is the user's."""
        heads = "|".join(re.escape(head) for head in sorted(self._heads, key=len, reverse=True))
        parts = re.split(f"({heads})", turn["text"]) if heads else [turn["text"]]
        roles = ["user", *(self._heads[head] for head in parts[1::2])]
        found = []
        for role, text in zip(roles, parts[::2], strict=True):
            content = text.strip().removesuffix(self._tails.get(role, "")).strip()
            for special in self._special if role == "user" else ():
                content = content.replace(special, "").strip()
            if content and role != "assistant":  # the sampled text follows only its head
                found.append({"role": role, "content": content})
        return found


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _cut(tokenizer: Tokenizer, messages: list[dict[str, Any]], at: str) -> tuple[str, str]:
    """Returns what the template writes before and after a text."""
    if not messages:
        return "", ""
    head, found, tail = tokenizer.render_chat(messages, add_generation_prompt=False).rpartition(at)
    if not found:
        raise InvalidInput("messages: the chat template leaves one out")
    return head, tail


def write_log(path: Path, folder: RolloutFolder, steps: list[int], batches: Iterable[int]) -> int:
    """Writes the samples of some steps, trained on or not, and returns their number.

    Args:
        path: The new file.
        folder: The run's rollouts.
        steps: The steps to write.
        batches: Yields the same steps, one at a time (for a progress bar).
    """
    messages = Messages(folder.tokenizer())
    model = folder.model_name()
    rewards: list[float] = []
    # Attempts of the same task are epochs of one sample.
    attempts: dict[str, int] = {}
    with path.open("w", encoding="utf-8") as file:
        file.write('{"version": 2, "status": "success", "samples": [\n')
        for step in batches:
            for one in [*folder.discarded([step]), *folder.read([step])]:
                attempts[one.task_id] = epoch = attempts.get(one.task_id, 0) + 1
                row = _sample(one, epoch, messages.of(one, folder.turns(one)), model)
                file.write((",\n" if sum(attempts.values()) > 1 else "") + json.dumps(row))
                rewards += [] if one.reward is None else [one.reward]
        file.write("\n], ")
        _write_header(file, folder, model, steps, attempts, rewards)
    return sum(attempts.values())


def _sample(one: Kept, epoch: int, messages: list[dict[str, Any]], model: str) -> dict[str, Any]:
    answers = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
    last = messages[answers[-1]] if answers else _said("")
    row: dict[str, Any] = {
        "id": one.task_id,
        "epoch": epoch,
        "input": messages[: answers[0]] if answers else "",
        "target": "",
        "messages": messages,
        "output": {
            "model": model,
            "choices": [
                {"message": last, "stop_reason": _STOP.get(one.finish_reason or "", "unknown")}
            ],
            "completion": last["content"],
            "time": one.generation_s,
        },
        "metadata": {
            **{name: getattr(one, name) for name in (*_METADATA, *_TIMES)},
            "servers": one.servers,
            "tokens": len(one.input_ids),
            "sampled_tokens": one.sampled,
            "versions": sorted({version for version in one.versions if version >= 0}),
        },
        "model_usage": {
            model: {
                "input_tokens": len(one.input_ids) - one.sampled,
                "output_tokens": one.sampled,
                "total_tokens": len(one.input_ids),
            }
        },
        "total_time": one.episode_s,
    }
    if one.reward is None:
        cause = f"{one.outcome}: {one.cause}"
        row["error"] = {"message": cause, "traceback": cause, "traceback_ansi": cause}
        return row
    made_of = ", ".join(f"{part['name']} {part['value']:g}" for part in one.parts)
    why = "; ".join(filter(None, (made_of, one.cause and f"{one.outcome}: {one.cause}")))
    row["scores"] = {
        "reward": {"value": one.reward, "answer": one.completion, "explanation": why or None},
        **{part["name"]: {"value": part["value"]} for part in one.parts},
    }
    return row


def _write_header(
    file: TextIO,
    folder: RolloutFolder,
    model: str,
    steps: list[int],
    attempts: dict[str, int],
    rewards: list[float],
) -> None:
    """Writes what the log says about the run, and ends the JSON object."""
    now = datetime.fromtimestamp(folder.written_at(), UTC).isoformat()
    experiment, trial = PurePath(folder.run).parts[-2:]
    name = f"{experiment}/{trial}"
    count = sum(attempts.values())
    mean = statistics.fmean(rewards) if rewards else 0.0
    header: dict[str, Any] = {
        "eval": {
            "eval_id": name,
            "run_id": name,
            "created": now,
            "task": experiment,
            "task_id": name,
            "dataset": {"name": f"steps {steps[0]} to {steps[-1]}", "samples": len(attempts)},
            "model": model,
            "config": {"epochs": max(attempts.values(), default=1)},
            "metadata": {"first_step": steps[0], "last_step": steps[-1]},
        },
        "results": {
            "total_samples": count,
            "completed_samples": len(rewards),
            "scores": [
                {
                    "name": "reward",
                    "scorer": "reward",
                    "metrics": {"mean": {"name": "mean", "value": mean}},
                }
            ],
        },
        "stats": {"started_at": now, "completed_at": now},
    }
    file.write(json.dumps(header)[1:] + "\n")
