from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal.staleness import admission_headroom, oldest_admissible_version, staleness

steps = st.integers(1, 10_000)
etas = st.integers(0, 16)


@settings(deadline=None)
@given(step=steps, eta=etas)
def test_oldest_admissible_version_when_taken_then_staleness_is_the_bound(
    step: int, eta: int
) -> None:
    oldest = oldest_admissible_version(step, eta)
    assert staleness(step, oldest) == eta
    assert staleness(step, oldest - 1) == eta + 1


def test_staleness_when_generated_by_the_current_weights_then_zero() -> None:
    assert staleness(step=1, head_version=0) == 0
    assert staleness(step=8, head_version=5) == 2


@settings(deadline=None)
@given(size=st.integers(1, 512), eta=etas, version=st.integers(0, 1000), data=st.data())
def test_headroom_when_no_group_was_lost_then_equals_the_papers_bound(
    size: int, eta: int, version: int, data: st.DataObject
) -> None:
    """AReaL: accepted + running <= (eta + version + 1) * B, with version * B consumed so far."""
    running = data.draw(st.integers(0, 2000))
    completed = data.draw(st.integers(0, 2000))
    ahead = data.draw(st.integers(0, size))
    accepted = version * size + ahead + completed
    papers = (eta + version + 1) * size - (accepted + running)
    assert papers == admission_headroom(
        batch_size=size,
        max_head_offpolicyness=eta,
        running=running,
        completed=completed,
        batched_ahead=ahead,
    )
