"""A critic's loss against a loop over tokens in float64."""

import pytest
import torch

from areal_torch.algorithms import losses


def inputs(seed):
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 90, (1,), generator=g))
    values, moved, returns = torch.randn(3, count, generator=g, dtype=torch.float64)
    return values + 0.3 * moved, values, returns, torch.rand(count, generator=g) < 0.6


def by_loop(values, center, returns, mask, eps):
    """Loss, slope and number of clipped tokens, one token at a time."""
    total, clipped, slope = 0.0, 0, [0.0] * len(values)
    for i, (v, c, r, m) in enumerate(zip(values, center, returns, mask, strict=True)):
        if not m:
            continue
        near = min(max(float(v), float(c) - eps), float(c) + eps)
        plain, other = (float(v - r)) ** 2, (near - float(r)) ** 2
        total += max(plain, other) / 2
        clipped += other > plain
        slope[i] = 0.0 if other > plain else float(v - r)
    return total, clipped, slope


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("eps", [0.05, 0.2, 1e9])
def test_value_loss_when_shapes_and_masks_vary_then_equals_a_loop(seed, eps):
    values, center, returns, mask = inputs(seed)
    # What lies off the mask has no say, whatever it is.
    values[~mask], returns[~mask], center[~mask] = torch.nan, torch.inf, -torch.inf
    values.requires_grad_()
    loss, stats = losses.value_loss(values, center, returns, mask, eps_clip=eps)
    loss.backward()
    total, clipped, slope = by_loop(values.detach(), center, returns, mask, eps)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-12, abs=1e-12)
    assert int(stats["clip_ratio"]) == clipped
    # At the center both squares are equal up to rounding, and so are their slopes.
    assert values.grad.tolist() == pytest.approx(slope, rel=1e-9, abs=1e-9)
    assert (eps > 1) == (clipped == 0) or int(mask.sum()) < 8
