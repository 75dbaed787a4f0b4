"""Top-k KL against whole distributions, and a student that comes near its teacher."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from areal.config.training import OptimizerConfig, TrainEngineConfig
from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.distill import Distillation, top_k_kl, with_rest
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.heads import TopLogprobHead
from areal_torch.engines.sft import evaluate_lm, pack_examples, train_lm

VOCABULARY = 261
EXAMPLES = [([258, 48 + i, 259], [57 - i, 260]) for i in range(10)]


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("seed", range(3))
def test_kl_when_k_grows_then_it_rises_to_that_of_whole_distributions(seed, direction) -> None:
    g = torch.Generator().manual_seed(seed)
    teacher, student = torch.randn(2, 5, 12, generator=g, dtype=torch.float64).log_softmax(-1)
    whole = kl(teacher, student) if direction == "forward" else kl(student, teacher)
    before = torch.zeros(5, dtype=torch.float64)
    for k in (2, 6, 11):
        best, ids = teacher.topk(k, -1)
        found = top_k_kl(student.gather(-1, ids), best, direction)
        p, q = (
            torch.cat([x.gather(-1, ids).exp(), x.exp().sum(-1, keepdim=True)], -1)
            for x in (teacher, student)
        )
        p[:, -1], q[:, -1] = 1 - p[:, :-1].sum(-1), 1 - q[:, :-1].sum(-1)
        expected = kl(p.log(), q.log()) if direction == "forward" else kl(q.log(), p.log())
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert bool((found >= before - 1e-12).all())
        before = found
    torch.testing.assert_close(before, whole)  # the last id alone is the rest


def plain_kl(logits: list[float], teacher: list[float], ids: list[int], direction: str) -> float:
    """The divergence over some ids and the rest, of two lists of logits, in plain numbers."""

    def outcomes(scores: list[float]) -> list[float]:
        total = sum(math.exp(score) for score in scores)
        kept = [math.exp(scores[i]) / total for i in ids]
        return [*kept, 1.0 - sum(kept)]

    q, p = outcomes(logits), outcomes(teacher)
    if direction == "reverse":
        p, q = q, p
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_kl_when_a_logit_of_the_student_moves_then_its_gradient_says_by_how_much(
    k, direction
) -> None:
    g = torch.Generator().manual_seed(k)
    teacher, student = torch.randn(2, 8, generator=g, dtype=torch.float64)
    ids, logits = teacher.topk(k).indices, student.clone().requires_grad_()
    kept = (each.log_softmax(-1)[ids] for each in (logits, teacher))
    top_k_kl(*kept, direction).backward()
    slopes, width = [], 1e-6
    for step in width * torch.eye(8, dtype=torch.float64):
        above, below = (
            plain_kl(moved.tolist(), teacher.tolist(), ids.tolist(), direction)
            for moved in (student + step, student - step)
        )
        slopes.append((above - below) / (2 * width))
    assert max(map(abs, slopes)) > 0.05
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(slopes, abs=1e-8)


def test_rest_when_the_ids_are_nearly_certain_then_finite() -> None:
    sure = torch.tensor([[-1e-9, -30.0]], requires_grad=True)
    top_k_kl(sure, sure.detach(), "reverse").sum().backward()
    assert bool(torch.isfinite(with_rest(sure)).all())
    assert sure.grad is not None
    assert bool(torch.isfinite(sure.grad).all())


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_kl_when_the_teacher_rules_ids_out_then_they_are_of_the_rest(direction, kept) -> None:
    g = torch.Generator().manual_seed(kept)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    teacher = torch.tensor([0.5, 0.3, 0.1], dtype=torch.float64).log()
    teacher[kept:] = -torch.inf
    found = top_k_kl(logits.log_softmax(-1)[:3], teacher, direction)
    found.backward()
    short = top_k_kl(logits.detach().log_softmax(-1)[:kept], teacher[:kept], direction)
    assert float(found.detach()) == pytest.approx(float(short), rel=1e-12)
    assert bool(torch.isfinite(logits.grad).all())
    q, p = (
        [*each, max(1 - sum(each), 1e-6)]
        for each in (logits.detach().softmax(-1)[:kept].tolist(), teacher[:kept].exp().tolist())
    )
    if direction == "reverse":
        q, p = p, q
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert float(found.detach()) == pytest.approx(expected, rel=1e-9)


def engine_of(path: Path, lr: float) -> FSDPEngine:
    optimizer = OptimizerConfig(lr=lr, weight_decay=0.0)
    engine = FSDPEngine(TrainEngineConfig(path=str(path), optimizer=optimizer))
    engine.initialize()
    return engine


def sample(student: FSDPEngine, generator: torch.Generator) -> packing.Batch:
    """Two tokens after each prompt, drawn from the student."""
    sequences = [prompt for prompt, _ in EXAMPLES]
    for _ in range(2):
        batch = pack_examples([(ids, [0]) for ids in sequences])
        logprobs, ids = student.read(batch, TopLogprobHead(VOCABULARY))
        mask = batch["loss_mask"]
        drawn = torch.multinomial(logprobs[mask].exp(), 1, generator=generator)
        chosen = ids[mask].gather(1, drawn)[:, 0].tolist()
        sequences = [[*ids, token] for ids, token in zip(sequences, chosen, strict=True)]
    return pack_examples([(ids[:-2], ids[-2:]) for ids in sequences])


@pytest.mark.long
def test_student_when_it_learns_from_its_own_samples_then_closes_the_gap_to_its_teacher(
    taught_dir: Path,
) -> None:
    right = pack_examples(EXAMPLES)
    teacher = engine_of(taught_dir, 1e-2)
    student = engine_of(taught_dir, 1e-2)
    for _ in range(60):
        train_lm(teacher, right)
    best, first = evaluate_lm(teacher, right), evaluate_lm(student, right)
    assert best < 0.5 < first
    generator = torch.Generator().manual_seed(0)
    distillation = Distillation(k=16)
    for _ in range(120):
        batch = sample(student, generator)
        distillation.ask(teacher, batch)
        stats = distillation.train(student, batch)
    last = evaluate_lm(student, right)
    teacher.destroy()
    student.destroy()
    assert stats["loss"] < 0.5
    assert (first - last) / (first - best) >= 0.8, (first, last, best)


def test_train_when_the_teacher_was_not_asked_then_refused() -> None:
    engine = FSDPEngine(TrainEngineConfig(path="nowhere"))
    with pytest.raises(InvalidInput, match="no 'teacher_ids'"):
        Distillation().train(engine, pack_examples(EXAMPLES))
