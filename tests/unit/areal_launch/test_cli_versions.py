"""`areal versions`: what it prints of a run, and which checkpoints it exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.unit.areal_weight_sync.weight_sync_fakes import make_model, publish_folder

from areal.config.experiment import GRPOConfig, save_config
from areal.errors import InvalidInput, NotFound
from areal.runs.checkpoints import CheckpointFolder
from areal_launch.commands import versions
from areal_launch.commands.versions import export_version, list_versions, show_version
from areal_launch.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with versions 0, 3, 4 of incarnation 1, and 4 again of incarnation 2."""
    config = GRPOConfig(experiment_name="test", trial_name="t", run_root=str(tmp_path))
    config.model.path = str(make_model(tmp_path / "model"))
    save_config(config, RunFolder(config.run_dir).config_file)
    RunFolder(config.run_dir).stack_file.write_text("{}")
    root = config.run_dir / "weights"
    root.mkdir()
    for version, incarnation in ((4, 2), (3, 1), (4, 1)):
        publish_folder(root, version, incarnation)
    shutil.copytree(root / "v00000003-inc1", root / ".spare")
    (root / "v00000009-inc1").mkdir()
    return config.run_dir


def test_list_when_the_run_is_over_then_shows_what_is_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_versions(run, as_json=True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["version"], row["incarnation"]) for row in rows] == [
        (0, 0), (3, 1), (4, 1), (4, 2),
    ]  # fmt: skip
    assert {row["encoding"] for row in rows} == {"full"}
    assert all(row["size_bytes"] > 0 and len(row["digest"]) == 32 for row in rows)
    assert list_versions(run, as_json=False) == 0
    printed = capsys.readouterr().out
    assert "v00000004-inc2" in printed
    assert "not running" in " ".join(printed.split())


def test_list_when_the_model_is_old_then_the_age_of_version_0_is_that_of_its_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (tmp_path / "model").iterdir():
        os.utime(file, (5000.0, 5000.0))
    list_versions(run, as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["publish_time"] == 5000.0


def test_show_when_two_incarnations_made_it_then_the_last_one_counts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show_version(run, 4) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["name"] == "v00000004-inc2"
    assert shown["tensors"][0]["digest"]
    assert Path(shown["path"]).is_dir()  # what model.path of a new trial is given
    with pytest.raises(NotFound, match="version 7: not stored; stored: 0, 3, 4, 4"):
        show_version(run, 7)


# -- exports -------------------------------------------------------------------------------------


def save_checkpoint(run: Path, step: int) -> Path:
    """As a trainer does that keeps one."""
    folder = CheckpointFolder(run / "checkpoints", keep=1)
    half = folder.begin(step, 1)
    (half / "__0_0.distcp").write_bytes(bytes(100))
    return folder.finish(half, {"step": step})


class Exports:
    """Stands in for the process that exports, while `steps` more are trained in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path, steps: list[int]) -> None:
        self.begun: list[str] = []
        self._run, self._steps = run, steps
        monkeypatch.setattr(versions.subprocess, "run", self.export)

    def export(self, command: list[str], **_: Any) -> None:
        checkpoint = Path(command[4])
        self.begun.append(checkpoint.name)
        if self._steps:
            save_checkpoint(self._run, self._steps.pop(0))
        if not checkpoint.is_dir():
            raise subprocess.CalledProcessError(2, command)


@pytest.mark.parametrize("which", ["latest", "3"])
def test_export_when_a_file_has_other_bytes_then_refused_and_nothing_begins(
    run: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    checkpoint = save_checkpoint(run, 3)
    (checkpoint / "__0_0.distcp").write_bytes(bytes(99) + b"x")
    exports = Exports(monkeypatch, run, [])
    with pytest.raises(InvalidInput, match=r"step_3-inc_1': __0_0.distcp is not what was written"):
        export_version(run, which, run / "out")
    assert exports.begun == []
    assert not (run / "out").exists()


def test_export_when_the_run_removes_the_latest_meanwhile_then_the_newer_one(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(run, 3)
    exports = Exports(monkeypatch, run, [4, 5])
    assert export_version(run, "latest", run / "out") == 0
    assert exports.begun == ["step_3-inc_1", "step_4-inc_1", "step_5-inc_1"]
    assert "step 5 of" in capsys.readouterr().out


def test_export_when_the_run_removes_each_latest_meanwhile_then_it_ends_and_says_so(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(run, 3)
    exports = Exports(monkeypatch, run, list(range(4, 100)))
    with pytest.raises(NotFound, match=r"latest: the run has removed .* kept: 8; .* checkpoint.k"):
        export_version(run, "latest", run / "out")
    assert len(exports.begun) == 5


def test_export_when_the_run_removes_a_step_meanwhile_then_said_and_no_other_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(run, 3)
    exports = Exports(monkeypatch, run, [4])
    with pytest.raises(NotFound, match=r"3: the run has removed this checkpoint meanwhile; kept: "):
        export_version(run, "3", run / "out")
    assert exports.begun == ["step_3-inc_1"]
    assert not (run / "out").exists()


@pytest.mark.parametrize("which", ["\u00b2", "\u0663", "9" * 5000])
def test_export_when_a_step_is_no_number_then_refused_in_one_line(run: Path, which: str) -> None:
    with pytest.raises(InvalidInput, match="expected best, latest, or the step of a checkpoint"):
        export_version(run, which, run / "out")
