"""The process that outlives a launcher killed with -9, and ends what it left behind.

    launcher ──pipe──> guard (stdin)
       │ dies: the kernel closes its end of the pipe
       v
    guard reads EOF ──> SIGTERM to every process of the stack, SIGKILL after the grace
                    ──> the stack's secrets go ──> exit

The launcher starts it before any other child and holds the only writing end. A child that is
being started still holds a copy until its exec, so EOF cannot come before it carries its tag.
The guard also holds the run's lock: a new stack of the trial cannot start before it is done.
"""

from __future__ import annotations

import os
import signal
import sys

DEFAULT_GRACE_S = 8.0


def main(argv: list[str]) -> int:
    """Waits for EOF on stdin, then ends the stack of a stack.json within `argv[1]` seconds."""
    # The terminal's and the launcher's signals are not for us: only the end of the pipe is.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    stack_file = argv[0]
    grace_s = float(argv[1]) if len(argv) > 1 else DEFAULT_GRACE_S
    while os.read(0, 4096):
        pass
    # psutil only now: until here a few MB suffice.
    import json
    from pathlib import Path

    from areal_launch.processes.descendants import end_tagged, leaders_of
    from areal_launch.run_folder import RunFolder, remove_secrets

    stack = json.loads(Path(stack_file).read_text())
    try:
        end_tagged(stack["stack_id"], grace_s=grace_s, leaders=leaders_of(stack))
    finally:
        remove_secrets(RunFolder(Path(stack_file).parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
