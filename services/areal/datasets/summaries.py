"""Posts and their summaries: a task for a reward model that a tiny model learns within minutes."""

from __future__ import annotations

import random
from typing import Any

from areal.errors import InvalidInput

_WORDS = ("bee", "fog", "fox", "ice", "oak", "owl", "sea", "sun")
_MOST = 20_000


def posts(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows with posts to summarize.

    A post is seven words, one of which appears three times. That word is the summary.

    Args:
        count: Number of rows, 1 to 20,000; no post is repeated.
        seed: Random seed.

    Raises:
        InvalidInput: `count` is out of range.

    Example:
        >>> posts(1, seed=0)[0]
        {'messages': [{'role': 'user', 'content': 'ice owl sun bee owl owl oak'}], 'summary': 'owl'}
    """
    if not 0 < count <= _MOST:
        raise InvalidInput(f"posts(count={count}): expected 1 to {_MOST}")
    generator = random.Random(f"posts:{seed}")  # noqa: S311 - problems, not secrets
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        topic, *others = generator.sample(_WORDS, 5)
        words = [topic] * 3 + others
        generator.shuffle(words)
        text = " ".join(words)
        rows[text] = {"messages": [{"role": "user", "content": text}], "summary": topic}
    return list(rows.values())


def preferred(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Returns rows with two summaries of each post, for training a reward model with `pair_unit`.

    `chosen` is only the right word. About half of the `rejected` summaries are another word of the
    post; the others have extra words or end too early. Summaries that end too early are included
    because a reward model that was never trained on any might prefer them.

    Args:
        rows: Rows of `posts`.
        seed: Random seed.

    Example:
        >>> preferred(posts(1, seed=0), seed=0)[0]["rejected"]
        'bee'
    """
    generator = random.Random(f"preferred:{seed}")  # noqa: S311 - problems, not secrets
    pairs = []
    for row in rows:
        right, post = row["summary"], row["messages"][0]["content"]
        others = [word for word in post.split() if word != right]
        more = " ".join(generator.sample(post.split(), generator.randint(1, 3)))
        wrong = generator.choice(others)
        cut = right[: generator.randint(0, 2)]
        rejected = generator.choice((wrong, wrong, f"{right} {more}", cut))
        pairs.append({"prompt": row["messages"], "chosen": right, "rejected": rejected})
    return pairs
