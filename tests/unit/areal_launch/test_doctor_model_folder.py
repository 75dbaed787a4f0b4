"""`areal doctor FOLDER` looks at a folder: its tokenizer, and whether its weights are usable."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from areal_launch.doctor import model
from areal_launch.doctor.model import architecture, examine_model, tokenizer_ids
from areal_launch.view.output import CheckResult
from areal_torch.models.tiny import save_tokenizer


def test_doctor_when_ids_are_beyond_the_embedding_then_it_names_the_first(tmp_path: Path) -> None:
    assert tokenizer_ids(tmp_path).verdict is CheckResult.NOTE
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 261}))
    assert tokenizer_ids(tmp_path).verdict is CheckResult.OK
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 259}}))
    found = tokenizer_ids(tmp_path)
    assert found.verdict is CheckResult.MISSING
    assert "2 tokens have ids beyond the embedding's 259 rows" in found.found
    assert "the first is '<|assistant|>', 259" in found.found


@pytest.mark.parametrize("file", ["pytorch_model.bin", "tiny.Q4_K_M.gguf"])
def test_doctor_when_weights_are_no_safetensors_then_it_says_how_to_get_some(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / file).write_bytes(b"weights")
    found = architecture(tmp_path)
    assert found.verdict is CheckResult.MISSING
    assert found.found == (
        f"no usable weights: {file}, but no model.safetensors and no model.safetensors.index.json"
    )
    assert "save_pretrained" in found.fix


def test_doctor_when_weights_are_quantized_then_it_says_so_without_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(model, "_run", lambda *_: pytest.fail("nothing is to be tried"))
    first, *others = examine_model(tmp_path)
    assert first.verdict is CheckResult.MISSING
    assert "quant_method 'fp8': expected a bfloat16 copy" in first.found
    assert [each.name for each in others] == ["tokenizer"], "no CPU engine would serve it"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "pip install 'areal-services[trainer]'"),
        ("KeyError: 'su'", "see the message"),
    ],
)
def test_doctor_when_the_trial_ends_then_a_package_is_advised_only_if_one_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, advice: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    done = subprocess.CompletedProcess([], 1, "", f"Traceback\n{line}\n")
    monkeypatch.setattr(model, "_run", lambda *_: done)
    found = architecture(tmp_path)
    assert (found.verdict, found.found, found.fix) == (CheckResult.MISSING, line, advice)
