"""Kill the trainer anywhere, as often as you like: it trains on the same batches to the same end.

Real processes: Redis, buffer, weight-sync, an inference server, and trainers. CHAOS_SEED picks the
points of the kills.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.chaos.trainer_rig import BATCH, TrainerRig, trainer_rig

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

SEED = int(os.environ.get("CHAOS_SEED", "0"))
KILLS, STEPS = 20, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from areal.models.tiny import make_tiny_model

    return Path(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0))


def prefilled(model: Path, steps: int) -> tuple[str, ...]:
    """Overrides: all batches fit below the staleness bound, so that they can be made before."""
    return (
        f"model.path={model}",
        f"total_train_steps={steps}",
        f"rollout.max_head_offpolicyness={steps}",
        "rollout.max_concurrent_rollouts=10000",
        "checkpoint.freq_steps=3",
    )


def check_batches(rig: TrainerRig, expected: list[str], steps: int) -> int:
    """Every life, every rank: the groups of a step are those of that step. Returns replays."""
    batches: dict[tuple[int, int], list[str]] = {}
    for line in rig.seen():
        batches.setdefault((line["incarnation"], line["step"]), []).extend(line["groups"])
    for (incarnation, step), groups in batches.items():
        of_step = expected[(step - 1) * BATCH : step * BATCH]
        assert sorted(groups) == sorted(of_step), f"incarnation {incarnation}, step {step}"
    assert {step for _, step in batches} == set(range(1, steps + 1))
    return len(batches) - steps


def test_trainer_when_killed_20_times_then_same_batches_and_same_weights_to_the_bit(
    model: Path, tmp_path: Path
) -> None:
    common = (*prefilled(model, STEPS), "noise=true", "pace_s=0.02")
    with trainer_rig(tmp_path, "whole", *common, generation=False) as whole:
        expected = whole.prefill(STEPS * BATCH)
        whole.finish()
        assert check_batches(whole, expected, STEPS) == 0
        reference = load_file(whole.run_dir / "final" / "model.safetensors")
    rng = random.Random(SEED)
    with trainer_rig(tmp_path, "killed", *common, generation=False) as killed:
        assert killed.prefill(STEPS * BATCH) == expected
        for number in range(KILLS):
            print(f"kill {number + 1}: {killed.kill_at_random(rng, killed.trainer())}")
        killed.finish()
        replayed = check_batches(killed, expected, STEPS)
        print(f"{replayed} steps replayed")
        assert replayed > 0
        assert [row["step"] for row in killed.rows()] == list(range(1, STEPS + 1))
        counts = killed.counts()
        assert counts["trained"] == STEPS * BATCH
        assert not any(counts.get(live) for live in ("queued", "running", "completed", "batched"))
        weights = load_file(killed.run_dir / "final" / "model.safetensors")
    start = load_file(model / "model.safetensors")
    assert weights.keys() == reference.keys() == start.keys()
    for name, tensor in reference.items():
        assert weights[name].equal(tensor), f"{name} differs"
        assert not tensor.equal(start[name]), f"{name} was never trained"
