"""A trial that has trained keeps its configuration, unless its changes are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig, build_config, save_config
from areal.errors import CannotStart
from areal_launch.run_folder import RunFolder
from areal_launch.stack.trial_config import check_unchanged


def experiment(tmp_path: Path, *overrides: str) -> GRPOConfig:
    return build_config(GRPOConfig, None, [f"run_root={tmp_path}", *overrides])


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A trial that has finished a step with the default configuration."""
    config = experiment(tmp_path)
    folder = RunFolder(config.run_dir)
    save_config(config, folder.config_file)
    folder.metrics_file.write_text('{"step": 1}\n')
    return tmp_path


def test_check_when_what_is_learned_changed_then_the_difference_is_shown(trained: Path) -> None:
    changed = experiment(trained, "gconfig.n_samples=4", "actor.optimizer.lr=0.5")
    with pytest.raises(CannotStart) as caught:
        check_unchanged(changed, accept=False)
    text = str(caught.value)
    assert "gconfig.n_samples 1 -> 4; actor.optimizer.lr 1.7e-05 -> 0.5" in text
    assert "--accept-changes" in text
    assert "\n" not in text
    assert check_unchanged(changed, accept=True) == [
        "gconfig.n_samples 1 -> 4",
        "actor.optimizer.lr 1.7e-05 -> 0.5",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "total_train_steps=900",
        "allocation_mode=sglang:d4+fsdp:d2",
        "stack.max_restarts=1",
        "rollout.request_timeout_s=5",
        "checkpoint.freq_steps=3",
        "endpoints.redis=redis://elsewhere:1/0",
    ],
)
def test_check_when_only_where_or_how_long_changed_then_it_passes(
    trained: Path, override: str
) -> None:
    assert check_unchanged(experiment(trained, override), accept=False) == []


def test_check_when_the_staleness_bound_changed_then_it_is_refused(trained: Path) -> None:
    with pytest.raises(CannotStart, match=r"max_head_offpolicyness 2 -> 0"):
        check_unchanged(experiment(trained, "rollout.max_head_offpolicyness=0"), accept=False)


def test_check_when_no_step_was_trained_then_anything_may_change(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    save_config(config, RunFolder(config.run_dir).config_file)
    assert check_unchanged(experiment(tmp_path, "gconfig.n_samples=4"), accept=False) == []


def test_check_when_the_algorithm_is_another_then_what_it_sets_is_shown(trained: Path) -> None:
    with pytest.raises(CannotStart, match=r"reward_norm 'group/group' -> 'group/none'"):
        check_unchanged(experiment(trained, "algorithm=dr_grpo"), accept=False)


def test_check_when_the_earlier_file_lacks_a_new_key_then_its_default_counts(
    trained: Path,
) -> None:
    file = RunFolder(experiment(trained).run_dir).config_file
    lines = [line for line in file.read_text().splitlines() if "n_samples" not in line]
    file.write_text("\n".join(lines))
    assert check_unchanged(experiment(trained), accept=False) == []
    with pytest.raises(CannotStart, match=r"gconfig.n_samples 1 -> 2"):
        check_unchanged(experiment(trained, "gconfig.n_samples=2"), accept=False)
