"""Which version answers an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from areal.errors import NotFound
from areal_torch.training.evaluation import pinned


@dataclass
class Session:
    """Of a trainer: what it has finished, what servers are brought to."""

    step: int
    served_version: int


@pytest.mark.parametrize(
    ("step", "served", "version"),
    [(4, 4, 4), (3, 5, None), (4, 5, None)],  # 5: also when its trainer died before storing it
)
def test_evaluation_when_servers_are_ahead_then_any_version_answers(
    step: int, served: int, version: int | None
) -> None:
    assert pinned(Session(step, served), "heldout", None) == version


def test_evaluation_when_another_version_is_asked_for_then_refused_by_name() -> None:
    for asked, gone in ((4, "no longer served"), (6, "not published yet")):
        with pytest.raises(NotFound, match=gone):
            pinned(Session(4, 5), "heldout", asked)
