"""What the GPU kit compares a step with: after the engine is gone, and without whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.gpu import models
from tools.gpu.cases import plain, speed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_torch.engines.fsdp import FSDPEngine

SETTING: dict[str, Any] = {"shape": "qwen2.5-0.5b", "tokens": 256, "lengths": "even"}


def test_plain_when_the_engine_is_done_then_its_memory_is_freed_before_the_peak_is_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def note(name: str, result: Any = None) -> Callable[..., Any]:
        def noted(*_: object) -> Any:
            done.append(name)
            return result

        return noted

    destroy = FSDPEngine.destroy
    monkeypatch.setattr(FSDPEngine, "destroy", lambda made: (destroy(made), done.append("destroy")))
    measure = speed.measure

    def on_the_cpu(*given: Any) -> dict[str, Any]:
        found = measure(*given)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return found

    monkeypatch.setattr(speed, "measure", on_the_cpu)
    monkeypatch.setattr(plain.gc, "collect", note("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", note("empty_cache"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", note("reset"))
    monkeypatch.setattr(plain, "_plain", note("plain", (1.0, 0.0)))
    plain.measure(SETTING, True)
    assert done == ["destroy", "collect", "empty_cache", "reset", "plain"]


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator makes."""

    elements = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        made = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max([self.elements, *made])
        return result


def test_plain_when_its_loss_is_computed_then_whole_logits_never_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary, trained = 4096, SETTING["tokens"] // 2
    monkeypatch.setitem(models._TINY, "vocab_size", vocabulary)
    monkeypatch.setattr(plain, "_CHUNK", trained // 8)
    with Largest() as largest:
        plain._plain(SETTING, True)
    weight = vocabulary * models._TINY["hidden_size"]
    assert largest.elements == weight < trained * vocabulary
