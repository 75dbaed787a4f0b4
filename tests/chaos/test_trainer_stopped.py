"""A trainer of one rank is stopped (SIGSTOP) while it holds a batch, for a minute and longer.

It continues, or it has been replaced and ends with an error that says so; either way each batch is
trained on once.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.chaos.replays import (
    assert_trained_once,
    check_batches,
    check_replays,
    prefilled,
    until_steps,
)
from tests.chaos.trainer_rig import BATCH, trainer_rig, whole_run
from tests.integration.stack_tools import eventually
from tests.service_process import free_port

pytestmark = pytest.mark.timeout(600)

STEPS = 12
STOPPED_S = 65.0


def test_trainer_when_stopped_for_a_minute_with_a_batch_then_it_goes_on_with_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    common = (*prefilled(tiny_model, STEPS), "pace_s=0.5")
    with trainer_rig(tmp_path, "stopped", *common, generation=False) as rig:
        expected = rig.prefill(STEPS * BATCH)
        trainer = rig.trainer()
        until_steps(rig, trainer, 5)
        trainer.popen.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        trainer.popen.send_signal(signal.SIGCONT)
        assert trainer.popen.wait(120.0) == 0, rig.trainer_log[-4000:]
        assert check_batches(rig, expected, STEPS) == 0, "no step was taken twice"
        assert {line["incarnation"] for line in rig.seen()} == {1}
        assert_trained_once(rig, STEPS)


def test_trainer_when_replaced_while_it_is_stopped_then_it_ends_by_name_and_changes_nothing(
    tiny_model: Path, tmp_path: Path
) -> None:
    common = (*prefilled(tiny_model, STEPS), "pace_s=0.5")
    with trainer_rig(tmp_path, "replaced", *common, generation=False) as rig:
        expected = rig.prefill(STEPS * BATCH)
        first = rig.trainer()
        until_steps(rig, first, 5)
        first.popen.send_signal(signal.SIGSTOP)
        last = max(x["step"] for x in rig.seen())
        rig.trainer_address = f"127.0.0.1:{free_port()}"  # the first still holds its own
        second = rig.trainer()
        eventually(
            lambda: (
                second.popen.poll() is not None
                or any(x["incarnation"] == 2 and x["step"] > last for x in rig.seen())
            ),
            f"a step after {last} of the second one",
            120.0,
            lambda: rig.trainer_log,
        )
        first.popen.send_signal(signal.SIGCONT)
        assert first.popen.wait(60.0) == 1, rig.trainer_log[-4000:]
        assert "StaleIncarnation" in rig.trainer_log, rig.trainer_log[-4000:]
        assert second.popen.wait(120.0) == 0, rig.trainer_log[-4000:]
        assert check_batches(rig, expected, STEPS) > 0
        assert max(x["step"] for x in rig.seen() if x["incarnation"] == 1) == last
        assert_trained_once(rig, STEPS)


def test_run_when_its_only_rank_is_stopped_for_good_then_it_is_replaced_by_name(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A whole `areal run`: the launcher waits for a sign of life, 50 s, then starts another."""
    with whole_run(tmp_path, "single", tiny_model, f"total_train_steps={STEPS}") as (rig, launcher):
        stack = rig.stack
        eventually(
            lambda: launcher.poll() is not None or any(x["step"] >= 6 for x in rig.seen()),
            "step 6",
            180.0,
            lambda: stack.log("trainer"),
        )
        assert launcher.poll() is None, (tmp_path / "run.log").read_text()
        victim, began = psutil.Process(stack.process("trainer")["pid"]), time.monotonic()
        victim.suspend()
        eventually(
            lambda: stack.process("trainer")["restarts"] == 1,
            "another trainer",
            120.0,
            lambda: stack.log("trainer"),
        )
        said = next(x for x in stack.log("launcher").splitlines() if "; restart " in x)
        print(f"replaced after {time.monotonic() - began:.1f} s: {said}")
        assert "trainer gave no sign of life for" in said
        assert f"process {victim.pid} is stopped (SIGSTOP)" in said
        assert not victim.is_running()
        assert launcher.wait(180.0) == 0, (tmp_path / "run.log").read_text()
        stack.assert_gone()
    assert check_replays(rig, STEPS) > 0
    assert [row["step"] for row in rig.rows()] == list(range(1, STEPS + 1))
    summary = json.loads((rig.run_dir / "summary.json").read_text())
    assert summary["restarts"] == {"trainer": 1}
    assert summary["accounting"]["trained"] == STEPS * BATCH
