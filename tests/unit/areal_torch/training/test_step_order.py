"""A step has one batch and one end, and `main` ends after the last step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from areal.config.experiment import GRPOConfig
from areal.errors import InvalidInput
from areal.recipe import called_at, load_recipe
from areal.runs.run_files import EVALUATIONS
from areal_torch.training.offline_session import OfflineSession
from areal_trainer import job

RECIPE = b"""
from areal.recipe import called_at

def take(session):
    session.begin_step()
    session.batch_at = called_at()

def twice(session):
    take(session)
    take(session)
"""


class Actor:
    """Has nothing to save."""

    def checkpoint_bytes(self) -> int:
        return 1

    def save_checkpoint(self, directory: Path) -> Future[None]:
        (directory / "weights").write_bytes(b"w")
        done: Future[None] = Future()
        done.set_result(None)
        return done


@pytest.fixture
def session(tmp_path: Path) -> Iterator[OfflineSession]:
    config = GRPOConfig(run_root=str(tmp_path), total_train_steps=3, allocation_mode="fsdp:d1")
    opened = OfflineSession(config)
    opened.open()
    yield opened
    opened.close()


def test_called_at_when_a_recipe_called_then_its_innermost_line_else_none() -> None:
    module = load_recipe(b"def f(g):\n    return g()\n", "mine/x.py")
    assert module.f(called_at) == "mine/x.py:2"
    assert called_at() == "a caller outside a recipe"


def test_begin_step_when_the_step_has_a_batch_then_refused_with_both_lines(session) -> None:
    module = load_recipe(RECIPE, "mine/x.py")
    with pytest.raises(InvalidInput) as error:
        module.twice(session)
    assert str(error.value) == (
        "mine/x.py:5: step 1 has a batch already, taken at mine/x.py:6: expected upload_weights, "
        "which ends a step, in between"
    )


def test_steps_when_each_is_ended_then_none_is_refused(session) -> None:
    session.attach(Actor())
    module = load_recipe(RECIPE, "mine/x.py")
    for _ in range(3):
        module.take(session)
        session.finish_step()
    session.check_complete("mine/x.py:9", None)


def test_main_when_it_ends_before_upload_weights_then_refused_and_nothing_is_saved(
    session,
) -> None:
    session.attach(Actor())
    load_recipe(RECIPE, "mine/x.py").take(session)
    with pytest.raises(InvalidInput, match=r"^mine/x\.py:6: main ended in step 1, .*upload_weig"):
        session.check_complete("mine/x.py:9", None)
    assert session.folder.list() == []


@pytest.mark.parametrize("taken", [0, 2])
def test_main_when_it_ends_early_then_refused_and_its_steps_are_saved(session, taken) -> None:
    session.attach(Actor())
    for _ in range(taken):
        session.begin_step()
        session.finish_step()
    with pytest.raises(InvalidInput, match=rf"^mine/x\.py:9: main ended after {taken} of 3 steps"):
        session.check_complete("mine/x.py:9", None)
    assert [each.step for each in session.folder.list()] == [taken] * bool(taken)


def test_main_when_it_returns_a_reason_then_it_may_end_early(session) -> None:
    session.attach(Actor())
    session.check_complete("mine/x.py:9", "good enough")
    assert session.result("ended_early") == "good enough"


def test_upload_weights_when_the_step_has_no_batch_then_refused(session) -> None:
    with pytest.raises(InvalidInput, match=r"upload_weights: step 1 has no batch: expected prep"):
        session.check_batch()
    load_recipe(RECIPE, "mine/x.py").take(session)
    session.check_batch()


def test_main_when_it_trains_no_model_then_no_step_is_expected(session) -> None:
    session.check_complete("mine/x.py:9", None)


def test_call_when_main_leaves_by_sys_exit_then_0_is_a_return_and_all_else_an_error() -> None:
    def leave(code: object) -> object:
        def main(argv: list[str]) -> None:
            raise SystemExit(code)

        return job._call(main, Path("c.yaml"))

    assert leave(0) is None
    assert leave(None) is None
    for code in (1, "no rows"):
        with pytest.raises(InvalidInput, match=f"main ended with SystemExit: {code}"):
            leave(code)


def test_main_when_it_only_evaluates_then_it_ends_at_its_first_batch(session) -> None:
    recipe = load_recipe(b"def ask(session):\n    session.end_evaluation()\n", "mine/x.py")
    recipe.ask(session)  # a run that trains goes on
    session.only_evaluates = True
    with pytest.raises(InvalidInput, match=r"^mine/x\.py:2: areal eval: main asks for a batch bef"):
        recipe.ask(session)
    session.record(EVALUATIONS, [{"name": "heldout", "step": 0, "mean": 0.5}])
    assert job._call(lambda _: recipe.ask(session), Path("c.yaml")) is None
    session.attach(Actor())
    session.check_complete("mine/x.py:9", None)
    session.save_checkpoint()
    assert session.folder.list() == []


RECORDS = b"""
from areal.recipe import called_at

def record(session, numbers):
    session.note(numbers)
"""


def test_record_when_a_step_is_in_progress_then_its_row_has_the_numbers(session) -> None:
    session.attach(Actor())
    load_recipe(RECIPE, "mine/x.py").take(session)
    session.note({"my/x": 1, "my/array": np.float32(0.5), "my/tensor": np.ones(1)})
    session.note({"my/x": 2.5})
    session.finish_step()
    row = json.loads((session.config.run_dir / "metrics.jsonl").read_text())
    assert (row["my/x"], row["my/array"], row["my/tensor"]) == (2.5, 0.5, 1.0)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"reward/mean": 1.0}, "'reward/mean' is a metric of every step"),
        ({"loss": 1.0}, "'loss' is a metric of every step"),
        ({"my/x": "1"}, "'my/x': expected a number, got str"),
        ({"my/x": np.ones(3)}, r"'my/x': expected a number, got shape \(3,\)"),
        ({"my/x": 10**20}, "'my/x': expected a number of 64 bits, got one of 67"),
        ({"my/caf\udce9": 1.0}, r"name 'my/caf\\udce9': expected printable characters"),
        ({"a\nb": 1.0}, r"name 'a\\nb': expected printable characters"),
        ({"reward/format": 1.0}, "'reward/format' is in the step's row already"),
        ({"": 1.0}, "name '': expected a name"),
        ({3: 1.0}, "name 3: expected a name"),
        ([1.0], "list: expected a dict"),
    ],
)
def test_record_when_it_cannot_be_in_a_row_then_one_line_names_the_place(
    session, numbers, said
) -> None:
    module = load_recipe(RECORDS, "mine/x.py")
    with pytest.raises(InvalidInput, match=r"^mine/x\.py:5: record: no step has a batch"):
        module.record(session, {"my/x": 1.0})
    load_recipe(RECIPE, "mine/x.py").take(session)
    session.row["reward/format"] = 0.5  # a part of the batch's reward
    with pytest.raises(InvalidInput, match=rf"^mine/x\.py:5: record: {said}"):
        module.record(session, numbers)
