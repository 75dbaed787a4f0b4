import random

import numpy as np
import pytest
import torch

from areal_torch.engines import random_state


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        float(torch.rand(())),
        float(torch.randn(())),
    )


@pytest.fixture(autouse=True)
def undisturbed():
    before = random_state.capture()
    yield
    random_state.restore(before)


@pytest.mark.parametrize("cached_normals", [0, 1])
def test_restore_when_captured_before_then_every_generator_draws_the_same(cached_normals):
    random_state.seed_all(0, 0)
    for _ in range(cached_normals):  # python and numpy make two at a time and keep the second
        random.gauss(0, 1)
        np.random.standard_normal()
    states = random_state.capture()
    expected = [draw(), draw()]
    random_state.restore(states)
    assert [draw(), draw()] == expected


def test_seed_all_when_rank_or_seed_differs_then_so_do_the_draws():
    drawn = set()
    for seed, rank in [(0, 0), (0, 1), (1, 0)]:
        random_state.seed_all(seed, rank)
        drawn.add(first := draw())
        random_state.seed_all(seed, rank)
        assert draw() == first
    assert len({value for draws in drawn for value in draws}) == 18


def test_restore_when_a_state_is_missing_then_that_generator_goes_on():
    random_state.seed_all(0, 0)
    states = random_state.capture()
    expected = random.random()
    numpy_next = np.random.rand()
    random_state.restore({"numpy": states["numpy"]})
    assert random.random() != expected
    assert np.random.rand() == numpy_next
