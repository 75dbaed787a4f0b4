"""GRPO on adapters through a whole stack: servers get adapters, or what is merged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.metric_names import read_metrics

from areal_launch.commands.versions import export_version

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_lora_grpo_when_run_then_servers_have_what_peft_merges(tmp_path: Path, form: str) -> None:
    small = ("total_train_steps=3", "train_dataset.batch_size=16", "gconfig.n_samples=8")
    small += ("allocation_mode=sglang:d1+fsdp:d1", "actor.optimizer.lr=1e-2")
    small += ("rollout.max_head_offpolicyness=0",)  # each version is sampled from, then compared
    if form == "merged":
        small += ("actor.lora.publish=merged",)
    model = tmp_path / "model"
    small += (f"model.path={model}",)
    small += ("train_problems=400", "heldout_problems=6", "warm_start_steps=250")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "areal_launch.cli", "run"),
            *(str(ROOT / "examples" / "arithmetic_grpo.py"), "--config"),
            *(str(ROOT / "examples" / "lora_grpo.yaml"), *small),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "PYTHONPATH": str(ROOT / "services")},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    run = tmp_path / "runs" / "lora" / "demo"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    rows = read_metrics(run)
    assert rows[0]["train/grad_norm"] > 0, "some sums were right, others wrong"
    assert [row["staleness/max"] for row in rows] == [0, 0, 0]
    # What the servers sampled with versions 1 and 2 is what the adapted model computes.
    assert all(row["mismatch/max"] < 1e-3 for row in rows), rows

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    version = run / "weights" / "v00000003-inc1"
    assert export_version(run, "latest", tmp_path / "out") == 0
    plain = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    merged = PeftModel.from_pretrained(plain, tmp_path / "out" / "adapter").merge_and_unload()
    expected = merged.state_dict()
    if form == "adapter":
        held = sum(file.stat().st_size for file in version.glob("*.safetensors"))
        whole = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        assert held < whole / 2, "the example's adapters are a quarter of its tiny model"
        again = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        served = PeftModel.from_pretrained(again, version).merge_and_unload().state_dict()
    else:
        served = load_file(version / "model.safetensors")
    moved = 0.0
    for name, tensor in served.items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=1e-2, atol=1e-5)
        moved = max(moved, float((expected[name] - before[name]).abs().max()))
    assert moved > 1e-3, "three steps at this rate move a weight by more than rounding"
