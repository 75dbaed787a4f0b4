"""`make soak` tells growth from noise, and says what grows."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.soak import MOST_MIB, Slope, _folders, _steps, growing, slope, slopes_of, table


@given(st.floats(-5, 5), st.floats(0, 1000), st.integers(6, 60))
def test_slope_when_growth_is_linear_then_exact_whatever_the_start(
    per_step: float, base: float, count: int
) -> None:
    steps = [10.0 * place for place in range(count)]
    # The first half, in which caches fill, does not matter.
    values = [0.0 if place < count // 2 else base + per_step * x for place, x in enumerate(steps)]
    found = slope(steps, values)
    assert found.per_1000 == pytest.approx(1000 * per_step, abs=1e-6)
    assert found.error == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(("grows", "expected"), [(0.0, []), (5.0, ["memory/gateway MiB"])])
def test_growth_when_samples_are_noisy_then_found_only_where_it_is(
    grows: float, expected: list[str]
) -> None:
    noise = random.Random(0)
    steps = [20.0 * place for place in range(200)]
    values = [100 + grows * step / 1000 + noise.gauss(0, 1) for step in steps]
    samples = [
        {"step": step, "time": step, "memory/gateway MiB": value, "disk/logs MiB": step}
        for step, value in zip(steps, values, strict=True)
    ]
    assert growing(slopes_of(samples)) == expected


@pytest.mark.parametrize("place", [60, 75, 90])
@pytest.mark.parametrize(("grows", "expected"), [(0.0, []), (4.0, ["memory/trainer MiB"])])
def test_growth_when_memory_jumps_once_then_only_steady_growth_is_found(
    place: int, grows: float, expected: list[str]
) -> None:
    noise = random.Random(0)
    steps = [90.0 * place for place in range(100)]
    values = [400 + noise.gauss(0, 3) + grows * step / 1000 for step in steps]
    values = [value + 40 * (at >= place) for at, value in enumerate(values)]
    samples = [
        {"step": step, "time": step, "memory/trainer MiB": value}
        for step, value in zip(steps, values, strict=True)
    ]
    assert growing(slopes_of(samples)) == expected


def test_growth_when_a_run_is_too_short_then_not_claimed() -> None:
    found = slopes_of(
        [{"step": 1.0, "memory/a MiB": 1.0}, {"step": 2.0, "memory/a MiB": 2 + MOST_MIB}]
    )
    assert math.isinf(found["memory/a MiB"].error)
    assert growing(found) == []
    assert "?" in table(found)


def test_slopes_when_a_process_came_later_then_over_the_samples_that_have_it() -> None:
    samples = [{"step": float(n), "x": 1.0, **({"y": 2.0 * n} if n > 3 else {})} for n in range(10)]
    found = slopes_of(samples)
    assert found["x"] == Slope(1.0, 1.0, 0.0, 0.0)
    assert found["y"].per_1000 == pytest.approx(2000)


def test_run_when_looked_at_then_its_last_whole_step_and_its_sizes(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert _steps(metrics) == 0
    rows = "".join(json.dumps({"step": n, "x": "y" * 50}) + "\n" for n in range(1, 4000))
    metrics.write_text(rows + '{"step": 4000, "x"', "utf-8")
    assert _steps(metrics) == 3999
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_bytes(bytes(2**20))
    (tmp_path / "logs" / "gone.log").symlink_to(tmp_path / "nowhere")
    found = _folders(tmp_path)
    assert found["disk/logs MiB"] >= 1.0
    assert found["disk/metrics.jsonl MiB"] == pytest.approx(metrics.stat().st_size / 2**20)
