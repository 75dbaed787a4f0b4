"""The optimizer steps of one PPO update, against the algorithm written out over tokens."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid

from areal.config.training import PPOActorConfig
from areal_torch.algorithms import packing
from areal_torch.engines.ppo import PPOActor

BEGIN = (0.6, -0.4)
LR = 8.0
LONGEST = 7


def features(token):
    return (math.sin(token), math.cos(2.0 * token))


class TwoWeights:
    """An engine with two weights: a token's logprob is log sigmoid(w . x). It descends by LR."""

    process_group = None

    def __init__(self):
        self.weights = torch.tensor(BEGIN, dtype=torch.float64, requires_grad=True)
        self.forwards = 0

    def _logprobs(self, batch):
        x = [features(token) for token in batch["input_ids"].tolist()]
        scores = torch.tensor(x, dtype=torch.float64).reshape(-1, 2) @ self.weights
        return torch.where(batch["loss_mask"], logsigmoid(scores), 0.0)

    def forward(self, batch, head):
        self.forwards += 1
        return self._logprobs(batch).detach()

    def train_batch(self, batch, loss_fn, head):
        policy, tokens = self._logprobs(batch), int(batch["loss_mask"].sum())
        loss, stats = loss_fn(policy, torch.zeros_like(policy), batch)
        (gradient,) = torch.autograd.grad(loss, self.weights)
        if tokens:
            with torch.no_grad():
                self.weights -= LR * gradient / tokens
        means = {name: float(value) / max(tokens, 1) for name, value in stats.items()}
        return {**means, "n_tokens": len(policy), "n_loss_tokens": tokens, "seconds": 1.0}

    def reduce_stats(self, sums):
        return {name: float(value) for name, value in sums.items()}


def logprob(weights, token):
    score = sum(w * x for w, x in zip(weights, features(token), strict=True))
    return -math.log1p(math.exp(-score))


def loss_of(weights, rows, method, aggregation):
    """A minibatch's loss in plain numbers. The policy at the start of the update has BEGIN."""
    sums, counts = [], []
    for row in rows:
        total, count = 0.0, 0
        columns = ("input_ids", "loss_mask", "behavior_logprobs", "advantages")
        for token, asked, behavior, gain in zip(*(row[c].tolist() for c in columns), strict=True):
            if asked:
                start = logprob(BEGIN, token)
                ratio = math.exp(logprob(weights, token) - start)
                surrogate = min(ratio * gain, min(max(ratio, 0.8), 1.2) * gain)
                weight = min(math.exp(start - behavior), 5.0) if method == "recompute" else 1.0
                total, count = total - weight * surrogate, count + 1
        if count:
            sums.append(total)
            counts.append(count)
    if not counts:
        return 0.0
    if aggregation == "token_mean":
        return sum(sums) / sum(counts)
    divisors = counts if aggregation == "sequence_mean" else [LONGEST] * len(counts)
    return sum(s / n for s, n in zip(sums, divisors, strict=True)) / len(counts)


def descend(weights, loss):
    """One step along the gradient by central differences."""
    moved, width = [], 1e-6
    for place in range(len(weights)):
        above, below = list(weights), list(weights)
        above[place] += width
        below[place] -= width
        moved.append(weights[place] - LR * (loss(above) - loss(below)) / (2 * width))
    return moved


def make_batch(lengths, groups):
    """A prompt token and an answer for each length; of length 0: no token of it is trained on."""
    g = torch.Generator().manual_seed(len(lengths))
    rows = []
    for answer in lengths:
        count = 1 + (answer or 3)
        mask = torch.arange(count) > (0 if answer else count)
        behavior = -2.0 * torch.rand(count, generator=g, dtype=torch.float64)
        gains = torch.randn(count, generator=g, dtype=torch.float64)
        rows.append(
            {
                "input_ids": torch.randint(0, 200, (count,), generator=g),
                "loss_mask": mask,
                "behavior_logprobs": torch.where(mask, behavior, 0.0),
                "advantages": torch.where(mask, gains, 0.0),
                "rewards": torch.zeros(count),
            }
        )
    return packing.pack(rows, groups)


BATCHES = {
    "an empty sequence each": make_batch([4, 7, 0, 2, 0, 5, 6, 3, 0], [0] * 3 + [1] * 3 + [2] * 3),
    "fewer sequences than minibatches": make_batch([6, 0], [0, 0]),
    "a minibatch without loss tokens": make_batch([6, 3, 0], [0, 1, 2]),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("method", ["recompute", "unweighted"])
@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_ppo_update_when_in_minibatches_then_steps_as_the_algorithm_says(
    minibatches, method, aggregation, batch
):
    config = PPOActorConfig(
        ppo_n_minibatches=minibatches,
        prox_logp_method=method,
        loss_aggregation=aggregation,
        max_response_tokens=LONGEST,
    )
    engine = TwoWeights()
    stats = PPOActor(config, engine).ppo_update(batch)

    weights, rows = list(BEGIN), packing.unpack(batch)
    for indices in packing.split_minibatches(batch, minibatches):
        chosen = [rows[index] for index in indices]
        weights = descend(weights, lambda w, own=chosen: loss_of(w, own, method, aggregation))

    assert engine.weights.tolist() == pytest.approx(weights, abs=1e-7)
    assert math.dist(weights, BEGIN) > 0.1
    assert (stats["clip_ratio"] > 0.0) == (minibatches > 1 and len(rows) == 9)
    assert stats["n_loss_tokens"] == int(batch["loss_mask"].sum())
    # A single minibatch takes the proximal logprobs from its own forward pass.
    assert engine.forwards == (minibatches > 1)
