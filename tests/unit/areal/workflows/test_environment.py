"""EnvWorkflow: worlds of a recipe and of other packages; the loss covers answers only."""

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine

from areal.errors import InvalidInput, WorkflowError
from areal.recipe import load_recipe
from areal.rewards.rubric import rubric
from areal.types import GenerationHyperparameters
from areal.workflows.environment import EnvWorkflow
from areal.workflows.gyms import Gymnasium, find_environment
from areal.workflows.specs import build_workflow, describe_workflow

ROW = {"secret": 7}
RECIPE = b"""
class World:
    def reset(self, data):
        return "digit?"

    def step(self, action):
        return "", 1.0, True
"""


class Digits:
    """Closer guesses are told apart; every guess costs a tenth, the right one brings 1."""

    closed: ClassVar[list[int]] = []

    def __init__(self, question="digit?"):
        self.question = question

    def reset(self, data):
        self.secret = data["secret"]
        return self.question

    def step(self, action):
        if int(action) == self.secret:
            return "yes", 1.0, True
        return "more" if int(action) < self.secret else "less", -0.1, False

    def close(self):
        Digits.closed.append(self.secret)


def workflow(environment=Digits, n=1, **options):
    return EnvWorkflow(environment, GenerationHyperparameters(n_samples=n), **options)


async def test_episode_when_played_then_each_answer_has_its_reward_and_the_world_no_loss():
    engine = ScriptedEngine([["5"], ["8"], ["7"], ["never"]], None)
    [one] = await workflow().arun_episode(engine, ROW)
    assert engine.trained(one) == ["5", "8", "7"]
    assert one.rewards[one.rewards != 0].tolist() == pytest.approx([-0.1, -0.1, 1.0])
    assert one.loss_mask[one.rewards != 0].all()
    text = engine.tokenizer.decode(one.input_ids.tolist())
    assert text.index("digit?") < text.index("more") < text.index("less")
    assert "yes" not in text, "what follows the last answer is not read"


async def test_step_when_its_reward_has_parts_then_the_episode_has_their_sums():
    class Parts(Digits):
        def step(self, action):
            said, reward, ended = super().step(action)
            return said, rubric(right=reward > 0, guesses=(1, -0.1)), ended

    engine = ScriptedEngine([["5"], ["7"]], None)
    [one] = await workflow(Parts).arun_episode(engine, ROW)
    assert one.reward == pytest.approx(0.8)
    assert one.reward_parts == {"right": 1.0, "guesses": 2.0}


async def test_group_when_it_begins_alike_then_one_request_asks_for_all_first_answers():
    engine = ScriptedEngine([["7", "5"], ["7"]], None)
    Digits.closed.clear()
    group = await workflow(n=2).arun_episode(engine, ROW)
    assert [engine.trained(each) for each in group] == [["7"], ["5", "7"]]
    assert len(engine.requests) == 2
    assert Digits.closed == [7, 7]


async def test_group_when_worlds_begin_differently_then_each_is_asked_by_itself():
    questions = iter(["first?", "second?"])
    engine = ScriptedEngine([["7"], ["7"]], None)
    await workflow(lambda: Digits(next(questions)), n=2).arun_episode(engine, ROW)
    asked = [engine.tokenizer.decode(request.input_ids) for request in engine.requests]
    assert ["first?" in text for text in asked] == [True, False]
    assert ["second?" in text for text in asked] == [False, True]


@pytest.mark.parametrize(
    ("script", "options"),
    [([["5"], ["6"]], {"max_turns": 2}), ([["5"], ["6"], InvalidInput("no room")], {})],
)
async def test_episode_when_turns_or_context_are_over_then_the_answers_so_far_count(
    script, options
):
    engine = ScriptedEngine(script, None)
    [one] = await workflow(**options).arun_episode(engine, ROW)
    assert engine.trained(one) == ["5", "6"]
    assert one.reward == pytest.approx(-0.2)


async def test_step_when_it_hangs_then_the_failure_names_it():
    released = threading.Event()

    class Hangs(Digits):
        def step(self, action):
            released.wait(30)

    try:
        with pytest.raises(WorkflowError, match=r"Hangs.step: no step within 0.05 s"):
            await workflow(Hangs, step_timeout_s=0.05).arun_episode(
                ScriptedEngine([["5"]], None), ROW
            )
    finally:
        released.set()


def test_class_of_a_recipe_when_described_then_a_worker_rebuilds_it():
    recipe = load_recipe(RECIPE, "world.py")
    spec = describe_workflow(workflow(recipe.World, max_turns=3))
    assert spec.name == "env"
    built = build_workflow(spec, load_recipe(RECIPE, "world.py"))
    assert (built.make.__name__, built.max_turns) == ("World", 3)


def test_name_when_it_is_a_class_of_a_module_then_it_is_made(monkeypatch):
    module = ModuleType("worlds_of_a_test")
    module.Maze = Digits
    monkeypatch.setitem(sys.modules, "worlds_of_a_test", module)
    assert find_environment("worlds_of_a_test:Maze") is Digits
    with pytest.raises(InvalidInput, match="did you mean 'Maze'"):
        find_environment("worlds_of_a_test:Maz")


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ("chess", {}, "gymnasium:ID, openenv:URL or module:Class"),
        ("verifiers:gsm8k", {}, "expected VerifiersWorkflow"),
        ("no_such_package:Chess", {}, "pip install no-such-package"),
        (Digits, {"max_turns": 0}, "max_turns 0: expected 1 or more"),
        (Digits, {"step_timeout_s": 0}, "step_timeout_s 0: expected above 0"),
        (7, {}, "environment 7: expected a name, class or function"),
    ],
)
def test_workflow_when_something_is_wrong_then_one_line_says_what(environment, options, said):
    with pytest.raises(InvalidInput, match=said):
        workflow(environment, **options)


async def test_gymnasium_when_played_then_numbers_act_and_anything_else_is_told():
    pytest.importorskip("gymnasium")
    named = workflow("gymnasium:FrozenLake-v1", options={"is_slippery": False})
    engine = ScriptedEngine([["go"], ["9"], *[[f"I go {n}"] for n in (2, 2, 1, 1, 1, 2)]], None)
    [one] = await named.arun_episode(engine, {"seed": 3})
    assert one.reward == 1.0, "the way around the holes"
    text = engine.tokenizer.decode(one.input_ids.tolist())
    assert text.count("expected an action of Discrete(4)") == 2
    with pytest.raises(InvalidInput, match="did you mean 'FrozenLake-v1'"):
        find_environment("gymnasium:FrozenLak-v1")


def test_gymnasium_when_actions_are_no_text_then_refused(monkeypatch):
    spaces = SimpleNamespace(Discrete=int, Text=str)
    env = SimpleNamespace(action_space=0.5)
    fake = SimpleNamespace(spaces=spaces, make=lambda name, **options: env)
    monkeypatch.setitem(sys.modules, "gymnasium", fake)
    with pytest.raises(InvalidInput, match=r"gymnasium:Car: actions are 0.5: expected Discrete"):
        Gymnasium("Car")


async def test_reasoning_gym_when_answered_then_the_task_scores_it():
    pytest.importorskip("reasoning_gym")
    from areal.workflows.gyms import reasoning_gym_rows

    train, heldout = reasoning_gym_rows("chain_sum", train=20, heldout=10, seed=1, max_terms=2)
    assert train
    assert heldout
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert reasoning_gym_rows("chain_sum", train=20, heldout=10, seed=1, max_terms=2)[0] == train
    row = train[0]
    engine = ScriptedEngine([[row["answer"], "no"]], None)
    right, wrong = await workflow("reasoning_gym:chain_sum", n=2).arun_episode(engine, row)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert row["prompt"] in engine.tokenizer.decode(right.input_ids.tolist())
    with pytest.raises(InvalidInput, match="did you mean 'chain_sum'"):
        find_environment("reasoning_gym:chain_sun")
    with pytest.raises(InvalidInput, match="min_terms"):
        reasoning_gym_rows("chain_sum", train=1, heldout=1, seed=1, min_terms=-1)


async def test_reasoning_gym_when_many_episodes_are_played_then_its_task_is_made_once(monkeypatch):
    made = []
    fake = SimpleNamespace(
        factory=SimpleNamespace(DATASETS={"slow": None}),
        get_score_answer_fn=lambda task: made.append(task) or (lambda answer, entry: 0.25),
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    row = {"prompt": "why?", "entry": {"question": "why?"}}
    engine = ScriptedEngine([["so", "no"]] * 2, None)
    flow = workflow("reasoning_gym:slow", n=2)
    played = [each for _ in range(2) for each in await flow.arun_episode(engine, row)]
    assert [each.reward for each in played] == [0.25] * 4
    assert made == ["slow"]
