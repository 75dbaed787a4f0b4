"""Secrets of a stack: in files of their owner, nowhere else."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig, build_config, save_config
from areal.security import Security
from areal_launch.processes.process import child_environment
from areal_launch.run_folder import RunFolder, remove_secrets
from areal_launch.stack.plan import plan_stack
from areal_launch.stack.secret_files import place_secrets

TOKEN = "correct-horse-battery-staple"


def make(tmp_path: Path, *overrides: str) -> tuple[GRPOConfig, RunFolder]:
    config = build_config(GRPOConfig, None, [f"run_root={tmp_path}", *overrides])
    return config, RunFolder(config.run_dir)


def test_secrets_when_none_is_given_then_the_stack_has_its_own_and_each_start_others(
    tmp_path: Path,
) -> None:
    config, folder = make(tmp_path)
    plan = plan_stack(config, folder, with_trainer=True)
    security = Security.load(plan.config.security)
    secrets = {security.token, security.redis_password, security.nats_token}
    assert {len(secret) for secret in secrets} == {43}
    assert len(secrets) == 3
    assert plan.config.security.token_file in plan.inference[0].argv
    assert config.security.token_file == "", "the caller's config is left as it was"
    again = Security.load(plan_stack(config, folder, with_trainer=True).config.security)
    assert again.token not in secrets


def test_secrets_when_a_job_will_make_them_then_none_is_left_in_the_folder(tmp_path: Path) -> None:
    config, folder = make(tmp_path)
    assert place_secrets(config, folder, make_token=False) == Security()
    assert not folder.secrets.exists()


def test_secrets_when_in_the_environment_then_in_private_files_that_the_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_TOKEN", TOKEN)
    config, folder = make(tmp_path)
    plan = plan_stack(config, folder, with_trainer=True)
    monkeypatch.delenv("AREAL_TOKEN")
    security = Security.load(plan.config.security)
    assert security.token == TOKEN
    assert len(security.redis_password) == len(security.nats_token) == 43
    assert security.redis_password != security.nats_token
    assert stat.S_IMODE(folder.secrets.stat().st_mode) == 0o700
    names = {file.name for file in folder.secrets.iterdir()}
    assert names == {"token", "redis-password", "nats-token", "redis.conf", "nats.conf"}
    for file in folder.secrets.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    save_config(plan.config, folder.config_file)
    everything = [*plan.stores, *plan.inference, *plan.services, plan.trainer]
    written = folder.config_file.read_text() + "".join(str(spec) for spec in everything)
    for secret in (TOKEN, security.redis_password, security.nats_token):
        assert secret not in written
    remove_secrets(folder)
    assert not folder.secrets.exists()


def test_secrets_when_the_folder_is_the_users_then_the_run_has_a_copy_until_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/token").write_text(TOKEN)
    config, folder = make(tmp_path, "security.dir=own", "endpoints.redis=redis://elsewhere:6379/0")
    security = place_secrets(config, folder)
    assert config.security.dir == str(folder.secrets.resolve()), "absolute"
    assert (security.token, security.redis_password) == (TOKEN, ""), "not ours to choose"
    assert len(security.nats_token) == 43
    assert [file.name for file in Path("own").iterdir()] == ["token"]


def test_secrets_when_a_file_lies_there_open_then_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_TOKEN", TOKEN)
    config, folder = make(tmp_path)
    folder.secrets.mkdir(parents=True)
    (folder.secrets / "token").write_text("longer than what will be written there: " + TOKEN)
    (folder.secrets / "token").chmod(0o644)
    place_secrets(config, folder)
    assert (folder.secrets / "token").read_text() == TOKEN + "\n"
    assert stat.S_IMODE((folder.secrets / "token").stat().st_mode) == 0o600


def test_children_when_started_then_their_environment_has_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AREAL_TOKEN", "AREAL_REDIS_PASSWORD", "AREAL_NATS_TOKEN"):
        monkeypatch.setenv(name, TOKEN)
    assert TOKEN not in child_environment("stack", "buffer", {}).values()
