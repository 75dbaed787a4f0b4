"""What would end a run later is refused before anything starts, in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig, build_config
from areal.errors import ArealError, CannotStart, ConfigError
from areal_launch.commands.stack import resolve_run
from areal_launch.doctor import preflight
from areal_launch.doctor.preflight import check_start

RECIPE = "def main(argv):\n    pass\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the files that are asked for; nothing reads them here."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def experiment(model: Path, tmp_path: Path, *overrides: str) -> GRPOConfig:
    paths = [f"model.path={model}", f"run_root={tmp_path / 'runs'}"]
    return build_config(GRPOConfig, None, [*paths, *overrides])


def refusal(
    config: GRPOConfig, *, will_prepare: bool = False, error: type[ArealError] = CannotStart
) -> str:
    with pytest.raises(error) as caught:
        check_start(config, will_prepare=will_prepare)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_check_when_all_is_there_then_nothing_is_made(model: Path, tmp_path: Path) -> None:
    check_start(experiment(model, tmp_path), will_prepare=False)
    assert not (tmp_path / "runs").exists()


def test_check_when_run_root_is_a_file_then_it_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    why = refusal(experiment(model, tmp_path))
    assert why.startswith(f"run_root '{tmp_path / 'runs'}': {tmp_path / 'runs'} is a file")
    assert "run_root=DIR" in why


@pytest.mark.parametrize("key", ["run_root", "weight_sync.path"])
def test_check_when_the_disk_is_full_then_refused_in_one_line(
    key: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setattr(
        preflight, "free_bytes", lambda folder: (6 if folder == small else 10_000) << 20
    )
    why = refusal(experiment(model, tmp_path, f"{key}={small}/deep/er"))
    assert why.startswith(f"{key} '{small}/deep/er': {small} has 6 MiB of free disk space")
    assert "expected at least 16 MiB" in why


def test_check_when_run_root_cannot_be_written_then_it_says_so(model: Path, tmp_path: Path) -> None:
    # No one may write there, not even root.
    why = refusal(experiment(model, tmp_path, "run_root=/proc/sys/kernel"))
    assert why == (
        "run_root '/proc/sys/kernel': this user may not write in /proc/sys/kernel; "
        "choose a folder with run_root=DIR"
    )


def test_check_when_versions_cannot_be_written_then_it_is_named(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_text("")
    why = refusal(experiment(model, tmp_path, f"weight_sync.path={tmp_path / 'weights'}"))
    assert why.startswith(f"weight_sync.path '{tmp_path / 'weights'}': ")


def test_check_when_the_tokenizer_is_missing_then_its_folder_is_named(
    model: Path, tmp_path: Path
) -> None:
    (model / "tokenizer.json").unlink()
    config = experiment(model, tmp_path)
    assert refusal(config).startswith(f"model.path '{model}': no tokenizer.json there")
    check_start(config, will_prepare=True)


def test_check_when_the_data_set_is_missing_then_its_path_is_named(
    model: Path, tmp_path: Path
) -> None:
    why = refusal(experiment(model, tmp_path, "train_dataset.path=rows.jsonl"))
    assert why.startswith("train_dataset.path 'rows.jsonl': no such file")
    check_start(experiment(model, tmp_path, "train_dataset.path=gsm8k"), will_prepare=False)


def test_check_when_the_dashboards_port_is_taken_then_it_is_named(
    model: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = experiment(model, tmp_path, f"stack.gateway_port={port}")
        assert refusal(config).startswith(f"stack.gateway_port {port}: something listens there")
    check_start(config, will_prepare=False)


def test_check_when_answers_cannot_fit_then_both_numbers_are_named(
    model: Path, tmp_path: Path
) -> None:
    config = experiment(model, tmp_path, "gconfig.max_new_tokens=100000")
    assert refusal(config, error=ConfigError) == (
        "gconfig.max_new_tokens 100000: expected less than model.context_length 4096, which prompt "
        "and answer share"
    )
    check_start(config, will_prepare=False, with_trainer=False)
    nobody_said = experiment(model, tmp_path, "model.context_length=64")
    check_start(nobody_said, will_prepare=False)


def test_resolve_when_no_experiment_file_lies_beside_then_it_is_named(tmp_path: Path) -> None:
    recipe = tmp_path / "lonely.py"
    recipe.write_text(RECIPE)
    with pytest.raises(ConfigError) as caught:
        resolve_run(recipe, None, [])
    assert str(caught.value).startswith(
        f"experiment file '{tmp_path / 'lonely.yaml'}': does not exist"
    )


def test_resolve_when_only_the_model_is_given_then_no_file_is_needed(
    model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "lonely.py"
    recipe.write_text(RECIPE)
    resolved = resolve_run(recipe, None, [f"model.path={model}"])
    assert resolved.config.model.path == str(model)


def test_check_when_the_model_is_quantized_then_its_method_is_named(
    model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    assert "quantization_config: quant_method 'gptq': expected" in refusal(
        experiment(model, tmp_path)
    )
