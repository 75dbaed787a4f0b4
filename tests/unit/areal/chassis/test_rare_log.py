"""What happens all the time leaves few lines, and says how many it left out."""

from __future__ import annotations

from typing import Any

from areal.chassis.rare_log import RareLog


class _Lines(list[tuple[str, dict[str, Any]]]):
    def info(self, event: str, **fields: Any) -> None:
        self.append((event, fields))


def test_line_when_it_comes_all_the_time_then_once_a_minute_with_the_number_left_out() -> None:
    lines, now = _Lines(), [0.0]
    log = RareLog(lines, lambda: now[0])
    for second in range(3600):
        now[0] = float(second)
        log.info("published", version=second)
        log.info("updated", version=second)
    published = [fields for event, fields in lines if event == "published"]
    assert [each["version"] for each in published[:10]] == list(range(10))
    assert len(published) <= 70
    assert len(published) + sum(each.get("unsaid", 0) for each in published) >= 3600 - 60
    assert len(lines) == 2 * len(published)


def test_line_when_it_is_rare_then_always_written() -> None:
    lines, now = _Lines(), [0.0]
    log = RareLog(lines, lambda: now[0])
    for hour in range(50):
        now[0] = 3600.0 * hour
        log.info("published", version=hour)
    assert lines == [("published", {"version": hour}) for hour in range(50)]
