"""The folder of one run: where its files are, who holds it, what is in `stack.json`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil

from areal.chassis.files import replacing
from areal.errors import CannotStart, InvalidInput, NotFound, did_you_mean


class RunFolder:
    """The folder `run_root/experiment/trial`.

    Example:
        >>> RunFolder(Path("runs/arithmetic/trial0")).stack_file
        PosixPath('runs/arithmetic/trial0/stack.json')
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.stack_file = path / "stack.json"
        self.lock_file = path / ".lock"
        self.control_file = path / "control.sock"
        self.secrets = path / "secrets"
        self.logs = path / "logs"
        self.metrics_file = path / "metrics.jsonl"
        self.trainer_file = path / "trainer.json"
        self.verdict_file = path / ".trainer-verdict"
        self.dead_letters_file = path / "dead_letters.jsonl"
        self.summary_file = path / "summary.json"
        self.plot_file = path / "reward.png"

    def make(self, *, shared: bool = False) -> None:
        """Creates the folder, which only its owner may enter, and that of the logs.

        Prompts, answers and rewards are in it. A folder that exists keeps its permissions.

        Args:
            shared: Servers that others run read versions there: the umask says who may enter.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(0o777 if shared else 0o700, exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    def log_of(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def lock(self, wait_s: float = 15.0) -> int:
        """Takes the run for this process; held until the descriptor and its copies are closed.

        Args:
            wait_s: How long to wait while the guard of a dead launcher still cleans up.

        Raises:
            CannotStart: A living launcher holds the run; the line names its pid.
        """
        self.make()
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                pid = self.holder_pid()
                alive = pid > 0 and psutil.pid_exists(pid)
                if alive or time.monotonic() > deadline:
                    os.close(descriptor)
                    raise CannotStart(
                        f"run folder {str(self.path)!r}: a stack of this trial "
                        f"{'is already running' if alive else 'is still being cleaned up'} "
                        f"(pid {pid}); stop it with `areal down`, or choose another trial_name"
                    ) from None
                # Bounded: the holder is a guard, which needs at most its grace period.
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def replaced(self, descriptor: int) -> bool:
        """Whether the folder was deleted, and made again by another run, since it was locked.

        What is in it is that run's.

        Args:
            descriptor: What `lock` returned.
        """
        try:
            return not os.path.samestat(os.fstat(descriptor), self.lock_file.stat())
        except OSError:  # deleted, and not made again
            return False

    def holder_pid(self) -> int:
        """Returns the pid that last took the lock; 0 if none did."""
        try:
            return int(self.lock_file.read_text("utf-8").strip() or 0)
        except (OSError, ValueError):
            return 0

    def held(self) -> bool:
        """Whether a launcher (or its guard, while it cleans up) holds the run now."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def write_stack(self, content: dict[str, Any]) -> None:
        """Replaces stack.json atomically: a reader sees the old one or the new one."""
        write_json(self.stack_file, content)

    def started_in(self) -> Path:
        """Returns where the run was started: the base of its configuration's relative paths.

        Raises:
            NotFound: As `read_stack`.
        """
        return Path(str(self.read_stack().get("started_in", "")) or ".").absolute()

    def read_stack(self) -> dict[str, Any]:
        """Returns the content of stack.json.

        Raises:
            NotFound: There is none, or it cannot be read.
        """
        try:
            content = json.loads(self.stack_file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise NotFound(f"{self.stack_file}: no readable stack there ({error})") from None
        if not isinstance(content, dict):
            raise NotFound(f"{self.stack_file}: expected a JSON object")
        return content

    def killed(self) -> list[float]:
        """Returns when invocations began that trained and were killed: Unix times, oldest first.

        Only for the launcher that holds the run, before it writes its own stack.json.
        """
        try:
            stack = self.read_stack()
        except NotFound:
            return []
        ended = stack.get("state") in ("stopped", "failed")
        last = [] if ended or "trainer" not in stack.get("processes", ()) else [stack["started"]]
        return [*stack.get("killed", ()), *last]


def remove_secrets(folder: RunFolder) -> None:
    """Forgets what was made; the next stack of the trial makes its own."""
    shutil.rmtree(folder.secrets, ignore_errors=True)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file in one step."""
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _named_run(run: Path, root: Path) -> RunFolder:
    try:
        there = (run / "stack.json").is_file()
    except OSError as error:  # another user's
        raise NotFound(f"--run {str(run)!r}: {error.strerror}") from None
    if there:
        return RunFolder(run)
    parts = run.parts
    if run.is_absolute() or ".." in parts or len(parts) > 2:
        raise NotFound(f"--run {str(run)!r}: no stack.json there")
    trials = sorted(file.parent for file in root.glob("*/*/stack.json"))
    found = [each for each in trials if each.parts[-len(parts) :] == parts]
    if len(found) > 1:
        raise InvalidInput(
            f"--run {str(run)!r}: {len(found)} trials have this name: expected one of "
            f"{', '.join('/'.join(each.parts[-2:]) for each in found)}"
        )
    if not found:
        names = {each.name for each in trials} | {"/".join(each.parts[-2:]) for each in trials}
        raise NotFound(
            f"--run {str(run)!r}: no stack.json there, and no trial of this name in {str(root)!r}"
            f"{did_you_mean(str(run), sorted(names))}"
        )
    return RunFolder(found[0])


def find_run(run: Path | None, root: Path = Path("runs"), *, live: bool = True) -> RunFolder:
    """Returns the run that a command is about.

    Args:
        run: Named by the user: a folder, or `TRIAL` or `EXPERIMENT/TRIAL` of one under `root`;
            None: the most recent one under `root`.
        root: Where to look.
        live: Only a running one will do.

    Raises:
        NotFound: Nothing fits; says where it looked.
        InvalidInput: Several trials have this name.
    """
    if run is not None:
        return _named_run(run, root)
    files = sorted(root.glob("*/*/stack.json"), key=lambda f: f.stat().st_mtime, reverse=True)
    folders = [RunFolder(file.parent) for file in files]
    running = [folder for folder in folders if folder.held()]
    if running:
        return running[0]
    if folders and not live:
        return folders[0]
    hint = f"; the last one is {folders[0].path}" if folders else ""
    kind = "running stack" if live else "run"
    raise NotFound(f"no {kind} under {str(root)!r} (use --run DIR to name one){hint}")
