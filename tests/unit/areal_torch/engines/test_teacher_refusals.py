"""What a served teacher refuses, and what happens where there is no server."""

from __future__ import annotations

import math

import pytest
import torch
from tests.ports import free_port

from areal.errors import InvalidInput, Unavailable, WaitTimeout
from areal_torch.algorithms import packing
from areal_torch.engines.model.heads import LogprobHead, TopLogprobHead
from areal_torch.engines.served_teacher import ServedTeacher


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


@pytest.mark.parametrize("never", ["null", "-Infinity"])
def test_read_when_the_server_rules_an_id_out_then_its_logprob_is_minus_infinity(never):
    answer = '{"meta_info": {"input_top_logprobs": [null, [[-0.5, 7], [NEVER, 3]]]}}'.replace(
        "NEVER", never
    )
    found = ServedTeacher("http://x")._read(answer.encode(), 1, 2)
    assert found.tolist() == [[[-0.5, 7.0], [-math.inf, 3.0]]]


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", '"x"', "[]"])
def test_read_when_a_logprob_is_no_number_then_refused(wrong):
    answer = '{"meta_info": {"input_top_logprobs": [[[-0.5, 7], [WRONG, 3]]]}}'.replace(
        "WRONG", wrong
    )
    with pytest.raises(Unavailable, match="/generate"):
        ServedTeacher("http://x")._read(answer.encode(), 1, 2)
