"""Fitting arguments to a reward function, and judging what it returns."""

from __future__ import annotations

import re

import numpy as np
import pytest

from areal.errors import InvalidInput
from areal.recipe import load_recipe
from areal.rewards.functions import RewardFunction, outcome, raised, resolve
from areal.rewards.group import group_reward
from areal.rewards.rubric import rubric
from areal.v1 import reward_service_pb2 as pb
from areal_reward.frames import pack_results, unpack_results

ITEM = pb.ScoreItem(
    prompt="2+2=",
    completion="4",
    prompt_ids=[1, 2],
    completion_ids=[3],
    data_json='{"answer": "4", "level": 1}',
)


def _score(function, item=ITEM, **kwargs):
    reward = RewardFunction("f", function, kwargs)
    args, named = reward.bind(item)
    return reward.call(args, named)


def test_bind_when_function_has_the_library_signature_then_all_arrives():
    def reward_fn(prompt, completions, prompt_ids, completion_ids, **data):
        return prompt, completions, prompt_ids, completion_ids, data

    assert _score(reward_fn) == ("2+2=", "4", [1, 2], [3], {"answer": "4", "level": 1})


def test_bind_when_function_takes_few_names_then_only_those_arrive():
    assert _score(lambda completion, answer: completion == answer) is True
    assert _score(lambda completion, /, answer: (completion, answer)) == ("4", "4")
    assert _score(lambda completions, missing=7: (completions, missing)) == ("4", 7)


def test_bind_when_fixed_argument_and_row_agree_on_a_name_then_fixed_wins():
    assert _score(lambda answer: answer, answer="5") == "5"


def test_bind_when_row_holds_prompt_then_the_real_one_wins():
    item = pb.ScoreItem(prompt="real", completion="", data_json='{"prompt": "row"}')
    assert _score(lambda prompt: prompt, item) == "real"


def test_bind_when_a_field_is_missing_then_it_and_the_nearest_are_named():
    with pytest.raises(InvalidInput, match=r"needs 'answr'.*did you mean 'answer'"):
        _score(lambda completion, answr: 1)


def test_bind_when_fixed_argument_is_unknown_then_it_is_named():
    with pytest.raises(InvalidInput, match=r"no argument 'patern'; did you mean 'pattern'"):
        RewardFunction("f", lambda completion, pattern: 1, {"patern": "x"})


def test_bind_when_row_is_not_json_then_it_says_so():
    with pytest.raises(InvalidInput, match="data_json: not JSON"):
        _score(lambda completion: 1, pb.ScoreItem(data_json="{"))


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array(1.0), np.int64(1)])
def test_outcome_when_value_is_a_number_then_it_is_the_reward(value):
    assert outcome("f", value).reward == 1.0


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("-inf"), [1.0], {}, 1j])
def test_outcome_when_value_is_no_finite_number_then_failure_not_zero(value):
    result = outcome("f", value)
    assert result.WhichOneof("outcome") == "failure"
    assert result.failure.error == pb.SCORE_ERROR_FUNCTION
    assert "expected a finite number" in result.failure.message


def test_raised_when_function_raises_then_line_and_trace_are_told():
    def reward_fn():
        raise ValueError("two\nlines " + "x" * 9000)

    try:
        reward_fn()
    except ValueError as error:
        result = raised("reward_fn", error)
    assert result.failure.error == pb.SCORE_ERROR_FUNCTION
    assert result.failure.message.startswith("reward_fn raised ValueError: two lines x")
    assert "\n" not in result.failure.message
    assert f"{__file__}:" in result.failure.message
    assert len(result.failure.traceback) <= 4000


def test_raised_when_the_errors_own_text_raises_then_it_is_still_told():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    try:
        raise Mute
    except Mute as error:
        result = raised("reward_fn", error)
    assert result.failure.error == pb.SCORE_ERROR_FUNCTION
    assert "reward_fn raised Mute: (its message could not be read: RuntimeError)" in (
        result.failure.message
    )


def test_resolve_when_recipe_has_the_function_then_it_is_called_by_name():
    recipe = load_recipe(b"class A:\n    @staticmethod\n    def f(completion): return 2\n")
    function = resolve(pb.RewardSpec(name="A.f", recipe_digest="d"), recipe)
    assert function.call([], {"completion": ""}) == 2
    assert not function.is_async


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"def f(:\n", r"recipe\.py:1: .*syntax"),
        (b"import nowhere_at_all\n", r"recipe\.py:1: ModuleNotFoundError"),
        (b"def reward(completion): return 1\n", r"no function 'rewrd'; did you mean 'reward'"),
    ],
)
def test_resolve_when_recipe_does_not_load_then_one_line_says_where(source, message):
    with pytest.raises(InvalidInput, match=message) as caught:
        resolve(pb.RewardSpec(name="rewrd", recipe_digest="d"), load_recipe(source))
    assert "\n" not in str(caught.value)


def test_resolve_when_function_is_a_coroutine_function_then_it_is_known():
    recipe = load_recipe(
        b"async def f(completion): return 1\nclass J:\n"
        b"    async def __call__(self, completion): return 1\nj = J()\n",
    )
    for name in ("f", "j"):
        assert resolve(pb.RewardSpec(name=name, recipe_digest="d"), recipe).is_async


def test_frames_when_packed_then_unpacked_is_the_same():
    results = [pb.ScoreResult(reward=0.5), pb.ScoreResult(reward=0.0)]
    assert unpack_results(pack_results([7, 2], results)) == ([7, 2], results)
    assert unpack_results(pack_results([], [])) == ([], [])


@pytest.mark.parametrize("body", [b"", b"\x01", b"\x05\0\0\0", b"\x01\0\0\0\0\0\0\0\xff\xff\xff"])
def test_frames_when_body_is_garbage_then_value_error(body):
    with pytest.raises(ValueError, match="results frame"):
        unpack_results(body)


GROUP = pb.ScoreItem(
    prompt="2+2=",
    samples=[pb.Sample(completion="4", completion_ids=[3]), pb.Sample(completion="22")],
    data_json='{"answer": "4"}',
)


def _result(function, item=GROUP):
    reward = RewardFunction("f", group_reward(function), {})
    args, named = reward.bind(item)
    return reward.result(reward.call(args, named), item)


def test_group_reward_when_called_then_it_has_all_samples_and_scores_each():
    def ranked(completions, completion_ids, answer, **data):
        assert (completions, completion_ids, answer) == (["4", "22"], [[3], []], "4")
        shortest = min(map(len, completions))
        return [rubric(short=len(text) == shortest, right=text == answer) for text in completions]

    first, second = _result(ranked).group.samples
    assert (first.reward, dict(first.parts)) == (2.0, {"short": 1.0, "right": 1.0})
    assert (second.reward, dict(second.parts)) == (0.0, {"short": 0.0, "right": 0.0})
    assert [one.reward for one in _result(lambda completions: np.arange(2)).group.samples] == [
        0.0,
        1.0,
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.5, "returned 0.5: expected 2 numbers, one for each completion"),
        ([1.0], r"returned list \[1.0\]: expected 2 numbers"),
        ([1.0, float("nan")], "completion 1, returned nan: expected a finite number"),
        ([1.0, None], "completion 1, returned None: expected a finite number"),
        (None, "returned None: expected 2 numbers"),
    ],
)
def test_group_reward_when_it_does_not_score_each_then_all_fail(value, message: str):
    result = _result(lambda completions: value)
    assert result.failure.error == pb.SCORE_ERROR_FUNCTION
    assert not result.HasField("group")
    assert re.search(message, result.failure.message)


def test_bind_when_the_item_is_of_the_other_kind_then_one_line():
    with pytest.raises(InvalidInput, match=r"reward 'f': expected a group to score"):
        RewardFunction("f", group_reward(lambda completions: [1.0]), {}).bind(ITEM)
    with pytest.raises(InvalidInput, match=r"reward 'f': expected one completion to score"):
        RewardFunction("f", lambda completions: 1.0, {}).bind(GROUP)
