"""A recipe whose reward fails ends its run and says why; mended, the same command continues."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.e2e.cluster_runs import RECIPE, arguments, check_books, rows_of
from tests.integration.stack_tools import RunningStack, areal

pytestmark = pytest.mark.timeout(300)

RIGHT = '    return float(completions.strip().lstrip("0") == answer)\n'
# Only on what a real policy says: what `areal run` tries before it starts would find it at once.
WRONG = '    return float(data["solution"]) if completions not in ("The answ", "7", "") else 0.0\n'


@pytest.mark.long
def test_run_when_its_reward_raises_then_it_stops_with_the_cause_and_goes_on_when_mended(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = 2
    source = re.sub(r"    rollout\.evaluate\(.*\n", "", RECIPE.read_text())
    assert source.count(RIGHT) == 1
    recipe = tmp_path / "mine.py"
    recipe.write_text(source.replace(RIGHT, WRONG))
    line = recipe.read_text().splitlines().index(WRONG.rstrip()) + 1
    recipe.with_suffix(".yaml").write_text(RECIPE.with_suffix(".yaml").read_text())
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "mended")
    command = arguments(tiny_model, "mended", steps, "sglang:d1+fsdp:d2")
    command[0] = str(recipe)
    try:
        broken = areal("run", *command, cwd=tmp_path, timeout=150.0)
        stack.assert_gone()
        assert broken.returncode == 1, broken.stdout + broken.stderr
        first = re.search(r"warning: recipe: task (e0-\d+) failed: (.*)", broken.stdout)
        assert first is not None, broken.stdout
        assert first[2].endswith(f"raised KeyError: 'solution' ({recipe}:{line})")
        summary = json.loads((stack.run_dir / "summary.json").read_text())
        assert summary["status"] == "failed"
        assert "the first 16 tasks all failed with the same error" in summary["cause"]
        assert f"({recipe}:{line})" in summary["cause"]
        assert summary["restarts"] == {}, "trained again although it would fail again"
        assert [each["site"] for each in summary["recipe_failures"]] == [
            f"KeyError at mine.py:{line}"
        ]
        assert summary["accounting"]["dead_lettered"] >= 16
        assert rows_of(stack) == []

        assert "areal dead-letters list" in broken.stdout
        letters = areal("dead-letters", "list", "--limit", "1", cwd=tmp_path)
        assert letters.returncode == 0, letters.stderr
        assert 'return float(data["solution"])' in letters.stdout
        assert "workflow_error after 3" in letters.stdout

        recipe.write_text(source)
        again = areal("run", *command, cwd=tmp_path, timeout=180.0)
        stack.assert_gone()
        assert again.returncode == 0, again.stdout + again.stderr + stack.log("trainer")
    finally:
        stack.clean_up()
    told = re.search(r"(\d+) tasks that failed because of the recipe are tried again", again.stdout)
    assert told is not None, again.stdout
    assert int(told[1]) == summary["accounting"]["dead_lettered"]
    mended = json.loads((stack.run_dir / "summary.json").read_text())
    assert (mended["status"], mended["cause"], mended["recipe_failures"]) == ("finished", None, [])
    check_books(mended, steps)
    batches = (stack.run_dir / "batches.jsonl").read_text().splitlines()
    trained = [task_id for batch in batches for task_id in json.loads(batch)["task_ids"]]
    # The ones that had failed are the oldest: they are trained first, each once.
    assert sorted(trained, key=lambda each: int(each[3:])) == [
        f"e0-{n}" for n in range(len(trained))
    ]
