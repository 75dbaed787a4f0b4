"""docs/models.md says what really happens to every architecture of transformers."""

import pytest
import torch
from tools.gen_models import (
    NOT_TRIED,
    PAGE,
    REFUSED,
    RIGHT,
    Row,
    registry,
    render,
    try_architecture,
)


def rows_of_the_page():
    results = {"Correct": RIGHT, "Refused": REFUSED, "Not tried": NOT_TRIED}
    result, rows = "", []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            result = results[line.removeprefix("## ").split(" (")[0]]
        elif line.startswith("| `"):
            model_type, architecture, *note = (
                cell.strip() for cell in line.strip("|").split(" | ")
            )
            rows.append(Row(model_type.strip("`"), architecture, result, *note))
    return rows


def test_page_when_transformers_changes_then_lists_every_architecture():
    rows = sorted(rows_of_the_page(), key=lambda row: row.model_type)
    assert {row.model_type: row.architecture for row in rows} == registry()
    assert PAGE.read_text() == render(rows)
    assert sum(row.result == RIGHT for row in rows) >= 45


# Those of the examples and of the tests' models, and one that is refused; `make test-all`: all.
TRIED = {"qwen2", "qwen3", "qwen3_moe", "llama", "gemma2", "mistral", "mamba"}


def architectures():
    return [
        pytest.param(row, marks=[pytest.mark.long] * (row.model_type not in TRIED))
        for row in rows_of_the_page()
    ]


def test_architectures_when_all_are_listed_then_those_tried_each_time_are_among_them():
    assert {row.model_type for row in rows_of_the_page()} >= TRIED


@pytest.mark.process  # some of transformers' models compile a kernel when they are imported
@pytest.mark.parametrize("row", architectures(), ids=lambda row: row.model_type)
@pytest.mark.filterwarnings("ignore")
def test_architecture_when_tried_then_is_what_the_page_says(row):
    torch.set_num_threads(1)
    assert try_architecture(row.model_type) == row
