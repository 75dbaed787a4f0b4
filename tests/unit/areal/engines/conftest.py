"""What tests of the trainer's engines share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is quick to train; it is only read."""
    import torch

    from areal.models.tiny import make_tiny_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    return Path(make_tiny_model(folder, seed=3, hidden_size=32))
