"""A stack of another machine, by its stack.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal.config.experiment import GRPOConfig
from areal_launch.run_folder import RunFolder
from areal_launch.stack.remote import RemoteStack


def write(folder: RunFolder, job: str, state: str, restarts: int, cause: str = "") -> None:
    content: dict[str, Any] = {
        "state": state,
        "cause": cause,
        "started": 1700000000.0,
        "launcher": {"pid": 1, "slurm_job": job},
        "processes": {"buffer": {"state": "up", "restarts": restarts}},
    }
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_stack(content)


def test_followed_when_the_file_is_an_earlier_jobs_then_it_is_not_believed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    stack = RemoteStack(GRPOConfig(), folder, "")
    assert not stack.refresh({"slurm_job": "8"}), "nothing is there yet"
    write(folder, "7", "failed", 0, "an old story")
    assert not stack.refresh({"slurm_job": "8"})
    assert (stack.state, stack.cause) == ("starting", "")
    write(folder, "8", "ready", 0)
    assert stack.refresh({"slurm_job": "8"})
    assert stack.state == "ready"
    assert stack.started == 1700000000.0


def test_followed_when_a_process_was_restarted_then_there_is_an_event(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    stack = RemoteStack(GRPOConfig(), folder, "")
    for restarts in (0, 0, 1, 1):
        write(folder, "8", "ready", restarts)
        stack.refresh({"slurm_job": "8"})
    assert [event.process for event in stack.events.recent] == ["buffer"]
    assert stack.processes["buffer"].restarts == 1
