import statistics
from typing import get_args

import pytest
import torch

from areal.config.training import RewardNorm
from areal_torch.algorithms import normalization

SCORES = torch.tensor([1.0, 0.0, 0.0, 5.0, 7.0, 3.0, 9.0])
# Uneven, not contiguous, arbitrary labels: {1, 0, 7}, {0, 5}, {3}, {9}.
GROUPS = torch.tensor([40, 40, 7, 7, 40, -3, 12])


def normalize(scores, groups, norm):
    center, scale = normalization.center_and_scale(scores, groups, norm)
    return (scores.double() - center) / scale


def loop(norm):
    scores, groups = SCORES.tolist(), GROUPS.tolist()
    mean_level, std_level = norm.split("/")
    result = []
    for i, score in enumerate(scores):
        members = [s for s, g in zip(scores, groups, strict=True) if g == groups[i]]
        mean = std = 0.0
        if mean_level == "batch":
            mean = statistics.mean(scores)
        elif mean_level in ("group", "leave1out"):
            others = [s for j, s in enumerate(scores) if groups[j] == groups[i] and j != i]
            mean = statistics.mean(members)
            if mean_level == "leave1out":
                mean = statistics.mean(others) if others else score
        if std_level == "batch":
            std = statistics.stdev(scores)
        elif std_level == "group":
            std = statistics.stdev(members) if len(members) > 1 else 0.0
        # No spread, no division.
        result.append((score - mean) / (std + 1e-5 if std else 1.0))
    return torch.tensor(result, dtype=torch.float64)


@pytest.mark.parametrize("norm", get_args(RewardNorm))
def test_center_and_scale_when_groups_are_uneven_then_equals_a_loop(norm):
    ours = normalize(SCORES, GROUPS, norm)
    torch.testing.assert_close(ours, loop(norm), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("norm", ["leave1out/group", "leave1out/none"])
def test_center_and_scale_when_leave_one_out_then_a_group_of_one_gets_zero(norm):
    ours = normalize(SCORES, GROUPS, norm)
    assert ours[5:].tolist() == [0.0, 0.0]


def test_center_and_scale_when_rewards_are_equal_then_is_zero():
    ours = normalize(torch.full((4,), 0.1), torch.tensor([0, 0, 1, 1]), "group/group")
    assert float(ours.abs().max()) < 1e-9


def test_center_and_scale_when_a_group_has_no_spread_then_only_its_center_is_taken_off():
    scores, groups = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.3]), torch.tensor([0, 0, 1, 1, 2])
    ours = normalize(scores, groups, "batch/group")
    std = 0.5**0.5
    expected = [0.34, 0.34, -0.66 / std, 0.34 / std, -0.36]
    assert ours.tolist() == pytest.approx(expected, rel=1e-4)
    alone = normalize(scores, groups, "none/group")
    assert alone[[0, 1, 4]].tolist() == pytest.approx([1.0, 1.0, 0.3])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mean_level", ["batch", "none"])
def test_center_and_scale_when_equal_scores_round_then_their_group_still_has_no_spread(
    seed, mean_level
):
    g = torch.Generator().manual_seed(seed)
    # The float64 mean of three times 0.1 (or of any such number) is not always that number.
    values = torch.rand(50, generator=g, dtype=torch.float64)
    ours = normalize(values.repeat_interleave(3), torch.arange(150) // 3, f"{mean_level}/group")
    center = values.mean() if mean_level == "batch" else 0.0
    torch.testing.assert_close(ours, (values - center).repeat_interleave(3))


def test_masked_mean_std_when_mean_is_large_then_does_not_cancel():
    x = torch.tensor([1e9 + 1, 1e9 + 2, 1e9 + 3, 5.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    mean, std = normalization.masked_mean_std(x, mask)
    assert float(mean) == 1e9 + 2
    assert float(std) == pytest.approx(1.0, rel=1e-6)


def test_normalize_tokens_when_masked_then_leaves_zeros_and_unit_variance():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, generator=g) * 3 + 5
    mask = torch.rand(1000, generator=g) < 0.5
    ours = normalization.normalize_tokens(x, mask, "batch/batch")
    assert bool((ours[~mask] == 0).all())
    assert float(ours[mask].mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(ours[mask].std()) == pytest.approx(1.0, abs=1e-4)
    centered = normalization.normalize_tokens(x, mask, "batch/none")
    torch.testing.assert_close(centered[mask], x[mask] - x[mask].mean(), rtol=1e-4, atol=1e-4)


def test_normalize_tokens_when_mask_is_empty_then_is_zero():
    empty = torch.zeros(3, dtype=torch.bool)
    assert normalization.normalize_tokens(torch.ones(3), empty, "batch/batch").tolist() == [0.0] * 3
