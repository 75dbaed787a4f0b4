"""What is shown while a process takes long to start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.areal_launch.supervised import FAST, Recorder, file_probe, python
from tests.waiting import until

from areal_launch.commands.serve import _tell
from areal_launch.processes.supervisor import ProcessState, Supervised
from areal_launch.stack.events import StackEvent


async def test_start_when_it_takes_long_then_the_newest_line_of_the_log_is_shown(
    tmp_path: Path, stack_id: str
) -> None:
    ready, more, recorder = tmp_path / "ready", tmp_path / "more", Recorder()
    code = (
        "import pathlib, time\n"
        "print('Load weight begin'); print('Capturing CUDA graphs', flush=True)\n"
        f"while not pathlib.Path({str(more)!r}).exists(): time.sleep(0.05)\n"
        "print('Compiling kernels', flush=True)\n"
        "time.sleep(60)"
    )
    spec = python("inference-0", code, tmp_path, probe=file_probe(ready))
    process = Supervised(spec, stack_id, replace(FAST, progress_s=0.2), recorder)
    process.start()

    def shown() -> list[str]:
        return [text.partition(" s: ")[2] for text in recorder.texts("info")]

    await until(lambda: bool(shown()), "the first line", 60.0)
    assert shown() == ["Capturing CUDA graphs"]
    more.touch()
    await until(lambda: len(shown()) > 1, "the next line", 60.0)
    assert shown() == ["Capturing CUDA graphs", "Compiling kernels"]
    assert recorder.texts("info")[0].startswith("starting for ")
    ready.touch()
    await process.wait_up(60.0)
    assert process.state is ProcessState.UP
    await process.stop()
    assert len(recorder.texts("info")) == 2, "an idle log is shown once"


def test_serve_when_a_server_starts_then_its_progress_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _tell(StackEvent(0.0, "info", "inference-0", "starting for 10 s: Load weight begin"))
    _tell(StackEvent(0.0, "info", "stack", "ready after 20.0 s"))
    assert capsys.readouterr().out == "inference-0: starting for 10 s: Load weight begin\n"
