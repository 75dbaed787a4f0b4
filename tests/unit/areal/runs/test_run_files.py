import json
from typing import Any

from areal.runs.run_files import MEASURED_AT, RunFiles, best_step, describe_best
from areal.runs.status import Evaluation
from areal.runs.step_rows import MOST_ROWS


def test_rows_when_resumed_then_lost_steps_are_dropped(tmp_path):
    files = RunFiles(tmp_path, resume_step=0)
    for step in (1, 2, 3):
        files.append_row({"step": step, "reward/mean": step / 10})
    resumed = RunFiles(tmp_path, resume_step=2)
    assert [row["step"] for row in resumed.rows] == [1, 2]
    resumed.append_row({"step": 3, "reward/mean": 0.9})
    assert [row["step"] for row in RunFiles(tmp_path, resume_step=3).rows] == [1, 2, 3]


def test_rows_when_a_replaced_trainer_wakes_then_its_row_is_not_in_the_successors_file(tmp_path):
    replaced = RunFiles(tmp_path, resume_step=0)
    replaced.append_row({"step": 1})
    successor = RunFiles(tmp_path, resume_step=1)
    replaced.append_row({"step": 2})
    successor.append_row({"step": 2, "reward/mean": 0.5})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2, "reward/mean": 0.5}]


def test_rows_when_the_run_is_long_then_few_are_kept_and_the_file_has_all(tmp_path):
    files = RunFiles(tmp_path, 0)
    for step in range(1, MOST_ROWS + 501):
        files.append_row({"step": step})
        assert len(files.rows) <= MOST_ROWS
    files.close()
    resumed = RunFiles(tmp_path, MOST_ROWS + 500)
    assert len(resumed.rows) <= MOST_ROWS
    assert resumed.rows[-1]["step"] == MOST_ROWS + 500
    resumed.close()
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == MOST_ROWS + 500


def test_rows_when_the_last_line_was_cut_off_then_the_rest_is_kept(tmp_path):
    files = RunFiles(tmp_path, resume_step=0)
    files.append_row({"step": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert [row["step"] for row in RunFiles(tmp_path, resume_step=5).rows] == [1]


def test_rows_when_an_earlier_release_wrote_them_then_the_file_gets_the_names_of_this_one(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "reward_mean": 0.5, "approx_kl": 0.1, "mismatch/kl": 0.2}\n')
    (row,) = RunFiles(tmp_path, resume_step=1).rows
    assert row == {"step": 1, "reward/mean": 0.5, "policy/kl": 0.1, "mismatch/kl": 0.2}
    assert json.loads(file.read_text()) == row


def test_results_when_recorded_then_found_by_the_next_incarnation(tmp_path):
    RunFiles(tmp_path, resume_step=0).record("heldout_before", 0.25)
    assert RunFiles(tmp_path, resume_step=0).results == {"heldout_before": 0.25}


def test_batches_when_resumed_then_rows_of_lost_steps_stay(tmp_path):
    files = RunFiles(tmp_path, resume_step=0)
    for step in (1, 2):
        files.append_batch(step=step, incarnation=1, replay=False, task_ids=[f"e0-{step}"])
    # Killed while it wrote; what follows must not be spoilt by it.
    with (tmp_path / "batches.jsonl").open("a") as file:
        file.write('{"step": 3, "incarn')
    resumed = RunFiles(tmp_path, resume_step=1)
    resumed.append_batch(step=2, incarnation=2, replay=True, task_ids=["e0-2"])
    lines = (tmp_path / "batches.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    assert [(row["step"], row["incarnation"], row["replay"]) for row in rows] == [
        *[(1, 1, False), (2, 1, False), (2, 2, True)],
    ]
    assert [row["task_ids"] for row in rows] == [["e0-1"], ["e0-2"], ["e0-2"]]


def test_evaluations_when_recorded_then_told_by_step_to_the_next_incarnation(tmp_path):
    files = RunFiles(tmp_path, resume_step=0)
    assert files.evaluations() == []
    files.record("after", 0.75)
    files.record("before", 0.25)
    files.record(MEASURED_AT, {"after": 4, "before": 0})
    assert RunFiles(tmp_path, resume_step=4).evaluations() == [
        Evaluation("before", 0, 0.25),
        Evaluation("after", 4, 0.75),
    ]


def _measured(name: str, *means: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"name": name, "step": step, "mean": mean} for step, mean in means]


def test_best_step_when_there_are_two_sets_then_their_rewards_are_not_compared() -> None:
    easy = _measured("easy", (20, 0.9), (40, 0.8), (60, 0.7))
    hard = _measured("hard", (20, 0.1), (60, 0.2))
    assert best_step(easy + hard, [20, 40, 60]) == 20
    assert best_step(hard + easy, [20, 40, 60]) == 20  # easy: evaluated most often
    assert best_step(hard[:1] + easy[:1] + hard[1:] + easy[2:], [20, 60]) == 60  # as often: hard
    assert best_step(easy, [80]) is None


def test_best_step_when_described_then_with_the_start_of_the_same_set() -> None:
    measured = _measured("heldout", (0, 0.159), (20, 0.045), (40, 0.018)) + _measured(
        "other", (0, 0.9)
    )
    assert best_step(measured, [20, 40]) == 20
    assert describe_best(measured, [20, 40]) == "heldout 0.045 (0.159 before training)"
    assert describe_best(measured[1:], [20]) == "heldout 0.045"
    assert describe_best(measured, [7]) == ""
