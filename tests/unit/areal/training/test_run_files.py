import json

from areal.training.run_files import MEASURED_AT, RunFiles
from areal.training.status import Evaluation


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
