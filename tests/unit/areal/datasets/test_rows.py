"""Rows of files and folders."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from areal.datasets.rows import NoSplitError, load_rows
from areal.errors import InvalidInput
from areal_torch.models.tiny import save_tokenizer


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
        ({"a.csv": b"x"}, "train", r"no \.parquet, \.jsonl or \.json files there, only a\.csv$"),
        ({".git": b"x"}, "train", r"no \.parquet, \.jsonl or \.json files there$"),
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


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["train-00000-of-00003", "train-00002-of-00003"], "train-00001-of-00003 is missing, "),
        (["train-00001-of-00002-a09b74b3ef9c3b56"], "train-00000-of-00002 is missing, "),
        (["train-00001-of-00003"], "train-00000-of-00003, train-00002-of-00003 are missing"),
        (["train/data-0-of-2"], "data-1-of-2 is missing, expected 2 files of that name"),
        (["train-0-of-9"], "train-1-of-9, train-2-of-9, train-3-of-9, … are missing"),
        (["train-0-of-1", "train-0-of-2", "train-1-of-2"], "say -of-1 and -of-2: expected"),
        (["train-0-of-2", "train-1-of-2", "train-2-of-2"], r"3 files train-\* say -of-2, exp"),
        (["train-0-of-1", "train-00-of-01"], r"2 files train-\* say -of-0?1, expected 1"),
    ],
)
def test_folder_when_files_of_a_numbered_set_are_missing_then_they_are_named(
    folder: Callable[..., Path], names: list[str], said: str
) -> None:
    place = folder(**{f"{name}.jsonl": jsonl({"n": 1}) for name in names})
    with pytest.raises(InvalidInput, match=said):
        load_rows(place)


@pytest.mark.parametrize(
    "names",
    [
        ["train-1-of-2", "train-2-of-2", "test-0-of-4"],
        [f"train-0000{n}-of-00002-a09b74b3ef9c3b5{n}" for n in (0, 1)],
        ["train/a-0-of-1", "train/b-0-of-1"],
        ["train-0", "train-2"],
        ["train/7-of-9-tales"],
    ],
)
def test_folder_when_numbered_sets_are_whole_then_they_are_read(
    folder: Callable[..., Path], names: list[str]
) -> None:
    place = folder(**{f"{name}.jsonl": jsonl({"name": name}) for name in names})
    assert [row["name"] for row in load_rows(place)] == [n for n in names if n[:2] == "tr"]


def test_folder_when_programs_keep_copies_in_hidden_places_then_these_are_not_read(
    folder: Callable[..., Path],
) -> None:
    place = folder(
        **{
            "train.jsonl": jsonl({"n": 1}),
            ".ipynb_checkpoints/train.jsonl": jsonl({"n": 2}),
            "__pycache__/train.jsonl": jsonl({"n": 3}),
            "train/.old.jsonl": jsonl({"n": 4}),
        }
    )
    assert load_rows(place) == [{"n": 1}]


def test_folder_when_it_is_in_a_hidden_place_then_it_is_read(folder: Callable[..., Path]) -> None:
    place = folder(**{".cache/rows/train.jsonl": jsonl({"n": 1})})
    assert load_rows(place / ".cache" / "rows") == [{"n": 1}]


@pytest.mark.parametrize("inside", ["", "train/", "all/train/"])
def test_folder_when_datasets_saved_it_then_one_line_says_how_to_write_parquet(
    folder: Callable[..., Path], inside: str
) -> None:
    files = {f"{inside}{name}.json": b"{}" for name in ("state", "dataset_info")}
    place = folder(**files, **{f"{inside}data-00000-of-00001.arrow": b"x"})
    with pytest.raises(InvalidInput, match=r"save_to_disk.*dataset\.to_parquet\(") as caught:
        load_rows(place)
    assert "\n" not in str(caught.value)


def test_folder_when_datasets_saved_a_part_of_it_then_the_other_files_are_read(
    folder: Callable[..., Path],
) -> None:
    files = {f"train/{name}.json": b"{}" for name in ("state", "dataset_info")}
    place = folder(**files, **{"test.jsonl": jsonl({"n": 1})})
    assert load_rows(place, "test") == [{"n": 1}]
    with pytest.raises(InvalidInput, match="save_to_disk"):
        load_rows(place)
    with pytest.raises(NoSplitError):
        load_rows(place, "heldout")


@pytest.mark.parametrize("address", ["", " "])
def test_rows_when_the_address_is_empty_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl({"n": 1}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"dataset ' ?': expected a file, a folder or hf://"):
        load_rows(address)
    assert load_rows(".") == [{"n": 1}]


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


def test_folder_when_it_has_json_files_then_those_of_the_split_are_read(
    folder: Callable[..., Path],
) -> None:
    place = folder(
        **{
            "train.json": b'\n [{"n": 1},\n {"n": 2}]',
            "test.json": jsonl({"n": 9}),
            "dataset_infos.json": b"{}",
        }
    )
    assert load_rows(place) == [{"n": 1}, {"n": 2}]
    assert load_rows(place, "test") == load_rows(place / "test.json") == [{"n": 9}]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'[{"n": 1}, 5]', r"a\.json: row 2: expected a JSON object, got int"),
        (b'[{"n": 1}', r"a\.json: not JSON"),
        (b"[]", "has no rows"),
        (b'{\n "n": 1\n}', r"a\.json:1: not JSON"),
    ],
)
def test_json_file_when_it_is_no_array_of_rows_then_one_line_says_so(
    folder: Callable[..., Path], content: bytes, why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        load_rows(folder(**{"a.json": content}) / "a.json")


@pytest.mark.parametrize(
    "value",
    [
        {"data": [{"prompt": "a"}, {"prompt": "b"}]},
        {"prompt": ["a", "b"], "answer": ["1", "2"]},
        {"messages": [[{"role": "user", "content": "a"}]]},
        {"prompt": {"0": "a", "1": "b"}, "answer": {"0": "1", "1": "2"}},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_json_file_when_it_is_one_object_of_lists_then_refused(
    folder: Callable[..., Path], value: dict[str, Any], indent: int | None
) -> None:
    place = folder(**{"train.json": json.dumps(value, indent=indent).encode()})
    with pytest.raises(
        InvalidInput, match=r"train\.json': one object with .*expected a list of ro"
    ):
        load_rows(place)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "tags": ["b"]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"chosen": [{"role": "user", "content": "a"}], "rejected": []},
        {},
    ],
)
def test_json_file_when_it_has_one_row_then_it_is_read(
    folder: Callable[..., Path], row: dict[str, Any]
) -> None:
    place = folder(**{"a.json": jsonl(row), "b.jsonl": jsonl({"x": [1]})})
    assert load_rows(place / "a.json") == [row]
    assert load_rows(place / "b.jsonl") == [{"x": [1]}]
    (place / "a.json").write_bytes(jsonl({"x": [1]}, {"x": [2]}))
    assert load_rows(place / "a.json") == [{"x": [1]}, {"x": [2]}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        # mtime: the content is part of the test's ID, which must be the same in every worker
        ("a.jsonl.gz", gzip.compress(jsonl({"n": 1}), mtime=0), "gzip"),
        ("a.jsonl", gzip.compress(jsonl({"n": 1}), mtime=0), "gzip"),
        ("a.jsonl", table({"n": 1}), r"Parquet \(name it \.parquet\)"),
        ("data.arrow", b"\xff\xff\xff\xff\x10\x00", "Arrow"),
        ("a.jsonl", jsonl({"n": 1}).decode().encode("utf-16"), "UTF-16"),
        ("a.jsonl", jsonl({"n": 1}).decode().encode("utf-16-le"), "UTF-16"),
        ("a.json", b'[{"n": "\xe9"}]', "text in another encoding than UTF-8"),
        (
            "a.jsonl",
            jsonl({"n": 1}) + b'{"n": "\xe9"}',
            r"a\.jsonl:2: .*another encoding than UTF-8",
        ),
        ("a.csv", b"prompt,answer\na,1\n", "CSV"),
        ("a.tsv", b"prompt\tanswer\na\t1\n", "CSV"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        ("a.parquet", gzip.compress(b"x", mtime=0), "gzip"),
    ],
)
def test_file_when_it_has_another_format_then_the_line_says_which(
    folder: Callable[..., Path], name: str, content: bytes, said: str
) -> None:
    read = "expected Parquet, JSON Lines or JSON, in UTF-8"
    with pytest.raises(InvalidInput, match=f"{said}.*{read}") as caught:
        load_rows(folder(**{name: content}) / name)
    assert "\n" not in str(caught.value)


ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": "a\u2028b\u0085c\x0b\x0c\x1c\x1d\x1e\u2029d"},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": {"town": "Oslo"}}}],
            },
            {"role": "tool", "content": "5", "name": "f"},
            {
                "role": "assistant",
                "content": "ok",
                "tool_calls": [{"function": {"name": "g", "arguments": {"n": [1, None]}}}],
            },
        ],
        "answer": 7,
    },
    {"messages": [{"role": "user", "content": "é数"}], "tools": [{"name": "f"}], "answer": 8},
]


def test_parquet_when_it_pads_then_its_rows_equal_those_of_the_jsonl(
    folder: Callable[..., Path],
) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
    keys = {key for row in ROWS for key in row}
    padded = [{key: row.get(key) for key in keys} for row in ROWS]
    place = folder(**{"a.jsonl": lines, "a.parquet": table(*padded)})
    assert load_rows(place / "a.jsonl") == load_rows(place / "a.parquet") == ROWS


def test_parquet_when_it_has_maps_then_they_are_objects(folder: Callable[..., Path]) -> None:
    out, kind = BytesIO(), pa.map_(pa.string(), pa.int64())
    parquet.write_table(pa.table({"m": pa.array([[("a", 1)], []], kind)}), out)
    place = folder(**{"a.parquet": out.getvalue()})
    assert load_rows(place / "a.parquet") == [{"m": {"a": 1}}, {"m": {}}]


def test_jsonl_when_an_integer_is_long_then_it_stays_one(folder: Callable[..., Path]) -> None:
    rows = [{"n": 2**64}, {"n": -(2**63) - 1}, {"n": [10**60], "id": "9" * 30}, {"x": 1e30}]
    assert load_rows(folder(**{"a.jsonl": jsonl(*rows)}) / "a.jsonl") == rows


def test_files_when_the_locale_is_not_utf_8_then_text_is_the_same(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("é{{ messages[0].content }}", "utf-8")
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "数"}]}', "utf-8")
    code = (
        "from pathlib import Path; from areal.tokenizer import Tokenizer\n"
        "from areal.datasets.rows import load_rows\n"
        f"place = Path({str(tmp_path)!r}); [row] = load_rows(place / 'a.jsonl')\n"
        "assert Tokenizer.load(place).render_chat(row['messages']) == '\\u00e9\\u6570'\n"
    )
    services = Path(__file__).parents[4] / "services"
    env = {
        "PYTHONPATH": str(services),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=60)


def test_parquet_when_a_single_file_has_no_rows_then_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"question": pa.array([], pa.string())}), file)
    with pytest.raises(InvalidInput, match="has no rows"):
        load_rows(file)


def test_parquet_when_a_row_has_no_value_then_its_number_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"prompt": ["a", None], "answer": ["1", None]}), file)
    with pytest.raises(
        InvalidInput, match=r"rows\.parquet: row 2: null in each column .prompt, answer"
    ):
        load_rows(file)
