"""Runs an example that trains on rows alone, in this process, with fewer steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.metric_names import read_metrics

from areal.config.experiment import GRPOConfig, build_config, save_config
from areal.recipe import find_config_class, load_recipe
from areal_torch.training.offline_session import OfflineSession

EXAMPLES = Path(__file__).parents[1] / "examples"


class Example:
    """One trial of an example in a folder of its own."""

    def __init__(self, name: str, folder: Path, *overrides: str) -> None:
        file = EXAMPLES / f"{name}.py"
        self.module = load_recipe(file.read_bytes(), str(file))
        self.config = build_config(
            find_config_class(self.module, GRPOConfig),
            file.with_suffix(".yaml"),
            [f"run_root={folder}/runs", f"model.path={folder}/model", *overrides],
        )
        self.config.recipe = str(file)
        self.file = folder / "config.yaml"
        save_config(self.config, self.file)

    def prepare(self) -> Example:
        """Makes its model, as `areal run` does before anything else."""
        torch.set_num_threads(1)
        if not (Path(self.config.model.path) / "config.json").exists():
            self.module.prepare_model(self.config)
        return self

    def run(self) -> Example:
        """From its newest checkpoint to its last step."""
        self.prepare()
        session = OfflineSession(self.config)
        try:
            session.open()
            with session.active():
                self.module.main(["--config", str(self.file)])
        finally:
            session.close()
        read_metrics(self.config.run_dir)
        return self

    @property
    def results(self) -> dict[str, Any]:
        """What it has recorded."""
        return json.loads((self.config.run_dir / "trainer.json").read_text())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Its steps."""
        return read_metrics(self.config.run_dir)
