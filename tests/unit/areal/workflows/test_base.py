import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import WorkflowError
from areal.types import LLMResponse, StopReason
from areal.workflows.base import make_trajectory


def response(prompt, output, version=3, stop=StopReason.STOP):
    return LLMResponse(
        list(prompt),
        list(output),
        [-0.5 * (i + 1) for i in range(len(output))],
        [version + i % 2 for i in range(len(output))],
        stop,
    )


def test_trajectory_when_one_turn_then_loss_covers_the_output_only():
    t = make_trajectory(response([1, 2, 3], [4, 5], stop=StopReason.LENGTH), 0.75, "four five")
    assert t.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert t.loss_mask.tolist() == [False, False, False, True, True]
    assert t.behavior_logprobs.tolist() == [0, 0, 0, -0.5, -1.0]
    assert t.token_versions.tolist() == [-1, -1, -1, 3, 4]
    assert t.rewards.tolist() == [0, 0, 0, 0, 0.75]
    assert (t.reward, t.head_version) == (0.75, 3)
    assert (t.finish_reason, t.completion_text) == (StopReason.LENGTH, "four five")
    assert (t.input_ids.dtype, t.token_versions.dtype) == (np.int32, np.int32)
    assert (t.behavior_logprobs.dtype, t.rewards.dtype) == (np.float32, np.float32)


def test_trajectory_when_two_turns_then_what_lies_between_is_context():
    first = response([1, 2], [3, 4], version=0)
    second = response([1, 2, 3, 4, 9, 9], [5], version=7)
    t = make_trajectory([first, second], 1.0)
    assert t.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert t.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert t.token_versions.tolist() == [-1, -1, 0, 1, -1, -1, 7]
    assert t.behavior_logprobs.tolist() == [0, 0, -0.5, -1.0, 0, 0, -0.5]
    assert t.rewards.tolist() == [0, 0, 0, 0, 0, 0, 1.0]


def test_trajectory_when_a_reward_each_then_on_each_last_token():
    first, second = response([1], [2, 3]), response([1, 2, 3, 9], [4, 5])
    assert make_trajectory([first, second], [0.25, 0.5]).rewards.tolist() == [
        0, 0, 0.25, 0, 0, 0.5,
    ]  # fmt: skip


def test_trajectory_when_the_last_turn_is_empty_then_reward_is_on_a_sampled_token():
    first, second = response([1], [2, 3]), response([1, 2, 3, 9], [])
    assert make_trajectory([first, second], 1.0).rewards.tolist() == [0, 0, 1.0, 0]


@pytest.mark.parametrize(
    ("responses", "reward", "message"),
    [
        ([], 1.0, "no token was sampled"),
        ([response([1], [])], 1.0, "no token was sampled"),
        ([response([1], [2]), response([1, 9, 3], [4])], 1.0, "prompt of response 1"),
        ([response([1], [2]), response([1, 9, 3], [4])], 1.0, "with areal.Conversation, which"),
        ([response([1], [2, 3]), response([1, 2], [4])], 1.0, "prompt of response 1"),
        ([response([1], [2])], [1.0, 2.0], "2 rewards for 1 responses"),
    ],
)
def test_trajectory_when_turns_do_not_fit_then_says_which(responses, reward, message):
    with pytest.raises(WorkflowError, match=message):
        make_trajectory(responses, reward)


@pytest.mark.parametrize("reward", [1.0, -0.5, 1e-9])
def test_trajectory_when_a_response_without_tokens_has_a_reward_then_refused(reward):
    turns = [response([1], [2]), response([1, 2, 3], [])]
    said = rf"reward {reward} of response 1: it has no token"
    with pytest.raises(WorkflowError, match=said):
        make_trajectory(turns, [1.0, reward])
    assert make_trajectory(turns, [1.0, 0.0]).rewards.tolist() == [0.0, 1.0, 0.0]
    assert make_trajectory(turns, reward).reward == pytest.approx(reward)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, -2.0])), min_size=1))
def test_trajectory_when_made_of_any_responses_then_no_reward_is_lost(turns):
    context: list[int] = []
    responses = []
    for tokens, _ in turns:
        prompt, output = [*context, 9], [7] * tokens
        responses.append(response(prompt, output))
        context = [*prompt, *output]
    rewards = [reward for _, reward in turns]
    try:
        made = make_trajectory(responses, rewards)
    except WorkflowError:
        assert not any(n for n, _ in turns) or any(r and not n for n, r in turns) or len(turns) == 1
        return
    assert float(made.rewards.sum()) == sum(rewards)
