"""verifiers' own task set `openenv`, unmodified, is trained on: `make test-verifiers`.

trainer, rollout worker ──> EnvServer (verifiers) ──> OpenEnv server
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from tests.integration.stack_tools import RunningStack, areal, eventually
from tests.ports import free_port
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine

from areal.types import GenerationHyperparameters
from areal.workflows.environment import EnvWorkflow

PYTHON = os.environ.get("AREAL_TEST_VERIFIERS", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs verifiers: make test-verifiers")

HERE = Path(__file__).parent / "verifiers_env"


@contextmanager
def server(folder: Path, what: str, *arguments: str) -> Iterator[str]:
    """host:port of one of servers.py, once it listens."""
    port, log = free_port(), folder / f"{what}.log"
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"  # uv, with which programs are prepared
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PYTHON, str(HERE / "servers.py"), what, str(port), *arguments],
            env={**os.environ, "PATH": path, "PYTHONPATH": ""},
            stdout=output,
            stderr=output,
        )

    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    try:
        # Its imports alone may take minutes on a busy machine; its death is noticed at once.
        eventually(listens, f"the {what} listens", 600.0, log.read_text)
        yield f"127.0.0.1:{port}"
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        for each in (*children, process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(30)


@pytest.mark.timeout(900)
async def test_openenv_server_when_it_is_the_packages_own_then_an_episode_is_played(
    tmp_path: Path,
) -> None:
    engine = ScriptedEngine([["abc", "12"], ["d1"], ["d1"]], None)
    fields = {"action": "message", "observation": "text"}
    with server(tmp_path, "world") as world:
        workflow = EnvWorkflow(
            f"openenv:http://{world}", GenerationHyperparameters(n_samples=2), options=fields
        )
        letters, digits = await workflow.arun_episode(engine, {"seed": 7})
    assert (letters.reward, digits.reward) == (1.5, 0.5)
    assert engine.trained(letters) == ["abc", "d1"]
    assert "letters, please (7)" in engine.tokenizer.decode(letters.input_ids.tolist())


@pytest.mark.timeout(2100)
def test_environment_of_verifiers_when_run_then_three_steps_train_on_the_very_ids_it_has(
    tmp_path: Path,
) -> None:
    stack, log = RunningStack(tmp_path / "runs" / "verifiers" / "demo"), tmp_path / "tokens.jsonl"
    with (
        server(tmp_path, "world") as world,
        server(tmp_path, "env", f"http://{world}", str(log)) as env,
    ):
        try:
            done = areal(
                "run",
                str(HERE / "recipe.py"),
                *(f"server=tcp://{env}", f"python={PYTHON}", f"world=http://{world}"),
                cwd=tmp_path,
                timeout=780.0,
            )
            assert done.returncode == 0, done.stdout + done.stderr + stack.log("rollout-0")
        finally:
            stack.clean_up()
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    known = {
        (tuple(ids), tuple(mask)): logprobs
        for ids, mask, logprobs in map(json.loads, log.read_text().splitlines())
    }
    rows = [
        row
        for part in sorted((stack.run_dir / "rollouts").glob("*.parquet"))
        for row in pq.read_table(part).to_pylist()
    ]
    assert len(rows) >= 12
    for row in rows:
        logprobs = known[tuple(row["input_ids"]), tuple(map(bool, row["loss_mask"]))]
        assert row["logprobs"] == pytest.approx(logprobs, abs=1e-5)
        # The task set sums the rewards of its world's steps, of which there are two.
        assert [part["name"] for part in row["parts"]] == ["openenv_reward"]
        assert row["reward"] == pytest.approx(row["parts"][0]["value"], abs=1e-5)
        assert 0.0 <= row["reward"] <= 2.0
