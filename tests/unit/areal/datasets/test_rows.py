"""Rows of files and folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from areal.datasets.rows import load_rows
from areal.errors import InvalidInput


def jsonl(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(*rows: dict[str, Any]) -> bytes:
    out = BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    def make(**files: bytes) -> Path:
        for name, content in files.items():
            file = tmp_path / "rows" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return tmp_path / "rows"

    return make


def test_folder_when_split_by_file_then_rows_in_order(folder: Callable[..., Path]) -> None:
    place = folder(
        **{
            "train-00001-of-00002.parquet": table({"n": 3}),
            "train-00000-of-00002.parquet": table({"n": 1}, {"n": 2}),
            "test.parquet": table({"n": 9}),
            "training-notes.jsonl": jsonl({"n": 0}),
        }
    )
    assert [row["n"] for row in load_rows(place)] == [1, 2, 3]
    assert load_rows(place, "test") == [{"n": 9}]
    assert load_rows(place / "test.parquet") == [{"n": 9}]


def test_folder_when_split_by_folder_and_in_two_forms_then_parquet_is_read(
    folder: Callable[..., Path],
) -> None:
    place = folder(**{"train/0.jsonl": jsonl({"n": 1}), "train/0.parquet": table({"n": 1})})
    assert load_rows(place) == [{"n": 1}]


@pytest.mark.parametrize(
    ("files", "split", "said"),
    [
        ({"a.csv": b"x"}, "train", r"no \.parquet or \.jsonl files there"),
        ({"train.jsonl": jsonl({"n": 1})}, "tset", r"no files of split 'tset' among train\.jsonl"),
        ({"train.parquet": b"PAR1"}, "train", r"train\.parquet"),
        ({"train.parquet": table()}, "train", r"has no rows"),
        (
            {"main/train.jsonl": jsonl({"n": 1}), "hard/train.jsonl": jsonl({"n": 2})},
            "train",
            r"several configs; append one of them to the name: /hard, /main",
        ),
    ],
)
def test_folder_when_it_is_not_what_was_meant_then_one_line_says_what_is_there(
    folder: Callable[..., Path], files: dict[str, bytes], split: str, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        load_rows(folder(**files), split)
    assert "\n" not in str(caught.value)


def test_folder_when_splits_share_the_beginning_of_their_names_then_they_stay_apart(
    folder: Callable[..., Path],
) -> None:
    place = folder(
        **{
            "data/train_sft-00000-of-00001.parquet": table({"n": 1}),
            "data/train_prefs-00000-of-00001.parquet": table({"n": 2}),
        }
    )
    assert load_rows(place, "train_prefs") == [{"n": 2}]
    with pytest.raises(InvalidInput, match="no files of split 'train' among"):
        load_rows(place)


def test_folder_when_configs_lie_deeper_then_they_are_not_mixed(
    folder: Callable[..., Path],
) -> None:
    place = folder(
        **{"data/en/train.jsonl": jsonl({"n": 1}), "data/de/train.jsonl": jsonl({"n": 2})}
    )
    with pytest.raises(InvalidInput, match=r"several configs.*: /de, /en"):
        load_rows(place)
