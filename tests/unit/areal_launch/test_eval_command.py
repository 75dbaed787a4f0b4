"""`areal eval RECIPE`: which policies, in which trials, and how two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from areal.config.experiment import GRPOConfig, build_config
from areal.runs.checkpoints import CheckpointFolder
from areal_launch.cli import app
from areal_launch.commands import evaluate
from areal_launch.commands.row_differences import compare, print_differences
from areal_launch.commands.stack import Resolved
from areal_launch.commands.versions import export_version
from areal_launch.run_folder import RunFolder
from areal_launch.stack.plan import plan_stack

RECIPE = "def main(argv):\n    pass\n"
SETTINGS = """\
experiment_name: mine
allocation_mode: sglang:d1+fsdp:d1
model:
  path: models/of-${trial_name}
"""


class Ran:
    """What would have run, and what would have been exported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.configs: list[Any] = []
        self.exported: list[tuple[str, str]] = []
        self.code = code
        monkeypatch.setattr(evaluate, "run_here", self.run)
        monkeypatch.setattr(evaluate, "export_version", self.export)

    def export(self, run: Path, which: str, to: Path) -> int:
        self.exported.append((str(run), which))
        to.mkdir()
        (to / "config.json").write_text("{}")
        (to / "tokenizer.json").write_text("{}")
        return 0

    def run(self, resolved: Any, *, as_json: bool, only_evaluate: bool) -> int:
        assert only_evaluate
        self.configs.append(resolved.config)
        resolved.config.run_dir.mkdir(parents=True, exist_ok=True)
        RunFolder(resolved.config.run_dir).stack_file.write_text("{}")
        return self.code

    @property
    def trials(self) -> list[str]:
        return [each.trial_name for each in self.configs]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe beside the run folder of its trial, which has been trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "with_model", with_any_model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.py").write_text(RECIPE)
    (tmp_path / "mine" / "recipe.yaml").write_text(SETTINGS)
    trained = RunFolder(Path("runs/mine/trial0"))
    trained.path.mkdir(parents=True)
    trained.stack_file.write_text("{}")
    folder = CheckpointFolder(trained.path / "checkpoints", keep=2)
    for step in (20, 40):
        folder.finish(folder.begin(step, 1), {"step": step})
    measured = [{"name": "held", "step": 20, "mean": 0.5}]
    trained.trainer_file.write_text(json.dumps({"evaluations": measured}))
    return tmp_path


def with_any_model(config: Any, *, can_prepare: bool) -> Any:
    """As if each model were there."""
    return Resolved(config, prepare=can_prepare)


def areal_eval(*arguments: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, ["eval", *arguments])
    return answer.exit_code, answer.output


def test_eval_when_no_checkpoint_is_named_then_the_latest_in_a_trial_of_its_own(
    place: Path, monkeypatch
) -> None:
    ran = Ran(monkeypatch)
    assert areal_eval("mine", "seed=3") == (0, "")
    assert ran.exported == [("runs/mine/trial0", "latest")]
    (config,) = ran.configs
    model = place / "runs/mine/trial0-eval-latest/model"
    assert (config.trial_name, config.seed) == ("trial0-eval-latest", 3)
    assert config.model.path == str(model)
    assert not model.exists(), "it is exported again when it is needed again"
    areal_eval("mine")
    assert ran.trials == ["trial0-eval-latest", "trial0-eval-latest-2"]


def test_eval_when_a_checkpoint_is_exported_then_only_its_user_may_read_it(
    place: Path, monkeypatch
) -> None:
    Ran(monkeypatch)
    assert areal_eval("mine") == (0, "")
    assert (place / "runs/mine/trial0-eval-latest").stat().st_mode & 0o077 == 0


def test_eval_when_a_model_is_named_then_it_is_the_start(place: Path, monkeypatch) -> None:
    ran = Ran(monkeypatch)
    areal_eval("mine", "model.path=other")
    areal_eval("mine", "--checkpoint", "start")
    assert ran.exported == []
    assert ran.trials == ["trial0-eval-start", "trial0-eval-start-2"]
    # Its path has the name of the trial that is trained, not of the one that evaluates.
    assert [each.model.path for each in ran.configs] == ["other", "models/of-trial0"]


def test_eval_when_a_step_has_leading_zeros_then_named_as_without(place: Path, monkeypatch) -> None:
    ran = Ran(monkeypatch)
    assert areal_eval("mine", "--checkpoint", "0020", "--against", "040") == (0, "")
    assert [which for _, which in ran.exported] == ["20", "40"]
    assert ran.trials == ["trial0-eval-20", "trial0-eval-40"]


def test_eval_when_a_trial_has_a_long_name_then_its_evaluation_has_a_legal_one(
    place: Path, monkeypatch
) -> None:
    ran = Ran(monkeypatch)
    areal_eval("mine", f"trial_name={'t' * 63}", "--checkpoint", "start")
    assert ran.trials == [f"{'t' * 52}-eval-start"]


def test_eval_when_an_evaluation_fails_then_its_code_and_no_second_one(
    place: Path, monkeypatch
) -> None:
    ran = Ran(monkeypatch, code=1)
    assert areal_eval("mine", "--checkpoint", "best", "--against", "40")[0] == 1
    assert [which for _, which in ran.exported] == ["best", "40"]
    assert ran.trials == ["trial0-eval-best"]
    assert not list(place.glob("runs/*/*/model"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["mine", "trial_name=other"], "'runs/mine/other' has not been trained"),
        (["mine", "--against", "latest"], "--against 'latest': expected another one"),
        (["mine", "--against", "40"], "--checkpoint latest; both are step_40-inc_1"),
        (["mine", "--checkpoint", "020", "--against", "20"], "both are step_20-inc_1"),
        (["mine", "--checkpoint", "best", "--against", "20"], "both are step_20-inc_1"),
        (["mine", "--checkpoint", "start", "--against", "start"], "both are start"),
        (["mine", "--checkpoint", "9" * 5000], "expected best, latest, start, or the step"),
        (["mine", "--checkpoint", "../x"], "--checkpoint '../x': expected best, latest, start"),
        (["mine", "--against", "\u0663"], "expected best, latest, start, or the step"),
        (["mine", "--checkpoint", "lastest"], "expected best, latest, start, or the step"),
        (["mine", "model.path=x", "--checkpoint", "best"], "expected --checkpoint start with it"),
        (["mine", "allocation_mode=fsdp:d1"], "'fsdp:d1' has no servers"),
        (["mine", "--accept-changes"], "expected no recipe with it"),
        (["rows=3", "--against", "best"], "expected a recipe"),
        (["mien"], "did you mean|No such file"),
    ],
)
def test_eval_when_it_makes_no_sense_then_refused_in_one_line(
    place: Path, monkeypatch, arguments, why
) -> None:
    ran = Ran(monkeypatch)
    code, said = areal_eval(*arguments)
    assert code in (1, 2)
    assert len(said.strip().splitlines()) == 1
    assert any(part in said for part in why.split("|")), said
    assert (ran.configs, ran.exported) == ([], [])
    assert [each.name for each in (place / "runs/mine").iterdir()] == ["trial0"]


def test_eval_when_there_is_no_such_checkpoint_then_no_folder_is_left(place, monkeypatch) -> None:
    Ran(monkeypatch)
    monkeypatch.setattr(evaluate, "export_version", export_version)
    code, said = areal_eval("mine", "--checkpoint", "7", "--against", "start")
    assert (code, "7: no such checkpoint; kept: 20, 40" in said) == (1, True)
    assert [each.name for each in (place / "runs/mine").iterdir()] == ["trial0"]


@pytest.mark.parametrize("only", [True, False])
def test_plan_when_a_stack_only_evaluates_then_its_trainer_is_told(tmp_path: Path, only) -> None:
    config = build_config(GRPOConfig, None, [f"run_root={tmp_path}"])
    plan = plan_stack(config, RunFolder(config.run_dir), with_trainer=True, only_evaluate=only)
    assert plan.trainer is not None
    assert ("--only-evaluate" in plan.trainer.argv) is only


# -- differences ---------------------------------------------------------------------------------


def write(folder: Path, rows: list[list[float] | None], data: str = "1+1=") -> Path:
    """A run folder with one evaluation: rewards of each row's answers; None: it failed."""
    lines = [
        {"task_id": f"held-out-v0-{index}", "data": {"prompt": f"{data}{index}"}, "answers": []}
        | ({"failed": "lost"} if row is None else {"answers": [{"reward": r} for r in row]})
        for index, row in enumerate(rows)
    ]
    (folder / "evaluations").mkdir(parents=True, exist_ok=True)
    file = folder / "evaluations" / "held-out-v0.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    entry = {"name": "held-out", "step": 0, "mean": 0.0, "rows": len(rows)}
    (folder / "trainer.json").write_text(json.dumps({"evaluations": [entry]}))
    return folder


ROW = st.none() | st.lists(st.floats(-10, 10), max_size=3)


@given(st.lists(st.tuples(ROW, ROW), max_size=12))
def test_differences_when_rows_end_anyhow_then_paired_and_all_are_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, rows
) -> None:
    root = tmp_path_factory.mktemp("runs")
    first = write(root / "a", [one for one, _ in rows])
    (found,) = compare(first, write(root / "b", [other for _, other in rows]))
    paired = [(a or [0.0], b or [0.0]) for a, b in rows if a is not None and b is not None]
    figures = found.figures()
    assert figures["rows"] == len(paired)
    both_failed = sum(a is None and b is None for a, b in rows)
    assert figures["rows"] + figures["left_out"] + both_failed == len(rows)
    if paired:
        expected = fmean(fmean(a) - fmean(b) for a, b in paired)
        assert figures["mean"] == pytest.approx(expected, abs=1e-9)
    print_differences(("latest", first), ("start", root / "b"), as_json=False)


def test_differences_when_printed_then_the_rows_that_moved_most_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a", [[1.0, 1.0], [1.0, 0.0], [0.0], [0.5]], "\x1b[2J\u202e")
    second = write(tmp_path / "b", [[0.0, 0.0], [1.0, 0.0], [0.5], None], "\x1b[2J\u202e")
    print_differences(("latest", first), ("start", second), as_json=False)
    shown = capsys.readouterr().out
    assert "latest - start = +0.167 ± 0.441 over 3 rows: 1 higher, 1 lower" in shown
    assert "left out: 1, failed or not the same in both" in shown
    assert shown.index("+1.000") < shown.index("-0.500")
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    lines = (first / "evaluations" / "held-out-against-start.jsonl").read_text().splitlines()
    assert [json.loads(line)["difference"] for line in lines] == [1.0, 0.0, -0.5]


def test_differences_when_the_rows_are_others_then_they_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a", [[1.0]])
    print_differences(("20", first), ("start", write(tmp_path / "b", [[0.0]], "2+")), as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    said = json.loads(line)
    assert (said["event"], said["rows"], said["left_out"]) == ("difference", 0, 1)
    assert said["mean"] is None


def test_differences_when_they_cancel_then_zero_has_no_minus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(tmp_path / "a", [[0.1 + 0.2], [0.3], [-0.0001]])
    second = write(tmp_path / "b", [[0.3], [0.1 + 0.2], [0.0]])
    print_differences(("latest", first), ("start", second), as_json=False)
    shown = capsys.readouterr().out
    assert "latest - start = +0.000 ±" in shown
    assert "-0.000" not in shown
