"""Recipes that train on rows alone: they run, resume, and do the same on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.offline_rig import EXAMPLES, Example
from transformers import AutoModelForSequenceClassification

from areal.config.experiment import GRPOConfig, save_config
from areal.errors import InvalidInput
from areal.runs.checkpoints import CheckpointFolder
from areal_torch.engines.rollout import RemoteSGLangEngine
from areal_torch.training.offline_session import OfflineSession

LIMIT_S = 600
SERVICES = EXAMPLES.parent / "services"
FEW = ("train_dataset.batch_size=6", "heldout_rows=8")

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def test_sft_when_run_then_the_loss_falls_and_transformers_reads_the_model(tmp_path: Path) -> None:
    example = Example("gsm8k_sft", tmp_path, *FEW, "total_train_steps=6", "evaluate_steps=3").run()
    results, rows = example.results, example.rows
    assert results["heldout_loss_after"] < results["heldout_loss_before"] - 0.5
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(example.config.run_dir / "model")


@pytest.mark.parametrize("name", ["gsm8k_sft", "dpo", "reward_model"])
def test_recipe_when_as_many_rows_are_held_out_as_the_file_has_then_one_line_names_both(
    tmp_path: Path, name: str
) -> None:
    row = {"prompt": "1?", "question": "1?", "answer": "1", "chosen": "1", "rejected": "2"}
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps({**row, "prompt": f"{n}?", "question": f"{n}?"}) + "\n" for n in range(9)
        )
    )
    example = Example(name, tmp_path, f"train_dataset.path={file}", "heldout_rows=9")
    with pytest.raises(InvalidInput, match="heldout_rows=9: there are 9 rows"):
        example.run()
    few = Example(
        name,
        tmp_path,
        *(f"train_dataset.path={file}", "heldout_rows=0", "train_dataset.batch_size=3"),
        *("total_train_steps=1", "trial_name=none"),
    ).run()
    results = few.config.run_dir / "trainer.json"
    assert not results.exists() or not [each for each in few.results if "heldout" in each]


def test_sft_when_with_lora_then_the_loss_falls_and_the_saved_model_has_merged_weights(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    keys = (*FEW, "total_train_steps=6", "actor.lora={}", "actor.optimizer.lr=1e-2")
    example = Example("gsm8k_sft", tmp_path, *keys).run()
    assert example.results["heldout_loss_after"] < example.results["heldout_loss_before"]
    saved, base = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (example.config.run_dir / "model", example.config.model.path)
    )
    assert saved.keys() == base.keys()
    changed = {name for name in base if not torch.equal(saved[name], base[name])}
    assert "model.layers.0.mlp.down_proj.weight" in changed
    assert not {"model.embed_tokens.weight", "model.norm.weight"} & changed


def test_sft_when_resumed_then_it_takes_the_rows_it_would_have_taken(tmp_path: Path) -> None:
    keys = (*FEW, "checkpoint.freq_steps=2", "actor.optimizer.lr_scheduler_type=constant")
    whole = Example("gsm8k_sft", tmp_path, *keys, "total_train_steps=4", "trial_name=whole").run()
    Example("gsm8k_sft", tmp_path, *keys, "total_train_steps=2", "trial_name=twice").run()
    again = Example("gsm8k_sft", tmp_path, *keys, "total_train_steps=4", "trial_name=twice").run()
    assert [row["step"] for row in again.rows] == [1, 2, 3, 4]
    assert [row["incarnation"] for row in again.rows] == [1, 1, 2, 2]
    # The warm-up's length is of the planned steps: 0 in both.
    assert [r["train/loss"] for r in again.rows] == pytest.approx(
        [r["train/loss"] for r in whole.rows]
    )


@pytest.mark.long
def test_sft_when_on_two_ranks_then_it_is_what_one_computes(tmp_path: Path) -> None:
    keys = (*FEW, "total_train_steps=3", "actor.dtype=float64")
    one = Example("gsm8k_sft", tmp_path, *keys, "trial_name=one").run()
    two = Example(
        "gsm8k_sft", tmp_path, *keys, "trial_name=two", "allocation_mode=fsdp:d2"
    ).prepare()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", "-m", "areal_trainer", "--config", str(two.file)),
        ],
        env={**os.environ, "PYTHONPATH": str(SERVICES), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for a, b in zip(one.rows, two.rows, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-8)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-8)
    assert one.results["heldout_loss_after"] == two.results["heldout_loss_after"]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dpo", ()),
        ("dpo", ("loss=ipo",)),
        ("dpo", ("loss=simpo", "beta=2")),
        ("dpo", ("actor.lora={}",)),
        ("reward_model", ()),
        ("reward_model", ("actor.lora={}",)),
    ],
)
def test_pairs_when_learned_for_some_steps_then_heldout_loss_is_recorded_and_the_model_saved(
    tmp_path: Path, name: str, keys: tuple[str, ...]
) -> None:
    example = Example(name, tmp_path, *FEW, "total_train_steps=4", *keys).run()
    assert len(example.rows) == 4
    assert example.rows[-1]["train/loss_tokens"] == 6, "what is counted are pairs"
    assert 0 <= example.results["heldout_accuracy"] <= 1
    assert (example.config.run_dir / "model" / "model.safetensors").is_file()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("keys", [(), pytest.param(("actor.lora={}",), marks=pytest.mark.long)])
def test_reward_model_when_a_checkpoint_is_exported_then_it_is_the_saved_classifier(
    tmp_path: Path, keys: tuple[str, ...]
) -> None:
    keys = (*FEW, "total_train_steps=2", "checkpoint.freq_steps=2", *keys)
    example = Example("reward_model", tmp_path, *keys).run()
    run_dir = example.config.run_dir
    [checkpoint] = [each.path for each in CheckpointFolder(run_dir / "checkpoints", keep=1).list()]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "areal_torch.engines.export_checkpoint", str(example.file)),
            *(str(checkpoint), str(tmp_path / "exported"), str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": str(SERVICES), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ids = torch.tensor([[65, 66, 67, 68, 69]])
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "A reward model" in card
    assert "with the recipe `reward_model.py`, on dataset rows only: step" in card
    assert not any(word in card for word in ("grpo", "groups", "samples", "temperature"))
    scores = [_scores(folder, ids) for folder in (run_dir / "model", tmp_path / "exported")]
    assert scores[0].abs().sum() > 0, "the head has learned something"
    assert torch.equal(*scores)
    if example.config.actor.lora is not None:
        adapter = json.loads(
            (tmp_path / "exported" / "adapter" / "adapter_config.json").read_text()
        )
        assert adapter["task_type"] == "SEQ_CLS"
        base = _classifier(example.config.model.path)
        adapted = PeftModel.from_pretrained(base, tmp_path / "exported" / "adapter")
        torch.testing.assert_close(_logits(adapted, ids), scores[0], rtol=1e-5, atol=1e-6)


def _classifier(folder: Path | str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def _scores(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    return _logits(_classifier(folder), ids)


def test_rollouts_when_there_are_no_servers_then_refused(tmp_path: Path) -> None:
    config = GRPOConfig(allocation_mode="fsdp:d1", run_root=str(tmp_path))
    save_config(config, tmp_path / "config.yaml")
    session = OfflineSession(config)
    try:
        session.open()
        with (
            pytest.raises(InvalidInput, match="'fsdp:d1' has no servers"),
            session.active(),
        ):
            RemoteSGLangEngine(config.rollout)
    finally:
        session.close()
