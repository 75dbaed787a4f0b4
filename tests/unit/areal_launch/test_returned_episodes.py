"""Why workers returned episodes, as lines for the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from areal_launch.stack.returned_episodes import ReturnedEpisodes


def returned(cause: str, detail: str) -> str:
    return json.dumps({"event": "episode_returned", "cause": cause, "detail": detail}) + "\n"


def test_report_when_episodes_are_returned_then_one_line_a_minute_counts_them(
    tmp_path: Path,
) -> None:
    logs = [tmp_path / "rollout-0.log", tmp_path / "rollout-1.log"]
    logs[0].write_text(returned("infrastructure", "of an earlier run"))
    lines: list[str] = []
    watch = ReturnedEpisodes(logs, lines.append)

    watch.look(0.0)
    assert lines == []

    away = "server 127.0.0.1:1: HTTP 503\nin one step for 61 s"
    with logs[0].open("a") as log:
        log.write(returned("infrastructure", away))
    watch.look(1.0)
    assert lines == [
        "1 episode was returned and will be run again: server 127.0.0.1:1: HTTP 503 in one step "
        "for 61 s"
    ]

    logs[1].write_text(returned("infrastructure", "a") + returned("infrastructure", "b"))
    watch.look(2.0)
    watch.look(60.0)
    assert len(lines) == 1
    watch.look(61.0)
    assert lines[1:] == ["2 episodes were returned and will be run again: b"]
    watch.look(200.0)
    assert len(lines) == 2


def test_report_when_lines_are_of_something_else_then_nothing_is_told(tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.log"
    lines: list[str] = []
    watch = ReturnedEpisodes([log], lines.append)
    log.write_text(
        returned("workflow_error", "has a line of its own")
        + '{"event": "other", "why": "episode_returned"}\n'
        + 'torn "episode_returned"\n["episode_returned"]\n'
    )
    watch.look(0.0)
    assert lines == []
