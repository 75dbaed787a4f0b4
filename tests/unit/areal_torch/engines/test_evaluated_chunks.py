"""Held-out losses: means over tokens or pairs, however the rows are cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.offline import OfflineTrainer
from areal_torch.engines.preference import Preference
from areal_torch.engines.reward_model import evaluate_reward_model
from areal_torch.engines.sft import evaluate_lm
from areal_torch.models.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=0, num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    return folder


def engine_of(model: Path, *, scalar: bool = False) -> FSDPEngine:
    torch.set_num_threads(1)
    engine = FSDPEngine(TrainEngineConfig(path=str(model), scalar=scalar))
    engine.initialize()
    return engine


def sequence(seed: int, length: int, answer: int) -> dict[str, Any]:
    ids = [65 + (i * i * 7 + seed) % 26 for i in range(length)]
    return {"input_ids": ids, "loss_mask": [i >= length - answer for i in range(length)]}


# Chunks of unequal sizes, and rows of very unequal lengths.
SIZES = ((60, 50), (60, 55), (8, 2), (40, 30), (9, 3), (30, 4), (12, 8))


def cut(units: list[list[dict[str, Any]]], size: int) -> Iterator[packing.Batch]:
    for begin in range(0, len(units), size):
        part = units[begin : begin + size]
        batch = packing.pack([each for unit in part for each in unit])
        if len(part[0]) == 2:
            batch["chosen"] = torch.arange(2 * len(part)) % 2 == 0
            batch["reference_logprobs"] = torch.zeros(len(batch["input_ids"]))
        yield batch


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_evaluate_lm_when_rows_are_cut_into_chunks_then_each_token_counts_once(
    model: Path, size: int
) -> None:
    engine = engine_of(model)
    units = [[sequence(seed, *lengths)] for seed, lengths in enumerate(SIZES)]
    logprobs = torch.cat(
        [engine.forward(batch)[batch["loss_mask"]] for batch in cut(units, len(units))]
    )
    assert evaluate_lm(engine, cut(units, size)) == pytest.approx(-float(logprobs.mean()), rel=1e-5)
    means = [evaluate_lm(engine, batch) for batch in cut(units, size)]
    assert abs(sum(means) / len(means) + float(logprobs.mean())) > 1e-4


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "reward model"])
def test_evaluation_of_pairs_when_cut_into_chunks_then_each_pair_counts_once(
    model: Path, loss: Any
) -> None:
    engine = engine_of(model, scalar=loss == "reward model")
    if loss == "reward model":  # its head starts with zeros
        torch.nn.init.normal_(engine.model.hf.score.weight, generator=torch.manual_seed(0))
    units = [
        [sequence(seed, *lengths), sequence(seed + 9, *lengths)]
        for seed, lengths in enumerate(SIZES)
    ]

    def evaluate(batches: Any) -> dict[str, float]:
        if loss == "reward model":
            return evaluate_reward_model(engine, batches)
        return Preference(loss).evaluate(engine, batches)

    single = [evaluate(batch) for batch in cut(units, 1)]
    assert len({each["loss"] for each in single}) > 1
    for size in (1, 2, 3, 5):
        found = evaluate(cut(units, size))
        assert set(found) == {"loss", "accuracy", "margin"}
        for name in found:
            mean = sum(each[name] for each in single) / len(single)
            assert found[name] == pytest.approx(mean, rel=1e-4, abs=1e-6)


def test_evaluation_when_there_are_no_rows_then_refused_and_not_0(model: Path) -> None:
    engine = engine_of(model)
    with pytest.raises(InvalidInput, match="expected rows with loss tokens"):
        evaluate_lm(engine, [])
    with pytest.raises(InvalidInput, match="expected rows with loss tokens"):
        evaluate_lm(engine, packing.pack([sequence(0, 9, 0)]))
    with pytest.raises(InvalidInput, match="at least one pair"):
        Preference("dpo").evaluate(engine, [])


def test_record_when_given_several_values_then_refused() -> None:
    with pytest.raises(InvalidInput, match=r"record\('loss'\): expected a number, got list"):
        OfflineTrainer.record(None, "loss", [1.0, 2.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("status", "'status' is a figure of every run's summary: expected another name"),
        ("train/loss", "'train/loss' is a metric of every step"),
        ("", "name '': expected a name"),
    ],
)
def test_record_when_a_run_has_a_figure_of_the_name_then_refused(name: str, expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        OfflineTrainer.record(None, name, 1.0)  # type: ignore[arg-type]
