"""`areal scale` on a running stack, while long generations run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.stack_tools import (
    RunningStack,
    areal,
    areal_background,
    eventually,
    running_stack,
)

pytestmark = pytest.mark.timeout(300)

TASKS = 24


@pytest.fixture
def stack(tiny_model: Path, tmp_path: Path) -> Iterator[RunningStack]:
    overrides = (
        f"model.path={tiny_model}",
        "model.context_length=1024",
        "allocation_mode=sglang:d2+fsdp:d1",
        "gconfig.max_new_tokens=300",
    )
    with running_stack(tmp_path, "scale", *overrides) as running:
        yield running


def status(folder: Path) -> dict:
    return json.loads(areal("status", "--json", cwd=folder).stdout)


def test_servers_when_scaled_up_and_down_under_load_then_every_task_is_delivered(
    stack: RunningStack, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    kwargs = {"reward_fn": "math", "gconfig": {"max_new_tokens": 300, "min_new_tokens": 300}}
    line = {"data": {"prompt": "1+1=", "answer": "2"}, "kwargs": kwargs}
    rows.write_text("".join(f"{json.dumps(line)}\n" for _ in range(TASKS)))
    log = tmp_path / "submit.log"
    submitting = areal_background("submit", str(rows), "--wait", "--json", cwd=tmp_path, log=log)
    try:
        eventually(lambda: status(tmp_path)["accounting"]["running"], "tasks run", 60)

        grown = areal("scale", "inference=3", cwd=tmp_path)
        assert grown.returncode == 0, grown.stderr
        assert "2 -> 3 inference servers" in grown.stdout
        seen = status(tmp_path)
        assert "inference-2" in seen["processes"]
        assert [s["state"] for s in seen["servers"]].count("serving") == 3

        shrunk = areal("scale", "inference=1", cwd=tmp_path)
        assert shrunk.returncode == 0, shrunk.stderr
        assert "3 -> 1 inference servers" in shrunk.stdout
        seen = status(tmp_path)
        assert {n for n in seen["processes"] if n.startswith("inference")} == {"inference-0"}
        assert [s["state"] for s in seen["servers"]] == ["serving"]

        assert submitting.wait(180) == 0, log.read_text()
        accounting = status(tmp_path)["accounting"]
        assert accounting["delivered"] == TASKS == accounting["submitted"]
    finally:
        submitting.kill()
        submitting.wait(10)
    for wrong, words in (
        ("inference=0", "expected 1 to"),
        ("inference=many", "expected inference=N"),
        ("rollout=2", "expected inference=N"),
    ):
        refused = areal("scale", wrong, cwd=tmp_path)
        assert refused.returncode == 2
        assert words in refused.stderr
    assert stack.state() == "ready"
