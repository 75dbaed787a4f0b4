"""Rows that are longer than the model, or have ids beyond its embedding, never reach a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.datasets.chats import Pair, check_units
from areal.errors import InvalidInput
from areal.tokenizer import longest_input
from areal_torch.algorithms import packing
from areal_torch.engines.offline import OfflineTrainer
from areal_torch.engines.sft import FSDPLMEngine, evaluate_lm
from areal_torch.models.tiny import make_tiny_model


def sequence(length: int, token: int = 65) -> dict[str, list[Any]]:
    return {"input_ids": [token] * length, "loss_mask": [n > 0 for n in range(length)]}


def make_gpt2(folder: Path) -> Path:
    config = GPT2Config(vocab_size=261, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def make_rope(folder: Path) -> Path:
    return make_tiny_model(
        folder,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        max_position_embeddings=64,
    )


@pytest.mark.parametrize("make", [make_gpt2, make_rope])
def test_batch_when_a_sequence_does_not_fit_then_refused_before_it_is_computed(
    tmp_path: Path, make: Any
) -> None:
    torch.set_num_threads(1)
    engine = FSDPLMEngine(
        TrainEngineConfig(path=str(make(tmp_path / "m")), optimizer=OptimizerConfig())
    )
    engine.initialize()
    try:
        assert engine.train_lm(packing.pack([sequence(64, 260)]))["loss"] > 0
        long = packing.pack([sequence(3), sequence(65)])
        with pytest.raises(InvalidInput, match=r"sequence 1 of the batch: 65 tokens, .* most 64"):
            engine.train_lm(long)
        with pytest.raises(InvalidInput, match=r"sequence 1 of the batch: 65 tokens"):
            evaluate_lm(engine, long)
        beyond = packing.pack([sequence(3), sequence(2, 261), sequence(3)])
        with pytest.raises(InvalidInput, match=r"sequence 1 .*: token id 261, .* less than 261"):
            engine.train_lm(beyond)
    finally:
        engine.destroy()


@pytest.mark.parametrize("call", ["batches", "chunks"])
@pytest.mark.parametrize(
    ("unit", "why"),
    [
        ([sequence(10)], r"row 2: 10 tokens, expected at most 9 \(the model's max_position"),
        (Pair([sequence(3), sequence(3, 70)]), r"row 2: token id 70, expected less than 70"),
    ],
)
def test_units_when_one_does_not_fit_then_refused_before_the_first_step(
    call: str, unit: Any, why: str
) -> None:
    trainer = OfflineTrainer.__new__(OfflineTrainer)
    trainer.engine = SimpleNamespace(model=SimpleNamespace(longest=9, vocab_size=70))
    with pytest.raises(InvalidInput, match=why):
        next(getattr(trainer, call)([[sequence(9)], unit]))


def test_units_when_the_limits_are_unknown_then_any_are_fine() -> None:
    check_units([[sequence(9999)], [{"input_ids": [], "loss_mask": []}]], None, None)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4}}, 256),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"full_attention": {}}}, 64),
    ],
)  # fmt: skip
def test_longest_input_when_the_config_says_it_then_it_is_that(
    config: dict[str, Any], longest: int | None
) -> None:
    assert longest_input(config) == longest
