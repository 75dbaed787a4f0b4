"""`areal versions export`: a checkpoint becomes a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.areal_torch.engines.hub_families import scatter

from areal.config.experiment import GRPOConfig, build_config, save_config
from areal.config.training import TrainEngineConfig
from areal.errors import InvalidInput, NotFound
from areal.runs.checkpoints import CheckpointFolder
from areal.runs.run_files import EVALUATIONS, best_step
from areal_launch.commands.versions import export_version, list_versions
from areal_launch.stack.events import EventLog
from areal_launch.stack.local import LocalStack
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import lora
from areal_torch.models.tiny import make_tiny_model


def test_export_when_steps_were_evaluated_then_best_latest_and_a_number_are_written(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_tiny_model(tmp_path / "model", hidden_size=32)
    config = build_config(
        GRPOConfig, None, [f"model.path={model}", f"run_root={tmp_path / 'runs'}"]
    )
    run = config.run_dir
    save_config(config, run / "config.yaml")
    (run / "stack.json").write_text("{}")
    measured = [{"name": "held", "step": step, "mean": mean} for step, mean in ((1, 0.9), (2, 0.4))]
    (run / "trainer.json").write_text(json.dumps({EVALUATIONS: measured}))
    folder = CheckpointFolder(run / "checkpoints", keep=1)
    folder.find_best = lambda steps: best_step(measured, steps)
    engine = FSDPEngine(TrainEngineConfig(path=str(model)))
    engine.initialize()
    weights = {}
    for step in (1, 2, 3, 4):
        scatter(engine.model.hf)
        weights[step] = {n: t.clone() for n, t in engine.model.hf.state_dict().items()}
        half = folder.begin(step, 1)
        engine.save_checkpoint(half)
        folder.finish(half, {"step": step})
    engine.destroy()
    assert [each.step for each in folder.list()] == [1, 4], "the best and the newest"

    for which, step in (("best", 1), ("latest", 4)):
        to = tmp_path / which
        assert export_version(run, which, to) == 0
        found = AutoModelForCausalLM.from_pretrained(to).state_dict()
        assert all(torch.equal(found[name], each) for name, each in weights[step].items())
        assert AutoTokenizer.from_pretrained(to).chat_template
        assert f"step {step} of 100" in (to / "README.md").read_text()
    assert "| held | 0.9000 |" in (tmp_path / "best" / "README.md").read_text()
    with pytest.raises(NotFound, match=r"2: no such checkpoint; kept: 1, 4"):
        export_version(run, "2", tmp_path / "two")
    with pytest.raises(InvalidInput, match="'newest': expected best, latest, or the step"):
        export_version(run, "newest", tmp_path / "two")
    with pytest.raises(InvalidInput, match="already exists, expected a new folder"):
        export_version(run, "latest", tmp_path / "best")


def test_export_when_adapters_were_trained_then_merged_and_the_adapters_beside_it(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    model = make_tiny_model(tmp_path / "model", hidden_size=32)
    overrides = [f"model.path={model}", f"run_root={tmp_path / 'runs'}", "actor.lora.rank=4"]
    config = build_config(GRPOConfig, None, overrides)
    save_config(config, config.run_dir / "config.yaml")
    (config.run_dir / "stack.json").write_text("{}")
    engine = FSDPEngine(TrainEngineConfig(path=str(model), lora=config.actor.lora))
    engine.initialize()
    for _, parameter in lora.saved_parameters(engine.model):
        torch.nn.init.normal_(parameter, std=0.05)
    expected = {name: tensor.clone() for name, tensor in engine.iter_full_tensors()}
    folder = CheckpointFolder(config.run_dir / "checkpoints", keep=1)
    half = folder.begin(1, 1)
    engine.save_checkpoint(half)
    folder.finish(half, {"step": 1})
    adapters = dict(lora.saved_parameters(engine.model))
    engine.destroy()

    assert export_version(config.run_dir, "latest", tmp_path / "out") == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    beside = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert len(beside) == len(adapters)


@pytest.mark.long
def test_export_when_called_from_another_folder_then_model_path_begins_where_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    began, elsewhere = tmp_path / "began", tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_tiny_model(began / "models" / "tiny", hidden_size=32)
    monkeypatch.chdir(began)
    config = build_config(GRPOConfig, None, ["model.path=models/tiny", "run_root=runs"])
    save_config(config, config.run_dir / "config.yaml")
    stack = LocalStack(config, EventLog(), with_trainer=True)
    stack._write_stack()
    engine = FSDPEngine(TrainEngineConfig(path="models/tiny"))
    engine.initialize()
    folder = CheckpointFolder(config.run_dir / "checkpoints", keep=1)
    half = folder.begin(1, 1)
    engine.save_checkpoint(half)
    folder.finish(half, {"step": 1})
    engine.destroy()
    run = began / config.run_dir

    monkeypatch.chdir(elsewhere)
    assert export_version(run, "latest", Path("out")) == 0
    assert (elsewhere / "out" / "model.safetensors").is_file()
    assert list_versions(run, as_json=True) == 0
    assert str(began / "models" / "tiny") in capfd.readouterr().out
    (began / "models").rename(began / "moved")
    assert export_version(run, "latest", Path("again")) == 2
    assert "model.path 'models/tiny': expected the model that the run" in capfd.readouterr().err
