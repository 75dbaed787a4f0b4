"""SGLang is told to say which experts it chooses, where there are some to choose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.areal_launch.gpu_machines import install
from tests.unit.areal_launch.test_sharing import GIB, launched, make, write_model

from areal_rollout.config import RolloutConfig

FLAG = "--enable-return-routed-experts"
SGLANG = "stack.inference_command=/opt/python -m sglang.launch_server"


@pytest.mark.parametrize(
    ("experts", "keys", "times"),
    [
        (8, (), 1),
        (0, (), 0),
        (8, ("rollout.router_replay=false",), 0),
        (8, (f"{SGLANG} {FLAG}",), 1),
        (8, ("stack.inference_command=cpu",), 0),
    ],
)
async def test_server_when_it_starts_then_it_has_the_flag_once_or_not_at_all(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    experts: int,
    keys: tuple[str, ...],
    times: int,
) -> None:
    install(monkeypatch, tmp_path, there=2, free=80 * GIB)
    model = write_model(tmp_path / "model", "1.5B")
    config = json.loads((model / "config.json").read_text())
    config |= {"num_experts": experts, "num_experts_per_tok": 2}
    (model / "config.json").write_text(json.dumps(config))
    made = make("sglang:d1+fsdp:d1", f"model.path={model}", SGLANG, *keys, gpus=2)
    _, argv, resolved = await launched(tmp_path, made)
    assert argv.count(FLAG) == times
    replays = RolloutConfig.from_experiment(resolved).router_replay
    assert replays == ("rollout.router_replay=false" not in keys)
