"""Control groups of boxes, in folders that stand for the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import CannotStart
from areal.protocol.boxes import Limits
from areal.sandbox import groups
from areal.sandbox.groups import Group, delegated


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """A tree in which this process is in the group user/run."""
    place = tmp_path / "mount" / "user" / "run"
    place.mkdir(parents=True)
    (place / "cgroup.controllers").write_text("cpu memory pids\n")
    (place / "cgroup.procs").write_text("1\n2\n")
    (tmp_path / "own").write_text("4:memory:/x\n0::/user/run\n")
    return tmp_path / "mount"


def mark(monkeypatch: pytest.MonkeyPatch, *marked: Path) -> None:
    def getxattr(path: Path, name: str) -> bytes:
        assert name == "user.delegate"
        if path not in marked:
            raise OSError("no such attribute")
        return b"1"

    monkeypatch.setattr(groups.os, "getxattr", getxattr, raising=True)


def test_group_when_it_is_not_marked_as_delegated_then_boxes_get_none(mount, monkeypatch) -> None:
    mark(monkeypatch)
    assert delegated(mount, mount.parent / "own") is None


@pytest.mark.parametrize("own", ["0::/user/run", "4:x:/y\n0::/user/run/areal"])
def test_group_when_it_is_delegated_then_boxes_get_groups_in_it(mount, monkeypatch, own) -> None:
    mark(monkeypatch, mount / "user" / "run")
    (mount.parent / "own").write_text(own)
    assert delegated(mount, mount.parent / "own") == mount / "user" / "run"


@pytest.mark.parametrize("missing", ["own", "mount", "pids"])
def test_group_when_the_machine_has_no_such_groups_then_boxes_get_none(
    mount, monkeypatch, missing
) -> None:
    place = mount / "user" / "run"
    mark(monkeypatch, place)
    if missing == "own":
        (mount.parent / "own").write_text("4:memory:/x\n")
    elif missing == "mount":
        (place / "cgroup.controllers").unlink()
    else:
        (place / "cgroup.controllers").write_text("memory\n")
    assert delegated(mount, mount.parent / "own") is None


def test_box_when_it_has_a_group_then_its_limits_are_written_there(mount) -> None:
    place = mount / "user" / "run"
    (place / "areal").mkdir()
    group = Group(place)
    assert (place / "areal" / "cgroup.procs").read_text() == "2"
    assert (place / "cgroup.subtree_control").read_text() == "+memory +pids"
    group.limit(Limits(memory_mb=100, disk_mb=10, processes=5))
    assert int((group.path / "memory.max").read_text()) == (100 + 2 * 10 + 64) << 20
    assert int((group.path / "pids.max").read_text()) == 5 + 8
    (group.path / "memory.events").write_text("oom 3\noom_kill 2\noom_group_kill 1\n")
    assert group.killed() == 2
    assert group.enter(["true"])[-2:] == [str(group.path), "true"]


def test_box_when_the_kernel_refuses_its_group_then_the_error_names_it(mount) -> None:
    place = mount / "user" / "run"
    (place / "cgroup.procs").unlink()
    with pytest.raises(CannotStart, match=f"cgroup {place}: expected a delegated group"):
        Group(place)
