"""Sampling: distribution, logprobs, seeds."""

import math
from itertools import pairwise

import pytest
import torch

from areal_inference.decode.request import SamplingParams
from areal_inference.decode.sampling import SamplingBatch, _invert, sample, seeded_uniform

VOCAB = 12


def draw(params: list[SamplingParams], logits: torch.Tensor, *, seed: int = 0, generated=None):
    generator = torch.Generator().manual_seed(seed)
    rows = logits.clone() if logits.dim() == 2 else logits.repeat(len(params), 1)
    return sample(rows, SamplingBatch(params), generated or [0] * len(params), generator)


def params(**values) -> SamplingParams:
    return SamplingParams(max_new_tokens=8, **values)


def reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities after temperature, top-k and top-p, by sorting in Python."""
    probabilities = torch.softmax(logits / temperature, -1)
    kept, mass = {}, 0.0
    for rank, index in enumerate(probabilities.argsort(descending=True).tolist()):
        if (top_k > 0 and rank >= top_k) or mass > top_p:
            break
        kept[index] = float(probabilities[index])
        mass += kept[index]
    filtered = torch.zeros(VOCAB)
    for index, value in kept.items():
        filtered[index] = value / sum(kept.values())
    return filtered


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.5, -1, 1.0), (1.7, -1, 1.0), (1.0, 3, 1.0), (1.0, -1, 0.7), (0.8, 5, 0.6)],
)
def test_sample_when_drawn_often_then_follows_the_distribution(temperature, top_k, top_p):
    logits = torch.linspace(-2, 2, VOCAB)[torch.randperm(VOCAB)]
    count = 40_000
    row = params(temperature=temperature, top_k=top_k, top_p=top_p)
    tokens, logprobs = draw([row] * count, logits)

    expected = reference(logits, temperature, top_k, top_p)
    seen = torch.bincount(tokens, minlength=VOCAB) / count
    assert (seen[expected == 0] == 0).all()
    sigma = (expected * (1 - expected) / count).sqrt()
    assert ((seen - expected).abs() <= 5 * sigma + 1e-9).all()
    # The logprob is that of the scaled distribution, before the filters.
    scaled = torch.log_softmax(logits / temperature, -1)
    torch.testing.assert_close(logprobs, scaled[tokens])


def test_sample_when_greedy_then_most_likely_token_with_raw_logprob():
    logits = torch.randn(5, VOCAB)
    tokens, logprobs = draw([params(temperature=0.0)] * 5, logits)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    expected = torch.log_softmax(logits, -1).max(-1).values
    torch.testing.assert_close(logprobs, expected)


def test_sample_when_rows_are_mixed_then_each_keeps_its_settings():
    rows = [
        params(temperature=0.0),
        params(temperature=0.5, seed=7),
        params(top_k=1),
        params(seed=7, top_p=0.9),
        params(),
    ]
    logits = torch.randn(5, VOCAB)
    tokens, logprobs = draw(rows, logits, generated=[0, 3, 0, 3, 0])
    for index in (0, 1, 2, 3):  # all but the unseeded last one are determined
        alone, logprob = draw(
            [rows[index]], logits[index : index + 1], seed=99, generated=[[0, 3, 0, 3][index]]
        )
        assert tokens[index] == alone[0]
        torch.testing.assert_close(logprobs[index], logprob[0])


def test_sample_when_below_min_new_tokens_then_no_stop_token():
    logits = torch.zeros(VOCAB)
    logits[4] = 20.0
    row = params(min_new_tokens=2, stop_ids=frozenset({4}), temperature=0.0)
    assert draw([row], logits, generated=[1])[0].item() != 4
    tokens, _ = draw([row], logits, generated=[2])
    assert tokens.item() == 4
    # While masked, the logprob is that of the distribution actually sampled from.
    masked = draw([row], logits, generated=[0])[1].item()
    assert math.isclose(masked, -math.log(VOCAB - 1), rel_tol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 0.5])
def test_invert_when_weights_are_zero_then_never_chosen(uniform: float):
    weights = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7000001, 0.0, 0.0]])
    assert _invert(weights, torch.tensor([[uniform]])).item() in (2, 4)


def test_seeded_uniform_when_indexed_then_uniform_and_distinct():
    values = [seeded_uniform(seed, index) for seed in range(40) for index in range(50)]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value < 1.0 for value in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    products = [(a - 0.5) * (b - 0.5) for a, b in pairwise(values)]
    mean = sum(products) / len(products)
    assert abs(mean) < 0.01  # uncorrelated (variance is 1/12)
