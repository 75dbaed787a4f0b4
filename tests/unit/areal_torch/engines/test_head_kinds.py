"""Heads against whole logits and plain layers: logprobs of ids, a teacher's best, one number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.areal_torch.engines.train_fixtures import gradients, make_batch

from areal.config.training import LoraConfig, OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import LogprobHead, ScalarHead, TopLogprobHead

K = 5


def engine_of(path: Path, **keys: object) -> FSDPEngine:
    config = TrainEngineConfig(path=str(path), **keys)  # type: ignore[arg-type]
    engine = FSDPEngine(config)
    engine.initialize()
    return engine


def all_logprobs(engine: FSDPEngine, batch: packing.Batch, temperature: float) -> torch.Tensor:
    """log_softmax of plain transformers' logits, at the token before each: [T, vocabulary]."""
    rows = []
    for sequence in packing.unpack(batch):
        logits = engine.model.hf(input_ids=sequence["input_ids"][None]).logits[0].float()
        shifted = torch.cat([logits[:1], logits[:-1]]) / temperature
        rows.append(shifted.log_softmax(-1))
    return torch.cat(rows)


def plainly(engine: FSDPEngine):
    """Outside packed sequences the model attends as transformers does."""
    engine.model.hf.set_attn_implementation("eager")


@pytest.mark.parametrize("chunk", [1 << 26, 261 * 7])
def test_teacher_when_its_best_are_read_then_they_are_those_of_whole_logits(
    model_dir: Path, chunk: int
) -> None:
    engine, batch = engine_of(model_dir, logits_chunk_elements=chunk), make_batch(1)
    logprobs, ids = engine.read(batch, TopLogprobHead(K, 0.7))
    plainly(engine)
    mask = batch["loss_mask"]
    with torch.no_grad():
        best, chosen = all_logprobs(engine, batch, 0.7).topk(K, -1)
    assert torch.allclose(logprobs[mask], best[mask], atol=1e-5)
    assert torch.equal(ids[mask], chosen[mask])
    assert not logprobs[~mask].any()
    assert logprobs.shape == ids.shape == (len(mask), K)
    engine.destroy()


@pytest.mark.parametrize("chunk", [1 << 26, 261 * 7])
def test_student_when_it_is_compared_with_a_teacher_then_value_and_gradient_of_whole_logits(
    model_dir: Path, chunk: int
) -> None:
    engine, batch = engine_of(model_dir, logits_chunk_elements=chunk), make_batch(2)
    generator = torch.Generator().manual_seed(0)
    tokens = len(batch["input_ids"])
    ids = torch.stack([torch.randperm(261, generator=generator)[:K] for _ in range(tokens)])
    teacher = torch.randn(tokens, K, generator=generator).log_softmax(-1) - 0.3
    batch |= {"teacher_ids": ids, "teacher_logprobs": teacher}

    def loss(logprobs, entropies, mb):
        """KL(teacher || student) over the teacher's best."""
        weight = mb["teacher_logprobs"].exp() * mb["loss_mask"][:, None]
        total = (weight * (mb["teacher_logprobs"] - logprobs)).sum()
        return total, {"kl": total}

    found = {}
    held = engine.train_batch
    engine.train_batch = lambda b, f: held(b, f, head=LogprobHead(0.7, ids="teacher_ids"))
    ours, stats = gradients(engine, batch, loss)
    plainly(engine)
    mask = batch["loss_mask"]
    whole = all_logprobs(engine, batch, 0.7).gather(1, ids)
    expected, _ = loss(torch.where(mask[:, None], whole, 0.0), None, batch)
    (expected / mask.sum()).backward()
    found = {name: p.grad for name, p in engine.model.named_parameters()}
    assert stats["kl"] == pytest.approx(float(expected.detach() / mask.sum()), rel=1e-5)
    for name, gradient in found.items():
        assert torch.allclose(ours[name], gradient, atol=1e-5), name
    engine.destroy()


def test_number_when_read_then_it_is_the_heads_of_the_state_before_or_at_each_token(
    model_dir: Path, tmp_path: Path
) -> None:
    engine, batch = engine_of(model_dir, scalar=True), make_batch(3)
    assert not engine.forward(batch, ScalarHead()).any(), "a fresh head says 0"
    hf = engine.model.hf
    torch.nn.init.normal_(hf.score.weight, generator=torch.Generator().manual_seed(0))
    before, at = (engine.forward(batch, ScalarHead(shift)) for shift in (1, 0))
    engine.save(tmp_path / "saved")
    plainly(engine)
    with torch.no_grad():
        for sequence, first, second in zip(
            packing.unpack(batch),
            before.split(packing.sequence_lengths(batch).tolist()),
            at.split(packing.sequence_lengths(batch).tolist()),
            strict=True,
        ):
            hidden = hf.model(input_ids=sequence["input_ids"][None]).last_hidden_state[0]
            values, mask = hf.score(hidden)[:, 0], sequence["loss_mask"]
            assert torch.allclose(second[mask], values[mask], atol=1e-5)
            assert torch.allclose(first[1:][mask[1:]], values[:-1][mask[1:]], atol=1e-5)
    engine.destroy()
    # transformers reads it as a classifier of one class, and so do we.
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype="float32")
    assert torch.equal(loaded.score.weight, hf.score.weight)
    again = engine_of(tmp_path / "saved", scalar=True)
    assert torch.equal(again.forward(batch, ScalarHead(0)), at)
    again.destroy()


def test_number_when_the_model_has_the_vocabularys_head_then_refused(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    with pytest.raises(InvalidInput, match="Qwen2ForCausalLM has no scalar head"):
        engine.forward(make_batch(0), ScalarHead())
    engine.destroy()


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.long), LoraConfig(rank=4)])
def test_number_when_scores_of_pairs_are_trained_then_the_chosen_ones_are_preferred(
    model_dir: Path, lora: LoraConfig | None
) -> None:
    """Bradley-Terry, off the last token: preferred is the answer with more of token 7."""
    generator = torch.Generator().manual_seed(0)

    def pairs(count: int) -> packing.Batch:
        sequences = []
        for _ in range(count):
            prompt = torch.randint(0, 100, (4,), generator=generator).tolist()
            for share in (0.8, 0.1):
                hit = torch.rand(8, generator=generator) < share
                other = torch.randint(8, 100, (8,), generator=generator)
                ids = prompt + torch.where(hit, 7, other).tolist()
                mask = [False] * (len(ids) - 1) + [True]
                sequences.append({"input_ids": ids, "loss_mask": mask})
        return packing.pack(sequences, [i // 2 for i in range(2 * count)])

    def loss(scores, _, mb):
        chosen, rejected = scores[mb["loss_mask"]].view(-1, 2).unbind(1)
        return -torch.nn.functional.logsigmoid(chosen - rejected).sum(), {}

    engine = engine_of(
        model_dir,
        scalar=True,
        lora=lora,
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, warmup_steps_proportion=0.0),
    )
    head, held_out = ScalarHead(0), pairs(64)
    for _ in range(60):
        engine.train_batch(pairs(16), loss, lambda mb: int(mb["loss_mask"].sum()) // 2, head=head)
    scores = engine.forward(held_out, head)[held_out["loss_mask"]].view(-1, 2)
    assert float((scores[:, 0] > scores[:, 1]).float().mean()) >= 0.9
    engine.destroy()
