"""Writes the figures of a run into docs/gpu.md: a row per try, or "not measured"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.gpu import cases

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_NOT_FIGURES = {"case", "setting", "outcome", "at", "miniature", "seconds", "why", "peak_gib"}

Line = dict[str, Any]


def read(file: Path) -> list[Line]:
    """Return the lines of a run: the last of each try, without miniatures."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = {_key(line["case"], line["setting"]): line for line in lines if not line["miniature"]}
    return list(last.values())


def write(lines: list[Line]) -> None:
    """Replaces the table of the page."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{render(lines)}\n{END}{after}")


def render(lines: list[Line]) -> str:
    """Return the table: a row for every try of every case."""
    found = {_key(line["case"], line["setting"]): line for line in lines}
    rows = ["| case | setting | figures | peak GiB |", "|---|---|---|--:|"]
    for name in cases.NAMES:
        for setting in cases.find(name).settings(miniature=False):
            line = found.get(_key(name, setting))
            said = ", ".join(f"{key} {value}" for key, value in setting.items())
            rows.append(f"| `{name}` | {said} | {_figures(line)} | {_peak(line)} |")
    return "\n".join(rows)


def _figures(line: Line | None) -> str:
    if line is None:
        return "not measured"
    if line["outcome"] != "ok":
        return f"**{line['outcome']}** {line.get('why', '')}".strip()
    kept = {key: value for key, value in line.items() if key not in _NOT_FIGURES}
    return ", ".join(f"{key} {value}" for key, value in kept.items())


def _peak(line: Line | None) -> str:
    return str(line.get("peak_gib", "")) if line else ""


def _key(name: str, setting: dict[str, Any]) -> str:
    return f"{name} {json.dumps(setting, sort_keys=True)}"
