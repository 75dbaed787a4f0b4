"""A run's output may lose its reader; the run does not end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_launch.processes.process import python_environment

_VIEW = """
import pathlib, sys, time
from rich.console import Console
from areal_launch.view.output import lasting_output, print_event, say, whole_output
sys.stdin.readline()  # the reader has gone
with whole_output(), lasting_output():
    console = Console()
    for number in range(3000):
        say(f"line {number} of a run that takes a while")
        print_event("step", step=number)
        console.print("a panel")
        print("a warning", file=sys.stderr, flush=True)
    pathlib.Path(sys.argv[1]).write_text("trained")
"""


def _ends(streams: str, done: Path) -> int:
    """The exit code of a program whose `streams` no one reads; "full": a full disk takes them."""
    argv = [sys.executable, "-c", _VIEW, str(done)]
    with subprocess.Popen(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *argv] if streams == "closed" else argv,
        stdin=subprocess.PIPE,
        stdout=_full() if streams == "full" else subprocess.PIPE,
        stderr=subprocess.STDOUT if streams == "both" else subprocess.DEVNULL,
        env=python_environment(),
    ) as process:
        assert process.stdin is not None
        if process.stdout is not None:
            process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        return process.wait(timeout=60)


def _full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("streams", ["stdout", "both", "full", "closed"])
def test_run_when_no_one_reads_its_output_then_it_ends_as_it_would_have(
    streams: str, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    assert _ends(streams, done) == 0
    assert done.read_text() == "trained"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "printed",
    [
        "say('x')",
        "say('x' * 100_000)",
        "sys.stdout.write('x')",
        "print_json({'x': list(range(9000))})",
        "print_table(('a', 'b'), [('1', '2')] * 3000)",
        "typer.echo('x')",
    ],
)
def test_command_when_the_disk_of_its_output_is_full_then_one_line_and_exit_code_1(
    printed: str, unbuffered: str
) -> None:
    code = "import sys, typer; from areal_launch.view.output import *\n"
    code += f"with whole_output():\n    {printed}\n    sys.exit(0)"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**python_environment(), "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "areal: standard output: No space left on device\n"


def test_console_script_when_the_locale_is_another_then_it_starts_again_in_utf8() -> None:
    code = "from areal_launch.utf8 import restart_in_utf8; restart_in_utf8()\n"
    code += "import sys; print(sys.flags.utf8_mode, sys.argv)"
    environment = {**python_environment(), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    environment["PYTHONUTF8"] = "0"  # as in a locale of another encoding
    done = subprocess.run(
        [sys.executable, "-c", code, "a b", "'\"%", "数"],
        env=environment,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.decode() == "1 ['-c', 'a b', '\\'\"%', '数']\n"
    assert done.stderr == b""
