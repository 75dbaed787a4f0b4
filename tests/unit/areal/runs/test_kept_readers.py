"""Kept rollouts and exports in pandas, DuckDB and datasets, each where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from tests.unit.areal.runs.test_kept_rollouts import group, keep, kept_run, writer_of

from areal.runs.rollouts.records import file_name
from areal_launch.commands.rollouts import export

IDS = [1, 2, 3, 65, 66]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three steps of two ranks; those of the first were written before there was `parts`."""
    for rank in (0, 1):
        writer = writer_of(tmp_path, rank)
        for step in (1, 2, 3):
            one = group(f"s{step}r{rank}", 1.0, 0.0)
            one.trajectories[0].reward_parts["correct"] = 0.5 * step
            keep(writer, step, one)
        writer.close()
        old = tmp_path / "rollouts" / file_name(1, rank)
        parquet.write_table(parquet.read_table(old, partitioning=None).drop_columns("parts"), old)
    (tmp_path / "rollouts" / f".{file_name(4, 0)}.tmp").write_bytes(b"half a file")
    return tmp_path / "rollouts"


def test_pandas_when_it_opens_the_folder_then_each_trajectory_is_a_row(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = pandas.read_parquet(folder)
    assert len(table) == 12
    assert table.groupby("step").size().to_dict() == {1: 4, 2: 4, 3: 4}
    assert list(table["input_ids"][0]) == IDS
    newest = pandas.read_parquet(folder / file_name(3, 0))
    assert [dict(part) for part in newest["parts"][0]] == [{"name": "correct", "value": 1.5}]


def test_duckdb_when_it_asks_the_files_then_rewards_and_parts_are_there(folder: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    files = f"read_parquet('{folder}/*.parquet', union_by_name=true)"
    rows = duckdb.sql(
        f"select step, sum(reward), count(parts[1].value) from {files} group by step order by step"
    ).fetchall()
    assert rows == [(1, 2.0, 0), (2, 2.0, 2), (3, 2.0, 2)]
    query = f"select input_ids, loss_mask from '{folder}/*.parquet' order by trajectory_id limit 1"
    assert duckdb.sql(query).fetchall() == [(IDS, [False] * 3 + [True] * 2)]


def test_datasets_when_it_loads_the_folder_then_lists_are_lists(
    folder: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    if not hasattr(datasets, "load_dataset"):  # a folder of tests of that name
        pytest.skip("datasets is not installed")
    files = [str(folder / file_name(step, rank)) for step in (2, 3) for rank in (0, 1)]
    rows = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(rows) == 8
    assert rows[0]["input_ids"] == IDS
    assert rows[0]["parts"] == [{"name": "correct", "value": 1.0}]
    assert rows[1]["parts"] == []


KINDS = {"rows": 6, "sft": 2, "preferences": 2}


@pytest.fixture(params=[(kind, suffix) for kind in KINDS for suffix in (".parquet", ".jsonl")])
def exported(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Path]:
    """(kind, file) of `areal export`."""
    kind, suffix = request.param
    to = tmp_path / f"out{suffix}"
    assert export(str(kept_run(tmp_path, tiny_model)), to, kind, None, None) == 0
    return kind, to


def check_rows(kind: str, rows: list[dict[str, Any]]) -> None:
    """What every reader must find."""
    assert len(rows) == KINDS[kind]
    if kind == "rows":
        assert [row["task_id"] for row in rows] == [*["even"] * 2, *["odd"] * 2, *["late"] * 2]
        assert [float(row["reward"]) for row in rows] == [1.0, 1.0, 0.0, 1.0, 0.25, 0.75]
        assert list(rows[3]["input_ids"]) == [1, 2, 3, 66, 66]
        assert rows[3]["response"] == "BB"
    elif kind == "sft":
        assert [row["completion"] for row in rows] == ["BB", "BB"]
    else:
        assert [(row["chosen"], row["rejected"]) for row in rows] == [("BB", "AB")] * 2


def test_export_when_pandas_opens_it_then_each_row_is_there(exported: tuple[str, Path]) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    kind, file = exported
    parquet_file = file.suffix == ".parquet"
    table = pandas.read_parquet(file) if parquet_file else pandas.read_json(file, lines=True)
    check_rows(kind, table.to_dict("records"))


def test_export_when_duckdb_opens_it_then_each_row_is_there(exported: tuple[str, Path]) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    kind, file = exported
    found = duckdb.sql(f"from '{file}'")
    check_rows(kind, [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()])


def test_export_when_datasets_loads_it_then_each_row_is_there(
    exported: tuple[str, Path], tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    if not hasattr(datasets, "load_dataset"):  # a folder of tests of that name
        pytest.skip("datasets is not installed")
    kind, file = exported
    reader = "parquet" if file.suffix == ".parquet" else "json"
    rows = datasets.load_dataset(
        reader, data_files=[str(file)], split="train", cache_dir=str(tmp_path / "cache")
    )
    check_rows(kind, list(rows))
