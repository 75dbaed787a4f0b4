"""Kept rollouts in pandas, DuckDB and datasets, each where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet
from tests.unit.areal.training.test_kept_rollouts import group, keep, writer_of

from areal.training.rollouts.records import file_name

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
