"""The built-in reward `reward_model`: an exported reward model, asked by a reward worker."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from tests.unit.areal.workflows.chat_families import template

from areal.config.training import TrainEngineConfig
from areal.datasets.chats import pair_unit
from areal.errors import InvalidInput
from areal.rewards.functions import RewardFunction, resolve
from areal.tokenizer import Tokenizer
from areal.v1 import reward_service_pb2 as pb
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.reward_model import score
from areal_torch.engines.reward_scorer import RewardModel
from areal_torch.models.tiny import USER_ID

ASKED = [{"role": "user", "content": "7+8="}]
ANSWERS = ["15", "", "a much longer answer than that", "15", "16"]


@pytest.fixture(scope="module")
def exported(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """A reward model as a run saves it, and the scores that its engine gives."""
    folder = tmp_path_factory.mktemp("judge")
    engine = FSDPEngine(TrainEngineConfig(path=str(tiny_model), scalar=True))
    engine.initialize()
    with torch.no_grad():
        engine.model.hf.score.weight.normal_(0.0, 0.1)
    tokenizer = Tokenizer.load(tiny_model)
    expected = score(
        engine,
        [
            tokenizer.apply_chat_template(
                [*ASKED, {"role": "assistant", "content": answer}], add_generation_prompt=False
            )
            for answer in ANSWERS
        ],
    )
    engine.save(folder)
    engine.destroy()
    return folder, expected


def test_scores_when_asked_at_once_then_one_pass_gives_what_the_trainer_computes(
    exported: tuple[Path, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = exported
    model = RewardModel(str(folder))
    passes = []
    original = model.scores
    monkeypatch.setattr(model, "scores", lambda ids: passes.append(len(ids)) or original(ids))

    async def ask() -> list[float]:
        return await asyncio.gather(*(model(answer, ASKED) for answer in ANSWERS))

    found = asyncio.run(ask())
    assert found == pytest.approx(expected, abs=1e-5)
    assert found[0] == found[3]
    assert len(set(found)) == 4
    assert passes == [5]


def test_reward_when_its_spec_is_resolved_then_it_is_made_with_the_fixed_arguments(
    exported: tuple[Path, list[float]],
) -> None:
    folder, expected = exported
    spec = pb.RewardSpec(name="reward_model", kwargs_json=f'{{"path": "{folder}"}}')
    function = resolve(spec, None)
    assert isinstance(function, RewardFunction)
    assert function.is_async
    item = pb.ScoreItem(
        prompt="rendered",
        completion="15",
        data_json='{"messages": [{"role": "user", "content": "7+8="}]}',
    )
    arguments, named = function.bind(item)
    assert asyncio.run(function.call(arguments, named)) == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ("{}", "expected reward_kwargs with path"),
        ('{"path": "x", "pth": 1}', "has no argument 'pth'"),
        ('{"path": "no-such-folder"}', "config.json"),
    ],
)
def test_reward_when_its_arguments_are_wrong_then_one_line_says_so(kwargs: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        resolve(pb.RewardSpec(name="reward_model", kwargs_json=kwargs), None)


def test_reward_when_the_folder_is_no_reward_model_then_one_line_says_so(tiny_model: Path) -> None:
    with pytest.raises(InvalidInput, match="architecture Qwen2ForCausalLM, expected a sequence"):
        RewardModel(str(tiny_model))


def test_reward_when_a_row_has_no_messages_then_the_field_is_named(
    exported: tuple[Path, list[float]],
) -> None:
    spec = pb.RewardSpec(name="reward_model", kwargs_json=f'{{"path": "{exported[0]}"}}')
    with pytest.raises(InvalidInput, match="needs 'messages', which the row does not have"):
        resolve(spec, None).bind(pb.ScoreItem(prompt="p", completion="c", data_json="{}"))


def test_ids_when_the_row_has_tools_and_turns_end_with_the_next_then_as_in_training(
    exported: tuple[Path, list[float]], tmp_path: Path
) -> None:
    shutil.copytree(exported[0], tmp_path / "glm")
    (tmp_path / "glm" / "chat_template.jinja").write_text(template("glm-4.6"), "utf-8")
    model = RewardModel(str(tmp_path / "glm"))
    # Here <|user|> ends a turn, as in GLM.
    model._tokenizer.eos_token_ids = [USER_ID]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    row = {"prompt": ASKED, "chosen": "15", "rejected": "", "tools": [tool]}
    for answer, unit in zip(("15", ""), pair_unit(model._tokenizer, row), strict=True):
        ids = model._ids(ASKED, answer, [tool])
        assert ids == unit["input_ids"]
        assert ids[-1] == USER_ID
    # Whatever the policy has said is scored.
    assert model._ids(ASKED, "<think>x</think>y\ufdd0", None)
