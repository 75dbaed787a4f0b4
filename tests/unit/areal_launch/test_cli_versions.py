"""`areal versions`: what it prints of a run that is over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.unit.areal_weight_sync.weight_sync_fakes import make_model, publish_folder

from areal.config.experiment import GRPOConfig, save_config
from areal.errors import NotFound
from areal_launch.commands.versions import list_versions, show_version
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
