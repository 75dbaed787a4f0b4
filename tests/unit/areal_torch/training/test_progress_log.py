from __future__ import annotations

from typing import Any

from areal.runs.status import ProgressLog


class Lines(list[dict[str, Any]]):
    def info(self, event: str, **fields: Any) -> None:
        self.append({"event": event, **fields})


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"step": step, "reward/mean": step / 100} for step in range(first, last + 1)]


def test_progress_when_many_steps_end_within_seconds_then_one_line_averages_them() -> None:
    lines, clock = Lines(), Clock()
    log = ProgressLog(50, lines, clock)
    for row in rows(1, 10):
        log.finished_step(row)
    assert [line["step"] for line in lines] == ["1/50"]
    clock.now += 5
    log.finished_step(rows(11, 11)[0])
    assert lines[-1] == {"event": "training", "step": "11/50", "reward": 0.065}


def test_progress_when_the_last_step_ends_then_it_has_its_line_at_once() -> None:
    lines = Lines()
    log = ProgressLog(3, lines, Clock())
    for row in rows(1, 3):
        log.finished_step(row)
    assert [line["step"] for line in lines] == ["1/3", "3/3"]
    assert lines[-1]["reward"] == 0.025
