"""Where a ledger's input ends: the last good value is taken, the next one refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.ledger_support import make_group, make_task

from areal.errors import InvalidInput
from areal.protocol.trajectories import GroupCodec, pack_group, task_to_pb
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal_buffer.validation import (
    check_completion,
    check_digest,
    check_group,
    check_number,
    check_return,
    check_task,
    check_task_ids,
    check_worker_id,
    line,
)


def task(change: Callable[[trajectory_pb2.Task], object]) -> trajectory_pb2.Task:
    message = task_to_pb(make_task("a", position=(0, 0)))
    change(message)
    return message


def kwargs(size: int) -> str:
    return '{"k":"' + "x" * (size - 8) + '"}'


def position(epoch: int, index: int) -> Callable[[trajectory_pb2.Task], object]:
    return lambda m: m.position.CopyFrom(trajectory_pb2.DatasetPosition(epoch=epoch, index=index))


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (
            lambda m: setattr(m.workflow, "kwargs_json", kwargs(64 * 1024)),
            lambda m: setattr(m.workflow, "kwargs_json", kwargs(64 * 1024 + 1)),
            r"workflow.kwargs_json has 65537 characters: at most 65536",
        ),
        (
            lambda m: setattr(m.workflow, "kwargs_json", '{"k": [1]}'),
            lambda m: setattr(m.workflow, "kwargs_json", "[1]"),
            r"workflow.kwargs_json: expected a JSON object",
        ),
        (
            lambda m: setattr(m.workflow, "name", "w" * 200),
            lambda m: setattr(m.workflow, "name", "w" * 201),
            r"workflow.name 'w+': expected 1 to 200",
        ),
        (
            lambda m: setattr(m.workflow, "recipe_digest", "0f" * 32),
            lambda m: setattr(m.workflow, "recipe_digest", "0f" * 32 + "0"),
            r"workflow.recipe_digest '0f",
        ),
        (
            lambda m: setattr(m, "traceparent", "t" * 200),
            lambda m: setattr(m, "traceparent", "t" * 201),
            r"traceparent: more than 200",
        ),
        (position(2**31 - 1, 2**27 - 1), position(2**31 - 1, 2**27), r"position .* index < 2\^27"),
        (position(2**31 - 1, 0), position(2**31, 0), r"position .* epoch < 2\^31"),
    ],
)
def test_task_when_a_field_is_at_its_limit_then_taken_and_beyond_it_refused(good, bad, words):
    assert check_task(task(good)).task_id == "a"
    with pytest.raises(InvalidInput, match=f"^task 'a' {words}"):
        check_task(task(bad))


def test_task_ids_when_too_many_or_too_few_then_refused() -> None:
    ids = [f"t{number}" for number in range(10_001)]
    assert check_task_ids(ids[:10_000]) == ids[:10_000]
    with pytest.raises(InvalidInput, match="got 10001, expected 0 to 10000"):
        check_task_ids(ids)
    assert check_task_ids([]) == []
    with pytest.raises(InvalidInput, match="got 0, expected 1 to 10000"):
        check_task_ids([], at_least=1)


@pytest.mark.parametrize("worker_id", ["", "w" * 201, "w\n", "w\x00"])
def test_worker_id_when_it_is_no_line_of_text_then_refused(worker_id: str) -> None:
    assert check_worker_id("w" * 200) == "w" * 200
    with pytest.raises(InvalidInput, match="worker_id"):
        check_worker_id(worker_id)


def test_digest_and_number_when_at_their_limits_then_taken_and_beyond_refused() -> None:
    assert check_digest("") == ""
    assert check_digest("ab" * 32) == "ab" * 32
    for digest in ("ab" * 32 + "c", "ab" * 31, "AB" * 32):
        with pytest.raises(InvalidInput, match="recipe_digest"):
            check_digest(digest)
    assert check_number(2**53 - 1, "incarnation", 1) == 2**53 - 1
    for number in (0, 2**53):
        with pytest.raises(InvalidInput, match=f"incarnation {number}: expected 1 or more"):
            check_number(number, "incarnation", 1)


def completion(group, token: int = 4) -> pb.Completion:
    return pb.Completion(lease=pb.LeaseRef(task_id="a", token=token), group=pack_group(group))


def test_group_when_trajectory_ids_are_missing_or_the_same_then_refused() -> None:
    for ids in (("", "x"), ("x", "x")):
        group = make_group("a", samples=2)
        for trajectory, name in zip(group.trajectories, ids, strict=True):
            trajectory.trajectory_id = name
        with pytest.raises(InvalidInput, match="trajectory_id must be set and distinct"):
            check_group(completion(group), 10_000)


def test_group_when_a_token_is_of_the_last_version_then_taken_and_beyond_it_refused() -> None:
    group = make_group("a", version=2**21 - 1, samples=2)
    assert check_group(completion(group), 10_000).head_version == 2**21 - 1
    group.trajectories[0].token_versions[-1] = 2**21
    with pytest.raises(InvalidInput, match="token_versions: 2097152 is no policy version"):
        check_group(completion(group), 10_000)


def test_group_when_its_lease_has_no_token_then_refused_by_itself() -> None:
    refused = check_completion(completion(make_group("a"), token=0), 10_000, GroupCodec())
    assert isinstance(refused, InvalidInput)
    assert str(refused) == "lease.token 0: expected 1 or more, below 2^53"


def returned(**fields) -> pb.Return | InvalidInput:
    message = pb.Return(
        lease=pb.LeaseRef(task_id="a", token=4),
        **{"cause": pb.RETURN_CAUSE_WORKFLOW_ERROR, "detail": "it failed", **fields},
    )
    return check_return(message, 10)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lease": pb.LeaseRef(task_id="a b", token=4)}, "lease.task_id 'a b'"),
        ({"lease": pb.LeaseRef(task_id="a")}, "lease.token 0"),
        ({"cause": pb.RETURN_CAUSE_UNSPECIFIED}, "cause 0: expected DRAIN"),
        ({"partial": bytes(11)}, "task 'a' partial has 11 bytes: at most 10"),
        ({"failed_server": "s" * 301}, "failed_server 'sss"),
        ({"failed_server": "http://a\nhttp://b"}, "failed_server 'http://a\\nhttp://b'"),
    ],
)
def test_return_when_a_field_is_wrong_then_refused_by_itself_in_one_line(fields, words) -> None:
    lease = fields.pop("lease", pb.LeaseRef(task_id="a", token=4))
    message = pb.Return(lease=lease, **{"cause": pb.RETURN_CAUSE_DRAIN, **fields})
    refused = check_return(message, 10)
    assert isinstance(refused, InvalidInput)
    assert words in str(refused)
    assert "\n" not in str(refused)


def test_return_when_fields_are_at_their_limits_then_kept_as_they_are() -> None:
    lease = returned(partial=bytes(10), failed_server="s" * 300)
    assert isinstance(lease, pb.Return)
    assert (lease.partial, lease.failed_server) == (bytes(10), "s" * 300)


def test_return_when_errors_differ_in_their_values_only_then_they_share_a_site() -> None:
    """A site is what a failing recipe is told apart by: of errors of the recipe, and no others."""
    details = ["KeyError: 'a' in row 7 (12.5 s)", 'KeyError: "b c" in row 1234 (3 s)']
    sites = {returned(detail=detail).site for detail in details}
    assert sites == {"KeyError: … in row … (… s)"}
    assert returned(site=" KeyError at\nr.py:3 ").site == "KeyError at r.py:3"
    assert len(returned(site="x" * 500).site) == 200
    assert returned(detail="").site == "an error without a message"
    assert returned(cause=pb.RETURN_CAUSE_INFRASTRUCTURE, site="server gone").site == ""


def test_return_when_texts_are_long_then_a_line_keeps_its_start_and_a_trace_its_end() -> None:
    lease = returned(detail="cause:\n  " + "d" * 3_000, traceback="begin" + "t" * 20_000 + "end")
    assert len(lease.detail) == 2_000
    assert lease.detail.startswith("cause: ddd")
    assert len(lease.traceback) == 16_000
    assert lease.traceback.endswith("tttend")
    assert line(" a\n\tb ") == "a b"
