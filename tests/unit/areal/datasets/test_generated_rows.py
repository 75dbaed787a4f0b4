"""Rows that are made on the spot: pictures to count, posts to sum up."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from areal.datasets.counting import counting
from areal.datasets.summaries import posts, preferred
from areal.errors import InvalidInput


def squares(file: bytes) -> int:
    """Bright regions of a picture, each of 9 pixels."""
    bright = np.asarray(Image.open(io.BytesIO(file)).convert("L")) > 100
    assert bright.sum() % 9 == 0
    starts = bright & ~np.roll(bright, 1, axis=0) & ~np.roll(bright, 1, axis=1)
    return int(starts.sum())


def test_counting_when_pictures_are_read_then_they_show_what_the_answer_says() -> None:
    rows = counting(200, most=3, seed=1)
    assert [str(squares(row["images"][0])) for row in rows] == [row["answer"] for row in rows]
    assert set(Counter(row["answer"] for row in rows)) == set("0123")
    assert rows == counting(200, most=3, seed=1) != counting(200, most=3, seed=2)
    with pytest.raises(InvalidInput, match="most=9"):
        counting(1, most=9, seed=0)


def test_posts_when_made_then_the_summary_is_the_word_that_comes_three_times() -> None:
    rows = posts(300, seed=0)
    for row in rows:
        words = Counter(row["messages"][0]["content"].split())
        assert words.most_common(1) == [(row["summary"], 3)]
        assert sorted(words.values()) == [1, 1, 1, 1, 3]
    assert len({row["messages"][0]["content"] for row in rows}) == 300
    with pytest.raises(InvalidInput, match="expected 1 to"):
        posts(0, seed=0)


def test_preferred_when_made_then_the_rejected_summary_is_wrong_or_too_long() -> None:
    rows = posts(300, seed=0)
    pairs = preferred(rows, seed=0)
    assert [pair["chosen"] for pair in pairs] == [row["summary"] for row in rows]
    rejected = [pair["rejected"] for pair in pairs]
    kinds = Counter((len(text) == 3 and " " not in text) or len(text) > 3 for text in rejected)
    assert not any(pair["rejected"] == pair["chosen"] for pair in pairs)
    assert kinds[True] > 150
    assert kinds[False] > 30, "some stop too soon"
