"""`areal doctor DIRECTORY`: whether a model can be trained, before anything is started."""

import json
import re
import shutil
import subprocess
import sys

import pytest


def doctor(directory):
    command = [sys.executable, "-m", "areal_launch.cli", "doctor", str(directory), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def finding(findings, name):
    return next(each for each in findings if each["name"] == name)


def test_doctor_when_a_model_can_be_trained_then_says_how_exact_it_is(tiny_model):
    code, findings = doctor(tiny_model)
    found = finding(findings, "architecture")
    assert found["verdict"] == "ok"
    assert "Qwen2ForCausalLM" in found["found"]
    assert "its weights, 3 layers" in found["found"]
    assert "CPU engine" not in {each["name"] for each in findings}, "it has 32 bits"
    assert code == 0


def test_doctor_when_weights_have_16_bits_then_it_says_how_the_cpu_engine_keeps_them(
    tiny_model, tmp_path
):
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    _, findings = doctor(tmp_path)
    found = finding(findings, "CPU engine")
    assert found["verdict"] == "ok"
    assert re.match(r"would keep the bfloat16 weights as (bfloat16|float32) \[", found["found"])
    for way in ("bfloat16 [out, in]", "bfloat16 [in, out]", "float32 [in, out]"):
        assert re.search(re.escape(way) + r" [\d.e+]+", found["found"]), found


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "rwkv", "hidden_size": 32}, "RwkvForCausalLM .*a state that carries over"),
        pytest.param({"model_type": "no_such"}, "no_such", marks=pytest.mark.long),
        (None, r"expected a Hugging Face model directory with config\.json"),
    ],
)
def test_doctor_when_a_model_cannot_be_trained_then_exits_with_the_reason(tmp_path, config, named):
    if config:
        config |= {"num_hidden_layers": 2, "vocab_size": 96, "state_size": 4}
        (tmp_path / "config.json").write_text(json.dumps(config))
    code, findings = doctor(tmp_path)
    found = finding(findings, "architecture")
    assert found["verdict"] == "missing"
    assert "\n" not in found["found"]
    assert re.search(named, found["found"]), found
    assert code == 1


def test_doctor_when_the_recipe_is_a_folder_then_it_examines_the_run(tmp_path):
    (tmp_path / "helpers.py").write_text("NAME = 'model'\n")
    recipe = "from .helpers import NAME\n\n\ndef main(argv): ...\ndef prepare_model(config): ...\n"
    (tmp_path / "recipe.py").write_text(recipe)
    (tmp_path / "recipe.yaml").write_text("model: {path: made-by-the-recipe}\n")
    _, findings = doctor(tmp_path)
    assert {"python", "run folder"} <= {each["name"] for each in findings}, findings
    assert finding(findings, "model")["verdict"] == "ok"
