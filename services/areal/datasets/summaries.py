"""Posts and their summaries: a task for a reward model that a tiny model learns within minutes."""

from __future__ import annotations

import random
from typing import Any

from areal.errors import InvalidInput

_WORDS = ("bee", "fog", "fox", "ice", "oak", "owl", "sea", "sun")
_MOST = 20_000


def posts(count: int, seed: int) -> list[dict[str, Any]]:
    """Returns posts of seven words. One word appears three times: it is the summary.

    Args:
        count: Number of rows; no post is repeated.
        seed: Random seed.

    Raises:
        InvalidInput: There are not that many posts.

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
    """Returns two summaries of each post; a person would prefer the right word alone.

    Half of the rejected summaries name another word of the post. The others have extra words or end
    too early. A judge that was never trained on summaries that end too early would prefer them.

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
