"""What every suite shares."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model with a tokenizer; it is only read."""
    import torch

    from areal.models.tiny import make_tiny_model

    torch.set_num_threads(1)
    return Path(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0))
