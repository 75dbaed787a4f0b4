"""What a served teacher refuses, and what happens where there is no server."""

from __future__ import annotations

import pytest
import torch
from tests.ports import free_port

from areal.algorithms import packing
from areal.engines.model.heads import LogprobHead, TopLogprobHead
from areal.engines.served_teacher import ServedTeacher
from areal.errors import InvalidInput, WaitTimeout


def batch_of(*sequences: list[int], sampled: int) -> packing.Batch:
    """Each with its last `sampled` tokens to be learned."""
    return packing.pack(
        [
            {"input_ids": ids, "loss_mask": [False] * (len(ids) - sampled) + [True] * sampled}
            for ids in sequences
        ]
    )


def test_read_when_another_head_then_one_line():
    batch = batch_of([5, 6, 7], sampled=1)
    for head in (LogprobHead(), TopLogprobHead(4, temperature=0.5), None):
        with pytest.raises(InvalidInput, match=r"expected TopLogprobHead\(k\) at temperature 1"):
            ServedTeacher("http://127.0.0.1:1").read(batch, head)


def test_read_when_no_one_listens_then_the_deadline_names_the_server():
    port = free_port()
    teacher = ServedTeacher(f"http://127.0.0.1:{port}", timeout_s=0.5)
    with pytest.raises(WaitTimeout, match=rf"teacher http://127.0.0.1:{port}: waited"):
        teacher.read(batch_of([5, 6, 7], sampled=1), TopLogprobHead(4))


def test_read_when_nothing_is_to_be_learned_then_no_one_is_asked():
    batch = batch_of([5, 6, 7], sampled=0)
    logprobs, ids = ServedTeacher("http://127.0.0.1:1").read(batch, TopLogprobHead(4))
    assert torch.equal(logprobs, torch.zeros(3, 4))
    assert torch.equal(ids, torch.zeros(3, 4, dtype=torch.int64))


def test_repr_when_there_is_a_key_then_it_is_not_in_it():
    assert "secret" not in repr(ServedTeacher("http://x", api_key="secret"))
