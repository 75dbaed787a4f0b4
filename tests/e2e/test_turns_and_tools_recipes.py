"""Recipes whose episodes have several turns, or whose answers run in a box, in miniature."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.e2e.test_recipe_loops import run
from tests.integration.stack_tools import RunningStack

from areal.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4")


def samples(stack: RunningStack, model: Path) -> list[tuple[str, str, float]]:
    """(what the loss covers, what it does not, reward) of every sample trained."""
    tokenizer, found = Tokenizer.load(model), []
    for part in sorted((stack.run_dir / "rollouts").glob("step-*-rank*.parquet")):
        for row in pq.read_table(part).to_pylist():
            pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
            said = tokenizer.decode([token for token, mask in pairs if mask])
            read = tokenizer.decode([token for token, mask in pairs if not mask])
            found.append((said, read, row["reward"]))
    return found


@pytest.mark.long
def test_multi_turn_math_when_run_then_late_answers_are_discounted_and_feedback_is_not_trained(
    tmp_path: Path,
) -> None:
    stack = RunningStack(tmp_path / "runs" / "multi-turn-math" / "demo")
    more = ("heldout_problems=20", "warm_start_loss=1.2")
    summary, rows = run(stack, tmp_path, str(EXAMPLES / "multi_turn_math.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    assert [row["samples"] for row in rows] == [16, 16]
    trained = samples(stack, tmp_path / "runs/models/multi-turn-math-seed0")
    assert {round(reward, 2) for _, _, reward in trained} <= {0.0, 0.7, 1.0}
    again = [(said, read) for said, read, _ in trained if said.count("<|end|>") == 2]
    assert again, "a model that knows few sums needs second tries"
    assert all(read.count("<|user|>") == 2 for _, read in again)
    assert not any("more" in said or "less" in said for said, _, _ in trained)


@pytest.mark.long
def test_search_agent_when_run_then_documents_are_read_and_not_trained(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path / "runs" / "search-agent" / "demo")
    more = ("heldout_problems=20", "warm_start_steps=75", "train_problems=20")
    summary, rows = run(stack, tmp_path, str(EXAMPLES / "search_agent.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    assert len(rows) == 2
    trained = samples(stack, tmp_path / "runs/models/search-agent-seed0")
    assert {reward for _, _, reward in trained} <= {0.0, 1.0}
    # An answer that ends after "find " has no query, and its blank is stripped: it is no search.
    searches = [(re.findall(r"find [^<]", said), read) for said, read, _ in trained]
    searched = [(len(found), read) for found, read in searches if found]
    assert searched, "the warm start shows it how to search"
    for found, read in searched:
        assert read.count("<|user|>") == found + 1 or found == 3
    assert any("parcel" in read for _, read in searched)
    assert not any("parcel" in said or "nothing" in said for said, _, _ in trained)


@pytest.mark.long
def test_tool_calculator_when_run_then_results_are_context_and_only_right_ones_are_rewarded(
    tmp_path: Path,
) -> None:
    stack = RunningStack(tmp_path / "runs" / "tool-calculator" / "demo")
    more = ("heldout_problems=10", "warm_start_steps=70", "guess_steps=5")
    summary, _ = run(stack, tmp_path, str(EXAMPLES / "tool_calculator.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    trained = samples(stack, tmp_path / "runs/models/tool-calculator-seed0")
    results = []
    for said, read, reward in trained:
        first, _, answer = said.partition("<|end|>")
        [(a, b)] = re.findall(r"<\|user\|>(\d+)\*(\d+)=", read)
        final = (answer or first).removesuffix("<|end|>").strip()
        assert reward == float(final == str(int(a) * int(b)))
        call = re.search(r'"x": "(\d+)\*(\d+)"', first)
        if call is not None and answer:
            results.append(f"<|tool|>{int(call[1]) * int(call[2])}")
            assert results[-1] in read
    assert results, "the warm start shows it how to call"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_code_rl_when_run_then_exactly_what_passes_its_tests_has_a_reward(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path / "runs" / "code-rl" / "demo")
    more = ("heldout_problems=20", "warm_start_loss=0.4", "train_dataset.batch_size=16")
    summary, _ = run(stack, tmp_path, str(EXAMPLES / "code_rl.py"), *SMALL, *more)
    assert summary["status"] == "finished"
    trained = samples(stack, tmp_path / "runs/models/code-rl-seed0")
    line = re.compile(r"f\(0\)= *(\d+) f\(1\)= *(\d+)")
    for said, read, reward in trained:
        [(low, high)] = line.findall(read)
        right = re.fullmatch(rf" *{int(high) - int(low)}\*x\+ *{low}", said.removesuffix("<|end|>"))
        assert reward == float(right is not None) or not right, said
    assert {reward for _, _, reward in trained} == {0.0, 1.0}


def test_code_rl_when_bubblewrap_is_missing_then_the_first_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    recipe = EXAMPLES / "code_rl.py"
    script = (
        f"import sys, importlib.util as u; s = u.spec_from_file_location('r', {str(recipe)!r});"
        "m = u.module_from_spec(s); sys.modules['r'] = m; s.loader.exec_module(m);"
        f"m.main(['--config', {str(recipe.with_suffix('.yaml'))!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path / "bin"), "PYTHONPATH": str(ROOT / "services")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "apt-get install bubblewrap" in done.stderr.splitlines()[-1]
