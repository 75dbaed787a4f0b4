"""Where an export launches its exchanges: beside the training thread, or in order before a step."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from areal_torch.engines.export.exporter import Exporter


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world", [1, 2, 8])
def test_export_when_several_gpus_gather_then_the_training_thread_launches_all_exchanges(
    monkeypatch: pytest.MonkeyPatch, device: str, world: int
) -> None:
    for name, value in {"new_group": None, "get_world_size": world, "get_rank": 0}.items():
        monkeypatch.setattr(dist, name, mock.Mock(return_value=value))
    monkeypatch.setattr(torch.cuda, "Event", mock.Mock())
    launched: list[threading.Thread] = []
    exporter = Exporter(None, Path(), torch.device(device), 60.0)
    monkeypatch.setattr(exporter, "gathering", mock.Mock())
    monkeypatch.setattr(exporter, "_launch", lambda *_: launched.append(threading.current_thread()))
    exporter.begin(None, lambda *_: None).result(60)
    assert len(launched) == 1
    in_order = launched[0] is threading.main_thread()
    assert in_order == (device == "cuda" and world > 1)
