"""`areal show` and `areal export`: what a run was trained on."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areal.errors import InvalidInput
from areal.training.rollouts.reader import Kept, RolloutFolder, export_rows
from areal_launch.run_folder import find_run
from areal_launch.view.output import print_json, print_table, say

_SUFFIXES = (".parquet", ".jsonl")
_SHOWN = 60


def show(run: Path | None, task_id: str, step: int | None, *, as_json: bool) -> int:
    """Prints the groups of a step, or the trajectories of a task; the exit code.

    Raises:
        NotFound: The run, step or task does not exist, or nothing was kept.
    """
    folder = _folder(run)
    if task_id:
        _show_task(folder, task_id, as_json=as_json)
    else:
        _show_step(folder, step, as_json=as_json)
    return 0


def _folder(run: Path | None) -> RolloutFolder:
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidInput("this installation cannot read rollouts; pip install pyarrow")
    return RolloutFolder(find_run(run, live=False).path)


def _show_step(folder: RolloutFolder, step: int | None, *, as_json: bool) -> None:
    groups = folder.groups(step)
    step = step or folder.steps[-1]
    rows: list[dict[str, Any]] = [
        {
            "task_id": task_id,
            "samples": len(group),
            "reward_mean": statistics.fmean(one.reward for one in group),
            "reward_min": min(one.reward for one in group),
            "reward_max": max(one.reward for one in group),
            "tokens_mean": statistics.fmean(one.sampled for one in group),
            "staleness": step - 1 - min(one.head_version for one in group),
            "best": max(group, key=lambda one: one.reward).completion,
        }
        for task_id, group in groups.items()
    ]
    if as_json:
        print_json({"step": step, "groups": rows})
        return
    print_table(
        ("task", "samples", "reward", "min to max", "tokens", "staleness", "best answer"),
        [
            (
                row["task_id"],
                str(row["samples"]),
                f"{row['reward_mean']:.2f}",
                f"{row['reward_min']:g} to {row['reward_max']:g}",
                f"{row['tokens_mean']:.0f}",
                str(row["staleness"]),
                _short(row["best"]),
            )
            for row in sorted(rows, key=lambda row: row["reward_mean"])
        ],
    )
    equal = sum(row["reward_min"] == row["reward_max"] for row in rows)
    say(
        f"step {step}: {len(rows)} groups, {equal} of them with equal rewards; "
        f"kept: steps {folder.steps[0]} to {folder.steps[-1]}; areal show TASK shows one"
    )


def _show_task(folder: RolloutFolder, task_id: str, *, as_json: bool) -> None:
    group = folder.task(task_id)
    tokenizer = folder.tokenizer()
    if as_json:
        print_json(
            [
                {
                    **vars(one),
                    "turns": [
                        {"sampled": sampled, "text": tokenizer.decode(ids)}
                        for sampled, ids in one.segments()
                    ],
                }
                for one in group
            ]
        )
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    for one in group:
        text = Text()
        for sampled, ids in one.segments():
            text.append(tokenizer.decode(ids), "bold" if sampled else "bright_black")
        console.print(Panel(text, title=_title(one), title_align="left", border_style="blue"))
    console.print(
        f"{task_id}, step {group[0].step}: gray: given; bold: sampled", style="bright_black"
    )


def _title(one: Kept) -> str:
    advantage = "" if one.advantage is None else f", advantage {one.advantage:+.2f}"
    made_of = ", ".join(f"{part['name']} {part['value']:g}" for part in one.parts)
    versions = sorted({version for version in one.versions if version >= 0})
    by = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions))
    return (
        f"sample {one.sample}: reward {one.reward:g}{made_of and f' ({made_of})'}{advantage}, "
        f"{one.sampled} of {len(one.input_ids)} tokens sampled by version {by or '-'}, "
        f"{one.finish_reason}"
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def export(run: Path | None, to: Path, kind: str, first: int | None, last: int | None) -> int:
    """Writes kept rollouts into one file; the exit code.

    Raises:
        NotFound: The run does not exist, or nothing was kept for those steps.
        InvalidInput: The file exists, or its suffix is none that is known.
    """
    if to.suffix not in _SUFFIXES:
        raise InvalidInput(
            f"--to {str(to)!r}: expected a name that ends in {' or '.join(_SUFFIXES)}"
        )
    if to.exists():
        raise InvalidInput(f"--to {str(to)!r}: already exists, expected a new file")
    folder = _folder(run)
    low, high = folder.steps[0] if first is None else first, last or folder.steps[-1]
    steps = [step for step in folder.steps if low <= step <= high]
    if not steps:
        raise InvalidInput(
            f"steps {low} to {high}: expected steps from {folder.steps[0]} to {folder.steps[-1]}"
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    temporary = to.with_name(f"{to.name}.tmp")
    batches = _progress(export_rows, folder, kind, steps)
    try:
        if to.suffix == ".parquet":
            count = _write_parquet(temporary, batches, folder)
        else:
            count = _write_jsonl(temporary, batches)
        if not count:
            raise InvalidInput(
                f"--as {kind}: no rows in steps {low} to {high}: "
                "no group has samples with different rewards"
            )
        temporary.replace(to)
    finally:
        temporary.unlink(missing_ok=True)
    say(f"{to}: {count} rows of steps {steps[0]} to {steps[-1]}")
    return 0


def _progress(
    rows: Any, folder: RolloutFolder, kind: str, steps: Sequence[int]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each step, with a bar."""
    from rich.progress import track

    for step in track(steps, description="steps", transient=True):
        yield list(rows(folder, kind, [step]))


def _write_jsonl(path: Path, batches: Iterator[list[dict[str, Any]]]) -> int:
    count = 0
    with path.open("w") as file:
        for rows in batches:
            for row in rows:
                file.write(json.dumps(row) + "\n")
            count += len(rows)
    return count


def _write_parquet(
    path: Path, batches: Iterator[list[dict[str, Any]]], folder: RolloutFolder
) -> int:
    import pyarrow as pa
    from pyarrow import parquet

    # Not what the first rows look like: a column may be null in them.
    known = {field.name: field for field in parquet.read_schema(folder.files[-1])}
    count, writer = 0, None
    for rows in batches:
        if not rows:
            continue
        schema = pa.schema([known.get(name) or pa.field(name, pa.string()) for name in rows[0]])
        writer = writer or parquet.ParquetWriter(path, schema, compression="zstd")
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        count += len(rows)
    if writer:
        writer.close()
    return count
