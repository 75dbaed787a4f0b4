"""When a train step computes the common prefixes of a group once: by kernel, setting and batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.areal_torch.engines.model.attention.flash_on_cpu import torch_kernels
from tests.unit.areal_torch.engines.train_fixtures import weighted_loss

from areal.config.training import TrainEngineConfig
from areal_torch.algorithms import packing
from areal_torch.engines.fsdp import FSDPEngine
from areal_torch.engines.model.attention import dispatch
from areal_torch.engines.model.attention.dispatch import PACKED
from areal_torch.engines.model.attention.layout import PackedLayout
from areal_torch.engines.model.attention.varlen import TORCH


def group_of(answers: int, prompt: int, answer: int) -> packing.Batch:
    """Answers to one prompt, which differ from their first token on."""
    mask = [False] * prompt + [True] * answer
    rows = [
        {"input_ids": [*range(prompt), *[100 + number] * answer], "loss_mask": mask}
        for number in range(answers)
    ]
    return packing.pack(rows, [0] * answers)


# A batch, and the tokens that remain if its prefixes are computed once.
HALF, TENTH = (group_of(3, 12, 4), 24), (group_of(2, 4, 16), 36)


@pytest.mark.parametrize(
    ("kernel", "setting", "batch", "shared"),
    [
        (TORCH, None, HALF, True),
        (TORCH, None, TENTH, False),
        (TORCH, True, TENTH, True),
        (TORCH, False, HALF, False),
        (PACKED, None, TENTH, True),
        (PACKED, False, HALF, False),
    ],
    ids=lambda each: f"{len(each[0]['input_ids'])} tokens" if isinstance(each, tuple) else None,
)
def test_train_step_when_prefixes_are_common_then_shared_once_worth_it_or_asked_for(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    setting: bool | None,
    batch: tuple[packing.Batch, int],
    shared: bool,
) -> None:
    monkeypatch.setattr(dispatch, "choose", lambda *_: kernel)
    engine, layouts = FSDPEngine(TrainEngineConfig(path=str(model_dir), share_prefixes=setting)), []
    with torch_kernels():
        engine.initialize()

        def keep(_: object, given: tuple[object, PackedLayout, object]) -> None:
            layouts.append(given[1])

        engine.model.register_forward_pre_hook(keep)
        engine.train_batch(batch[0], weighted_loss)
        engine.destroy()
    [layout] = layouts
    assert layout.shared == shared
    assert len(layout.computed) == (batch[1] if shared else len(batch[0]["input_ids"]))
