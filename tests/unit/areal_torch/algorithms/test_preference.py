"""Losses over pairs against TRL's own (tools/reference_goldens.py) and closed forms in float64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.areal_torch.algorithms.test_reference_goldens import SEEDS, Case

from areal.config.training import TrainEngineConfig
from areal_torch.algorithms import packing, preference
from areal_torch.engines.preference import Preference


def paired(case: Case) -> packing.Batch:
    """Rows 0 to 3 are chosen over rows 4 to 7: a batch with the two of a pair side by side."""
    rows = torch.stack([torch.arange(4), torch.arange(4, 8)], 1).flatten().tolist()
    keys = ("loss_mask", "policy_logprobs", "reference_logprobs")
    batch = {key: case[key] for key in keys}
    batch |= {"cu_seqlens": case.cu_seqlens, "group_index": torch.arange(4).repeat(2)}
    return packing.select(batch, rows) | {"chosen": torch.tensor([True, False] * 4)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "settings", [Preference("dpo", 0.3), Preference("ipo", 0.3), Preference("simpo", 2.0, 0.7)]
)
def test_loss_when_of_trls_rows_then_its_value_and_gradient(
    seed: int, settings: Preference
) -> None:
    case = Case("trl_preference", seed)
    batch, rows = paired(case), [0, 4, 1, 5, 2, 6, 3, 7]
    policy = batch["policy_logprobs"].clone().requires_grad_()
    loss, stats = settings._loss(policy, torch.empty(0), batch)
    (loss / 4).backward()
    torch.testing.assert_close(loss.detach() / 4, case.arrays[f"{settings.loss}.loss"])
    grad = case[f"{settings.loss}.grad"]
    whole = {"cu_seqlens": case.cu_seqlens, "group_index": torch.arange(8), "grad": grad}
    expected = packing.select(whole, rows)["grad"]
    torch.testing.assert_close(policy.grad, expected, rtol=1e-5, atol=1e-7)
    assert 0 <= int(stats["accuracy"]) <= 4


@pytest.mark.parametrize("seed", range(5))
def test_losses_when_of_random_pairs_then_their_closed_forms_in_float64(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    sequences, scores = [], []
    for _ in range(6):
        length = int(torch.randint(2, 9, (1,), generator=g))
        mask = [False] + [bool(b) for b in torch.rand(length - 1, generator=g) < 0.6]
        mask[-1] = True
        logprobs = torch.randn(length, generator=g, dtype=torch.float64)
        sequences.append({"input_ids": [1] * length, "loss_mask": mask, "x": logprobs})
        own = [float(x) for x, m in zip(logprobs, mask, strict=True) if m]
        scores.append((math.fsum(own), math.fsum(own) / len(own)))
    batch = packing.pack(sequences, [0, 0, 1, 1, 2, 2])
    batch["chosen"] = torch.tensor([True, False, False, True, True, False])

    def margins(which: int) -> list[float]:
        s = [pair[which] for pair in scores]
        return [s[0] - s[1], s[3] - s[2], s[4] - s[5]]

    def lost(x: float) -> float:
        return math.log1p(math.exp(-x))

    sums, means = (
        preference.pair_margins(preference.answer_logprobs(batch["x"], batch, mean=mean), batch)
        for mean in (False, True)
    )
    near = {"rel": 1e-12, "abs": 1e-12}
    assert sums.tolist() == pytest.approx(margins(0), **near)
    assert means.tolist() == pytest.approx(margins(1), **near)
    found = preference.dpo_loss(sums, 0.3).tolist()
    assert found == pytest.approx([lost(0.3 * m) for m in margins(0)], **near)
    found = preference.ipo_loss(means, 0.3).tolist()
    assert found == pytest.approx([(m - 1 / 0.6) ** 2 for m in margins(1)], **near)
    found = preference.simpo_loss(means, 2.0, 0.7).tolist()
    assert found == pytest.approx([lost(2 * m - 0.7) for m in margins(1)], **near)
    found = preference.bradley_terry_loss(sums).tolist()
    assert found == pytest.approx([lost(m) for m in margins(0)], **near)


def test_pairs_when_cut_into_micro_batches_then_they_are_never_parted() -> None:
    sequences = [{"input_ids": [1] * 9, "loss_mask": [False] * 8 + [True]} for _ in range(8)]
    batch = packing.pack(sequences, [0, 0, 1, 1, 2, 2, 3, 3])
    parted = packing.split_micro_batches(batch, 12, 5)
    assert any(len(part) == 1 for part in parted), "without the key each stands alone"
    batch["chosen"] = torch.tensor([True, False] * 4)
    for budget in (12, 36):
        for part in packing.split_micro_batches(batch, budget, 5):
            assert [i % 2 for i in part] == [0, 1] * (len(part) // 2)
            assert packing.select(batch, part)["chosen"].sum() == len(part) // 2
    dummy = packing.dummy_like(batch)
    margins = preference.pair_margins(torch.ones(1, requires_grad=True), dummy)
    assert margins.shape == (1,), "a rank without pairs computes with something"


def test_train_when_a_key_is_missing_then_says_which() -> None:
    from areal.errors import InvalidInput
    from areal_torch.engines.fsdp import FSDPEngine

    engine = FSDPEngine(TrainEngineConfig(path="nowhere"))
    batch = packing.pack([{"input_ids": [1, 2], "loss_mask": [False, True]}])
    with pytest.raises(InvalidInput, match="no 'chosen': dpo needs it"):
        Preference().train(engine, batch)
    batch["chosen"] = torch.tensor([True])
    with pytest.raises(InvalidInput, match="no 'reference_logprobs'"):
        Preference().train(engine, batch)
