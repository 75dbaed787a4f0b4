import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.errors import InvalidInput
from areal.recipe import Recipe, find_config_class, find_function, function_reference, load_recipe
from areal.types import GenerationHyperparameters, WorkflowSpec
from areal.workflows.base import RolloutWorkflow
from areal.workflows.rlvr import RLVRWorkflow
from areal.workflows.specs import build_workflow, describe_workflow, recipe_of

SOURCE = b"""
from __future__ import annotations

from dataclasses import dataclass, field

from areal.config.experiment import GRPOConfig
from areal.types import GenerationHyperparameters
from areal.workflows.base import RolloutWorkflow
from areal.workflows.rlvr import RLVRWorkflow


@dataclass
class Options:
    depth: int = 1
    tags: list[str] = field(default_factory=list)


@dataclass
class MyConfig(GRPOConfig):
    digits: int = 2


def reward_fn(prompt, completions, answer, **data):
    return float(completions == answer)


class Agent(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, options: Options | None = None, turns: int = 1, **more):
        self.reward_fn, self.gconfig, self.options = reward_fn, gconfig, options
        self.turns, self.more = turns, more

    async def arun_episode(self, engine, data):
        return None


def main(argv):
    import torch
"""


@pytest.fixture
def recipe():
    return load_recipe(SOURCE, "my_recipe.py")


def rebuild(workflow, module):
    return build_workflow(describe_workflow(workflow), module)


def test_workflow_when_described_and_rebuilt_then_has_the_same_arguments(recipe):
    gconfig = GenerationHyperparameters(n_samples=3, temperature=0.5, stop_token_ids=[7])
    workflow = recipe.Agent(
        recipe.reward_fn, gconfig, recipe.Options(2, ["a"]), turns=4, extra=[1, {"x": None}]
    )
    spec = describe_workflow(workflow)
    again = rebuild(workflow, recipe)

    assert spec.name == "Agent"
    assert spec.recipe_digest == Recipe("", SOURCE).digest
    assert type(again) is recipe.Agent
    assert again.reward_fn is recipe.reward_fn
    assert again.gconfig == gconfig
    assert again.options == recipe.Options(2, ["a"])
    assert (again.turns, again.more) == (4, {"extra": [1, {"x": None}]})
    assert describe_workflow(again) == spec


def test_workflow_when_rebuilt_from_a_second_load_then_uses_its_own_module(recipe):
    spec = describe_workflow(recipe.Agent(recipe.reward_fn, GenerationHyperparameters()))
    other = load_recipe(SOURCE, "elsewhere.py")
    assert build_workflow(spec, other).reward_fn is other.reward_fn


def test_builtin_when_reward_is_named_then_needs_no_recipe():
    workflow = RLVRWorkflow(
        "math", GenerationHyperparameters(n_samples=2), system_prompt="Be brief"
    )
    spec = describe_workflow(workflow)
    assert (spec.name, spec.recipe_digest) == ("rlvr", "")
    assert recipe_of(workflow) is None
    again = build_workflow(spec, None)
    assert (again.reward_fn, again.gconfig.n_samples) == ("math", 2)
    assert again.system_prompt == "Be brief"


def test_builtin_when_reward_is_a_recipe_function_then_carries_its_digest(recipe):
    workflow = RLVRWorkflow(recipe.reward_fn, GenerationHyperparameters())
    spec = describe_workflow(workflow)
    assert spec.name == "rlvr"
    assert spec.recipe_digest == recipe_of(workflow).digest == Recipe("", SOURCE).digest
    assert recipe_of(workflow).file_name == "my_recipe.py"
    assert build_workflow(spec, recipe).reward_fn is recipe.reward_fn
    assert function_reference(recipe.reward_fn) == (spec.recipe_digest, "reward_fn")


def test_workflow_when_written_by_a_client_then_plain_dicts_become_dataclasses():
    spec = WorkflowSpec("rlvr", "", '{"reward_fn":"math","gconfig":{"n_samples":4,"top_p":1}}')
    assert build_workflow(spec, None).gconfig == GenerationHyperparameters(n_samples=4, top_p=1)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("rlvrr", "{}", ["'rlvrr'", "did you mean 'rlvr'?"]),
        ("Agnet", "{}", ["'Agnet'", "did you mean 'Agent'?"]),
        ("rlvr", "[1]", ["kwargs_json", "JSON object"]),
        ("rlvr", "{", ["kwargs_json", "not JSON"]),
        ("rlvr", '{"rewardfn":"math"}', ["'rewardfn'", "did you mean 'reward_fn'?"]),
        ("rlvr", '{"gconfig":{"nsamples":4}}', ["'nsamples'", "did you mean 'n_samples'?"]),
        ("rlvr", '{"gconfig":{"n_samples":"4"}}', ["gconfig.n_samples", "'4'", "int"]),
        ("rlvr", '{"gconfig":{"n_samples":true}}', ["gconfig.n_samples", "True", "int"]),
        ("rlvr", '{"gconfig":{"n_samples":0}}', ["n_samples 0", "1 or more"]),
        ("rlvr", '{"reward_fn":{"$function":"rewad_fn"}}', ["did you mean 'reward_fn'?"]),
        ("rlvr", '{"reward_fn":7}', ["reward_fn 7", "a name or a function"]),
        ("Agent", "{}", ["Agent", "missing", "reward_fn"]),
        ("Agent", '{"reward_fn":"math","gconfig":{"$dataclass":"Path"}}', ["unknown dataclass"]),
    ],
)
def test_build_when_the_spec_is_wrong_then_one_line_names_it(recipe, name, kwargs, words):
    with pytest.raises(InvalidInput) as caught:
        build_workflow(WorkflowSpec(name, "", kwargs), recipe)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_build_when_function_is_private_machinery_then_refused(recipe):
    with pytest.raises(InvalidInput, match="no function"):
        find_function(recipe, "reward_fn.__globals__.get")


def test_describe_when_reward_is_a_lambda_or_nested_then_refused(recipe):
    def nested(**_):
        return 0.0

    for function in (lambda **_: 0.0, nested):
        with pytest.raises(InvalidInput, match="top level of the recipe"):
            describe_workflow(recipe.Agent(function, GenerationHyperparameters()))


def test_describe_when_argument_is_an_object_then_names_the_argument(recipe):
    with pytest.raises(InvalidInput, match=r"Agent\(gconfig=…\): PosixPath cannot be sent"):
        describe_workflow(recipe.Agent(recipe.reward_fn, Path("x")))


def test_describe_when_parts_come_from_two_files_then_refused(recipe):
    other = load_recipe(SOURCE + b"\n# another file\n", "other.py")
    with pytest.raises(InvalidInput, match=r"my_recipe\.py, other\.py"):
        describe_workflow(recipe.Agent(other.reward_fn, GenerationHyperparameters()))


def test_describe_when_class_lies_in_a_plain_file_then_reads_that_file():
    workflow = InThisFile(turns=2)
    assert recipe_of(workflow).source == Path(__file__).read_bytes()
    assert describe_workflow(workflow).kwargs_json == '{"turns":2}'


class InThisFile(RolloutWorkflow):
    def __init__(self, turns: int):
        self.turns = turns

    async def arun_episode(self, engine, data):
        return None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"x = 1\ndef f(:\n", "recipe bad.py:2: "),
        (b"x = 1\n\ny = 1 / 0\n", "recipe bad.py:3: ZeroDivisionError: division by zero"),
        (b"import sys\nsys.exit(3)\n", "recipe bad.py:2: SystemExit: 3"),
        (b"import nothing_like_it\n", "recipe bad.py:1: ModuleNotFoundError"),
        (b"\x00", "recipe bad.py:1: "),
        (b"x = '\xff'\n", "recipe bad.py:1: "),
    ],
)
def test_load_when_source_is_broken_then_names_file_and_line(source, expected):
    with pytest.raises(InvalidInput) as caught:
        load_recipe(source, "bad.py")
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_load_when_the_function_raises_then_the_traceback_shows_its_source():
    import traceback

    module = load_recipe(b"def f():\n    raise KeyError('boom')  # here\n", "shows.py")
    with pytest.raises(KeyError) as caught:
        module.f()
    text = "".join(traceback.format_exception(caught.value))
    assert 'File "shows.py", line 2' in text
    assert "# here" in text


def test_load_when_recipe_imports_torch_in_main_then_worker_stays_without_torch():
    code = (
        "import sys; from areal.recipe import load_recipe\n"
        "from areal.workflows.specs import describe_workflow\n"
        f"module = load_recipe({SOURCE!r}, 'r.py')\n"
        "describe_workflow(module.RLVRWorkflow(module.reward_fn))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    services = Path(__file__).parents[3] / "services"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(services)}, timeout=60
    )


def test_config_class_when_recipe_defines_one_then_found(recipe):
    assert find_config_class(recipe, GRPOConfig) is recipe.MyConfig
    assert find_config_class(load_recipe(b"x = 1"), GRPOConfig) is GRPOConfig


def test_config_class_when_there_are_two_then_the_derived_one_or_an_error():
    derived = SOURCE + b"\n@dataclass\nclass More(MyConfig):\n    z: int = 1\n"
    module = load_recipe(derived)
    assert find_config_class(module, GRPOConfig) is module.More
    rival = SOURCE + b"\n@dataclass\nclass Rival(GRPOConfig):\n    z: int = 1\n"
    with pytest.raises(InvalidInput, match="MyConfig, Rival"):
        find_config_class(load_recipe(rival), GRPOConfig)


def test_config_class_when_imported_only_then_not_taken():
    @dataclass
    class Here(BaseExperimentConfig):
        pass

    module = load_recipe(b"x = 1")
    module.Here = Here
    assert find_config_class(module, GRPOConfig) is GRPOConfig


def test_read_when_the_file_is_missing_then_names_the_nearest_beside_it(tmp_path):
    (tmp_path / "arithmetic_grpo.py").write_text("")
    with pytest.raises(InvalidInput, match=r"grp\.py': No such file.*mean '.*arithmetic_grpo\.py'"):
        Recipe.read(tmp_path / "arithmetic_grp.py")
