"""Lines about servers on the terminal of `areal run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_launch.commands.stack import with_log
from areal_launch.processes.process import ProcessSpec

_SPECS = [
    ProcessSpec("buffer", ("b",), Path("logs/buffer.log")),
    ProcessSpec("inference-0", ("s",), Path("logs/inference-0.log"), address="127.0.0.1:3000"),
    ProcessSpec("inference-1", ("s",), Path("logs/inference-1.log"), address="127.0.0.1:30001"),
]


@pytest.mark.parametrize(
    ("server", "log"),
    [
        ("127.0.0.1:3000", "; its log: logs/inference-0.log"),
        ("127.0.0.1:30001", "; its log: logs/inference-1.log"),
        ("127.0.0.1:300", ""),
        ("gpu-1:30000", ""),
    ],
)
def test_line_when_the_stack_started_the_server_then_it_names_its_log(
    server: str, log: str
) -> None:
    line = f"server {server} is quarantined: /update_weights_from_disk: HTTP 500"
    assert with_log(line, _SPECS) == line + log
