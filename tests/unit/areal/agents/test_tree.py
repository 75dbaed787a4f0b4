"""Calls of a session become trajectories exactly as a slow reference says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal.agents import slow_reference

from areal.agents.tree import Call, merge
from areal.errors import InvalidInput, WorkflowError
from areal.rewards.rubric import rubric
from areal.types import LLMResponse, StopReason


def call(prompt, output, version=3, **fields):
    logprobs = [-0.25 - 0.5 * i for i in range(len(output))]
    stop = StopReason.STOP
    return Call(
        LLMResponse(list(prompt), list(output), logprobs, [version] * len(output), stop), **fields
    )


def sampled(trajectory):
    return trajectory.input_ids[trajectory.loss_mask].tolist()


def test_turns_when_each_extends_the_last_then_one_trajectory_with_all_answers():
    merged = merge(
        [call([1, 2], [3]), call([1, 2, 3, 4], [5, 6]), call([1, 2, 3, 4, 5, 6], [7])], 1
    )
    [one] = merged.trajectories
    assert one.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert one.loss_mask.tolist() == [False, False, True, False, True, True, True]
    assert one.behavior_logprobs.tolist() == [0, 0, -0.25, 0, -0.25, -0.75, -0.25]
    assert one.token_versions.tolist() == [-1, -1, 3, -1, 3, 3, 3]
    assert one.rewards.tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_history_when_rewritten_then_a_trajectory_of_its_own():
    merged = merge([call([1, 2], [3]), call([1, 2, 3, 4], [5]), call([1, 9], [5])], 0.5)
    assert merged.chains == [[0, 1], [2]]
    assert [t.reward for t in merged.trajectories] == [0.5, 0.5]


def test_branch_when_two_calls_extend_one_then_its_ids_are_trained_once():
    merged = merge([call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])], 1)
    assert merged.chains == [[0, 1], [2]]
    assert [sampled(t) for t in merged.trajectories] == [[2, 4], [6]]
    assert merged.trajectories[1].input_ids.tolist() == [1, 2, 5, 6]
    assert merged.trajectories[1].token_versions.tolist() == [-1, -1, -1, 3]


def test_parts_when_they_add_up_to_0_then_every_trajectory_has_them():
    outcome = rubric(correct=0, long=(0.5, 0))
    own = rubric(correct=0.0)
    merged = merge([call([1], [2]), call([1, 2, 3], [4], reward=own), call([9], [5])], outcome)
    assert [t.reward for t in merged.trajectories] == [0, 0]
    assert [t.reward_parts for t in merged.trajectories] == [own.parts, outcome.parts]


def test_retry_when_the_first_answer_was_never_used_then_it_is_dropped():
    merged = merge(
        [call([1], [2], delivered=False), call([1], [3], retry=True), call([1, 3, 4], [5])], 1
    )
    assert (merged.orphans, merged.chains) == ([0], [[1, 2]])


def test_retry_when_the_first_answer_was_used_after_all_then_it_stays():
    merged = merge([call([1], [2]), call([1], [3], retry=True), call([1, 2, 4], [5])], 1)
    assert (merged.orphans, merged.chains) == ([], [[0, 2], [1]])


def test_retry_when_one_of_two_samples_did_not_arrive_then_the_other_stays():
    calls = [call([1], [2], delivered=False), call([1], [3]), call([1], [4], retry=True)]
    assert merge(calls, 1).orphans == [0]


def lost(prompt, output, **fields):
    return call(prompt, output, delivered=False, **fields)


def test_retries_when_the_gateway_died_under_four_equal_requests_then_four_answers_stay():
    died = [lost([1], []) for _ in range(4)]
    again = [lost([1], [7 + i], retry=True, reward=i / 4) for i in range(4)]
    merged = merge([*died, *again])
    assert merged.chains == [[4], [5], [6], [7]]
    assert [t.reward for t in merged.trajectories] == [0.0, 0.25, 0.5, 0.75]
    assert (merged.orphans, merged.dropped) == ([0, 1, 2, 3], 0)
    # The same without rewards, when some had been answered, and one answer had arrived.
    died = [lost([1], [3]), call([1], [4]), lost([1], [5]), lost([1], [])]
    again = [lost([1], [7 + i], retry=True) for i in range(3)]
    merged = merge([*died, *again], 1)
    assert (merged.chains, merged.dropped) == ([[1], [4], [5], [6]], 2)


@pytest.mark.parametrize("known", [{"delivered": True}, {"reward": 0.0, "delivered": False}])
def test_retry_when_only_an_answer_that_was_used_is_like_it_then_both_stay(known):
    """The first request was refused before it was recorded, or its record was lost."""
    merged = merge([call([1], [2], **known), call([1], [3], retry=True)], 1)
    assert (merged.orphans, merged.chains) == ([], [[0], [1]])


def test_retry_when_one_call_has_no_answer_then_that_is_the_one_that_it_repeats():
    merged = merge([lost([1], []), lost([1], [2]), lost([1], [3], retry=True)], 1)
    assert (merged.orphans, merged.chains) == ([0], [[1], [2]])


def test_repeated_request_when_it_has_a_key_then_exactly_the_call_of_that_key_is_dropped():
    calls = [lost([1], [2], key="a"), lost([1], [3], key="b"), lost([1], [4], key="a", retry=True)]
    assert merge(calls, 1).orphans == [0]
    # Another SDK, which does not count its retries; and the answer had left the server.
    assert merge([*calls[:2], lost([1], [4], key="a")], 1).orphans == [0]
    sent = call([1], [2], key="a")
    assert merge([sent, calls[1], calls[2]], 1).orphans == [0]
    # None has its key, and those of other keys are other requests.
    assert merge([*calls[:2], lost([1], [4], key="c", retry=True)], 1).orphans == []


def test_equal_requests_when_the_client_gives_all_one_key_then_delivered_answers_stay():
    calls = [call([1], [2 + i], key="constant") for i in range(3)]
    assert merge(calls, 1).chains == [[0], [1], [2]]


def test_samples_when_no_retry_then_each_is_a_trajectory():
    merged = merge([call([1], [2]), call([1], [3]), call([1], [2])], 1)
    assert (merged.orphans, merged.chains) == ([], [[0], [1], [2]])


def test_failed_call_when_it_has_no_ids_then_it_is_no_part_and_no_parent():
    merged = merge([call([1], []), call([1], [2], retry=True), call([1, 2], [3])], 1)
    assert (merged.orphans, merged.chains) == ([0], [[1, 2]])


def test_rewards_when_calls_have_their_own_then_outcome_is_for_the_others():
    calls = [call([1], [2], reward=0.25), call([1, 2, 3], [4]), call([9], [8], reward=-1.0)]
    main, sub = merge(calls, 1).trajectories
    assert (main.rewards.tolist(), sub.rewards.tolist()) == ([0, 0.25, 0, 1], [0, -1])


def test_rewards_when_only_a_call_has_one_then_the_rest_is_zero():
    main, sub = merge([call([1], [2], reward=2.0), call([9], [8])]).trajectories
    assert (main.reward, sub.reward) == (2.0, 0.0)


def test_session_when_no_reward_or_no_token_then_refused():
    with pytest.raises(InvalidInput, match="reward: none was sent"):
        merge([call([1], [2])])
    with pytest.raises(WorkflowError, match="no token was sampled"):
        merge([call([1], [])], 1)


# ---------------------------------------------------------------- a slow reference


@st.composite
def sessions(draw):
    """Few different ids and short answers, so that all kinds of coincidence occur."""
    tokens = st.lists(st.integers(0, 2), max_size=3)
    calls = []
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["extend", "extend", "again", "rewrite", "any"]))
        before = draw(st.sampled_from(calls)).response if calls else None
        if before is None or kind == "any":
            prompt = [0, *draw(tokens)]
        elif kind == "extend":
            prompt = [*before.input_tokens, *before.output_tokens, *draw(tokens)]
        elif kind == "again":
            prompt = list(before.input_tokens)
        else:
            cut = draw(st.integers(1, len(before.input_tokens)))
            prompt = [*before.input_tokens[:cut], *draw(tokens)]
        flags = {name: draw(st.booleans()) for name in ("retry", "delivered")}
        flags["key"] = draw(st.sampled_from(["", "", "a", "b"]))
        reward = draw(st.sampled_from([None, None, 0.5, -1.0]))
        calls.append(call(prompt, draw(tokens), len(calls), reward=reward, **flags))
    return calls


@pytest.mark.parametrize("examples", [300, pytest.param(5000, marks=pytest.mark.long)])
def test_random_sessions_when_merged_then_equal_to_the_slow_reference(examples):
    settings(max_examples=examples, deadline=None)(given(sessions())(equals_the_slow_reference))()


def equals_the_slow_reference(calls):
    expected, orphans = slow_reference.merged(calls)
    if not expected:
        with pytest.raises(WorkflowError):
            merge(calls, 1.0)
        return
    merged = merge(calls, 1.0)
    assert merged.orphans == orphans
    assert merged.chains == [owned for owned, _ in expected]
    for trajectory, (owned, whole) in zip(merged.trajectories, expected, strict=True):
        assert trajectory.input_ids.tolist() == whole
        versions, logprobs = [-1] * len(whole), [0.0] * len(whole)
        rewards = [0.0] * len(whole)
        for i in owned:  # a call's version is its index: each id is where it was sampled
            response = calls[i].response
            start = len(response.input_tokens)
            end = start + len(response.output_tokens)
            assert whole[start:end] == response.output_tokens
            versions[start:end] = response.output_versions
            logprobs[start:end] = [np.float32(p) for p in response.output_logprobs]
            rewards[end - 1] = calls[i].reward or 0.0
            if i == owned[-1] and calls[i].reward is None:
                rewards[end - 1] = 1.0
        assert trajectory.token_versions.tolist() == versions
        assert trajectory.loss_mask.tolist() == [version >= 0 for version in versions]
        assert trajectory.behavior_logprobs.tolist() == logprobs
        assert trajectory.rewards.tolist() == rewards
    kept = [c for i, c in enumerate(calls) if i not in orphans]
    trained = sum(int(t.loss_mask.sum()) for t in merged.trajectories)
    assert trained == sum(len(c.response.output_tokens) for c in kept)
