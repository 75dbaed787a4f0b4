"""Is this the experiment that the trial was trained with so far?

A trial's numbers are those of one configuration. What decides where and how fast it runs may
change between two invocations; what decides what is learned may not, unless the user says so.
"""

from __future__ import annotations

from typing import Any

import yaml
from omegaconf import OmegaConf

from areal.config.experiment import BaseExperimentConfig
from areal.errors import CannotStart
from areal_launch.run_folder import RunFolder

# What a run may change and still be the same trial.
_FREE = (
    "allocation_mode",
    "buffer",
    "checkpoint",
    "endpoints",
    "recipe",
    "reward",
    "run_root",
    "security",
    "stack",
    "total_train_steps",
    "weight_sync",
)
_BOUND_IN_ROLLOUT = "rollout.max_head_offpolicyness"
_SHOWN = 6


def check_unchanged(config: BaseExperimentConfig, *, accept: bool) -> list[str]:
    """Compares with what the trial has been trained with.

    Args:
        config: Resolved.
        accept: The user wants the changes.

    Returns:
        The accepted changes, `key before -> now`; none for a trial that has not trained a step.

    Raises:
        CannotStart: It changed and `accept` is false; shows the changes.
    """
    folder = RunFolder(config.run_dir)
    if not folder.metrics_file.is_file() or folder.metrics_file.stat().st_size == 0:
        return []
    changes = _changes(folder, config)
    if not changes or accept:
        return changes
    more = f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
    raise CannotStart(
        f"trial {str(folder.path)!r} was trained with another configuration: "
        f"{'; '.join(changes[:_SHOWN])}{more}. Choose another trial_name, or add --accept-changes "
        "to continue with the new configuration"
    )


def _changes(folder: RunFolder, config: BaseExperimentConfig) -> list[str]:
    try:
        before = _flat(yaml.safe_load(folder.config_file.read_text("utf-8")))
    except (OSError, yaml.YAMLError):
        return []  # nothing to compare with
    now = _flat(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))
    defaults = _flat(OmegaConf.to_container(OmegaConf.structured(type(config)), enum_to_str=True))
    # A key that the earlier file does not know had its default then.
    return [
        f"{key} {before.get(key, defaults.get(key))!r} -> {value!r}"
        for key, value in now.items()
        if not _is_free(key) and before.get(key, defaults.get(key)) != value
    ]


def _is_free(key: str) -> bool:
    section = key.partition(".")[0]
    return section in _FREE or (section == "rollout" and key != _BOUND_IN_ROLLOUT)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Maps dotted keys to leaves; an empty section and a list are leaves."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
