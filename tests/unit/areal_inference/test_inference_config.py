"""Configuration: strict keys and types, flags over file."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from areal.errors import ConfigError, InvalidInput
from areal.model_directory import read_config
from areal.weights.safetensors import parse_header
from areal_inference.cli import command_line
from areal_inference.config import InferenceConfig
from areal_inference.frontend import Frontend
from areal_inference.model.config import ModelConfig, ModelError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_pth": "x"}, "inference.model_pth: unknown key; did you mean 'model_path'?"),
        ({"model_path": "x", "zzz": 1}, "inference.zzz: unknown key"),
        ({}, "inference.model_path: missing"),
        ({"model_path": 3}, "inference.model_path: 3 is int, expected str"),
        ({"model_path": "x", "port": "80"}, "inference.port: '80' is str, expected int"),
        ({"model_path": "x", "port": True}, "inference.port: True is bool, expected int"),
        ({"model_path": "x", "port": 70000}, "inference.port: 70000, expected 0..65535"),
        ({"model_path": "x", "dtype": "fp16"}, "inference.dtype: 'fp16', expected one of"),
        ({"model_path": "x", "context_length": 0}, "context_length: 0, expected a positive"),
        (
            {"model_path": "x", "random_seed": 1.5},
            "inference.random_seed: 1.5 is float, expected int or null",
        ),
    ],
)
def test_from_mapping_when_wrong_then_one_line_names_key_and_value(values, message: str):
    with pytest.raises(ConfigError) as caught:
        InferenceConfig.from_mapping(values)
    assert message in str(caught.value)


def test_from_mapping_when_integer_for_float_then_accepted():
    assert InferenceConfig.from_mapping({"model_path": "x", "command_timeout_s": 5})


def test_load_when_file_and_flags_then_flags_win(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("inference:\n  model_path: a\n  port: 1234\nother: {ignored: true}\n")
    config = InferenceConfig.load(file, {"port": 0})
    assert (config.model_path, config.port) == ("a", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inference: [1", "not valid YAML"),
        ("- 1\n", "expected a mapping"),
        ("inference: 3\n", "expected a mapping"),
        ("inference:\n  prot: 1\n", "did you mean 'port'?"),
    ],
)
def test_load_when_file_is_broken_then_one_line(tmp_path: Path, text: str, message: str):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        InferenceConfig.load(file, {"model_path": "x"})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_when_file_is_missing_then_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        InferenceConfig.load(tmp_path / "nothing.yaml", {})


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_service_when_the_dtype_is_left_open_then_the_checkpoints(tiny_model, tmp_path, stored):
    model = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**model, "dtype": stored}))
    config = InferenceConfig(model_path=str(tmp_path))

    async def resolved() -> str:
        return Frontend(config, ModelConfig.from_folder(tmp_path), print).config.dtype

    assert asyncio.run(resolved()) == stored


def test_server_when_a_package_is_missing_then_it_refuses_for_good_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(_: InferenceConfig) -> int:
        import no_such_package  # noqa: F401

        return 0

    monkeypatch.setattr("sys.argv", ["areal-inference", "--model-path", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        command_line(serve)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "areal-inference: ModuleNotFoundError: No module named 'no_such_package'; "
        "pip install 'areal-services[inference]'"
    )


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("num_attention_heads", bad) for bad in (0, -1, 10**9, 1e400, None, "x", [], {}, 10**30)),
        *(("num_hidden_layers", bad) for bad in (0, -1, 10**9, [1])),
        *(("hidden_size", bad) for bad in (0, -1, 10**12)),
        *(("vocab_size", bad) for bad in (0, -5, 10**12)),
        *(("num_key_value_heads", bad) for bad in (-1, 10**9, "x", {"a": 1})),
        *(("head_dim", bad) for bad in (-1, 10**9)),
        *(("architectures", bad) for bad in (3, {"a": 1}, [["x"]], [{}])),
        *(("rope_scaling", bad) for bad in (3, [1], "x", {"rope_type": "llama3"})),
        *(("text_config", bad) for bad in (3, [], "x")),
        *(("eos_token_id", bad) for bad in ({}, [[1]], [{}])),
        *(("rms_norm_eps", bad) for bad in ("x", None, [])),
    ],
)
def test_model_when_a_value_of_its_config_is_hostile_then_model_error_in_one_line(
    tmp_path: Path, key: str, value: object
):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path).num_layers == 2
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    with pytest.raises(ModelError) as caught:
        ModelConfig.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "folder", "deep", "list", "binary"])
def test_model_when_its_config_is_no_file_of_json_then_refused_without_waiting(
    tmp_path: Path, kind: str
):
    file = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        texts = {"deep": b'{"a":' * 100_000, "list": b"[1]", "binary": b"\xff\x00"}
        file.write_bytes(texts[kind])
    with pytest.raises(ModelError):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(InvalidInput):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}',
        b"[]",
        b"3",
    ],
)
def test_weights_when_their_header_is_hostile_then_refused(header: bytes):
    with pytest.raises(InvalidInput):
        parse_header(len(header).to_bytes(8, "little") + header, "model.safetensors")
