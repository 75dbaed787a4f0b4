"""`areal_trainer.prepare`: what keeps a recipe from making its model is one line."""

import sys

import pytest
import typer

from areal_trainer.prepare import prepare


def test_prepare_when_torch_is_not_installed_then_one_line_says_what_to_install(
    tmp_path, monkeypatch, capsys
):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def prepare_model(config):\n    pass\n")
    config = tmp_path / "config.yaml"
    config.write_text(f"experiment_name: e\ntrial_name: t\nrecipe: {recipe}\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(typer.Exit) as ended:
        prepare(config)
    assert ended.value.exit_code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch" in line
    assert "pip install 'areal-services[trainer]'" in line
