"""How a stack's own stores are started."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from areal_launch.run_folder import RunFolder
from areal_launch.stack.stores import nats_spec, redis_spec


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
