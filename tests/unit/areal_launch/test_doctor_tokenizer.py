"""`areal doctor FOLDER` compares the tokenizer with the model's embedding."""

from __future__ import annotations

import json
from pathlib import Path

from areal_launch.doctor.model import tokenizer_ids
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
