"""summary.json: a run in one page of numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.config.learning_rules import PAGE, WINDOW, Finding, of_run
from areal.runs.run_files import EVALUATIONS, last_evaluations, over_rows
from areal.types import TaskState
from areal_launch.view.output import pause_words, state_word
from areal_launch.view.rows import column, mean

if TYPE_CHECKING:
    from areal_launch.view.poller import Snapshot

_SHOWN = 8
"""Number of an evaluation's means that are shown at the end of a run."""


def read_results(file: Path) -> dict[str, Any]:
    """Returns what the recipe recorded in trainer.json; empty when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def build_summary(
    *,
    status: str,
    rows: list[dict[str, Any]],
    results: Mapping[str, Any],
    snapshot: Snapshot,
    wall_s: float,
    cpu_s: float,
    memory_mb: Mapping[str, float],
    restarts: Mapping[str, int],
    cause: str = "",
    findings: Sequence[Finding] = (),
) -> dict[str, Any]:
    """Puts the summary together; what is unknown is null, never left out.

    Args:
        status: Finished, interrupted or failed.
        rows: Rows of metrics.jsonl.
        results: Content of trainer.json; every key is copied.
        snapshot: The stack just before it was stopped.
        wall_s: Seconds of this invocation.
        cpu_s: CPU seconds of all its processes.
        memory_mb: Peak resident memory by process, and "total" at one instant.
        restarts: By process; those above 0 are listed.
        cause: Why it failed, if it did.
        findings: What the configuration says against learning; what the rows say is added.
    """
    rewards, losses = column(rows, "reward/mean"), column(rows, "train/loss")
    ledger, sync = snapshot.ledger, snapshot.sync
    accounting: dict[str, int | None] = {"submitted": ledger.submitted if ledger else None}
    for state in TaskState:
        accounting[state.value] = ledger.counts.get(state, 0) if ledger else None
    steps = int(rows[-1]["step"]) if rows else 0
    window = _window(steps)
    return {
        "status": status,
        "cause": cause or None,
        "steps": steps,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "reward_first": mean(rewards[:window]),
        "reward_last": mean(rewards[-window:]),
        "loss_first": mean(losses[:window]),
        "loss_last": mean(losses[-window:]),
        "heldout_before": None,
        "heldout_after": None,
        **results,
        "findings": [each.as_dict() for each in of_run(findings, rows)],
        "samples": sum(int(row.get("samples", 0)) for row in rows),
        "tokens_generated": ledger.generated_tokens if ledger else None,
        "accounting": accounting,
        "recipe_failures": [
            {
                "site": failure.site,
                "attempts": failure.attempts,
                "first_task_id": failure.task_id,
                "detail": failure.detail,
            }
            for failure in snapshot.failures
        ],
        "staleness": {
            "max": ledger.staleness_max if ledger else None,
            "mean": ledger.staleness_mean if ledger else None,
        },
        "weight_updates": {
            "count": sync.updates if sync else None,
            "seconds_mean": sync.update_seconds_mean if sync else None,
            "aborted_requests": sync.aborted_requests if sync else None,
        },
        # The figures of these services are from before the end: the last look had no answer.
        "not_current": {
            service: snapshot.problems[service]
            for service in ("buffer", "weight-sync")
            if service in snapshot.problems
        },
        "restarts": {name: count for name, count in restarts.items() if count},
        "memory_mb": {name: round(value, 1) for name, value in memory_mb.items()},
    }


def continue_summary(
    earlier: Mapping[str, Any],
    latest: Mapping[str, Any],
    *,
    began: float,
    rows: Sequence[Mapping[str, Any]] = (),
    killed: Sequence[float] = (),
) -> dict[str, Any]:
    """Extends a run's summary by one more invocation, and keeps all earlier measurements.

    Steps, rewards, tasks and updates are counted over the trial already. What belongs to one
    invocation is listed under `invocations`; times, CPU and restarts are their sums, memory is
    their largest. An invocation that found the run finished leaves everything else as it was.

    Args:
        earlier: Content of the existing summary.json; empty if there is none.
        latest: Result of `build_summary` for this invocation alone.
        began: Unix time of its start.
        rows: Rows of metrics.jsonl; their times say which invocation made a step.
        killed: Unix times at which invocations began that were killed, oldest first: no summary
            has them. Of each, the steps are known, and its time up to the last of these.
    """
    before: list[dict[str, Any]] = list(earlier.get("invocations", ()))
    done = int(earlier.get("steps", 0)) if before else 0
    from_step = _reached(rows, began, done)
    known = {each["began"] for each in before}
    starts = [start for when in killed if (start := round(when, 3)) not in known]
    lost = [_killed(rows, start, end) for start, end in pairwise([*starts, began])]
    invocation = {
        "began": round(began, 3),
        "status": latest["status"],
        "from_step": min(from_step, latest["steps"]),
        "to_step": latest["steps"],
        "wall_s": latest["wall_s"],
        "cpu_s": latest["cpu_s"],
    }
    invocations = [*before, *lost, invocation]
    if before and earlier.get("status") == "finished" and latest["steps"] <= done:
        # Interrupted on the way to more steps: those that were asked for first are done.
        status = "interrupted" if latest["status"] == "interrupted" else "finished"
        return {**earlier, "status": status, "invocations": invocations}
    restarts: dict[str, int] = dict(earlier.get("restarts", {})) if before else {}
    for name, count in latest["restarts"].items():
        restarts[name] = restarts.get(name, 0) + count
    memory: dict[str, float] = dict(earlier.get("memory_mb", {})) if before else {}
    for name, size in latest["memory_mb"].items():
        memory[name] = max(memory.get(name, 0.0), size)
    return {
        **latest,
        "wall_s": round(sum(each["wall_s"] for each in invocations), 2),
        "cpu_s": round(sum(each["cpu_s"] or 0 for each in invocations), 2),
        "restarts": restarts,
        "memory_mb": memory,
        "invocations": invocations,
    }


def _window(steps: int) -> int:
    """Returns how many of the first and of the last steps a mean is over: half of a short run's."""
    return min(WINDOW, max(1, steps // 2))


def _reached(rows: Sequence[Mapping[str, Any]], when: float, otherwise: int) -> int:
    """Returns the last step that had ended then; `otherwise` if rows have no times."""
    times = [(int(row["step"]), float(row["time"])) for row in rows if row.get("time")]
    return max((step for step, time in times if time < when), default=0) if times else otherwise


def _killed(rows: Sequence[Mapping[str, Any]], began: float, end: float) -> dict[str, Any]:
    """Returns what rows tell of an invocation that was killed before `end`, and had no time to."""
    times = [float(row["time"]) for row in rows if began <= (row.get("time") or 0) < end]
    return {
        "began": began,
        "status": "killed",
        "from_step": _reached(rows, began, 0),
        "to_step": _reached(rows, end, 0),
        "wall_s": round(max(times, default=began) - began, 2),
        "cpu_s": None,
    }


def _invocations(invocations: Sequence[Mapping[str, Any]]) -> str:
    """Returns how the time is made up if the run was started more than once."""
    if len(invocations) < 2:
        return ""
    last = invocations[-1]
    steps = f"steps {last['from_step'] + 1} to {last['to_step']}"
    if last["to_step"] == last["from_step"]:
        steps = "no step" + (", because none remained" if last["status"] == "finished" else "")
    killed = sum(each["status"] == "killed" for each in invocations)
    counted = f" ({killed} killed: counted up to the last kept step, without CPU seconds)"
    return (
        f", over {len(invocations)} invocations{counted * bool(killed)}; "
        f"this one {last['wall_s']:.0f} s, {steps}"
    )


def _series(evaluations: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns a line for each name that was evaluated several times, except `held-out`."""
    series: dict[str, list[float]] = {}
    for each in evaluations:
        if each["name"] not in ("heldout_before", "heldout_after"):
            series.setdefault(each["name"], []).append(float(each["mean"]))
    return [
        (name, " → ".join(["… "] * (len(means) > _SHOWN) + [f"{m:.3f}" for m in means[-_SHOWN:]]))
        for name, means in series.items()
    ]


def _pass_at(evaluation: Mapping[str, Any]) -> str:
    """Returns the reward of the best of several answers, if rows had several."""
    found: Mapping[str, float] = evaluation.get("pass_at") or {}
    return "".join(f", pass@{k} {value:.3f}" for k, value in found.items())


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, text) pairs for people."""

    def number(value: Any, form: str = ".3f") -> str:
        return "?" if value is None else format(value, form)

    accounting = summary["accounting"]
    ended = ", ".join(
        f"{accounting[s.value]} {state_word(s)}" for s in TaskState if accounting[s.value]
    )
    updates = summary["weight_updates"]
    lines = [("status", f"{summary['status']} after {summary['steps']} steps")]
    trained = bool(summary["steps"])
    # A run on dataset rows has no ledger: rewards, tasks and versions are unknown.
    offline = accounting["submitted"] is None and summary["reward_first"] is None
    if trained:
        what = "loss" if offline else "reward"
        first, last = (number(summary.get(f"{what}_{end}")) for end in ("first", "last"))
        window = _window(summary["steps"])
        over = f"mean of the first and last {window} steps"
        if window == 1:
            over = "the first and the last step"
        change = f"{first} → {last} ({over})" if summary["steps"] > 1 else f"{last} (1 step)"
        lines.append((what, change))
        lines += _series(summary.get(EVALUATIONS) or ())
    else:
        lines += [
            (
                each["name"],
                f"{each['mean']:.3f} ± {each['stderr']:.3f} {over_rows(each)}{_pass_at(each)}",
            )
            for each in summary.get(EVALUATIONS) or ()
        ]
    measured = last_evaluations(summary)
    if trained and (summary["heldout_before"], summary["heldout_after"]) != (None, None):
        ends = [
            f"{number(summary[name])} {over_rows(measured.get(name, {}))}".rstrip()
            for name in ("heldout_before", "heldout_after")
        ]
        lines.append(("held-out", " → ".join(ends)))
    for name, each in measured.items():
        if each.get("failed"):
            why = f"{name}: {each['failed']:,} rows failed and are not in the mean: {each['cause']}"
            lines.append(("incomplete", why))
        if zeros := each.get("rejected"):
            lines.append(("rejected", f"{name}: {zeros:,} rows without a trajectory count as 0"))
    findings = summary.get("findings") or ()
    lines += [("will not learn", f"{each['seen']}; {each['advice']}") for each in findings]
    if findings:
        lines.append(("", f"more: {PAGE}"))
    lines += [
        (
            "time",
            f"{summary['wall_s']:.0f} s, {summary['cpu_s']:.0f} CPU seconds in all processes"
            f"{_invocations(summary.get('invocations', ()))}",
        ),
    ]
    lines += [
        (
            "generated",
            f"{summary['samples']:,} samples trained, "
            f"{number(summary['tokens_generated'], ',d')} tokens sampled",
        ),
        ("tasks", f"{number(accounting['submitted'], ',d')} submitted: {ended or 'none'}"),
    ] * (not offline)
    lines += [
        (
            "staleness",
            f"mean {number(summary['staleness']['mean'], '.2f')}, "
            f"max {number(summary['staleness']['max'], 'd')}",
        ),
        (
            "weights",
            f"{number(updates['count'], 'd')} versions, "
            + (f"{pause_words(updates['seconds_mean'] or 0)}, " if updates["count"] else "")
            + f"{number(updates['aborted_requests'], 'd')} requests aborted",
        ),
    ] * (trained and not offline)
    if accounting[TaskState.DEAD_LETTERED.value]:
        again = "; fix the causes and run the same command again" if summary.get("cause") else ""
        lines.append(("failed", f"areal dead-letters list shows causes and tracebacks{again}"))
    if summary["restarts"]:
        lines.append(
            ("restarts", ", ".join(f"{name} {n}" for name, n in summary["restarts"].items()))
        )
    lines += [
        ("not current", f"figures of {service}: {why}")
        for service, why in (summary.get("not_current") or {}).items()
    ]
    if total := summary["memory_mb"].get("total"):
        lines.append(("memory", f"{total / 1024:.2f} GiB peak resident memory"))
    return lines
