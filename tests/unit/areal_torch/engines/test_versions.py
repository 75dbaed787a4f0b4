"""The oldest supported torch and transformers: what is missing there is replaced, or named."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tests.unit.areal_torch.engines.model.test_self_test import wild_model
from tests.unit.areal_torch.engines.train_fixtures import make_batch, weighted_loss

from areal.config.allocation import Layout
from areal.config.training import TrainEngineConfig
from areal.errors import CannotStart
from areal_torch.engines import versions
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model import vision
from areal_torch.engines.parallel import plans


@pytest.fixture
def transformers_5_17(monkeypatch):
    """Whose models recompute only by the name that newer versions deprecate."""
    base = transformers.PreTrainedModel
    newer = base._activation_checkpointing_enable

    def older(self, gradient_checkpointing_kwargs=None, every_n_layers=1, offload=False):
        newer(self, gradient_checkpointing_kwargs, every_n_layers, offload)

    monkeypatch.delattr(base, "activation_checkpointing_enable")
    monkeypatch.setattr(base, "gradient_checkpointing_enable", older)
    pretend(monkeypatch, "transformers", "5.17.0")


def pretend(monkeypatch, package, found):
    real = versions.installed
    monkeypatch.setattr(versions, "installed", lambda p: found if p == package else real(p))
    monkeypatch.setattr(plans, "installed", versions.installed)


@pytest.mark.usefixtures("transformers_5_17")
@pytest.mark.parametrize(
    ("mode", "forwards"), [("none", 1), ("selective", 2), ("full", 2), ("offload", 2)]
)
def test_train_batch_when_transformers_is_the_oldest_then_layers_are_recomputed(
    tmp_path, mode, forwards
):
    wild_model(tmp_path, "qwen3", head_dim=8)
    engine = FSDPEngine(
        TrainEngineConfig(path=str(tmp_path), dtype="float32", gradient_checkpointing=mode)
    )
    try:
        engine.initialize()
        calls = []
        mlp = engine.model.hf.model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        engine.train_batch(make_batch(vocabulary=96), weighted_loss)
        assert len(calls) == forwards
    finally:
        engine.destroy()


def test_images_when_transformers_is_the_oldest_then_features_come_in_one_tensor():
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    newer, older = {"deepstack_features": [parts]}, {"deepstack_features": [torch.cat(parts)]}

    class Base:
        def get_image_features(self, pixels, grid, return_dict):
            return SimpleNamespace(pooler_output=parts, **self.found)

        def get_input_embeddings(self):
            return lambda ids: torch.zeros(len(ids), 3)

    seen = SimpleNamespace(
        pixel_values=None, grid=None, rows=torch.arange(3), places=torch.arange(3)
    )
    given = []
    for found in (newer, older):
        base = Base()
        base.found = found
        inputs, _ = vision.embed(SimpleNamespace(base_model=base), torch.zeros(4), seen)
        given.append(inputs["deepstack_visual_embeds"])
    torch.testing.assert_close(*given)


@pytest.mark.parametrize(
    ("layout", "letter", "spread"),
    [("d1t2", "t", plans.spread_matrices), ("d2e2", "e", plans.spread_experts)],
)
@pytest.mark.parametrize("found", ["5.17.0", "5.22.2"])
def test_layout_when_transformers_has_no_plan_for_it_then_one_line_says_which_has(
    monkeypatch, layout, letter, spread, found
):
    pretend(monkeypatch, "transformers", found)
    with pytest.raises(CannotStart) as refused:
        spread(None, SimpleNamespace(layout=Layout.parse(layout)))
    assert str(refused.value) == (
        f"trainer layout '{layout}': {letter} needs transformers 5.23, and {found} is installed; "
        f"expected a layout without {letter}, or pip install transformers==5.23.0"
    )


@pytest.mark.parametrize(
    ("package", "found", "line"),
    [
        ("torch", "2.10.0+cu128", "torch 2.10.0+cu128: expected 2.11 to 2.14 for the trainer"),
        ("transformers", "5.9.0", "transformers 5.9.0: expected 5.17 to 5.23 for the trainer"),
    ],
)
def test_engine_when_a_package_is_too_old_then_one_line_says_which_versions_work(
    tmp_path, monkeypatch, package, found, line
):
    pretend(monkeypatch, package, found)
    engine = FSDPEngine(TrainEngineConfig(path=str(tmp_path)))
    with pytest.raises(CannotStart) as refused:
        engine.initialize()
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("package", "found", "warned"),
    [
        ("torch", "2.11.0a0+gitabc", False),
        ("torch", "2.14.1+cu130", False),
        ("torch", "2.15.0", True),
        ("torch", "none", False),
        ("transformers", "5.24.0", True),
    ],
)
def test_versions_when_accepted_then_only_newer_ones_are_warned_about(
    monkeypatch, capsys, package, found, warned
):
    pretend(monkeypatch, package, found)
    versions.check_versions()
    assert ("version_not_tested" in capsys.readouterr().out) == warned
