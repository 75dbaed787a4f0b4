"""A recipe folder with its own loss, advantages, metric and helper module, on a real stack."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.integration.stack_tools import RunningStack, areal
from tests.metric_names import read_metrics

FOLDER = Path(__file__).parent / "recipes" / "own_formula"


def trained(folder: Path, trial: str, *settings: str) -> tuple[dict[str, str], list[Any]]:
    """The digest of each published weight file by name, and the rows of the metrics."""
    stack = RunningStack(folder / "runs" / "own-formula" / trial)
    try:
        arguments = ("run", "mine", f"trial_name={trial}", *settings)
        done = areal(*arguments, cwd=folder, timeout=500.0)
        assert done.returncode == 0, done.stdout + done.stderr + stack.log("trainer")
        stack.assert_gone()
    finally:
        stack.clean_up()
    files = {
        str(file.relative_to(stack.run_dir)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in stack.run_dir.rglob("*.safetensors")
    }
    return files, read_metrics(stack.run_dir)


@pytest.mark.long
@pytest.mark.timeout(1100)
def test_run_when_a_recipe_folder_copies_grpos_formulas_then_its_weights_are_equal_to_the_bit(
    tmp_path: Path,
) -> None:
    shutil.copytree(FOLDER, tmp_path / "mine")
    built_in, expected = trained(tmp_path, "built-in", "own=false")
    own, rows = trained(tmp_path, "own")

    assert built_in
    assert own == built_in
    for key in ("train/loss", "train/grad_norm", "reward/mean", "my/advantage"):
        assert [row[key] for row in rows] == [row[key] for row in expected]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("my/ratio" in row for row in rows)
    assert not any("my/ratio" in row for row in expected)
