"""The control experiment: the same rewards, dealt at random."""

import torch
from tests.unit.areal_torch.engines.train_fixtures import make_batch

from areal_torch.algorithms.advantages import sequence_sums
from areal_torch.algorithms.controls import shuffle_rewards


def test_shuffle_rewards_when_dealt_then_the_same_ones_sit_on_other_sequences():
    batch = make_batch(groups=8)
    before = sequence_sums(batch["rewards"], batch["cu_seqlens"])
    shuffle_rewards(batch, seed=1)
    after = sequence_sums(batch["rewards"], batch["cu_seqlens"])
    assert sorted(after.tolist()) == sorted(before.tolist())
    assert not torch.equal(after, before)
    last = batch["cu_seqlens"][1:].long() - 1
    assert float(batch["rewards"].sum()) == float(batch["rewards"][last].sum())
