"""Two evaluations of the same rows: the difference of their rewards, row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import orjson

from areal.runs.run_files import last_evaluations, write_atomically
from areal_launch.run_folder import RunFolder
from areal_launch.view.output import print_event, print_table, say
from areal_launch.view.summary import read_results

SHOWN = 10
"""Rows that are printed: those that differ most."""
_ASKED = ("prompt", "question", "problem", "instruction", "input", "messages")


@dataclass(frozen=True)
class RowDifference:
    """Mean rewards of one row's answers."""

    row: int
    """Index of the row in the evaluation, from 0."""
    data: dict[str, Any]
    first: float
    second: float

    @property
    def difference(self) -> float:
        return self.first - self.second


@dataclass(frozen=True)
class Differences:
    """Compares the rows for which both evaluations have a reward."""

    name: str
    rows: list[RowDifference]
    left_out: int
    """Rows that failed in one of them, or are not the same row in both."""

    def figures(self) -> dict[str, Any]:
        """Returns the paired difference, its standard error (0 for one row), and counts of rows."""
        each = [row.difference for row in self.rows]
        return {
            "name": self.name,
            "mean": fmean(each) if each else None,
            "stderr": stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0,
            "rows": len(each),
            "higher": sum(one > 0 for one in each),
            "lower": sum(one < 0 for one in each),
            "left_out": self.left_out,
        }


def compare(first: Path, second: Path) -> list[Differences]:
    """Pairs the rows of evaluations that two run folders have under the same name."""
    ones, others = _files(first), _files(second)
    return [_pair(name, ones[name], others[name]) for name in ones if name in others]


def _files(folder: Path) -> dict[str, Path]:
    results = read_results(RunFolder(folder).trainer_file)
    return {
        name: folder / "evaluations" / f"{name}-v{each['step']}.jsonl"
        for name, each in last_evaluations(results).items()
    }


def _pair(name: str, first: Path, second: Path) -> Differences:
    ones, others = _rows(first), _rows(second)
    rows = [
        RowDifference(index, data, reward, others[index][1])
        for index, (data, reward) in sorted(ones.items())
        if index in others and others[index][0] == data
    ]
    return Differences(name, rows, len(ones.keys() | others.keys()) - len(rows))


def _rows(file: Path) -> dict[int, tuple[dict[str, Any], float]]:
    """Returns data and mean reward of each row that did not fail, by index."""
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    return {
        int(line["task_id"].rpartition("-")[2]): (
            line["data"],
            fmean([one["reward"] for one in line["answers"]] or [0.0]),
        )
        for line in lines
        if "failed" not in line
    }


def print_differences(first: tuple[str, Path], second: tuple[str, Path], *, as_json: bool) -> None:
    """Prints each evaluation's difference, and writes all rows beside the first one's answers.

    Args:
        first: What was evaluated, and its run folder.
        second: What it is compared with.
        as_json: Whether to print a line of JSON each.
    """
    (one, folder), (other, _) = first, second
    for found in compare(folder, second[1]):
        figures = found.figures()
        file = folder / "evaluations" / f"{found.name}-against-{other}.jsonl"
        lines = [{**vars(row), "difference": row.difference} for row in found.rows]
        write_atomically(file, b"".join(orjson.dumps(line) + b"\n" for line in lines))
        if as_json:
            print_event("difference", checkpoint=one, against=other, file=str(file), **figures)
            continue
        say(f"\n{_headline(found.name, one, other, figures)}\nall rows: {file}")
        moved = sorted(found.rows, key=lambda row: -abs(row.difference))[:SHOWN]
        moved = [row for row in moved if row.difference]
        if moved:
            print_table(
                ("row", one, other, "difference", "asks"),
                [
                    (
                        *(str(row.row), f"{row.first:z.3f}", f"{row.second:z.3f}"),
                        *(f"{row.difference:+z.3f}", _asked(row.data)),
                    )
                    for row in moved
                ],
            )


def _headline(name: str, one: str, other: str, figures: Mapping[str, Any]) -> str:
    if not figures["rows"]:
        return f"{name}: {one} and {other} have no row in common with a reward in both"
    left_out = figures["left_out"]
    more = f"; left out: {left_out}, failed or not the same in both" if left_out else ""
    return (
        f"{name}: {one} - {other} = {figures['mean']:+z.3f} ± {figures['stderr']:.3f} over "
        f"{figures['rows']} rows: {figures['higher']} higher, {figures['lower']} lower{more}"
    )


def _asked(data: Mapping[str, Any]) -> str:
    """The start of what a row asks; JSON, which writes control characters as escapes."""
    asked = next((data[key] for key in _ASKED if data.get(key)), data)
    if isinstance(asked, list) and isinstance(asked[-1], dict):
        asked = asked[-1].get("content", asked)
    text = json.dumps(asked)
    return text if len(text) <= 60 else f"{text[:59]}…"
