import json

import pytest

from areal.errors import InvalidInput
from areal.model_directory import read_model_config, serving_dtype


def model(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "on_cpu"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_serving_dtype_when_auto_then_the_checkpoints_on_cpu_and_16_bits_on_gpu(
    tmp_path, config, on_cpu
):
    directory = model(tmp_path, **config)
    assert serving_dtype("auto", directory, gpu=False) == on_cpu
    assert serving_dtype("auto", directory, gpu=True) == "bfloat16"
    assert serving_dtype("float32", directory, gpu=True) == "float32"


def test_serving_dtype_when_the_model_is_yet_to_be_made_then_what_an_engine_saves(tmp_path):
    assert serving_dtype("auto", tmp_path / "later", gpu=False) == "float32"


def test_read_model_config_when_it_is_no_config_then_one_line_names_it(tmp_path):
    with pytest.raises(InvalidInput, match=r"config\.json: No such file"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidInput, match="not JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidInput, match="expected a JSON object"):
        read_model_config(tmp_path)
