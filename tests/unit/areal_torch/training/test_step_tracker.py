"""Experiment trackers get the numbers of each step, and never stop a run."""

from __future__ import annotations

import json
import sys
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig
from areal.errors import InvalidInput
from areal_torch.training import tracker as module
from areal_torch.training.tracker import StepTracker, settings_of

ROOT = Path(__file__).resolve().parents[4]


def config_of(tmp_path: Path, kind: str) -> GRPOConfig:
    config = GRPOConfig(experiment_name="x", trial_name="y/z")
    config.run_root, config.tracker = str(tmp_path), kind
    config.run_dir.mkdir(parents=True)
    return config


class Kept:
    """A tracker in memory, which may be slow or refuse."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self.may_go = threading.Event()
        self.may_go.set()
        self.fails = False

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self.may_go.wait(60)
        if self.fails:
            raise ConnectionError("no route to host")
        self.rows.append((step, dict(row)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    made = Kept()
    monkeypatch.setitem(module._KINDS, "wandb", lambda *_: made)
    return made


def test_rows_when_logged_then_their_numbers_arrive_in_order(tmp_path, kept):
    tracker = StepTracker(config_of(tmp_path, "wandb"))
    tracker.log(1, {"loss": 0.5, "replay": False, "note": "text", "tokens": 7})
    tracker.log(2, {"loss": 0.25})
    tracker.close()
    assert kept.rows == [(1, {"loss": 0.5, "replay": 0.0, "tokens": 7.0}), (2, {"loss": 0.25})]
    assert kept.closed


def test_a_tracker_when_it_refuses_then_it_is_said_once_and_nothing_is_raised(
    tmp_path, kept, capsys
):
    kept.fails = True
    tracker = StepTracker(config_of(tmp_path, "wandb"))
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 0.5})
    tracker.close()
    out = capsys.readouterr().out
    assert out.count("tracker_failed") == 1
    assert "no route to host" in out


def test_a_tracker_when_it_hangs_then_rows_are_left_out_and_the_end_does_not_wait(
    tmp_path, kept, capsys, monkeypatch
):
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    kept.may_go.clear()
    tracker = StepTracker(config_of(tmp_path, "wandb"))
    for step in range(module.BACKLOG + 3):
        tracker.log(step, {"loss": 0.5})
    tracker.close()
    assert capsys.readouterr().out.count("tracker_failed") == 1
    assert not kept.closed
    kept.may_go.set()


def test_a_tracker_when_it_cannot_start_then_the_run_goes_without(tmp_path, monkeypatch, capsys):
    def offline(*_: object) -> Kept:
        raise TimeoutError("login")

    monkeypatch.setitem(module._KINDS, "wandb", offline)
    tracker = StepTracker(config_of(tmp_path, "wandb"))
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert "does not start: TimeoutError: login" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        ("wandb", "wandb"),
        ("tensorboard", "tensorboardX"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow"),
    ],
)
def test_a_package_when_missing_then_one_line_names_the_extra(tmp_path, monkeypatch, kind, package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kind in project["optional-dependencies"]
    monkeypatch.setitem(sys.modules, package, None)
    said = rf"^tracker '{kind}': its package .*; pip install 'areal-services\[{kind}\]'$"
    with pytest.raises(InvalidInput, match=said):
        StepTracker(config_of(tmp_path, kind))


def test_none_when_configured_then_nothing_happens(tmp_path):
    tracker = StepTracker(config_of(tmp_path, "none"))
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert list((tmp_path / "x" / "y" / "z").iterdir()) == []


def test_settings_when_sent_then_plain_and_without_secrets_or_addresses(tmp_path):
    settings = settings_of(config_of(tmp_path, "none"))
    json.dumps(settings)
    assert settings["actor"]["optimizer"]["lr"]
    assert not {"security", "endpoints", "stack"} & set(settings)


def test_tensorboard_when_a_trial_resumes_then_the_steps_it_takes_again_are_hidden(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    config = config_of(tmp_path, "tensorboard")
    tracker = StepTracker(config)
    tracker.log(1, {"mismatch/kl": 0.5})
    tracker.log(2, {"mismatch/kl": 0.25})
    tracker.close()
    (file,) = (config.run_dir / "tensorboard").iterdir()
    events = [Event.FromString(each) for each in records(file)]
    found = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert found == [(1, "mismatch/kl", 0.5), (2, "mismatch/kl", 0.25)]
    file.rename(file.with_name("events.out.tfevents.1"))  # names have the second of the start
    StepTracker(config, step=1).close()
    (_, file) = sorted((config.run_dir / "tensorboard").iterdir())
    starts = [Event.FromString(each) for each in records(file)]
    assert [e.step for e in starts if e.session_log.status == SessionLog.START] == [2]


def records(file: Path) -> list[bytes]:
    """TFRecord: length, its checksum, the record, its checksum."""
    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(data[12 : 12 + size])
        data = data[16 + size :]
    return found


def test_wandb_when_a_trial_resumes_offline_then_what_is_synced_has_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = config_of(tmp_path, "wandb")
    config.trial_name = "y-z"
    config.run_dir.mkdir()
    for step in (1, 2):
        tracker = StepTracker(config)
        tracker.log(step, {"mismatch/kl": 0.5 / step})
        tracker.close()
    files = sorted(config.run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.name for file in files} == {"run-x-y-z.wandb"}
    assert b"mismatch/kl" in files[0].read_bytes()


def test_trackio_when_a_trial_resumes_then_its_run_continues(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    for module_of_it in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module_of_it}.TRACKIO_DIR", tmp_path / "trackio", raising=False)
    config = config_of(tmp_path, "trackio")
    config.trial_name = "y-z"
    for step in (1, 2):
        tracker = StepTracker(config)
        tracker.log(step, {"step": step, "time": 5.0, "mismatch/kl": 0.5 / step})
        tracker.close()
    assert SQLiteStorage.get_runs("x") == ["y-z"]
    found = SQLiteStorage.get_logs("x", "y-z")
    assert [(each["step"], each["mismatch/kl"]) for each in found] == [(1, 0.5), (2, 0.25)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
def test_mlflow_when_a_trial_resumes_then_its_run_continues(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = config_of(tmp_path, "mlflow")
    config.trial_name = "y-z"
    config.run_dir.mkdir()
    for step in (1, 2):
        tracker = StepTracker(config)
        tracker.log(step, {"mismatch/kl": 0.5 / step, "eval/heldout/mean": 0.75})
        tracker.close()
        config.actor.eps_clip = 0.3  # the second start has changed settings
    client = mlflow.MlflowClient(f"sqlite:///{config.run_dir}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    assert (run.info.run_name, run.info.status) == ("y-z", "FINISHED")
    assert run.data.params["actor.eps_clip"] == "0.2"
    found = client.get_metric_history(run.info.run_id, "mismatch/kl")
    assert [(each.step, each.value) for each in found] == [(1, 0.5), (2, 0.25)]
    assert run.data.metrics["eval/heldout/mean"] == 0.75
