"""What tests of the trainer's engines share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is quick to train; it is only read."""
    import torch

    from areal_torch.models.tiny import make_tiny_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    return Path(make_tiny_model(folder, seed=3, hidden_size=32))


@pytest.fixture(scope="session")
def taught_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """The same model, that answers each digit with its own: something for adapters to adapt."""
    from areal.config.training import OptimizerConfig, TrainEngineConfig
    from areal_torch.engines.sft import FSDPLMEngine, pack_examples

    folder = tmp_path_factory.mktemp("taught")
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.0)
    engine = FSDPLMEngine(TrainEngineConfig(path=str(model_dir), optimizer=optimizer))
    engine.initialize()
    for _ in range(60):
        engine.train_lm(pack_examples([([258, 48 + i, 259], [48 + i, 260]) for i in range(10)]))
    engine.save(folder)
    engine.destroy()
    return folder
