import subprocess
import sys

import pytest

from areal.algorithms.sampling_filters import (
    accept_all,
    all_of,
    mean_reward_within,
    rewards_differ,
)
from areal.errors import InvalidInput


@pytest.mark.parametrize(
    ("rewards", "accepted"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([1.0], False),
        ([], False),
        ([0.1, 0.1 + 1e-9], False),
    ],
)
def test_rewards_differ_when_given_a_group_then_accepts_only_a_signal(rewards, accepted):
    assert rewards_differ(rewards) is accepted


def test_mean_reward_within_when_bounds_are_given_then_accepts_inside():
    accept = mean_reward_within(0.25, 0.75)
    assert [accept(r) for r in ([0.0], [0.0, 1.0], [1.0], [])] == [False, True, False, False]
    with pytest.raises(InvalidInput, match="low=2"):
        mean_reward_within(2, 1)


def test_all_of_when_combined_then_needs_every_filter():
    accept = all_of(accept_all, rewards_differ, mean_reward_within(0.0, 0.5))
    assert accept([0.0, 1.0])
    assert not accept([1.0, 1.0])
    assert not accept([0.0, 1.0, 1.0])
    assert not accept([])


@pytest.mark.parametrize(
    "module",
    [
        "areal.algorithms.sampling_filters",
        "areal.config.training",
        "areal.engines.train_api",
        "areal.models.tiny",
    ],
)
def test_module_when_imported_then_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], timeout=60, check=False, env={"PYTHONPATH": "services"}
        ).returncode
        == 0
    )
