"""The parent of one process of a stack: owns its log, and ends what it leaves behind.

    launcher ──starts──> keeper ──starts──> the process ──> whatever it starts
       ^                  │  ^                   │                  │ its starter ends:
       │  pid, exit code  │  └─ output (pipe) ───┴──────────────────┤ the kernel hands it
       └──────────────────┘                                         v to the keeper
                                                                 keeper

It needs nothing of the launcher once it runs: when that dies the log is still bounded, and at the
end of the process nothing of it stays, whatever it did to hide (`areal.orphans`). It ends with the
process's own exit code or signal. Killed itself, it takes the process along.

| state   | consumes         | waits for                 | unblocked by                    |
|---------|------------------|---------------------------|---------------------------------|
| running | output; orphans  | output, the process's end | they come                       |
| ending  | what is left     | the end of what it killed | SIGKILL; `end_children`'s limit |

Runs without site-packages (`python -S`): a few milliseconds and megabytes.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from areal.orphans import adopt_orphans, die_with_parent, end_children, reap_strays
from areal_launch.processes.log_file import LogFile

_CHUNK = 1 << 16
# More than a pipe holds: a process that writes after that has escaped us.
_LAST_CHUNKS = 16
_CANNOT_EXECUTE = 127


def keeper_argv(log: Path, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the command that runs `argv` under a keeper."""
    # -P: a file of the user's beside us must not replace a module of Python's.
    return (sys.executable, "-S", "-P", "-m", "areal_launch.processes.keeper", str(log), *argv)


class Keeper:
    """One process and its output."""

    def __init__(self, log: LogFile, argv: list[str]) -> None:
        """Starts the process; raises OSError when its program cannot be executed."""
        self._log = log
        adopt_orphans()
        self._output, writing = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 - the launcher's own command
                argv,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        finally:
            os.close(writing)
        os.set_blocking(self._output, False)
        self.pid = process.pid
        # We wait for it ourselves, as for all our children: subprocess must not.
        process.returncode = 0
        self._wake, wakes = os.pipe()
        for end in (self._wake, wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        # Handlers of our own, which an exec resets: to be ignored is inherited. Asked to end, we
        # end with the process, which is asked too.
        for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)

    def run(self) -> int:
        """Returns the process's wait status once it and everything below it has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while (status := self._ended()) is None:
                for key, _ in selector.select():
                    if key.fd == self._output and not self._read():
                        selector.unregister(self._output)  # all its writers have closed it
                    elif key.fd == self._wake:
                        os.read(self._wake, _CHUNK)
        end_children()
        for _ in range(_LAST_CHUNKS):
            if not self._read():
                break
        return status

    def _ended(self) -> int | None:
        """The process's wait status; None while it runs."""
        reap_strays({self.pid})
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return status if pid else None

    def _read(self) -> bool:
        """Takes a piece of output, if there is one; False at its end."""
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return True
        self._log.write(data)
        return bool(data)


def main(argv: list[str]) -> int:
    """Runs `keeper LOG PROGRAM [ARGUMENT ...]`; prints "pid PID" or "error ERRNO"."""
    try:
        keeper = Keeper(LogFile(Path(argv[0])), argv[1:])
    except OSError as error:
        _tell(f"error {error.errno}")
        return _CANNOT_EXECUTE
    _tell(f"pid {keeper.pid}")
    status = keeper.run()
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core is enough
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    return os.waitstatus_to_exitcode(status)


def _tell(line: str) -> None:
    """Tells the launcher, which may have died meanwhile."""
    with suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)
