"""The built-in reward `reward_model`: scores answers by an exported reward model.

A reward process loads the model once. The answers of one call are scored together: each call of the
function adds its conversation to a list, and when all have done so, the event loop computes the
list.

    answer 1 ──┐
    answer 2 ──┼──> waiting ──next turn of the loop──> padded batches ──> a score each
    answer 3 ──┘

It reads what `OfflineTrainer(config.actor, scalar=True)` saves (examples/reward_model.py), and any
other sequence classifier of one class that transformers reads. It needs torch: on a cluster, run
areal-reward in the trainer's image.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.datasets.chats import answer_ids
from areal.errors import InvalidInput
from areal.model_directory import read_config
from areal.tokenizer import Tokenizer

_AT_ONCE = 32
"""Conversations in one forward pass."""


class RewardModel:
    """Scores answers with a trained reward model; concurrent calls share forward passes.

    Rows must have the field `messages`: the conversation that the completion answers.

    Example:
        >>> RLVRWorkflow("reward_model", config.gconfig, reward_kwargs={"path": "runs/.../model"})
    """

    def __init__(self, path: str, device: str = "cpu") -> None:
        """Loads the model, once in each reward process.

        Args:
            path: A Hugging Face folder with a single-class sequence classifier, such as the one
                that `OfflineTrainer.save` writes for a reward model.
            device: The torch device to run on, such as `cpu` or `cuda:7`.

        Raises:
            InvalidInput: The folder does not exist, or its model is not a single-class sequence
                classifier.
        """
        from transformers import AutoModelForSequenceClassification

        folder = Path(path)
        architecture = (read_config(folder).get("architectures") or ["none"])[0]
        if "SequenceClassification" not in architecture:
            raise InvalidInput(
                f"reward model {path!r}: architecture {architecture}, expected a sequence "
                "classifier of one class (examples/reward_model.py makes one)"
            )
        torch.set_num_threads(1)
        self._tokenizer = Tokenizer.load(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False)
        if model.config.num_labels != 1:
            raise InvalidInput(
                f"reward model {path!r}: {model.config.num_labels} classes, expected 1"
            )
        self._model = model.to(device).eval()
        self._device = device
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []

    async def __call__(self, completion: str, messages: Any, tools: Any = None) -> float:
        """The score of an answer.

        Args:
            completion: The answer.
            messages: The conversation that it answers: the row's `messages`.
            tools: The JSON schemas of the tools that the conversation offers: the row's `tools`.

        Raises:
            InvalidInput: The chat template refuses them.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._score_waiting)
        scored: asyncio.Future[float] = loop.create_future()
        self._waiting.append((self._ids(messages, completion, tools), scored))
        return await scored

    def _ids(self, messages: Any, completion: str, tools: Any) -> list[int]:
        asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        whole = [*asked, {"role": "assistant", "content": completion}]
        return answer_ids(self._tokenizer, whole, tools)  # as in training

    def _score_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        # Sequences of similar lengths form a batch, so that little is padded.
        waiting.sort(key=lambda each: len(each[0]))
        for start in range(0, len(waiting), _AT_ONCE):
            part = waiting[start : start + _AT_ONCE]
            try:
                scores: Sequence[Any] = self.scores([ids for ids, _ in part])
            except Exception as error:  # the callers that wait get it
                scores = [error] * len(part)
            for (_, scored), score in zip(part, scores, strict=True):
                if scored.done():  # its deadline has passed
                    continue
                if isinstance(score, Exception):
                    scored.set_exception(score)
                else:
                    scored.set_result(score)

    @torch.inference_mode()
    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score of each sequence of token ids, computed at its last token."""
        lengths = torch.tensor([len(ids) for ids in sequences], device=self._device)
        width = int(lengths.max())
        padded = torch.tensor(
            [[*ids, *([0] * (width - len(ids)))] for ids in sequences], device=self._device
        )
        mask = torch.arange(width, device=self._device) < lengths.unsqueeze(1)
        hidden: Tensor = self._model.base_model(
            input_ids=padded, attention_mask=mask.long()
        ).last_hidden_state
        last = hidden[torch.arange(len(sequences), device=self._device), lengths - 1]
        found: list[float] = self._model.score(last).squeeze(-1).float().tolist()
        return found
