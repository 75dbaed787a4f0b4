import pytest
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine

from areal.errors import InvalidInput
from areal.types import GenerationHyperparameters
from areal.workflows.multi_turn import MultiTurnWorkflow

ROW = {"prompt": "12+34=", "answer": "46"}


def right(completion, data):
    return float(completion == data["answer"])


def workflow(n=1, **options):
    return MultiTurnWorkflow("math", GenerationHyperparameters(n_samples=n), **options)


async def test_conversation_when_wrong_then_tried_again_with_a_discount():
    engine = ScriptedEngine([["45"], ["47"], ["46"], ["never"]], right)
    [one] = await workflow(max_turns=4, turn_discount=0.5).arun_episode(engine, ROW)
    assert one.reward == 0.25
    assert engine.trained(one) == ["45", "47", "46"]
    text = engine.tokenizer.decode(one.input_ids.tolist())
    assert text.count("That is not correct. Try again.") == 2


async def test_conversation_when_turns_are_over_then_the_last_reward_counts():
    engine = ScriptedEngine([["45"], ["47"]], lambda completion, data: -1.0)
    [one] = await workflow(max_turns=2, turn_discount=0.5).arun_episode(engine, ROW)
    assert (one.reward, engine.trained(one)) == (-0.5, ["45", "47"])


async def test_group_when_some_are_right_at_once_then_only_the_others_are_asked_again():
    engine = ScriptedEngine([["46", "45", "44"], ["46"], ["46"]], right)
    group = await workflow(3).arun_episode(engine, ROW)
    assert [engine.trained(each) for each in group] == [["46"], ["45", "46"], ["44", "46"]]
    assert [request.gconfig.n_samples for request in engine.requests][:1] == [3]


async def test_feedback_when_a_function_then_it_sees_answer_reward_and_row():
    def told(completion, reward, answer, **data):
        return f"{completion} scores {reward}, not {answer}"

    engine = ScriptedEngine([["45"], ["46"]], right)
    [one] = await workflow(feedback=told).arun_episode(engine, ROW)
    assert "45 scores 0.0, not 46" in engine.tokenizer.decode(one.input_ids.tolist())


async def test_context_when_full_then_the_answers_so_far_count():
    engine = ScriptedEngine([["45"], InvalidInput("input_ids: no room")], right)
    [one] = await workflow().arun_episode(engine, ROW)
    assert (one.reward, engine.trained(one)) == (0.0, ["45"])


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_turns": 0}, "max_turns 0: expected 1"), ({"turn_discount": 2}, "turn_discount 2")],
)
def test_workflow_when_a_number_is_out_of_range_then_refused(options, said):
    with pytest.raises(InvalidInput, match=said):
        workflow(**options)


async def test_row_when_it_has_no_question_then_its_fields_are_named():
    with pytest.raises(InvalidInput, match=r"got the fields \['answer'\]"):
        await workflow().arun_episode(ScriptedEngine([], right), {"answer": "46"})
