"""Files that appear whole, and that no other user has prepared."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from areal.chassis import files
from areal.chassis.files import foreign_owner, new_folder, remove_leftovers, replacing


@pytest.fixture
def guessed(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another user has guessed the name of our next file."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0" * 2 * count)
    return "." + "{}" + ".0000000000000000.tmp"


def test_file_when_it_is_whole_then_it_replaces_the_target_and_nothing_else_is_left(
    tmp_path: Path,
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with replacing(target) as path:
        path.write_text("new")
        assert target.read_text() == "old"
        assert path.parent == tmp_path
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_file_when_its_writer_fails_then_the_target_stays_and_nothing_is_left(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def write() -> None:
        with replacing(target) as path:
            path.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_file_when_two_are_written_at_once_then_each_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    with replacing(target) as first, replacing(target) as second:
        first.write_text("first")
        second.write_text("second")
    assert target.read_text() == "first"


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "file", "folder"])
def test_file_when_its_name_was_taken_by_another_user_then_refused_and_the_other_file_is_as_it_was(
    tmp_path: Path, guessed: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "remove_leftovers", lambda _: None)  # those of others stay
    victim, target = tmp_path / "victim", tmp_path / "a.json"
    victim.write_text("mine")
    prepare(tmp_path / guessed.format("a.json"), kind, victim)
    with pytest.raises(FileExistsError), replacing(target) as path:
        path.write_text("overwritten")
    with pytest.raises(FileExistsError), new_folder(target):
        pass
    assert victim.read_text() == "mine"
    assert not target.exists()


def prepare(path: Path, kind: str, victim: Path) -> None:
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling":
        path.symlink_to(victim.with_name("nowhere"))
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "theirs").touch()
    else:
        path.write_text("theirs")


def test_file_when_its_target_is_a_link_then_the_link_is_replaced(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "a.json"
    victim.write_text("mine")
    target.symlink_to(victim)
    with replacing(target) as path:
        path.write_text("new")
    assert (target.read_text(), target.is_symlink(), victim.read_text()) == ("new", False, "mine")


def test_file_when_it_is_secret_then_no_one_else_may_read_it_at_any_time(tmp_path: Path) -> None:
    with replacing(tmp_path / "token", 0o600) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["x" * 255, "a b*?[c]", "-", "ü" * 127])
def test_file_when_its_name_is_long_or_odd_then_written(tmp_path: Path, name: str) -> None:
    with replacing(tmp_path / name) as path:
        path.write_text("new")
    assert (tmp_path / name).read_text() == "new"


def test_folder_when_it_is_whole_then_it_has_its_name_and_else_nothing_is_left(
    tmp_path: Path,
) -> None:
    with new_folder(tmp_path / "model") as path:
        (path / "config.json").write_text("{}")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "config.json").read_text() == "{}"

    def fail() -> None:
        with new_folder(tmp_path / "other") as path:
            (path / "config.json").write_text("{}")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_leftovers_when_a_writer_was_killed_then_only_its_own_are_removed(tmp_path: Path) -> None:
    kept = [".b.0123456789abcdef.tmp", ".a.json.tmp", ".a.json.0123.tmp", "a.json"]
    for name in [*kept, ".a.json.0123456789abcdef.tmp"]:
        (tmp_path / name).touch()
    (tmp_path / ".a.json.ffffffffffffffff.tmp").mkdir()
    (tmp_path / "inside").mkdir()
    (tmp_path / ".a.json.eeeeeeeeeeeeeeee.tmp").symlink_to(tmp_path / "inside")
    remove_leftovers(tmp_path / "a.json")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*kept, "inside"])


def test_owner_when_a_folder_is_a_link_a_file_or_another_users_then_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert foreign_owner(tmp_path) == ""
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "file", "fifo"):
        assert "expected a folder, not a link or a file" in foreign_owner(tmp_path / name)
    found = tmp_path.lstat()
    theirs = os.stat_result((*found[:4], 4711, *found[5:]))
    monkeypatch.setattr(Path, "lstat", lambda _: theirs)
    assert "belongs to user 4711" in foreign_owner(tmp_path)
