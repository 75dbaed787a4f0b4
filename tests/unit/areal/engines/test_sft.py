import pytest
import torch

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.engines.sft import FSDPLMEngine, pack_examples
from areal.models.tiny import make_tiny_model


def test_train_lm_when_repeated_then_learns_the_answers(tmp_path):
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path, hidden_size=32)
    engine = FSDPLMEngine(
        TrainEngineConfig(path=str(path), optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0))
    )
    engine.initialize()
    batch = pack_examples([([258, 48 + i, 259], [57 - i, 260]) for i in range(10)])
    try:
        first = engine.train_lm(batch)
        for _ in range(120):
            last = engine.train_lm(batch)
        logprobs = engine.forward(batch)
    finally:
        engine.destroy()
    assert first["loss"] == pytest.approx(5.56, abs=0.2)  # log 261
    assert last["loss"] < 0.05
    assert last["n_loss_tokens"] == 20
    assert float(logprobs[batch["loss_mask"]].exp().min()) > 0.9
