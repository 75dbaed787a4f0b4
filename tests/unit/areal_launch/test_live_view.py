"""What the terminal shows."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.screen import Screen

from areal.clients.trainer import TrainerStatus
from areal.config.experiment import GRPOConfig
from areal.protocol.leases import LedgerStats
from areal.types import TaskState
from areal.weights.servers import InferenceServer, ServerState, SyncStatus
from areal_launch.processes.supervisor import ProcessState
from areal_launch.run_folder import RunFolder
from areal_launch.stack.remote import RemoteProcess, RemoteStack
from areal_launch.view.live_view import (
    LiveView,
    count,
    duration,
    eta_s,
    plain_line,
    sparkline,
)
from areal_launch.view.poller import Snapshot


def make_stack(**processes: tuple[str, int]) -> RemoteStack:
    config = GRPOConfig(experiment_name="sums", trial_name="t1")
    config.endpoints.gateway = "http://127.0.0.1:24000"
    return RemoteStack(
        config,
        RunFolder(config.run_dir),
        "Ctrl-C ends the job",
        state="ready",
        started=time.time() - 65,
        processes={
            name: RemoteProcess(ProcessState(state), restarts)
            for name, (state, restarts) in processes.items()
        },
    )


def make_snapshot() -> Snapshot:
    counts = dict.fromkeys(TaskState, 0)
    counts |= {TaskState.QUEUED: 131, TaskState.TRAINED: 5248}
    rows = [
        {"step": s, "reward/mean": s / 100, "staleness/mean": 1.0, "time/step": 0.5}
        for s in range(1, 41)
    ]
    return Snapshot(
        trainer=TrainerStatus("training", 40, 100, 1, 1, ""),
        rows=rows,
        ledger=LedgerStats(
            submitted=6000,
            counts=counts,
            staleness_mean=1.1,
            staleness_max=2,
            max_head_offpolicyness=2,
        ),
        servers=[
            InferenceServer("127.0.0.1:21001", "u1", ServerState.SERVING, 40),
            InferenceServer("127.0.0.1:21002", "u2", ServerState.QUARANTINED, 39, "no answer"),
        ],
        sync=SyncStatus(None, 1, 2, 40, 40, 0.021, 0),
        samples_per_s=838.0,
        tokens_per_s=12_345.0,
    )


def draw(stack: Any, snapshot: Snapshot, width: int = 110) -> str:
    view = LiveView(stack, SimpleNamespace(now_mb={"buffer": 88.0}))  # type: ignore[arg-type]
    view.snapshot = snapshot
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text()


def test_view_when_training_then_everything_is_on_one_screen() -> None:
    stack = make_stack(buffer=("up", 1), trainer=("up", 0))
    stack.events.report("warning", "buffer", "buffer ended with signal 9; restart 1 of 5")
    text = draw(stack, make_snapshot())
    for expected in (
        "sums/t1",
        "40/100",
        "ETA 0:30",
        "0.400",
        "838 samples/s",
        "12.3k tokens/s",
        "max 2 (bound 2)",
        "131 queued",
        "5,248 trained",
        ":21001",
        "quarantined",
        "server 127.0.0.1:21002: no answer",
        "1 restart",
        "http://127.0.0.1:24000",
        "buffer ended with signal 9",
    ):
        assert expected in text
    assert len(text.splitlines()) <= 24


def test_view_when_rows_alone_are_trained_on_then_loss_is_shown_and_nothing_of_rollouts() -> None:
    stack = make_stack(trainer=("up", 0))
    stack.config.allocation_mode = "fsdp:d1"
    row = {"train/loss": 0.625, "train/accuracy": 0.875, "time/step": 0.5, "time/train": 0.4}
    rows = [{"step": s, "train/tokens_per_second": 2500.0, **row} for s in range(1, 41)]
    snapshot = Snapshot(trainer=TrainerStatus("training", 40, 100, 1, 1, ""), rows=rows)
    for text in (draw(stack, snapshot), plain_line(stack, snapshot)):
        for expected in ("0.625", "0.875", "2,500 tokens/s", "ETA 0:30", "train 0.40"):
            assert expected in text
        for wrong in ("generated", "server", "wait", "publish", "127.0.0.1", "dashboard"):
            assert wrong not in text


def test_view_when_engine_and_trainer_disagree_then_a_line_says_so_until_they_agree() -> None:
    stack, snapshot = make_stack(trainer=("up", 0)), make_snapshot()
    snapshot.rows[-2]["mismatch/kl"] = 0.09  # the last step had nothing to compare
    text = draw(stack, snapshot, width=160)
    assert "step 39: engine and trainer disagree on logprobs, mismatch/kl 0.09" in text
    assert "docs/runbooks/logprob-mismatch.md" in text
    snapshot.rows[-1]["mismatch/kl"] = 0.004
    assert "disagree" not in draw(stack, snapshot, width=160)


@pytest.mark.parametrize(
    ("measured", "shown"),
    [
        ({"train/mfu": 0.41}, "81.2k tokens/s (41% MFU), peak 23.4 GiB"),
        ({}, "81.2k tokens/s, peak 23.4 GiB"),  # on a CPU, or a GPU that is not known
    ],
)
def test_view_when_the_trainer_reports_its_speed_then_it_is_shown(
    measured: dict[str, float], shown: str
) -> None:
    snapshot = make_snapshot()
    for row in snapshot.rows:
        row |= {"train/tokens_per_second": 81_234.0, "train/peak_gib": 23.42} | measured
    assert shown in draw(make_stack(trainer=("up", 0)), snapshot)


def test_view_when_nothing_is_known_yet_then_it_still_draws() -> None:
    text = draw(make_stack(redis=("starting", 0)), Snapshot())
    assert "redis" in text
    assert "starting" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_view_when_terminal_is_narrow_or_wide_then_it_fits(width: int) -> None:
    text = draw(make_stack(buffer=("up", 0)), make_snapshot(), width)
    assert all(len(line) <= width for line in text.splitlines())


_PROCESSES = (
    *("redis", "nats", "buffer", "weight-sync", "reward", "rollout-0", "gateway"),
    *("inference-0", "inference-1", "trainer"),
)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("wrong", [False, True])
def test_view_when_the_terminal_is_small_then_words_are_whole_and_the_footer_is_on_it(
    width: int, wrong: bool
) -> None:
    stack = make_stack(**{**dict.fromkeys(_PROCESSES, ("up", 0)), "trainer": ("backoff", 0)})
    stack.interrupt_hint = "Ctrl-C stops everything"
    stack.config.security.dir = "secrets"
    snapshot = make_snapshot()
    snapshot.generating = (391, 12.0)
    assert snapshot.ledger is not None
    snapshot.ledger.counts.update({TaskState.RUNNING: 64, TaskState.BATCHED: 640})
    if wrong:
        for number in range(3):
            stack.events.report("warning", "buffer", f"buffer ended {number} times; restart")
    view = LiveView(stack, SimpleNamespace(now_mb={}))  # type: ignore[arg-type]
    view.snapshot = snapshot
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    console.print(Screen(view))
    lines = console.export_text().splitlines()
    assert len(lines) == 24
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for word in (
        *("reward", "generated", "generating", "each step", "staleness", "queue", "ended"),
        *("server", "version", "state", "process", "MiB", ":21001", ":21002", "quarantined"),
        *("backoff", "ETA 0:30", "in training"),
    ):
        assert word in text
    assert ("buffer ended 2 times" in text) == wrong
    [footer] = [line for line in lines if line.startswith("╰")]
    assert "http://127.0.0.1:24000" in footer
    assert "Ctrl-C stops everything" in footer


def test_plain_line_when_training_then_one_line_with_the_same() -> None:
    line = plain_line(make_stack(), make_snapshot())
    assert "\n" not in line
    for expected in ("step 40/100", "reward 0.400", "1/2 servers serving", "ETA 0:30"):
        assert expected in line


def test_sparkline_when_rising_then_from_lowest_to_highest() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([], 10) == ""
    assert len(sparkline([float(i) for i in range(1000)], 48)) == 48


def test_eta_when_no_step_has_ended_then_none() -> None:
    assert eta_s(Snapshot(trainer=TrainerStatus("waiting", 0, 10, 1, 1, ""))) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (65.4, "1:05"), (3725, "1:02:05"), (-3, "0:00")]
)
def test_duration_when_formatted_then_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(9876, "9,876"), (12345, "12.3k"), (2.5e6, "2.5M")])
def test_count_when_large_then_with_unit(number: float, text: str) -> None:
    assert count(number) == text
