"""What a run writes is its owner's, in folders that all users share, too."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from areal.errors import ConfigError
from areal_launch.processes import free_ports
from areal_launch.processes.free_ports import PortPicker
from areal_launch.run_folder import RunFolder
from areal_launch.stack.secret_files import write_secret


@pytest.mark.parametrize(
    ("state", "processes", "expected"),
    [
        ("ready", {"trainer": {}}, [10.0, 50.0]),
        ("stopping", {"trainer": {}}, [10.0, 50.0]),
        ("stopped", {"trainer": {}}, [10.0]),
        ("failed", {"trainer": {}}, [10.0]),
        ("ready", {"buffer": {}}, [10.0]),  # `areal up`
    ],
)
def test_killed_when_the_last_stack_was_not_stopped_then_its_start_is_kept(
    tmp_path: Path, state: str, processes: dict[str, object], expected: list[float]
) -> None:
    folder = RunFolder(tmp_path)
    assert folder.killed() == []
    content = {"state": state, "started": 50.0, "killed": [10.0], "processes": processes}
    folder.write_stack(content)
    assert folder.killed() == expected


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_run_folder_when_made_then_only_its_owner_may_enter_unless_servers_of_others_read_it(
    tmp_path: Path, shared: bool, mode: int
) -> None:
    before = os.umask(0o022)
    try:
        folder = RunFolder(tmp_path / "runs" / "experiment" / "trial")
        folder.make(shared=shared)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == mode
    folder.path.chmod(0o750)  # its owner's choice
    os.close(folder.lock())
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o750


def test_run_folder_when_a_lock_is_the_first_to_need_it_then_private_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    os.close(folder.lock())
    assert stat.S_IMODE(folder.path.stat().st_mode) & 0o077 == 0


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of locks, in a temporary folder that all users share."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"areal-ports-{os.getuid()}"
    folder.mkdir(mode=0o700)
    return folder


def ports(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    monkeypatch.setattr(free_ports, "port_is_free", lambda port: port in free)


def test_port_when_its_lock_is_a_fifo_then_it_is_promised_without_waiting(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports(monkeypatch, 20_100)
    os.mkfifo(shared_folder / "20100")
    assert PortPicker({"redis": 20_100}).pick("redis") == 20_100


def test_port_when_its_lock_is_a_link_then_the_other_file_is_not_touched(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports(monkeypatch, 20_100)
    victim = shared_folder.parent / "victim"
    (shared_folder / "20100").symlink_to(victim)
    assert PortPicker({"redis": 20_100}).pick("redis") == 20_100
    assert not victim.exists()


def test_port_when_the_folder_of_locks_leads_elsewhere_then_nothing_is_written_there(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports(monkeypatch, 20_100)
    elsewhere = shared_folder.parent / "elsewhere"
    elsewhere.mkdir()
    shared_folder.rmdir()
    shared_folder.symlink_to(elsewhere)
    assert PortPicker({"redis": 20_100}).pick("redis") == 20_100
    assert not list(elsewhere.iterdir())


def test_port_when_promised_then_no_other_picker_gets_it_until_it_is_closed(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports(monkeypatch, 20_100, 20_101)
    first, second, third = (PortPicker({"redis": 20_100}) for _ in range(3))
    assert first.pick("redis") == 20_100
    assert second.pick("redis") == 20_101
    first.close()
    assert third.pick("redis") == 20_100


def test_secret_when_its_folder_leads_elsewhere_then_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", RunFolder(tmp_path / "run")
    for each in (elsewhere, folder.path):
        each.mkdir()
    folder.secrets.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="expected a folder, not a link"):
        write_secret(folder, "token", "0123456789abcdef")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_secret_when_its_name_is_taken_then_it_is_in_a_new_file(tmp_path: Path, kind: str) -> None:
    folder, victim = RunFolder(tmp_path), tmp_path / "victim"
    victim.write_text("theirs")
    folder.secrets.mkdir(mode=0o700)
    file = folder.secrets / "token"
    if kind == "link":
        file.symlink_to(victim)
    else:
        os.mkfifo(file)
    assert write_secret(folder, "token", "0123456789abcdef") == file
    assert (file.read_text(), victim.read_text()) == ("0123456789abcdef\n", "theirs")
    assert stat.S_ISREG(file.lstat().st_mode)
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
