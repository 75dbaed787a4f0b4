"""An export's config.json has the fields of the source's, which servers and transformers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, NemotronHForCausalLM, Qwen3NextForCausalLM
from transformers import Glm4vForConditionalGeneration as Glm4v

from areal_torch.engines.export.directory import write_directory

# As published, shortened: transformers writes these fields under other names, or not at all.
NEMOTRON_H = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*", "num_hidden_layers": 4}
QWEN3_NEXT = {"model_type": "qwen3_next", "full_attention_interval": 2, "num_hidden_layers": 4}
GLM4V = {
    "model_type": "glm4v",
    "text_config": {
        "model_type": "glm4v_text",
        "num_hidden_layers": 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]},
        "torch_dtype": "bfloat16",
    },
    "torch_dtype": "bfloat16",
}
MODELS = [
    pytest.param(NemotronHForCausalLM, NEMOTRON_H, id="nemotron_h"),
    pytest.param(Qwen3NextForCausalLM, QWEN3_NEXT, id="qwen3_next"),
    pytest.param(Glm4v, GLM4V, id="glm4v"),
]


def exported(kind: Any, published: dict[str, Any], tmp_path: Path, **changes: Any) -> Any:
    """The config.json of an export in float32, and the config that transformers reads there."""
    source, export = tmp_path / "source", tmp_path / "export"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(published))
    config = AutoConfig.from_pretrained(source)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        hf = kind(config)
    write_directory(export, [("weight", torch.zeros(2))], hf, source)
    return json.loads((export / "config.json").read_text()), AutoConfig.from_pretrained(export)


def without_dtypes(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: without_dtypes(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in ("dtype", "torch_dtype", "architectures", "_name_or_path")
    }


@pytest.mark.parametrize(("kind", "published"), MODELS)
def test_export_when_a_config_has_older_fields_then_it_keeps_them_and_reads_the_same(
    tmp_path: Path, kind: Any, published: dict[str, Any]
) -> None:
    written, read = exported(kind, published, tmp_path)
    assert without_dtypes(written) == without_dtypes(published)
    assert "_name_or_path" not in written
    assert written["architectures"] == [kind.__name__]
    assert written["dtype"] == "float32"
    before = AutoConfig.from_pretrained(tmp_path / "source")
    assert without_dtypes(read.to_dict()) == without_dtypes(before.to_dict())


def test_export_when_a_config_has_dtypes_then_they_are_those_of_the_weights(tmp_path: Path) -> None:
    written, read = exported(Glm4v, GLM4V, tmp_path)
    for part in (written, written["text_config"]):
        assert part["dtype"] == part["torch_dtype"] == "float32"
    assert read.dtype == read.text_config.dtype == torch.float32


def test_export_when_the_model_changed_its_config_then_the_change_is_written(
    tmp_path: Path,
) -> None:
    written, read = exported(Qwen3NextForCausalLM, QWEN3_NEXT, tmp_path, num_labels=1)
    assert read.num_labels == 1
    assert written["full_attention_interval"] == 2
