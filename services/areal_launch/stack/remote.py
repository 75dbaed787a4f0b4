"""A stack that another machine's launcher runs, as its stack.json shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.config.experiment import BaseExperimentConfig
from areal.errors import NotFound
from areal_launch.processes.supervisor import ProcessState, RemoteProcess
from areal_launch.run_folder import RunFolder
from areal_launch.stack.events import EventLog


@dataclass
class RemoteStack:
    """A stack elsewhere, as a display shows it."""

    config: BaseExperimentConfig
    """The configuration with its endpoints, once they are known."""
    folder: RunFolder
    interrupt_hint: str
    """What Ctrl-C does."""
    events: EventLog = field(default_factory=EventLog)
    started: float = field(default_factory=time.time)
    state: str = "starting"
    cause: str = ""
    processes: dict[str, RemoteProcess] = field(default_factory=dict)

    def refresh(self, launcher: Mapping[str, Any]) -> bool:
        """Reads stack.json; False while it is none of the launcher with those entries.

        Args:
            launcher: E.g. `{"slurm_job": "17"}`: an earlier run may have left its file.
        """
        try:
            content = self.folder.read_stack()
        except NotFound:
            return False
        told = content.get("launcher", {})
        if any(told.get(key) != value for key, value in launcher.items()):
            return False
        self.state = str(content["state"])
        self.cause = str(content.get("cause", ""))
        self.started = float(content["started"])
        seen = {
            name: RemoteProcess(ProcessState(entry["state"]), int(entry["restarts"]))
            for name, entry in content["processes"].items()
        }
        for name, process in seen.items():
            before = self.processes.get(name, process)
            if process.restarts > before.restarts:
                text = f"{name} was restarted; areal logs {name} says why"
                self.events.report("warning", name, text)
        self.processes = seen
        return True
