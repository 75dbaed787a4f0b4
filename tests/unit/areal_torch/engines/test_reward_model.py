"""A reward model of pairs: what it reads, what it learns, what transformers makes of its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal.config.training import LoraConfig, OptimizerConfig, TrainEngineConfig
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.reward_model import (
    at_last_token,
    evaluate_reward_model,
    score,
    train_reward_model,
)


def pairs(count: int, seed: int) -> packing.Batch:
    """The chosen answer ends with a larger digit."""
    g = torch.Generator().manual_seed(seed)
    sequences, chosen = [], []
    for _ in range(count):
        prompt = torch.randint(97, 122, (4,), generator=g).tolist()
        low, high = sorted(torch.randperm(10, generator=g)[:2].tolist())
        for digit in (high, low):
            ids = [*prompt, 48 + digit, 260]
            sequences.append({"input_ids": ids, "loss_mask": [False] * 4 + [True] * 2})
            chosen.append(digit == high)
    batch = packing.pack(sequences, [i // 2 for i in range(2 * count)])
    return {**batch, "chosen": torch.tensor(chosen)}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)])
def test_scores_when_trained_then_the_loss_falls_and_transformers_computes_them(
    taught_dir: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    config = TrainEngineConfig(
        path=str(taught_dir),
        scalar=True,
        lora=lora,
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
    )
    config.mb_spec.max_tokens_per_mb = 64  # several micro-batches
    engine = FSDPEngine(config)
    engine.initialize()
    known = pairs(16, 1)
    before = evaluate_reward_model(engine, known)
    assert before["loss"] == pytest.approx(0.6931, abs=1e-3), "a fresh head says 0"
    for _ in range(20):
        stats = train_reward_model(engine, known)
    after = evaluate_reward_model(engine, known)
    sequences = [each["input_ids"].tolist() for each in packing.unpack(known)]
    scores = score(engine, sequences)
    engine.save(tmp_path / "saved")
    engine.destroy()
    assert stats["n_loss_tokens"] == 16, "what is counted are pairs"
    assert after["loss"] < before["loss"] - 0.01
    margins = torch.tensor(scores).view(-1, 2)
    assert float((margins[:, 0] - margins[:, 1]).mean()) == pytest.approx(after["margin"], rel=1e-4)
    from transformers import AutoModelForSequenceClassification

    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype="float32")
    with torch.no_grad():
        theirs = [float(hf(input_ids=torch.tensor([ids])).logits[0, 0]) for ids in sequences[:8]]
    assert scores[:8] == pytest.approx(theirs, abs=1e-4)


def test_mask_when_of_last_tokens_then_one_a_sequence() -> None:
    batch = at_last_token(pairs(2, 0))
    assert batch["loss_mask"].nonzero().flatten().tolist() == [5, 11, 17, 23]
