"""`areal token`: what a browser's form or curl is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal.config.experiment import GRPOConfig, build_config, save_config
from areal.errors import ConfigError, NotFound
from areal_launch.commands.inspect import show_token
from areal_launch.run_folder import RunFolder, remove_secrets
from areal_launch.stack.plan import plan_stack


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a stack that was started without settings, as its launcher leaves it."""
    config = build_config(GRPOConfig, None, [f"run_root={tmp_path / 'runs'}"])
    folder = RunFolder(config.run_dir)
    plan = plan_stack(config, folder, with_trainer=False)
    save_config(plan.config, folder.config_file)
    folder.write_stack({"state": "ready"})
    return folder


@contextmanager
def running(folder: RunFolder) -> Iterator[None]:
    descriptor = folder.lock()
    try:
        yield
    finally:
        os.close(descriptor)


def test_token_when_the_stack_runs_then_it_alone_is_printed(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(folder):
        assert show_token(folder.path) == 0
    printed = capsys.readouterr().out
    assert printed == (folder.secrets / "token").read_text()
    assert len(printed.strip()) >= 32


def test_token_when_no_run_is_named_then_that_of_the_running_one(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.path.parents[2])
    with running(folder):
        assert show_token(None) == 0
    assert capsys.readouterr().out == (folder.secrets / "token").read_text()


def test_token_when_the_stack_does_not_run_then_one_line_that_says_so(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFound, match="not running, and each start generates a new token"):
        show_token(folder.path)
    assert capsys.readouterr().out == ""


def test_token_when_its_file_is_gone_then_it_is_named(folder: RunFolder) -> None:
    remove_secrets(folder)
    with running(folder), pytest.raises(ConfigError, match=r"security\.dir '.*secrets'"):
        show_token(folder.path)


def test_token_when_the_stack_has_none_then_said(folder: RunFolder) -> None:
    config = build_config(GRPOConfig, None, [f"run_root={folder.path.parents[1]}"])
    save_config(config, folder.config_file)
    with running(folder), pytest.raises(NotFound, match="requires no token"):
        show_token(folder.path)
