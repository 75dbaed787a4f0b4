"""The disk of the run folder is full for a while in the middle of a training run: it waits.

A tmpfs of the test's own is the disk, so mounting must be allowed. FULL_S makes it longer.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster_runs import arguments, check_books, rows_of
from tests.integration.stack_tools import RunningStack, areal_background, eventually

from areal_torch.models.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(600)

FULL_S = float(os.environ.get("FULL_S", "20"))
STEPS = 12


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    """Until not a byte more fits."""
    with file.open("wb", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    stream.write(b"\0" * size)
            except OSError:
                continue


def test_run_when_its_disk_is_full_for_a_while_then_it_waits_and_finishes(
    tmp_path: Path, disk: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", seed=0)
    stack = RunningStack(disk / "arithmetic" / "full")
    log = tmp_path / "out.jsonl"
    launcher = areal_background(
        *("run", "--json", *arguments(model, "full", STEPS, "sglang:d2+fsdp:d1")),
        f"run_root={disk}",
        cwd=tmp_path,
        log=log,
    )
    ballast = disk / "ballast"
    try:
        eventually(lambda: len(rows_of(stack)) >= 2, "two steps", 200.0)
        fill(ballast)
        eventually(lambda: "waiting for space" in log.read_text(), "the wait is said", 30.0)
        time.sleep(FULL_S)
        assert launcher.poll() is None, log.read_text()[-3000:]
        ballast.unlink()
        assert launcher.wait(300.0) == 0, log.read_text()[-3000:]
        stack.assert_gone()
    finally:
        ballast.unlink(missing_ok=True)
        launcher.kill()
        launcher.wait(20)
        stack.clean_up()
    assert f"the disk of {disk}" in log.read_text()
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [row["step"] for row in rows_of(stack)] == list(range(1, STEPS + 1))
    check_books(summary, STEPS)
