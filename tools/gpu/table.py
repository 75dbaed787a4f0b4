"""Tables of figures: of a run on a terminal, and in docs/gpu.md, with "not measured"."""

from __future__ import annotations

import json
import re
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


def write(lines: list[Line], page: Path = PAGE) -> None:
    """Puts these tries into the page's table; the rows of other tries stay."""
    before, rest = page.read_text().split(BEGIN)
    table, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n{render(lines, table)}\n{END}{after}")


def render(lines: list[Line], earlier: str = "") -> str:
    """Returns the page's table: a row for every try; one row for a case without any.

    Args:
        lines: From `read`.
        earlier: A table, whose rows stand for the tries that are not in `lines`.
    """
    known = {tuple(text.split(" | ")[:2]): text for text in earlier.splitlines()}
    known = {key: text for key, text in known.items() if not re.fullmatch(r"all \d+", key[-1])}
    found = {_key(line["case"], line["setting"]): line for line in lines}
    rows = ["| case | setting | figures | peak GiB |", "|---|---|---|--:|"]
    for case in plan.CASES:
        others = [line["setting"] for line in lines if line["case"] == case.name]
        settings = [*case.settings, *(each for each in others if each not in case.settings)]
        texts = {(f"| `{case.name}`", _said(each)): "" for each in settings}
        texts |= {key: text for key, text in known.items() if key[0] == f"| `{case.name}`"}
        for setting in settings:
            if line := found.get(_key(case.name, setting)):
                key = (f"| `{case.name}`", _said(setting))
                texts[key] = " | ".join([*key, _figures(line), f"{line.get('peak_gib', '')} |"])
        if not any(texts.values()):
            rows.append(f"| `{case.name}` | all {len(texts)} | not measured |  |")
            continue
        rows += [text or " | ".join([*key, "not measured", " |"]) for key, text in texts.items()]
    gpus = {f"On {line['gpu']}, torch {line['torch']}:" for line in lines if line["gpu"]}
    gpus |= {text for text in earlier.splitlines() if text.startswith("On ")}
    return "\n".join([*(f"{gpu}\n" for gpu in sorted(gpus)), *rows])


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
