"""Kept rollouts beside versions in an object store, against a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tests.s3_server import BUCKET, S3Server, start_s3, use
from tests.unit.areal.runs.test_kept_discarded import EQUAL, discard
from tests.unit.areal.runs.test_kept_rollouts import group, keep

from areal.config.services import rollouts_url
from areal.errors import NotFound
from areal.runs.rollouts.records import discarded_name, file_name, step_of
from areal.runs.rollouts.writer import RolloutWriter
from areal.weights.objects import ObjectStore
from areal.weights.publisher import TransportError
from areal_launch.commands.rollouts import export, show

URL = f"s3://{BUCKET}/arithmetic/seed-1"


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with start_s3(tmp_path / "s3", monkeypatch) as server:
        yield server


def read(store: ObjectStore, name: str) -> bytes:
    import obstore

    return bytes(obstore.get(store._client, name).bytes())


def test_rollouts_when_versions_are_in_a_store_then_each_file_is_copied_and_deleted_with_it(
    s3: S3Server, tmp_path: Path
) -> None:
    url = rollouts_url(URL)
    store = ObjectStore(url)
    writer = RolloutWriter(tmp_path / "rollouts", 0, 1 << 30, "", mirror=url)
    for step in (1, 2, 3):
        keep(writer, step, group(f"t{step}", 1.0))
        discard(writer, step, [EQUAL])
    writer.close()
    local = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert sorted(store.files()) == local
    assert len(local) == 6
    for name in (file_name(3, 0), discarded_name(3)):
        (tmp_path / name).write_bytes(read(store, name))
        whole = parquet.read_table(tmp_path / name, partitioning=None)
        assert whole == parquet.read_table(tmp_path / "rollouts" / name, partitioning=None)
    ObjectStore(URL).put("v00000001-inc1/x", b"")  # versions are not touched
    after = RolloutWriter(tmp_path / "rollouts", 0, 1, "", mirror=url)
    after.resume(2)
    assert {step_of(name) for name in store.files()} == {1, 2}
    keep(after, 3, group("t3", 1.0))
    after.close()
    assert store.files() == [file_name(3, 0)]  # only one step may stay
    assert ObjectStore(URL).files() == ["v00000001-inc1/x"]


def test_show_and_export_when_given_the_copies_then_as_from_the_run_folder(
    s3: S3Server, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = rollouts_url(URL)
    run = tmp_path / "runs" / "x" / "y"
    (run / "rollouts").mkdir(parents=True)
    (run / "stack.json").write_text("{}")
    writer = RolloutWriter(run / "rollouts", 0, 1 << 30, str(tiny_model), mirror=url)
    for step in (1, 2):
        keep(writer, step, group(f"t{step}", 0.0, 1.0))
        discard(writer, step, [EQUAL])
    writer.close()

    def shown(where: str, **asked: Any) -> str:
        assert show(where, asked.pop("task_id", ""), None, as_json=True, **asked) == 0
        return capsys.readouterr().out

    for asked in ({}, {"discarded": True}, {"task_id": "t1"}):
        assert shown(url, **asked) == shown(str(run), **asked)
    assert '"t2"' in shown(url)
    for name in ("log.json", "all.jsonl"):
        for where in (url, str(run)):
            folder = tmp_path / ("copies" if where == url else "run")
            kind = "inspect" if name == "log.json" else "rows"
            assert export(where, folder / name, kind, None, None) == 0
    copied, kept = (
        json.loads((tmp_path / of / "log.json").read_text()) for of in ("copies", "run")
    )
    assert copied["samples"] == kept["samples"]
    assert (copied["eval"]["task"], copied["eval"]["run_id"]) == (
        "arithmetic",
        "arithmetic/seed-1-rollouts",
    )
    assert (tmp_path / "copies" / "all.jsonl").read_text() == (
        tmp_path / "run" / "all.jsonl"
    ).read_text()
    with pytest.raises(NotFound, match=f"'{URL}': no rollouts"):
        show(URL, "", None, as_json=True)
    with pytest.raises(TransportError, match="s3://no-such-bucket/x"):
        show("s3://no-such-bucket/x", "", None, as_json=True)


def test_rollouts_when_the_store_refuses_then_the_run_folder_has_them(
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(monkeypatch, s3.endpoint, ("AKIAWRONG", "wrong-secret"))
    writer = RolloutWriter(tmp_path / "rollouts", 0, 1 << 30, "", mirror="s3://no-such-bucket/x")
    writer.resume(0)
    keep(writer, 1, group("a", 1.0))
    writer.close()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == [file_name(1, 0)]
    assert "".join(capsys.readouterr()).count("rollouts_not_copied") == 1
