"""A student's teacher on a server: its likeliest ids are those of the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.inference_server import make_model, running_server

from areal.errors import InvalidInput
from areal_torch.algorithms import packing
from areal_torch.engines.distill import Distillation
from areal_torch.engines.model.heads import TopLogprobHead
from areal_torch.engines.served_teacher import ServedTeacher

pytestmark = pytest.mark.timeout(120)
K = 5


def test_ask_when_served_then_ids_and_logprobs_are_those_of_the_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "teacher")
    lengths, sampled = [2, 30, 9, 41], [1, 12, 8, 40]
    torch.manual_seed(3)
    sequences = [torch.randint(2, 131, (length,)).tolist() for length in lengths]
    masks = [
        [False] * (length - learned) + [True] * learned
        for length, learned in zip(lengths, sampled, strict=True)
    ]
    masks[1][-3] = False  # a tool's token amid the answer
    rows = zip(sequences, masks, strict=True)
    batch = packing.pack([{"input_ids": ids, "loss_mask": mask} for ids, mask in rows])
    with running_server(tmp_path / "teacher", "--context-length", "64") as server:
        teacher = ServedTeacher(server.url)
        Distillation(K).ask(teacher, batch)
        long = packing.pack([{"input_ids": [5] * 80, "loss_mask": [True] * 80}])
        with pytest.raises(InvalidInput, match=r"teacher http.*HTTP 400.*longer than the model's"):
            teacher.read(long, TopLogprobHead(K))
        with pytest.raises(
            InvalidInput, match=r"HTTP 400.*top_logprobs_num: expected 0 to 128, got 500"
        ):
            teacher.read(batch, TopLogprobHead(500))
    whole = []
    for ids in sequences:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        whole.append(torch.cat([torch.zeros(1, 131), torch.log_softmax(logits, -1)]))
    expected = torch.cat(whole)
    learned = batch["loss_mask"]
    best, ids = expected.topk(K, -1)
    assert torch.equal(batch["teacher_ids"][learned], ids[learned])
    torch.testing.assert_close(batch["teacher_logprobs"][learned], best[learned], atol=1e-4, rtol=0)
    assert not batch["teacher_ids"][~learned].any()
    assert not batch["teacher_logprobs"][~learned].any()
