"""`areal show` and `areal export`: the groups that a run trained on."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from areal.agents.splits import explain
from areal.chassis.files import replacing
from areal.config.transports import in_object_store
from areal.errors import InvalidInput, NotFound
from areal.runs.rollouts.reader import Kept, RolloutFolder, by_attempt, export_rows
from areal.runs.rollouts.records import schema
from areal.weights.objects import ObjectStore
from areal_launch.commands.inspect_logs import write_log
from areal_launch.run_folder import find_run
from areal_launch.view.output import print_json, print_table, say, visible

_SUFFIXES = (".parquet", ".jsonl")
_SHOWN = 60


def show(
    run: str, task_id: str, step: int | None, *, discarded: bool = False, as_json: bool
) -> int:
    """Prints the groups of a step, or the trajectories of a task; returns the exit code.

    Args:
        run: The run folder, or the URL of a run's kept rollouts in an object store; "":
            the newest active run or, if none is active, the newest run.
        task_id: A task; "": all groups of a step.
        step: None: the newest step.
        discarded: Print the groups that were not trained on, instead of those that were.
        as_json: Print JSON.

    Raises:
        NotFound: The run, step or task does not exist, or nothing was kept.
        TransportError: The object store does not answer, or refuses.
    """
    folder = _folder(run)
    if task_id:
        _show_task(folder, task_id, as_json=as_json)
    elif discarded:
        _show_discarded(folder, step, as_json=as_json)
    else:
        _show_step(folder, step, as_json=as_json)
    return 0


def _folder(run: str) -> RolloutFolder:
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidInput("the package pyarrow is not installed: pip install pyarrow")
    if in_object_store(run):
        return RolloutFolder(ObjectStore(run))
    return RolloutFolder(find_run(Path(run) if run else None, live=False).path)


def _show_step(folder: RolloutFolder, step: int | None, *, as_json: bool) -> None:
    groups = folder.groups(step)
    step = step or folder.steps[-1]
    ended = Counter(
        f"{group[0].outcome} ({group[0].cause})"
        for group in by_attempt(folder.discarded([step])).values()
    )
    rows: list[dict[str, Any]] = [
        {
            "task_id": task_id,
            **_rewards(group),
            "tokens_mean": statistics.fmean(one.sampled for one in group),
            "staleness": step - 1 - min(one.head_version for one in group),
            "best": max(group, key=lambda one: one.reward or 0.0).completion,
        }
        for task_id, group in groups.items()
    ]
    if as_json:
        print_json({"step": step, "groups": rows, "discarded": dict(ended)})
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
        f"kept: steps {folder.steps[0]} to {folder.steps[-1]}; to see one task: areal show TASK"
    )
    if ended:
        causes = ", ".join(f"{count} {_short(cause)}" for cause, count in ended.most_common(3))
        say(
            f"{ended.total()} groups were discarded before this step: {causes}; "
            f"to see them: areal show --discarded --step {step}"
        )


def _rewards(group: Sequence[Kept]) -> dict[str, Any]:
    rewards = [one.reward for one in group if one.reward is not None]
    return {
        "samples": len(rewards),
        "reward_mean": statistics.fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
    }


def _show_discarded(folder: RolloutFolder, step: int | None, *, as_json: bool) -> None:
    found = folder.discarded(None if step is None else [step])
    if not found:
        when = "" if step is None else f" before step {step}"
        raise NotFound(f"no group was discarded{when}: every finished group was trained on")
    if step is None:
        step = found[-1].step
        found = [one for one in found if one.step == step]
    rows = [
        {
            "task_id": group[0].task_id,
            "outcome": group[0].outcome,
            "cause": group[0].cause,
            **_rewards(group),
        }
        for group in by_attempt(found).values()
    ]
    if as_json:
        print_json({"step": step, "discarded": rows})
        return
    print_table(
        ("task", "outcome", "samples", "reward", "cause"),
        [
            (
                row["task_id"],
                row["outcome"],
                str(row["samples"] or "-"),
                "-" if row["reward_mean"] is None else f"{row['reward_mean']:.2f}",
                row["cause"],
            )
            for row in rows
        ],
    )
    say(f"before step {step} took its batch, {len(rows)} groups ended without being trained on")


def _show_task(folder: RolloutFolder, task_id: str, *, as_json: bool) -> None:
    group = folder.task(task_id)
    if as_json:
        print_json([{**vars(one), "turns": folder.turns(one)} for one in group])
        return
    from rich.panel import Panel
    from rich.text import Text

    from areal_launch.view.terminal import make_console

    console = make_console(highlight=False)
    for attempt in by_attempt(group).values():
        first = attempt[0]
        sampled = [one for one in attempt if one.reward is not None]
        turns = [folder.turns(one) for one in sampled]
        splits = explain([[(t["sampled"], t["text"]) for t in each] for each in turns])
        step = f"step {first.step}"
        if first.cause is not None:
            step = f"{first.outcome} before {step}: {first.cause}"
        console.print(visible(f"{task_id}, {step}"), soft_wrap=True, markup=False)
        for one, its_turns, split in zip(sampled, turns, splits, strict=True):
            text = Text()
            for turn in its_turns:
                text.append(visible(turn["text"]), "bold" if turn["sampled"] else "bright_black")
            console.print(
                Panel(
                    text,
                    title=Text(visible(_title(one))),
                    title_align="left",
                    subtitle=Text(visible(_subtitle(one))),
                    subtitle_align="left",
                    border_style="blue",
                )
            )
            # Files of earlier releases do not say what changed.
            if one.split or (split and one.split is None):
                changed = f"{one.split} changed" if one.split else "the history changed"
                line = f"sample {one.sample} continues no earlier one: {changed} {split}".rstrip()
                console.print(visible(line), style="yellow", soft_wrap=True, markup=False)
        if first.episode_s:
            console.print(
                f"{first.queued_s:.1f} s in the queue, {first.episode_s:.1f} s in the workflow, "
                f"{first.score_s:.1f} s of it for rewards",
                style="bright_black",
            )
    console.print(
        "gray: prompts and other context; bold: text that the policy sampled", style="bright_black"
    )


def _title(one: Kept) -> str:
    advantage = "" if one.advantage is None else f", advantage {one.advantage:+.2f}"
    made_of = ", ".join(f"{part['name']} {part['value']:g}" for part in one.parts)
    return f"sample {one.sample}: reward {one.reward:g}{made_of and f' ({made_of})'}{advantage}"


def _subtitle(one: Kept) -> str:
    versions = sorted({version for version in one.versions if version >= 0})
    by = f"{versions[0]} to {versions[-1]}" if len(versions) > 1 else "".join(map(str, versions))
    where = f", {one.generation_s:.2f} s on {', '.join(one.servers)}" if one.servers else ""
    return (
        f"{one.sampled} of {len(one.input_ids)} tokens sampled by version {by or '-'}, "
        f"{one.finish_reason}{where}"
    )


def _short(text: str | None) -> str:
    line = visible(" ".join((text or "").split()))
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def export(run: str, to: Path, kind: str, first: int | None, last: int | None) -> int:
    """Writes kept rollouts into one file; returns the exit code.

    Raises:
        NotFound: The run does not exist, or nothing was kept for those steps.
        TransportError: The object store does not answer, or refuses.
        InvalidInput: The file exists, or its suffix is unknown.
    """
    suffixes = (".json",) if kind == "inspect" else _SUFFIXES
    if to.suffix not in suffixes:
        raise InvalidInput(
            f"--to {str(to)!r}: expected a name that ends in {' or '.join(suffixes)}"
        )
    if to.exists() or to.is_symlink():
        raise InvalidInput(f"--to {str(to)!r}: already exists, expected a new file")
    folder = _folder(run)
    low, high = folder.steps[0] if first is None else first, last or folder.steps[-1]
    steps = [step for step in folder.steps if low <= step <= high]
    if not steps:
        raise InvalidInput(
            f"steps {low} to {high}: none is kept, expected steps from {folder.steps[0]} to "
            f"{folder.steps[-1]}"
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    batches = _progress(export_rows, folder, kind, steps)
    with replacing(to) as temporary:
        if kind == "inspect":
            count = write_log(temporary, folder, steps, _bar(steps))
        elif to.suffix == ".parquet":
            count = _write_parquet(temporary, batches)
        else:
            count = _write_jsonl(temporary, batches)
        if not count:
            raise InvalidInput(
                f"--as {kind}: no rows in steps {low} to {high}: no group has samples with "
                f"different rewards{' and the same prompt' if kind == 'preferences' else ''}"
            )
    say(f"{to}: {count} rows of steps {steps[0]} to {steps[-1]}")
    return 0


def _progress(
    rows: Any, folder: RolloutFolder, kind: str, steps: Sequence[int]
) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of each step, with a progress bar."""
    for step in _bar(steps):
        yield list(rows(folder, kind, [step]))


def _bar(steps: Sequence[int]) -> Iterable[int]:
    from rich.progress import track

    return track(steps, description="steps", transient=True)


def _write_jsonl(path: Path, batches: Iterator[list[dict[str, Any]]]) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for rows in batches:
            for row in rows:
                file.write(json.dumps(row) + "\n")
            count += len(rows)
    return count


def _write_parquet(path: Path, batches: Iterator[list[dict[str, Any]]]) -> int:
    import pyarrow as pa
    from pyarrow import parquet

    # The first rows do not show the schema: a column may be null in them.
    known = {field.name: field for field in schema()}
    count, writer = 0, None
    for rows in batches:
        if not rows:
            continue
        columns = pa.schema([known.get(name) or pa.field(name, pa.string()) for name in rows[0]])
        writer = writer or parquet.ParquetWriter(path, columns, compression="zstd")
        writer.write_table(pa.Table.from_pylist(rows, schema=columns))
        count += len(rows)
    if writer:
        writer.close()
    return count
