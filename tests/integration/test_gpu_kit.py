"""The GPU kit, tiny, on this CPU: every case gives figures, and what goes wrong is a result."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.gpu import __main__ as kit
from tools.gpu import cases, table


def tries() -> list[tuple[str, dict[str, Any]]]:
    """The last setting of each case; of `probe` all."""
    chosen = []
    for name in cases.NAMES:
        settings = cases.find(name).settings(miniature=True)
        chosen += [(name, setting) for setting in settings[0 if name == "probe" else -1 :]]
    return chosen


@pytest.mark.long
@pytest.mark.parametrize(("name", "setting"), tries(), ids=str)
def test_case_when_it_runs_in_miniature_then_it_gives_figures(
    name: str, setting: dict[str, Any]
) -> None:
    demo = Path("runs/models/arithmetic-seed0")
    there = demo.exists()
    result = kit.run_apart(name, setting, 540, miniature=True)
    assert result["outcome"] == "ok", result
    assert demo.exists() == there, "the demo would train a miniature's model"
    figures = [value for value in result.values() if isinstance(value, int | float)]
    assert len(figures) >= 2, result
    if name == "correct":
        assert result["largest"] < 1e-5
        assert result["gradient"] < 1e-5


def test_attention_when_a_kernel_is_not_there_then_the_reason_is_its_figure() -> None:
    attention = cases.find("attention")
    setting = attention.settings(miniature=True)[0]
    refused = attention.measure(setting, miniature=True)["refused"]
    assert refused.startswith("attn_impl=varlen: the device is a cpu, not a GPU")


def test_driver_when_tries_hang_fail_or_come_too_late_then_each_has_a_line(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    kit.run_all(["probe"], time.monotonic() + 60, 0.1, out, miniature=True)
    kit.run_all(["probe"], time.monotonic() - 1, 60, out, miniature=True)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["longer than 0 s"] * 3 + ["no time left"] * 3
    failed = kit.run_apart("head", {"tokens": -1, "chunk": 1}, 300, miniature=True)
    assert failed["outcome"] == "exit 1"
    assert "negative" in failed["why"] or "RuntimeError" in failed["why"]


def test_try_when_memory_runs_out_then_that_is_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def greedy(setting: object, miniature: bool) -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70 GiB.\nmore")

    monkeypatch.setattr(cases.find("head"), "measure", greedy)
    kit.run_here("head", {}, miniature=True)
    said = capsys.readouterr().out.strip()
    assert json.loads(said.removeprefix(kit.LAST_LINE)) == {
        "outcome": "out of memory",
        "why": "CUDA out of memory. Tried to allocate 70 GiB.",
    }


def test_table_when_some_was_measured_then_the_rest_says_so(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    setting = cases.find("head").settings(miniature=False)[0]
    line = {"case": "head", "setting": setting, "at": "t", "seconds": 1.0}
    rows = [
        {**line, "outcome": "ok", "ms": 9.0, "miniature": False},
        {**line, "outcome": "ok", "ms": 5.0, "peak_gib": 3.1, "miniature": False},
        {**line, "outcome": "ok", "ms": 1.0, "miniature": True},
        {**line, "case": "stack", "setting": {"steps": 20}, "outcome": "exit 1", "why": "no Redis",
         "miniature": False},
    ]  # fmt: skip
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = table.render(table.read(out))
    assert "| `head` | tokens 8192, chunk 1024 | ms 5.0 | 3.1 |" in text
    assert "| `stack` | steps 20 | **exit 1** no Redis |  |" in text
    assert "| `export` | shape qwen2.5-1.5b, dtype bfloat16 | not measured |  |" in text


def test_page_when_the_cases_change_then_its_table_has_them_all() -> None:
    page = table.PAGE.read_text().split(table.BEGIN)[1].split(table.END)[0]
    rows = [line.split(" | ")[:2] for line in page.splitlines() if line.startswith("| `")]
    wanted = [line.split(" | ")[:2] for line in table.render([]).splitlines()[2:]]
    assert rows == wanted
