"""From rows and counters to summary.json and its last screen."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from areal.config.experiment import GRPOConfig
from areal.config.learning_rules import of_config
from areal.protocol.leases import LedgerStats
from areal.types import TaskState
from areal.weights.servers import SyncStatus
from areal_launch.view.plots import other_evaluations, plot_rewards
from areal_launch.view.poller import Snapshot
from areal_launch.view.rows import column, moving_mean, read_rows
from areal_launch.view.summary import (
    build_summary,
    continue_summary,
    read_results,
    summary_lines,
)


def row(step: int, reward: float) -> dict[str, float]:
    return {
        "step": step,
        "reward/mean": reward,
        "samples": 8,
        "train/loss": 0.1,
        "staleness/mean": 0.5,
        "staleness/max": 1,
    }


def snapshot() -> Snapshot:
    counts = dict.fromkeys(TaskState, 0)
    counts[TaskState.TRAINED], counts[TaskState.CANCELLED] = 90, 10
    ledger = LedgerStats(
        submitted=100,
        counts=counts,
        staleness_mean=0.7,
        staleness_max=2,
        trajectories=800,
        generated_tokens=3000,
    )
    return Snapshot(ledger=ledger, sync=SyncStatus(None, 2, 2, 45, 45, 0.012, 3))


def summarize(**changes: object) -> dict[str, object]:
    arguments: dict[str, object] = {
        "status": "finished",
        "rows": [row(step, step / 100) for step in range(1, 46)],
        "results": {"heldout_before": 0.3, "heldout_after": 0.7, "note": "x"},
        "snapshot": snapshot(),
        "wall_s": 12.345,
        "cpu_s": 20.0,
        "memory_mb": {"trainer": 500.04, "total": 2048.0},
        "restarts": {"buffer": 1, "trainer": 0},
        **changes,
    }
    return build_summary(**arguments)  # type: ignore[arg-type]


def test_summary_when_run_finished_then_means_of_first_and_last_twenty() -> None:
    summary = summarize()
    assert summary["steps"] == 45
    assert summary["reward_first"] == pytest.approx(sum(range(1, 21)) / 20 / 100)
    assert summary["reward_last"] == pytest.approx(sum(range(26, 46)) / 20 / 100)
    assert summary["samples"] == 45 * 8
    assert (summary["heldout_before"], summary["heldout_after"]) == (0.3, 0.7)
    assert summary["note"] == "x"
    assert summary["restarts"] == {"buffer": 1}
    assert summary["weight_updates"] == {
        "count": 45,
        "seconds_mean": 0.012,
        "aborted_requests": 3,
    }


def test_summary_when_accounting_then_the_ten_states_add_up() -> None:
    accounting = summarize()["accounting"]
    assert isinstance(accounting, dict)
    assert set(accounting) == {"submitted", *(state.value for state in TaskState)}
    assert accounting["submitted"] == sum(v for k, v in accounting.items() if k != "submitted")


def test_summary_when_nothing_is_known_then_null_not_zero() -> None:
    summary = summarize(rows=[], results={}, snapshot=Snapshot(), status="failed")
    assert summary["reward_first"] is None
    assert summary["heldout_after"] is None
    assert summary["accounting"]["submitted"] is None  # type: ignore[index]
    assert summary["staleness"] == {"max": None, "mean": None}
    json.dumps(summary)
    assert dict(summary_lines(summary))["status"] == "failed after 0 steps"


def test_summary_when_a_service_did_not_answer_last_then_its_figures_are_called_not_current() -> (
    None
):
    stale = snapshot()
    stale.problems = {"weight-sync": "no answer within 15 s", "trainer": "gone, as it should be"}
    summary = summarize(snapshot=stale)
    assert summary["not_current"] == {"weight-sync": "no answer within 15 s"}
    shown = dict(summary_lines(summary))
    assert shown["not current"] == "figures of weight-sync: no answer within 15 s"
    assert summarize()["not_current"] == {}
    assert "not current" not in dict(summary_lines(summarize()))


def test_read_rows_when_steps_repeat_and_a_line_is_cut_then_last_whole_one_counts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row(1, 0.1)), json.dumps(row(2, 0.2)), json.dumps(row(2, 0.25))]
    file.write_text("\n".join(lines) + '\n{"step": 3, "rew')
    assert [(r["step"], r["reward/mean"]) for r in read_rows(file)] == [(1, 0.1), (2, 0.25)]
    assert read_rows(tmp_path / "none") == []


def test_read_rows_when_an_earlier_release_wrote_them_then_names_are_of_this_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "metrics.jsonl"
    former = {"step": 1, "reward_mean": 0.1, "staleness_max": 2, "step_seconds": 0.5, "loss": 1.0}
    now = {"step": 2, "reward/mean": 0.2, "staleness/max": 1, "time/step": 0.4, "train/loss": 0.9}
    file.write_text("".join(json.dumps(each) + "\n" for each in (former, now)))
    first, second = read_rows(file)
    assert first.keys() == second.keys()
    assert column([first, second], "reward/mean") == [0.1, 0.2]


def test_read_results_when_missing_then_empty(tmp_path: Path) -> None:
    assert read_results(tmp_path / "trainer.json") == {}


def test_moving_mean_when_shorter_than_window_then_mean_so_far() -> None:
    assert moving_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def test_plot_when_there_are_steps_then_a_png(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row(step, step / 50)) + "\n" for step in range(1, 41))
    )
    (tmp_path / "trainer.json").write_text('{"heldout_before": 0.2}')
    target = tmp_path / "reward.png"
    assert plot_rewards(tmp_path, target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_plot_when_evaluations_have_other_names_then_each_is_a_series_by_step() -> None:
    measured = [
        {"name": name, "step": step, "mean": mean}
        for name, step, mean in (
            ("heldout", 20, 0.4), ("heldout", 0, 0.1), ("hard", 0, 0.5), ("heldout", 20, 0.3),
            ("heldout_before", 0, 0.2), ("heldout_after", 40, 0.6),
        )
    ]  # fmt: skip
    found = other_evaluations({"evaluations": measured})
    assert found == {"heldout": [(0, 0.1), (20, 0.3)], "hard": [(0, 0.5)]}
    assert other_evaluations({}) == {}


def test_plot_when_figures_of_some_steps_are_missing_then_the_rest_is_drawn(
    tmp_path: Path,
) -> None:
    rows = [row(step, step / 50) for step in range(1, 5)]
    rows[1]["reward/mean"] = rows[2]["staleness/max"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    measured = [{"name": "heldout", "step": step, "mean": 0.3} for step in (0, 2, 4)]
    (tmp_path / "trainer.json").write_text(json.dumps({"evaluations": measured}))
    assert plot_rewards(tmp_path, tmp_path / "reward.png")


@pytest.mark.parametrize("results", [("heldout_before",), ("heldout_before", "heldout_after")])
def test_plot_when_evaluations_and_staleness_have_labels_then_no_text_is_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, results: tuple[str, ...]
) -> None:
    rows = [row(step, 0.3 + step / 200) | {"staleness/mean": 1.0} for step in range(1, 13)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    measured = [{"name": name, "step": 0, "mean": 0.32, "rows": 500} for name in results]
    content = {**dict.fromkeys(results, 0.32), "evaluations": measured}
    (tmp_path / "trainer.json").write_text(json.dumps(content))
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", figures.append)
    assert plot_rewards(tmp_path, tmp_path / "reward.png")
    [figure] = figures
    boxes = {
        text: text.get_window_extent()
        for axes in figure.axes
        for text in (*axes.texts, *axes.get_yticklabels(), axes.yaxis.label, axes.xaxis.label)
        if text.get_text()
    }
    over = [
        (one.get_text(), other.get_text())
        for one, other in itertools.combinations(boxes, 2)
        if boxes[one].overlaps(boxes[other])
    ]
    assert over == []
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert (
        legend[2]
        == {
            1: "held-out 0.32 over 500 rows, before training",
            2: "held-out 0.32 → 0.32 over 500 rows",
        }[len(results)]
    )


def test_plot_when_there_is_no_step_then_no_file(tmp_path: Path) -> None:
    assert not plot_rewards(tmp_path, tmp_path / "reward.png")
    assert not (tmp_path / "reward.png").exists()


def test_continue_when_the_run_had_finished_then_its_figures_stay() -> None:
    first = continue_summary({}, summarize(wall_s=729.0), began=100.0)
    again = continue_summary(first, summarize(wall_s=13.0, cpu_s=4.0), began=900.0)
    assert again["wall_s"] == 729.0
    assert {**again, "invocations": first["invocations"]} == first
    assert [each["wall_s"] for each in again["invocations"]] == [729.0, 13.0]
    time = dict(summary_lines(again))["time"]
    assert "729 s" in time
    assert "over 2 invocations; this one 13 s, no step, because none remained" in time


def test_continue_when_interrupted_before_then_times_add_up() -> None:
    part = summarize(status="interrupted", rows=[row(1, 0.1), row(2, 0.2)], wall_s=10.0, cpu_s=5.0)
    first = continue_summary({}, part, began=100.0)
    whole = continue_summary(
        first, summarize(memory_mb={"trainer": 400.0, "total": 3000.0}), began=200.0
    )
    assert whole["status"] == "finished"
    assert (whole["wall_s"], whole["cpu_s"]) == (22.35, 25.0)
    assert whole["restarts"] == {"buffer": 2}
    assert whole["memory_mb"] == {"trainer": 500.0, "total": 3000.0}
    spans = [(each["from_step"], each["to_step"]) for each in whole["invocations"]]
    assert spans == [(0, 2), (2, 45)]
    assert "over 2 invocations; this one 12 s, steps 3 to 45" in dict(summary_lines(whole))["time"]


def timed(first: int, last: int, began: float) -> list[dict[str, float]]:
    """Rows of an invocation that makes a step each second."""
    return [row(step, 0.5) | {"time": began + step - first + 1} for step in range(first, last + 1)]


def test_continue_when_an_invocation_was_killed_then_it_counts_with_the_steps_that_it_made() -> (
    None
):
    rows = timed(1, 4, 100.0)
    part = summarize(status="interrupted", rows=rows, wall_s=10.0, cpu_s=5.0)
    first = continue_summary({}, part, began=100.0, rows=rows)
    rows = [*rows, *timed(5, 7, 200.0), *timed(8, 9, 300.0)]
    last = summarize(status="interrupted", rows=rows, wall_s=6.0, cpu_s=2.0)
    whole = continue_summary(first, last, began=300.0, rows=rows, killed=[200.0])
    names = ("began", "status", "from_step", "to_step", "wall_s", "cpu_s")
    assert [tuple(each[name] for name in names) for each in whole["invocations"][1:]] == [
        (200.0, "killed", 4, 7, 3.0, None),
        (300.0, "interrupted", 7, 9, 6.0, 2.0),
    ]
    assert (whole["wall_s"], whole["cpu_s"]) == (19.0, 7.0)
    assert dict(summary_lines(whole))["time"] == (
        "19 s, 7 CPU seconds in all processes, over 3 invocations (1 killed: counted up to the "
        "last kept step, without CPU seconds); this one 6 s, steps 8 to 9"
    )
    again = continue_summary(whole, last, began=400.0, rows=rows, killed=[200.0])
    assert [each["began"] for each in again["invocations"]] == [100.0, 200.0, 300.0, 400.0]


def test_continue_when_the_first_invocations_were_killed_then_they_count_too() -> None:
    rows = [*timed(1, 2, 200.0), *timed(3, 4, 300.0)]
    whole = continue_summary(
        {}, summarize(rows=rows), began=300.0, rows=rows, killed=[100.0, 200.0]
    )
    spans = [(e["from_step"], e["to_step"], e["wall_s"]) for e in whole["invocations"]]
    assert spans == [(0, 0, 0.0), (0, 2, 2.0), (2, 4, 12.35)]


def test_continue_when_the_earlier_file_knows_no_invocations_then_it_starts_over() -> None:
    assert (
        continue_summary({"status": "finished", "steps": 9}, summarize(), began=1.0)["invocations"][
            0
        ]["from_step"]
        == 0
    )


def test_panel_when_rows_were_trained_on_then_it_shows_the_loss_and_no_unknown_figures() -> None:
    rows = [{"step": step, "train/loss": 1.5 - step / 100} for step in range(1, 5)]
    panel = dict(summary_lines(summarize(rows=rows, results={}, snapshot=Snapshot())))
    assert panel["loss"] == "1.485 → 1.465 (mean of the first and last 2 steps)"
    assert not {"reward", "tasks", "staleness", "weights", "generated"} & panel.keys()
    assert "?" not in " ".join(panel.values())


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (1, "0.010 (1 step)"),
        (3, "0.010 → 0.030 (the first and the last step)"),
        (12, "0.035 → 0.095 (mean of the first and last 6 steps)"),
        (39, "0.100 → 0.300 (mean of the first and last 19 steps)"),
        (41, "0.105 → 0.315 (mean of the first and last 20 steps)"),
    ],
)
def test_panel_when_a_run_was_short_then_no_step_is_in_both_means(steps: int, text: str) -> None:
    rows = [row(step, step / 100) for step in range(1, steps + 1)]
    assert dict(summary_lines(summarize(rows=rows)))["reward"] == text


def test_panel_when_evaluations_have_other_names_then_each_is_a_series() -> None:
    measured = [
        {"name": name, "step": step, "mean": mean, "stderr": 0.1, "rows": 9}
        for name, step, mean in (
            ("heldout", 0, 0.159), ("hard", 0, 0.5), ("heldout", 20, 0.045), ("heldout", 40, 0.018),
        )
    ]  # fmt: skip
    panel = dict(summary_lines(summarize(results={"evaluations": measured})))
    assert panel["heldout"] == "0.159 → 0.045 → 0.018"
    assert panel["hard"] == "0.500"


def test_panel_when_a_run_failed_before_its_first_step_then_an_evaluation_is_shown_once() -> None:
    measured = [{"name": "heldout_before", "step": 0, "mean": 0.027, "stderr": 0.003, "rows": 9}]
    results = {"heldout_before": 0.027, "evaluations": measured}
    lines = summary_lines(summarize(rows=[], results=results))
    assert [text for _, text in lines if "0.027" in text] == ["0.027 ± 0.003 over 9 rows"]


@pytest.mark.parametrize(
    ("latest", "expected"), [("interrupted", "interrupted"), ("finished", "finished")]
)
def test_status_when_a_finished_run_is_given_more_steps_then_an_interruption_is_told(
    latest: str, expected: str
) -> None:
    first = continue_summary({}, summarize(), began=1.0)
    again = continue_summary(first, summarize(status=latest), began=2.0)
    assert again["status"] == expected
    assert again["steps"] == 45


def test_summary_when_a_run_cannot_learn_then_a_line_says_so_and_a_healthy_run_has_none() -> None:
    config = GRPOConfig()
    config.actor.optimizer.lr, config.actor.reward_norm = 30.0, "group/group"
    rows = [row(s, 0.0) | {"rollout/truncated": 0.9} for s in range(1, 46)]
    summary = summarize(rows=rows, findings=of_config(config))
    rules = [each["rule"] for each in summary["findings"]]
    assert rules == ["learning_rate", "answers_cut_off"]
    lines = [text for label, text in summary_lines(summary) if label == "will not learn"]
    assert [".lr 30" in line for line in lines] == [True, False]
    assert "90% of the last answers are cut off" in lines[1]
    before = summarize(rows=[], findings=of_config(config))["findings"]
    assert [each["rule"] for each in before] == ["one_sample_per_group", "learning_rate"]
    healthy = summarize()
    assert healthy["findings"] == []
    assert not {"will not learn"} & {label for label, _ in summary_lines(healthy)}


def test_column_when_a_row_has_null_for_a_value_that_is_no_number_then_skipped() -> None:
    rows = [{"train/loss": 0.5}, {"train/loss": None}, {}, {"train/loss": 1.5}]
    assert column(rows, "train/loss") == [0.5, 1.5]
