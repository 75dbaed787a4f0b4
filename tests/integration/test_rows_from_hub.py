"""`load_rows("hf://…")`: the Hub's client reads its address once, so each test is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tests.hub_server import Hub, serving

SCRIPT = """
import json, sys
from areal.datasets.rows import load_rows
from areal.errors import ArealError
try:
    said = load_rows(*sys.argv[1:])
except ArealError as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
Load = Callable[..., Any]


def table(*rows: dict[str, Any]) -> bytes:
    out = BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(rows)), out)
    return out.getvalue()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({}, name="lab/sums", kind="datasets")) as server:
        yield server


@pytest.fixture
def load(hub: Hub, tmp_path: Path) -> Load:
    def run(*arguments: str, endpoint: str = "") -> Any:
        place = {"HF_ENDPOINT": endpoint or hub.url, "HF_HOME": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env=os.environ | place,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    return run


def test_rows_when_the_hub_has_them_then_only_the_files_of_the_split_are_fetched(
    hub: Hub, load: Load
) -> None:
    hub.files = {
        "main/train-00000-of-00001.parquet": table({"n": 1}),
        "main/test-00000-of-00001.parquet": table({"n": 2}),
        "hard/train-00000-of-00001.parquet": table({"n": 3}),
        "README.md": b"# Sums",
    }
    assert load("hf://lab/sums/main@v1") == [{"n": 1}]
    assert hub.fetched == ["main/train-00000-of-00001.parquet"]
    assert "several configs" in load("hf://lab/sums")


def test_rows_when_the_hub_has_another_form_then_its_own_conversion_is_read(
    hub: Hub, load: Load
) -> None:
    hub.files = {"sums.csv": b"n\n1\n"}
    hub.other_revisions["refs/convert/parquet"] = {"default/train/0000.parquet": table({"n": 1})}
    assert load("hf://lab/sums") == [{"n": 1}]
    assert "no .parquet, .jsonl or .json files" in load("hf://lab/sums@main")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://sums", "InvalidInput: dataset 'hf://sums': expected hf://org/name"),
        ("hf://lab/none", "InvalidInput: dataset hf://lab/none: not found or not accessible"),
        ("hf://lab/sums@v9", "InvalidInput: dataset hf://lab/sums@v9: not found"),
    ],
)
def test_rows_when_the_address_is_wrong_then_one_line_says_so(
    load: Load, address: str, said: str
) -> None:
    assert load(address).startswith(said)


def test_rows_when_the_hub_is_away_then_it_is_unavailable(load: Load) -> None:
    said = load("hf://lab/sums", endpoint="http://127.0.0.1:9")
    assert said.startswith("Unavailable: dataset hf://lab/sums: ")
