"""What a server takes on: never more than its queue holds, but any group when it is idle."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import Unavailable
from areal_inference.api import GenerateCall, parse_generate
from areal_inference.config import InferenceConfig
from areal_inference.frontend import Frontend
from areal_inference.model.config import ModelConfig
from areal_torch.models.tiny import make_tiny_model


async def test_start_when_a_group_is_larger_than_the_queue_then_taken_only_by_an_idle_server(
    tmp_path: Path,
) -> None:
    make_tiny_model(tmp_path, seed=0)
    config = InferenceConfig(
        model_path=str(tmp_path), max_running_requests=2, max_queued_requests=1, dtype="float32"
    )
    frontend = Frontend(config, ModelConfig.from_folder(tmp_path), print)
    frontend.ready = True

    def call(count: int) -> GenerateCall:
        body = {"input_ids": [[5]] * count, "sampling_params": {"max_new_tokens": 4}}
        return parse_generate(body, frontend.limits, None)

    group = call(8)  # refused, it would be asked again and again, by everyone
    frontend.start(group)
    with pytest.raises(Unavailable, match="queue is full: 8 in progress, expected at most 3"):
        frontend.start(call(1))
    frontend.finished(group)
    frontend.start(call(2))
    with pytest.raises(Unavailable, match="queue is full: 2 in progress"):
        frontend.start(call(2))
    frontend.start(call(1))
