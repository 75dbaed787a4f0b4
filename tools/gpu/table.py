"""Tables of figures: of a run on a terminal, and in docs/gpu.md, with "not measured"."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tools.gpu import plan

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
LONGEST = 12_000
_NOT_FIGURES = {
    *("case", "setting", "outcome", "at", "gpu", "torch", "miniature", "seconds"),
    *("why", "frames", "peak_gib"),
    *("kernels_ms", "operators_ms"),  # too long for a table
}

Line = dict[str, Any]


def read(file: Path) -> list[Line]:
    """Returns the lines of a run: the last of each try, without miniatures."""
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
    """Returns the page's table: a row for every try; one row for a case without any."""
    found = {_key(line["case"], line["setting"]): line for line in lines}
    rows = ["| case | setting | figures | peak GiB |", "|---|---|---|--:|"]
    for case in plan.CASES:
        others = [line["setting"] for line in lines if line["case"] == case.name]
        settings = [*case.settings, *(each for each in others if each not in case.settings)]
        tries = [(setting, found.get(_key(case.name, setting))) for setting in settings]
        if not any(line for _, line in tries):
            rows.append(f"| `{case.name}` | all {len(tries)} | not measured |  |")
            continue
        for setting, line in tries:
            peak = (line or {}).get("peak_gib", "")
            rows.append(f"| `{case.name}` | {_said(setting)} | {_figures(line)} | {peak} |")
    gpus = sorted({f"{line['gpu']}, torch {line['torch']}" for line in lines if line["gpu"]})
    return "\n".join([*(f"On {gpu}:\n" for gpu in gpus), *rows])


def row(line: Line, tries: int) -> str:
    """Returns a try's row for a terminal; the rows of `tries` have at most 12,000 characters."""
    said = f"{line['case']:<10} {line['seconds']:>5.1f} s  {_said(line['setting'])}: "
    return f"{said}{_figures(line)}"[: (LONGEST - 200) // tries - 1]


def count(lines: list[Line]) -> str:
    """Returns how many tries had each outcome."""
    counts = Counter(line["outcome"] for line in lines)
    return f"{len(lines)} tries: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items())


def _said(setting: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in setting.items())


def _figures(line: Line | None) -> str:
    if line is None:
        return "not measured"
    if line["outcome"] != "ok":
        return f"**{line['outcome']}** {line.get('why', '')}".strip()
    kept = {key: value for key, value in line.items() if key not in _NOT_FIGURES}
    return ", ".join(f"{key} {value}" for key, value in kept.items()).replace("|", "/")


def _key(name: str, setting: dict[str, Any]) -> str:
    return f"{name} {json.dumps(setting, sort_keys=True)}"
