import pytest
import torch

from areal.config.training import LoraConfig, OptimizerConfig, TrainEngineConfig
from areal.datasets.chats import chat_unit
from areal.tokenizer import Tokenizer
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.sft import FSDPLMEngine, evaluate_lm, pack_examples, train_lm
from areal_torch.models.tiny import make_tiny_model


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


def test_loss_when_of_chats_of_several_turns_then_it_is_that_of_transformers(model_dir):
    tokenizer = Tokenizer.load(model_dir)
    chats = [
        [
            turn
            for number in range(count)
            for turn in (
                {"role": "user", "content": f"{number}+{count}="},
                {"role": "assistant", "content": str(number + count)},
            )
        ]
        for count in (1, 3, 2)
    ]
    units = [chat_unit(tokenizer, chat)[0] for chat in chats]
    config = TrainEngineConfig(path=str(model_dir), dtype="float64")
    config.mb_spec.max_tokens_per_mb = 30  # several micro-batches
    engine = FSDPEngine(config)
    engine.initialize()
    batch = packing.pack(units)
    before = evaluate_lm(engine, batch)
    engine.model.hf.set_attn_implementation("eager")
    total = tokens = 0
    with torch.no_grad():
        for unit in units:
            ids = torch.tensor([unit["input_ids"]])
            labels = torch.where(torch.tensor([unit["loss_mask"]]), ids, -100)
            count = int((labels != -100).sum())
            total += float(engine.model.hf(input_ids=ids, labels=labels).loss) * count
            tokens += count
    engine.destroy()
    engine = FSDPEngine(config)
    engine.initialize()
    stats = train_lm(engine, batch)
    engine.destroy()
    assert before == pytest.approx(total / tokens, rel=1e-6)  # its loss is of float32
    assert stats["loss"] == pytest.approx(before, rel=1e-12)
    assert stats["n_loss_tokens"] == tokens


def test_train_lm_when_with_lora_then_it_learns_at_least_four_fifths_as_much(taught_dir):
    batch = pack_examples([([258, 48 + i, 259], [57 - i, 260]) for i in range(10)])
    falls = []
    for lora, lr in ((None, 1e-2), (LoraConfig(rank=8), 3e-2)):
        optimizer = OptimizerConfig(lr=lr, weight_decay=0.0)
        engine = FSDPEngine(TrainEngineConfig(path=str(taught_dir), lora=lora, optimizer=optimizer))
        engine.initialize()
        losses = [train_lm(engine, batch)["loss"] for _ in range(100)]
        engine.destroy()
        falls.append(losses[0] - losses[-1])
    assert falls[1] >= 0.8 * falls[0], falls
