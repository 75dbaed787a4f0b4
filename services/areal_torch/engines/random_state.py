"""The three global random generators of a rank (python, numpy, torch), and its GPU's.

A checkpoint carries them as tensors. Python and NumPy may cache a second normal value; it is stored
as NaN if there is none.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Seeds all generators of this rank: a run that restarts at step 0 draws the same numbers."""
    for_python, for_numpy, for_torch = (
        int(word) for word in np.random.SeedSequence([seed, rank]).generate_state(3)
    )
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)  # GPUs too


def capture() -> dict[str, torch.Tensor]:
    """Returns the state of every generator by name."""
    _, words, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    cached = legacy["gauss"] if legacy["has_gauss"] else math.nan
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_normal": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor(
            [*legacy["state"]["key"].tolist(), legacy["state"]["pos"]], dtype=torch.int64
        ),
        "numpy_normal": torch.tensor([cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(states: Mapping[str, torch.Tensor]) -> None:
    """Sets the generators that `states` names; others continue from where they are."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        normal = _normal(states, "python_normal")
        random.setstate((3, tuple(states["python"].tolist()), normal))
    if "numpy" in states:
        *key, position = states["numpy"].tolist()
        normal = _normal(states, "numpy_normal")
        np.random.set_state(
            (
                "MT19937",
                np.array(key, dtype=np.uint32),
                position,
                int(normal is not None),
                normal or 0.0,
            )
        )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _normal(states: Mapping[str, torch.Tensor], name: str) -> float | None:
    value = float(states[name]) if name in states else math.nan
    return None if math.isnan(value) else value
