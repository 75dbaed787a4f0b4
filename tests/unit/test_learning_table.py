"""The learning table: its rows can run, what ran is skipped, the page says what has not run."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tools.learn import __main__ as learn
from tools.learn import page
from tools.learn.table import PACKAGES, ROOT, ROWS, Measure, Row, code_alone

from areal.config.experiment import GRPOConfig, build_config
from areal.recipe import find_config_class, load_recipe

GRPO = ROWS[0]


def ended(row: Row, seed: int, value: float = 0.4, **changes: object) -> dict[str, object]:
    return {
        "row": row.name,
        "seed": seed,
        "revision": row.revision(),
        "before": 0.3,
        "after": 0.3 + value,
        "value": value,
        "steps": 3,
        "seconds": 100,
        "load": [1.0, 2.0],
        "curve": [0.1, 0.2, 0.3],
        **changes,
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_when_its_overrides_are_read_then_the_example_knows_them(row: Row) -> None:
    if row.packages and not any(distributions(name="openai-agents")):
        pytest.skip(f"needs openai-agents: {PACKAGES[row.packages]}")
    recipe = ROOT / "examples" / f"{row.example}.py"
    schema = find_config_class(load_recipe(recipe.read_bytes(), str(recipe)), GRPOConfig)
    overrides = [*row.overrides, "experiment_name=learn", f"trial_name={row.name}-s0"]
    config = build_config(schema, recipe.with_suffix(".yaml"), overrides)
    assert config.trial_name == f"{row.name}-s0"


def test_rows_when_named_then_no_two_are_alike() -> None:
    assert len({row.name for row in ROWS}) == len({row.title for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("measure", "value", "met"),
    [
        (Measure(least=0.3), 0.3, True),
        (Measure(least=0.3), 0.29, False),
        (Measure(least=None, most=0.05), -0.2, True),
        (Measure(least=None, most=0.05), 0.06, False),
    ],
)
def test_measure_when_a_run_ends_then_its_bounds_say_whether_it_is_met(
    measure: Measure, value: float, met: bool
) -> None:
    assert measure.holds(value) is met


def test_code_alone_when_only_words_change_then_it_stays_the_same() -> None:
    recipe = (
        '"""Adds."""\nSTEPS = 3  # enough\ndef add(a, b):\n    """A sum."""\n    return a + b\n'
    )
    reworded = recipe.replace("Adds", "Sums up").replace("enough", "all it needs")
    assert code_alone(recipe) == code_alone(reworded)
    assert code_alone(recipe) != code_alone(recipe.replace("a + b", "a - b"))
    assert "STEPS = 3" in code_alone(recipe)


def test_results_when_settings_change_then_the_run_is_old_and_shown_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(GRPO, overrides=("algorithm=grpo", "gconfig.n_samples=4"))
    results = [ended(GRPO, 0)]
    assert set(learn.current(results, GRPO)) == {0}
    assert learn.current(results, changed) == {}
    monkeypatch.setattr(page, "PAGE", tmp_path / "learning.md")
    monkeypatch.setattr(page, "IMAGES", tmp_path)
    page.write([(changed, learn.shown(results, changed))])
    text = page.PAGE.read_text()
    assert "| 0* | 0.30 | 0.70 | +0.40 | 1 of 1 | 100 | 1 of 1 | 1 to 2 |" in text
    assert text.split("## Not run")[1].strip() == "- GRPO: seeds 1, 2"
    assert "arithmetic_grpo.py algorithm=grpo gconfig.n_samples=4`, 2 servers\n" in text
    assert list(tmp_path.glob("*.svg"))
    # A run of the row as it is now takes its place.
    page.write([(changed, learn.shown([*results, ended(changed, 0, 0.2)], changed))])
    assert "| 0 | 0.30 | 0.50 | +0.20 | 0 of 1 |" in page.PAGE.read_text()


def test_main_when_a_run_is_recorded_then_it_is_not_run_again_and_a_failure_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "learning.jsonl"
    results.write_text(json.dumps(ended(GRPO, 0)) + "\n")
    monkeypatch.setattr(learn, "RESULTS", results)
    monkeypatch.setattr(page, "PAGE", tmp_path / "learning.md")
    monkeypatch.setattr(page, "IMAGES", tmp_path)
    started = []

    def run(row: Row, seed: int, folder: Path) -> dict[str, object]:
        started.append(seed)
        if seed == 2:
            raise RuntimeError("grpo-s2: exit 1")
        return ended(row, seed)

    monkeypatch.setattr(learn, "run", run)
    monkeypatch.setattr("sys.argv", ["learn", "grpo"])
    assert learn.main() == 1
    assert sorted(started) == [1, 2]
    assert "FAILED grpo seed 2: grpo-s2: exit 1" in capsys.readouterr().out
    assert [json.loads(line)["seed"] for line in results.read_text().splitlines()] == [0, 1]
    monkeypatch.setattr("sys.argv", ["learn", "grop"])
    with pytest.raises(SystemExit):
        learn.main()
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_row_when_it_needs_packages_then_the_page_says_so_and_it_does_not_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [row, _] = [each for each in ROWS if each.packages == "build/agents-sdk"]
    shown = page._settings([(row, {}), (GRPO, {})])
    assert (
        "openai_agents_sdk.py`, 1 server; needs build/agents-sdk on PYTHONPATH "
        "(`make test-agents-sdk` creates this folder)\n" in shown
    )
    assert shown.endswith("algorithm=grpo`, 2 servers\n")
    monkeypatch.setattr(learn, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match=r"no folder build/agents-sdk: run `make test-agents-"):
        learn.run(row, 0, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_row_when_compared_with_another_then_the_page_says_whether_it_lies_in_its_spread() -> None:
    base = replace(GRPO, name="base", title="base", against="")
    low, high = (replace(GRPO, name=n, title=n, against="base") for n in ("low", "high"))
    runs = {seed: ended(base, seed, value) for seed, value in enumerate((0.4, 0.5))}
    text = page._compared(
        [
            (base, runs),
            (low, {0: ended(low, 0, 0.3)}),
            (high, {1: ended(high, 1, 0.45)}),
        ]
    )
    assert "| low | 0.600 | base | 0.750 | 0.700 to 0.800 | below | -0.100 |" in text
    assert "| high | 0.750 | base | 0.750 | 0.700 to 0.800 | within | -0.050 |" in text
