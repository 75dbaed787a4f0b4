"""Each model that docs/models.md calls correct trains in the engine, and leaves it as it came."""

import pytest
import torch
from peft import PeftModel
from tests.integration.test_models_page import TRIED, rows_of_the_page
from tests.unit.areal_torch.engines.tiny_families import alone, saved, text_batch
from tests.unit.areal_torch.engines.train_fixtures import weighted_loss
from tools.gen_models import LOGPROB_TOLERANCE, RIGHT

from areal.config.training import LoraConfig, OptimizerConfig, TrainEngineConfig
from areal.errors import CannotStart, InvalidInput
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]
# And one of each kind of layer, and a composite.
EACH_TIME = TRIED | {"qwen3_5", "qwen3_5_moe", "gemma4", "bamba", "kimi_linear", "lfm2"}

# The page names these exceptions.
WITHOUT_ADAPTERS = {"gpt2", "gpt-sw3"}
FLOAT32_ONLY = {"minimax"}


def families():
    return [
        pytest.param(row.model_type, marks=[pytest.mark.long] * (row.model_type not in EACH_TIME))
        for row in rows_of_the_page()
        if row.result == RIGHT
    ]


@pytest.fixture
def initialize():
    engines = []

    def make(folder, **options):
        options = {"dtype": "float32", "gradient_checkpointing": "none", **options}
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
        engine = FSDPEngine(TrainEngineConfig(path=str(folder), optimizer=optimizer, **options))
        engines.append(engine)
        engine.initialize(total_train_steps=10)
        return engine

    yield make
    for engine in reversed(engines):
        engine.destroy()


@pytest.mark.parametrize("adapters", [None, LoraConfig(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("kind", families())
def test_export_when_a_model_of_the_page_has_trained_then_its_class_computes_the_same(
    tmp_path, initialize, kind, adapters
):
    hf = saved(kind, tmp_path / "source")
    if adapters and kind in WITHOUT_ADAPTERS:
        with pytest.raises(InvalidInput, match=r"expected linear layers .*it has none"):
            initialize(tmp_path / "source", lora=adapters)
        return
    engine = initialize(tmp_path / "source", lora=adapters)
    batch = text_batch(hf)
    before = engine.forward(batch)
    engine.train_batch(batch, weighted_loss)
    after = engine.forward(batch)
    assert (after - before).abs().max() > 1e-3
    engine.save(tmp_path / "out")
    again = type(hf).from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    torch.testing.assert_close(after, alone(again.eval(), batch), atol=LOGPROB_TOLERANCE, rtol=0)
    if adapters:  # as peft reads them, beside the model as it came
        lora.write(engine.model.hf, tmp_path / "adapter", str(tmp_path / "source"))
        plain = type(hf).from_pretrained(
            tmp_path / "source", attn_implementation="eager", dtype=torch.float32
        )
        beside = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        torch.testing.assert_close(after, alone(beside, batch), atol=LOGPROB_TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", families())
def test_training_when_a_model_of_the_page_computes_in_bfloat16_then_its_step_is_finite(
    tmp_path, initialize, kind
):
    hf = saved(kind, tmp_path, scale=0.3)  # wild weights would amplify the rounding
    if kind in FLOAT32_ONLY:
        with pytest.raises(CannotStart, match="expected m1 and m2 to have the same dtype"):
            initialize(tmp_path, dtype="bfloat16")
        return
    engine = initialize(tmp_path, dtype="bfloat16")
    norm = engine.train_batch(text_batch(hf), weighted_loss)["grad_norm"]
    assert 0 < norm < float("inf")
