"""What an engine takes from the memory that its device has: its logits, and its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.config.training import RefConfig, TrainEngineConfig
from areal.memory_estimate import HEAD_TOKENS, LEAST_CHUNK, LOGIT_BYTES
from areal_torch.engines import checkpoint
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.parallel import memory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
VOCABULARY = 151_936
WHOLE = HEAD_TOKENS * VOCABULARY
Make = Callable[[TrainEngineConfig | RefConfig], FSDPEngine]


@pytest.fixture
def make_engine(model_dir: Path) -> Iterator[Make]:
    engines: list[FSDPEngine] = []

    def make(config: TrainEngineConfig | RefConfig) -> FSDPEngine:
        config.path = str(model_dir)
        engines.append(FSDPEngine(config))
        engines[-1].initialize()
        return engines[-1]

    yield make
    for engine in reversed(engines):
        engine.destroy()


@pytest.mark.parametrize("scalar", [False, True])
def test_engine_when_it_trains_then_its_logits_are_those_of_the_budget(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, scalar: bool
) -> None:
    budget = memory.budget
    monkeypatch.setattr(memory, "budget", lambda *given: replace(budget(*given), chunk=12_345))
    assert make_engine(TrainEngineConfig(scalar=scalar)).model.chunk_elements == 12_345


@pytest.mark.parametrize(
    "config",
    [
        RefConfig(),
        TrainEngineConfig(optimizer=None),
        TrainEngineConfig(optimizer=None, scalar=True),
    ],
    ids=["reference", "frozen", "frozen critic"],
)
def test_engine_when_it_only_reads_then_its_logits_follow_free_memory(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, config: TrainEngineConfig | RefConfig
) -> None:
    asked: list[Any] = []

    def frozen_chunk(*given: Any) -> int:
        asked.append(given)
        return 54_321

    monkeypatch.setattr(memory, "frozen_chunk", frozen_chunk)
    engine = make_engine(config)
    assert engine.model.chunk_elements == 54_321
    assert asked == [(config, engine.model.hf, engine.device)]


@pytest.mark.parametrize(
    ("free", "chunk"),
    [
        (4 * LOGIT_BYTES * WHOLE, WHOLE),
        (4 * LOGIT_BYTES * WHOLE - 4, WHOLE // 2),
        (LOGIT_BYTES * WHOLE, WHOLE // 4),
        (0, LEAST_CHUNK),
    ],
)
@pytest.mark.parametrize("config", [RefConfig(), TrainEngineConfig(optimizer=None)])
def test_frozen_chunk_when_a_gpu_has_room_then_a_quarter_of_it_for_logits(
    monkeypatch: pytest.MonkeyPatch,
    config: TrainEngineConfig | RefConfig,
    free: int,
    chunk: int,
) -> None:
    text = SimpleNamespace(vocab_size=VOCABULARY)
    hf = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    assert memory.frozen_chunk(config, hf, GPU) == chunk
    assert memory.frozen_chunk(config, hf, CPU) == LEAST_CHUNK
    given = replace(config, logits_chunk_elements=7)
    assert memory.frozen_chunk(given, hf, GPU) == memory.frozen_chunk(given, hf, CPU) == 7


def test_engine_when_it_starts_then_its_stager_is_that_of_its_device(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[torch.device, object] = {}
    monkeypatch.setattr(checkpoint, "stager_for", lambda device: made.setdefault(device, object()))
    engine = make_engine(TrainEngineConfig())
    assert engine._stager is made[engine.device]
