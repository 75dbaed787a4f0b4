"""An evaluation: its arguments, and what its mean is over."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal_launch.test_summary import summarize

from areal.datasets.difficulty import of_pass_rate
from areal.errors import InvalidInput, WorkflowError
from areal.protocol.leases import TaskRecord
from areal.runs.evaluation_arguments import TAKEN
from areal.runs.run_files import EVALUATIONS, MEASURED_AT, RunFiles, over_rows
from areal.types import Purpose, Task, TaskState, Trajectory, TrajectoryGroup, WorkflowSpec
from areal_launch.view.summary import summary_lines
from areal_torch.engines.export_checkpoint import card
from areal_torch.engines.rollout import RemoteSGLangEngine
from areal_torch.training.evaluation import Figure, Measurement, record

CAUSE = "workflow_error after 3 attempts: reward 'f': ValueError: cannot\n parse the answer"
LOST = (TaskState.DEAD_LETTERED, TaskState.EXPIRED, TaskState.CANCELLED)


def trajectory(reward: float) -> Trajectory:
    rewards = np.array([0.0, reward], dtype=np.float32)
    return Trajectory(
        trajectory_id="t",
        input_ids=np.array([65, 66], dtype=np.int32),
        loss_mask=np.array([False, True]),
        behavior_logprobs=np.zeros(2, dtype=np.float32),
        token_versions=np.array([-1, 0], dtype=np.int32),
        rewards=rewards,
        finish_reason="stop",
        completion_text="B",
    )


class Ended:
    """One evaluation whose tasks have ended: rewards of a row, or the state that it ended in."""

    def __init__(self, folder: Path, *ends: list[float] | TaskState) -> None:
        self.results: dict[str, Any] = {}
        self.tracked: dict[str, float] = {}
        self.evaluated: list[Any] = []
        self.session: Any = SimpleNamespace(
            config=SimpleNamespace(run_dir=folder),
            step=0,
            rank=0,
            result=self.results.get,
            record=self.keep,
            status=SimpleNamespace(evaluated=self.evaluated.append),
        )
        spec = WorkflowSpec("rlvr")
        tasks = [
            Task(f"held-v0-{n}", Purpose.SERVE, spec, {"question": str(n)}, policy_version=0)
            for n in range(len(ends))
        ]
        self.measurement = Measurement(self.session, tasks, "held", 60.0)
        for task, end in zip(tasks, ends, strict=True):
            self.measurement._waiting[task.task_id] = task
            lost = isinstance(end, TaskState)
            self.measurement._read(
                TaskRecord(
                    task=task,
                    state=end if lost else TaskState.DELIVERED,
                    reason=CAUSE if lost else "",
                    attempts=1,
                    infrastructure_attempts=0,
                    submit_time=0.0,
                    end_time=1.0,
                    group=None
                    if lost
                    else TrajectoryGroup(task.task_id, [trajectory(r) for r in end]),
                    step=0,
                )
            )

    def keep(self, name: str, value: Any, tracked: dict[str, float] | None = None) -> None:
        self.results[name] = value
        self.tracked |= tracked or {}


def test_evaluation_when_rows_fail_then_named_and_not_in_the_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = Ended(tmp_path, *[[1.0]] * 9, *LOST)
    figure = ended.measurement.finish()
    cause = "workflow_error after 3 attempts: reward 'f': ValueError: cannot parse the answer"
    assert figure == Figure(1.0, 0.0, 9, failed=3, cause=cause)
    assert record(ended.session, "held", figure) == 1.0
    entry = ended.results[EVALUATIONS][0]
    assert (entry["rows"], entry["failed"], entry["cause"]) == (9, 3, cause)
    assert ended.tracked["eval/held/failed"] == 3
    assert (ended.evaluated[0].rows, ended.evaluated[0].failed) == (9, 3)
    shown = capsys.readouterr()
    assert "over 9 of 12 rows" in shown.out + shown.err


def test_evaluation_when_the_workflow_rejects_rows_then_they_count_as_zero(tmp_path: Path) -> None:
    ended = Ended(tmp_path, [1.0, 1.0], [1.0, 0.0], TaskState.REJECTED, TaskState.REJECTED)
    figure = ended.measurement.finish()
    assert (figure.mean, figure.rows, figure.rejected, figure.failed) == (0.375, 4, 2, 0)
    none = Ended(tmp_path, TaskState.REJECTED).measurement.finish()
    assert (none.mean, none.rows) == (0.0, 1)


def test_evaluation_when_no_row_has_a_result_then_the_error_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match=r"none of 3 rows was delivered; .*cannot parse"):
        Ended(tmp_path, *LOST).measurement.finish()


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=4) | st.sampled_from(TaskState),
        max_size=20,
    )
)
def test_evaluation_when_rows_end_anyhow_then_all_are_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, ends: list[list[float] | TaskState]
) -> None:
    ends = [[1.0], *(end for end in ends if end is not TaskState.DELIVERED)]
    ended = Ended(tmp_path_factory.mktemp("run"), *ends)
    figure = ended.measurement.finish()
    means = [sum(end) / len(end) for end in ends if isinstance(end, list)]
    zeros = ends.count(TaskState.REJECTED)
    assert figure.mean == pytest.approx(sum(means) / (len(means) + zeros), abs=1e-6)
    assert (figure.rows, figure.rejected) == (len(means) + zeros, zeros)
    assert figure.rows + figure.failed == len(ends)


def test_answers_when_rows_failed_then_the_file_says_so_and_their_difficulty_is_unknown(
    tmp_path: Path,
) -> None:
    Ended(tmp_path, [1.0, 0.0], TaskState.DEAD_LETTERED, TaskState.REJECTED).measurement.finish()
    file = tmp_path / "evaluations" / "held-v0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert ["failed" in line for line in lines] == [False, True, False]
    assert ["rejected" in line for line in lines] == [False, False, True]
    assert lines[1]["data"] == {"question": "1"}
    rows = [{"n": n} for n in range(3)]
    assert of_pass_rate(rows, file) == [{"n": 0}]
    assert of_pass_rate(rows, file, least=0.0) == [{"n": 0}, {"n": 2}]


def test_status_when_resumed_then_it_still_says_how_many_rows_the_mean_is_over(
    tmp_path: Path,
) -> None:
    files = RunFiles(tmp_path, resume_step=0)
    ended = Ended(tmp_path, [1.0], TaskState.EXPIRED)
    record(ended.session, "held", ended.measurement.finish())
    for name, value in ended.results.items():
        files.record(name, value)
    [again] = RunFiles(tmp_path, resume_step=0).evaluations()
    assert (again.mean_reward, again.rows, again.failed) == (1.0, 1, 1)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"rows": 12, "failed": 0}, "over 12 rows"),
        ({"rows": 12}, "over 12 rows"),
        ({"rows": 1319, "failed": 3}, "over 1,319 of 1,322 rows"),
        ({}, ""),
    ],
)
def test_over_rows_when_told_then_says_how_many_of_how_many(
    entry: dict[str, int], words: str
) -> None:
    assert over_rows(entry) == words


def test_summary_when_an_evaluation_is_incomplete_then_said_with_its_cause() -> None:
    entry = {"name": "reward", "step": 0, "mean": 1.0, "stderr": 0.0, "rows": 9, "failed": 3}
    results = {"reward": 1.0, "evaluations": [{**entry, "rejected": 2, "cause": "no answer"}]}
    shown = dict(summary_lines(summarize(rows=[], results=results)))
    assert shown["reward"] == "1.000 ± 0.000 over 9 of 12 rows"
    assert shown["incomplete"] == "reward: 3 rows failed and are not in the mean: no answer"
    assert shown["rejected"] == "reward: 2 rows without a trajectory count as 0"
    ends = [{**entry, "name": f"heldout_{end}", "cause": "x"} for end in ("before", "after")]
    results = {"heldout_before": 0.5, "heldout_after": 1.0, "evaluations": ends}
    shown = dict(summary_lines(summarize(results=results)))
    assert shown["held-out"] == "0.500 over 9 of 12 rows → 1.000 over 9 of 12 rows"


def test_card_when_rows_failed_then_the_mean_says_of_how_many() -> None:
    from areal.config.experiment import GRPOConfig

    entry = {"name": "held", "step": 3, "mean": 0.5, "rows": 9, "failed": 3}
    assert "| held | 0.5000 over 9 of 12 rows |" in card(GRPOConfig(), 3, [entry], scalar=False)


# -- arguments -----------------------------------------------------------------------------------


def evaluate(rows: Any, name: Any) -> None:
    """As in a recipe; the arguments are read before the session is."""
    engine: Any = RemoteSGLangEngine.__new__(RemoteSGLangEngine)
    engine.session = None
    engine.evaluate(rows, None, name)


@pytest.mark.parametrize(
    ("rows", "got"), [([], "none"), ((), "none"), (({} for _ in "ab"), "generator"), (None, "None")]
)
def test_evaluate_when_there_are_no_rows_then_refused_before_anything_is_sampled(rows, got) -> None:
    with pytest.raises(InvalidInput, match=f"rows: expected a list with at least one row, .*{got}"):
        evaluate(rows, "held")


@pytest.mark.parametrize(
    "name", [3, None, "", "a b", "a/b", "\u00fc", ".a", "-a", "a" * 101, "a\n"]
)
def test_evaluate_when_its_name_is_of_no_use_then_refused_in_one_line(name) -> None:
    with pytest.raises(InvalidInput, match=r"evaluate: name .*: expected 1 to 100 of") as caught:
        evaluate([{}], name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["loss", "status", "steps", EVALUATIONS, MEASURED_AT])
def test_evaluate_when_a_figure_of_the_summary_has_its_name_then_refused(name) -> None:
    with pytest.raises(InvalidInput, match=f"name '{name}': the run's summary has a figure of"):
        evaluate([{}], name)


def test_summary_when_built_then_no_evaluation_may_have_the_name_of_a_figure(
    tmp_path: Path,
) -> None:
    figures = set(summarize(results={})) - {"heldout_before", "heldout_after"}
    assert figures <= TAKEN
