from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal.config.experiment import GRPOConfig, build_config, cautions, load_service_config
from areal_launch.cli import app

RECIPE = Path(__file__).resolve().parents[3] / "examples/arithmetic_grpo.py"


def test_config_when_printed_then_services_read_it_as_the_same_experiment(tmp_path: Path) -> None:
    printed = CliRunner().invoke(
        app, ["config", str(RECIPE), "seed=7", "endpoints.inference=[dns://inference:30000]"]
    )
    assert printed.exit_code == 0, printed.output
    file = tmp_path / "config.yaml"
    file.write_text(printed.stdout)
    config = load_service_config(file)
    assert config.model.path == "runs/models/arithmetic-seed7"
    assert config.endpoints.inference == ["dns://inference:30000"]
    assert config.recipe == str(RECIPE)
    assert config.gconfig.n_samples == 8  # of arithmetic_grpo.yaml


@pytest.mark.parametrize(
    ("key", "url", "shown"),
    [
        ("endpoints.redis", "redis://:hunter2@h:6379/0", "redis://***@h:6379/0"),
        ("endpoints.redis", "redis://u:hunter2@hunter2@h:6379/0", "redis://***@h:6379/0"),
        ("endpoints.nats", "nats://hunter2@a:4222,nats://u:hunter2@b:4222", "nats://***@a:4222,"),
    ],
)
def test_config_when_it_holds_a_secret_then_it_is_not_printed_and_the_key_is_named(
    key: str, url: str, shown: str
) -> None:
    printed = CliRunner().invoke(app, ["config", str(RECIPE), f"{key}={url}"])
    assert printed.exit_code == 0, printed.output
    assert "hunter2" not in printed.output
    assert shown in printed.stdout
    [line] = printed.stderr.splitlines()
    assert line.startswith(f"areal: {key}: its secret is printed as ***")


def test_cautions_when_an_address_holds_a_secret_then_the_key_is_named_and_not_the_secret() -> None:
    secret = build_config(GRPOConfig, None, ["endpoints.redis=redis://:hunter2@h:6379/0"])
    [line] = [each for each in cautions(secret) if "secret" in each]
    assert line.startswith("endpoints.redis: holds a secret")
    assert "hunter2" not in line
    plain = build_config(GRPOConfig, None, ["endpoints.redis=redis://h:6379/0"])
    assert not [each for each in cautions(plain) if "secret" in each]


@pytest.mark.parametrize("override", ["gconfig.n_sample=8", "seed"])
def test_config_when_an_override_is_wrong_then_one_line_and_exit_2(override: str) -> None:
    refused = CliRunner().invoke(app, ["config", str(RECIPE), override])
    assert refused.exit_code == 2
    assert len(refused.stderr.splitlines()) == 1
    assert override.split("=", maxsplit=1)[0] in refused.stderr


def test_doctor_when_there_is_no_recipe_then_the_first_argument_may_be_an_override(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs"
    ran = CliRunner().invoke(app, ["doctor", f"run_root={folder}", "gconfig.top_k=20", "--json"])
    assert "gconfig.top_k 20: answers are sampled" in ran.stdout, ran.output
    assert str(folder) in ran.stdout
    refused = CliRunner().invoke(app, ["doctor", "endpoints.redis=redis://a:1", "sed=7"])
    assert refused.exit_code == 2
    assert "unknown key 'sed'" in refused.stderr
