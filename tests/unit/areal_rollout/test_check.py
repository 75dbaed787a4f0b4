"""What `areal check` says of recipes, good and bad; here in the test's own process."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from areal.config.experiment import GRPOConfig, save_config
from areal_rollout.check.__main__ import check
from areal_rollout.check.report import Report
from areal_torch.models.tiny import save_tokenizer

Findings = list[dict[str, Any]]
Check = Callable[..., Findings]

RECIPE = """
from areal import (
    FSDPPPOActor, GRPOConfig, RemoteSGLangEngine, RLVRWorkflow, RolloutWorkflow, StatefulLoader,
    load_expr_config, make_trajectory, LLMRequest, shuffle_rewards,
)

ROWS = [{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}]

def reward_fn(completions, answer, **data):
    return float(completions == answer)

class Mine(RolloutWorkflow):
    def __init__(self, gconfig):
        self.gconfig = gconfig

    async def arun_episode(self, engine, data):
        ids = engine.tokenizer.apply_chat_template(data["messages"])
        response = await engine.agenerate(LLMRequest(ids, self.gconfig))
        [reward] = await engine.score(reward_fn, completions=["x"], data=data)
        return make_trajectory(response, reward)

def workflow_of(config):
    return RLVRWorkflow(reward_fn, config.gconfig)

def loader_of(config):
    return StatefulLoader(ROWS)

def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    rollout = RemoteSGLangEngine(config.rollout)
    actor = FSDPPPOActor(config.actor)
    for step in range(actor.get_version(), config.total_train_steps):
        batch = rollout.prepare_batch(loader_of(config), workflow=workflow_of(config))
        raise AssertionError("beyond the first batch")
"""
LINES = len(RECIPE.splitlines())


@pytest.fixture
def run(tmp_path: Path) -> Check:
    """Checks RECIPE with more lines below it."""
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)

    def checked(more: str = "", *, model_later: str = "", **changes: Any) -> Findings:
        recipe = tmp_path / "recipe.py"
        recipe.write_text(RECIPE + textwrap.dedent(more))
        config = GRPOConfig(recipe=str(recipe), total_train_steps=1)
        config.model.path = str(changes.get("model_path", model))
        config.model.context_length = changes.get("context_length", 256)
        config.gconfig.n_samples = 4
        config.actor.reward_norm = "group/group"
        config.gconfig.max_new_tokens = 32
        save_config(config, tmp_path / "config.yaml")
        findings = tmp_path / "findings.jsonl"
        with (tmp_path / "stacks.txt").open("w") as stacks:
            report = Report(findings, stacks)
            check(tmp_path / "config.yaml", report, model_later=model_later)
        lines = [orjson.loads(line) for line in findings.read_bytes().splitlines()]
        return [line for line in lines if "late" not in line]

    return checked


def verdicts(findings: Findings) -> list[tuple[str, str]]:
    return [(each["stage"], each["verdict"]) for each in findings]


ALL_OK = [(each, "ok") for each in ("dataset", "tokenizer", "workflow", "reward", "packing")]


def test_check_when_the_recipe_is_good_then_every_stage_is_ok(run: Check) -> None:
    findings = run()
    assert verdicts(findings) == ALL_OK
    said = {each["stage"]: each["said"] for each in findings}
    assert "'content': '1+1='" in said["dataset"]
    assert said["workflow"] == "RLVRWorkflow: 4 answers from a fake policy"
    assert said["reward"] == "reward_fn: 0 to 0"
    assert said["packing"].startswith("4 trajectories, ")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("return float(completions)", "reward_fn raised ValueError: could not convert string to"),
        ("return completions.split()[-1] == '7'", "reward_fn raised IndexError: list index out"),
        ("return None", "reward_fn returned None: expected a finite number"),
        ("return 'correct'", "reward_fn returned str 'correct': expected a finite number"),
        ("return float('nan')", "reward_fn returned nan: expected a finite number"),
        ("raise SystemExit", "reward_fn raised SystemExit"),
    ],
)
def test_check_when_the_reward_is_broken_then_it_fails_and_says_how(
    run: Check, reward: str, said: str
) -> None:
    last = run(f"def reward_fn(completions, **data):\n    {reward}\n")[-1]
    assert (last["stage"], last["verdict"]) == ("reward", "failed")
    assert last["said"].startswith(said)
    if "raised" in said:
        assert f"recipe.py:{LINES + 2})" in last["said"]
        assert last["traceback"]


def test_check_when_the_reward_needs_what_the_row_has_not_then_it_is_named(run: Check) -> None:
    last = run("def reward_fn(completions, solution): return 1.0\n")[-1]
    assert (last["stage"], last["verdict"]) == ("reward", "failed")
    assert "needs 'solution', which the row does not have" in last["said"]


MINE = "def workflow_of(config): return Mine(config.gconfig)\n"
EPISODE = "class Mine(Mine):\n    async def arun_episode(self, engine, data):\n        "


@pytest.mark.parametrize(
    ("more", "stage", "said"),
    [
        (MINE + EPISODE + "return {}", "workflow", "arun_episode returned dict: expected a Traj"),
        (MINE + EPISODE + "return data['question']", "workflow", "KeyError: 'question'"),
        (
            MINE + EPISODE + "return await engine.generate(1)",
            "workflow",
            "AttributeError: 'EpisodeEngine' object has no attribute 'generate'",
        ),
        (
            MINE + EPISODE + "t = await Mine.__mro__[1].arun_episode(self, engine, data)\n        "
            "t.input_ids[-1] = 10**6\n        return t",
            "packing",
            "trajectory 0 input_ids: token id 1000000 is outside 0..260",
        ),
        (
            MINE + EPISODE + "t = await Mine.__mro__[1].arun_episode(self, engine, data)\n        "
            "t.rewards = t.rewards[1:]\n        return t",
            "packing",
            "rewards: length",
        ),
        (
            MINE + EPISODE + "t = await Mine.__mro__[1].arun_episode(self, engine, data)\n        "
            "t.loss_mask[:] = False\n        return t",
            "packing",
            "loss_mask: False everywhere",
        ),
        ("def workflow_of(config): return Mine(object())\n", "workflow", "gconfig"),
        ("def workflow_of(config): return reward_fn\n", "workflow", "expected an object of a Roll"),
        ("ROWS = [{'answer': '2'}]\n", "workflow", "expected 'messages' (a list) or 'prompt'"),
        ("ROWS = [{'prompt': 'x', 'answer': {1}}]\n", "workflow", "row: field answer: got set {1}"),
        ("ROWS = [{'prompt': 'x' * 300, 'answer': '2'}]\n", "workflow", "leaves no room in a cont"),
        ("ROWS = ['1+1=']\n", "dataset", "expected a mapping, got str"),
        ("def loader_of(config): return ROWS\n", "dataset", "expected (epoch, index, row)"),
        ("def loader_of(config): return open('nowhere.txt')\n", "dataset", "FileNotFoundError"),
        (
            "from areal.datasets.jsonl import load_jsonl\n"
            "def loader_of(config): return StatefulLoader(load_jsonl('nowhere.jsonl'))\n",
            "dataset",
            "main: InvalidInput: dataset 'nowhere.jsonl': cannot be read: No such file",
        ),
        ("def loader_of(config): raise RuntimeError('the moon')\n", "dataset", "the moon"),
    ],
)
def test_check_when_a_stage_fails_then_it_is_named_with_the_cause(
    run: Check, more: str, stage: str, said: str
) -> None:
    last = run(more)[-1]
    assert (last["stage"], last["verdict"]) == (stage, "failed"), last
    assert said in last["said"]
    if "Error: " in last["said"] and MINE in more and stage == "workflow":
        assert "recipe.py:" in last["said"]


def test_check_when_the_row_is_bad_then_there_is_a_traceback_only_through_the_recipe(
    run: Check,
) -> None:
    last = run("ROWS = [{'answer': '2'}]\n")[-1]
    assert "expected 'messages'" in last["said"]
    assert "traceback" not in last
    assert run(MINE + EPISODE + "return engine.tokenizer.apply_chat_template([])")[-1]["traceback"]


def test_check_when_the_tokenizer_is_missing_then_it_fails_there(
    run: Check, tmp_path: Path
) -> None:
    last = run(model_path=tmp_path)[-1]
    assert (last["stage"], last["verdict"]) == ("tokenizer", "failed")
    assert "tokenizer.json' does not exist" in last["said"]


def test_check_when_the_workflow_rejects_the_row_then_that_is_no_error(run: Check) -> None:
    findings = run(MINE + EPISODE + "return None")
    assert verdicts(findings) == ALL_OK[:3]
    assert findings[-1]["said"].endswith("it rejects this row")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("def main(argv): pass\n", "main ended before it asked for a batch"),
        ("def main(argv): raise SystemExit\n", "main ended before it asked for a batch"),
        (
            "def loader_of(config): return StatefulLoader([] if FSDPPPOActor(1).loss < 3 else 1)\n",
            "maybe only because FSDPPPOActor.loss is a stand-in",
        ),
        (
            "def main(argv):\n    import torch.distributed as dist\n    dist.get_rank()\n",
            "only the trainer can run this",
        ),
        (
            "def loader_of(config):\n    from areal_torch.engines.sft import pack_examples\n"
            "    return pack_examples(ROWS) + 1\n",
            "maybe only because pack_examples() is a stand-in",
        ),
    ],
)
def test_check_when_main_cannot_be_followed_then_it_does_not_judge(
    run: Check, more: str, said: str
) -> None:
    (only,) = run(more)
    assert (only["stage"], only["verdict"]) == ("dataset", "unknown")
    assert said in only["said"]


def test_check_when_the_model_comes_later_then_rows_are_looked_at_and_no_more(run: Check) -> None:
    findings = run(model_later="downloaded from hf://lab/tiny")
    assert verdicts(findings) == [("dataset", "ok"), ("tokenizer", "unknown")]
    assert findings[1]["said"].endswith("downloaded from hf://lab/tiny when a run begins")


@pytest.mark.parametrize("load", ["Tokenizer.load(folder)", "(folder / 'config.json').open()"])
def test_check_when_main_reads_a_model_that_comes_later_then_it_does_not_judge(
    run: Check, tmp_path: Path, load: str
) -> None:
    more = f"""
        from areal.tokenizer import Tokenizer
        from pathlib import Path
        def loader_of(config):
            folder = Path(config.model.path)
            {load}
    """
    where = {"model_path": str(tmp_path / "nothing")}
    [finding] = run(more, model_later="prepare_model creates it", **where)
    assert (finding["stage"], finding["verdict"]) == ("dataset", "unknown")
    assert finding["said"].endswith("; prepare_model creates it when a run begins")
    assert run(more, **where)[-1]["verdict"] == "failed"
    other = run("def loader_of(config): {}['x']\n", model_later="x", **where)
    assert other[-1]["verdict"] == "failed"


def test_check_when_main_evaluates_first_then_that_row_is_checked_too(run: Check) -> None:
    findings = run("""
        def loader_of(config):
            held_out = [{"prompt": "2+2="}]
            RemoteSGLangEngine(config.rollout).evaluate(held_out, workflow_of(config), name="held")
            return StatefulLoader(ROWS)
    """)
    assert [(each["stage"], each["of"]) for each in findings[2:]] == [
        ("reward", "held"),
        ("workflow", ""),
        ("reward", ""),
        ("packing", ""),
    ]
    assert "needs 'answer'" in findings[2]["said"]


def test_check_when_main_evaluates_no_rows_then_refused_before_anything_starts(run: Check) -> None:
    findings = run("""
        def loader_of(config):
            RemoteSGLangEngine(config.rollout).evaluate([], workflow_of(config), name="held")
            return StatefulLoader(ROWS)
    """)
    assert verdicts(findings) == [("dataset", "failed")]
    assert "evaluate: rows: expected a list with at least one row, got none" in findings[0]["said"]


def test_check_when_main_extends_engines_and_calls_rollout_batch_then_it_is_followed(
    run: Check,
) -> None:
    findings = run("""
        class Bigger(FSDPPPOActor):
            extra = 1

        def main(argv):
            from areal_torch.engines.fsdp import FSDPEngine

            config, _ = load_expr_config(argv, GRPOConfig)
            actor, engine = Bigger(config.actor), FSDPEngine(config.actor)
            assert isinstance(actor, FSDPPPOActor) and actor.extra == 1
            engine.initialize(total_train_steps=1)
            RemoteSGLangEngine(config.rollout).rollout_batch(ROWS, workflow_of(config))
    """)
    assert verdicts(findings) == ALL_OK


def test_check_when_there_are_no_rows_then_agents_outside_are_expected(run: Check) -> None:
    (only,) = run(
        """
        def main(argv):
            config, _ = load_expr_config(argv, GRPOConfig)
            RemoteSGLangEngine(config.rollout).prepare_batch(None)
        """
    )
    assert (only["stage"], only["verdict"]) == ("dataset", "ok")
    assert only["said"] == "no rows: outside agents open sessions at the gateway"


ADVANTAGES = "\ndef later(actor, batch):\n    actor.compute_advantages(batch)\n"
ONE = (
    "from dataclasses import replace\n"
    "def workflow_of(config):\n"
    "    return {}(*{}, replace(config.gconfig, n_samples=1))\n"
)


def test_check_when_a_group_has_one_sample_for_certain_then_it_is_refused(run: Check) -> None:
    more = ONE.format("RLVRWorkflow", "[reward_fn]") + ADVANTAGES
    last = run(more, model_later="prepare_model creates it")[-1]
    assert (last["stage"], last["verdict"]) == ("workflow", "failed")
    assert last["said"].startswith("gconfig.n_samples 1: expected 2 or more with actor.reward_norm")


@pytest.mark.parametrize(
    "more",
    [
        ONE.format("RLVRWorkflow", "[reward_fn]"),  # never compared: a teacher's, say
        ONE.format("Mine", "[]") + ADVANTAGES,  # may form its groups itself
        ADVANTAGES,
    ],
)
def test_check_when_one_sample_may_be_right_then_it_is_not_refused(run: Check, more: str) -> None:
    assert ("workflow", "failed") not in verdicts(run(more))
