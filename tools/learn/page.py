"""Writes docs/learning.md and its curves from the finished runs."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from tools.learn.table import PACKAGES, ROOT, SEEDS, Row

Runs = dict[int, dict[str, Any]]
PAGE = ROOT / "docs" / "learning.md"
IMAGES = ROOT / "docs" / "images"
LIMIT_S = 600

_HEAD = """\
# What learns

This page shows how much the examples learn in minutes. Each run is `areal run` of an example on two
CPU cores, with one trainer. All services run too, unless the example trains only on dataset rows.
Below each table are the command and the number of inference servers of each run.

`make learn` starts the missing runs, two at a time, and resumes interrupted ones. Then it generates
this page from docs/learning.jsonl, which also has the commit of each run; do not edit the page. The
rows of the tables are defined in [tools/learn/table.py](../tools/learn/table.py).

- **criterion**: the goal of a run. `heldout_before` and `heldout_after` are the mean rewards on
  held-out rows before and after training. A control run must not improve.
- **before, after, value**: the measured results, and the value that the criterion compares.
- **seconds, in time**: the duration of each run (including the time to start the services and to
  create the model), and the number of runs that took at most 600 s. The seconds of an interrupted
  run are those since its last start; seed 0 of reasoning-gym is such a run.
- **load**: the machine's load average, over one minute at the start and over 15 minutes at the end.
  If the load was above about 4, other work ran at the same time; the seconds are then an upper
  bound and cannot be compared.
- **seeds marked `*`**: the run used an earlier revision of the recipe or its settings; `make learn`
  runs it again.

The runs in "Algorithms", except those with Muon, were made when the default of
`actor.behavior_weight_mode` was `token_mask` (now `token_truncate`). SFT and distillation have no
row with LoRA, because their models start from random weights, which LoRA keeps frozen. With LoRA,
SFT reached a loss of 3.4, and distillation closed a quarter of the gap to its teacher.
"""


_NOTES = {
    "Algorithms": """\
Muon's learning rate was chosen with runs of 80 steps (seed 0). At the recipe's 3e-4, the mean
held-out reward rose from 0.29 to 0.52 with Muon, and from 0.32 to 0.57 with AdamW. At 1e-3, it rose
from 0.28 to 0.71 with Muon, and fell from 0.32 to 0.03 with AdamW.
""",
    "Asynchrony": """\
η is the staleness bound. Training on stale samples should cost nothing: at every η, the mean over
the seeds should be within the spread of the seeds at η = 0. *Decoupled* PPO, which clips the ratio
between the new policy and the policy at the start of the step, reaches this goal. *Plain PPO*,
which clips the ratio between the new policy and the policy that sampled the tokens, does not.

These runs use half the recipe's learning rate, so the probability of an answer changes at most
4-fold within 8 versions. They take twice the recipe's steps, so the policy moves as far in total.
""",
    "Asynchrony at the full rate": """\
The cost of staleness depends on how far the policy moves from one version to the next. At the
recipe's own learning rate, the probability of an answer changes up to 30-fold within 8 versions.
With decoupled PPO, a staleness bound of 4 or 8 then lowers the mean held-out reward by 0.06 to
0.07. With plain PPO, a bound of 8 lowers it by 0.11.
""",
}
"""Explanations by section, printed below its comparison."""


def write(table: list[tuple[Row, Runs]]) -> None:
    """Writes the page, and an image for each section that has runs."""
    parts, missing = [_HEAD], []
    for section in dict.fromkeys(row.section for row, _ in table):
        rows = [(row, runs) for row, runs in table if row.section == section]
        parts.append(f"## {section}\n")
        if any(runs for _, runs in rows):
            image = IMAGES / f"learning-{section.lower().replace(' ', '-')}.svg"
            _draw(rows, image)
            parts.append(f"![{section}: curves](images/{image.name})\n")
        parts.append(
            "| run | criterion | seeds | before | after | value | met | seconds | in time "
            "| load |\n|---|---|---|---|---|---|---|---|---|---|\n"
            + "".join(_line(row, runs) for row, runs in rows)
        )
        for row, runs in rows:
            if lacking := [str(seed) for seed in SEEDS if seed not in runs]:
                missing.append(f"{row.title}: seeds {', '.join(lacking)}")
        if compared := _compared(rows):
            parts.append(compared)
        if section in _NOTES:
            parts.append(_NOTES[section])
        parts.append(_settings(rows))
    listed = "".join(f"- {each}\n" for each in missing) or "Nothing.\n"
    parts.append(f"## Not run\n\n{listed}")
    PAGE.write_text("\n".join(parts))


def _line(row: Row, runs: Runs) -> str:
    if not runs:
        return f"| {row.title} | {row.measure} | none | | | | not run | | | |\n"
    ordered = [runs[seed] for seed in sorted(runs)]

    def each(name: str, form: str = "{:.2f}") -> str:
        return ", ".join(form.format(r[name]) for r in ordered if r[name] is not None)

    met = sum(row.measure.holds(r["value"]) for r in ordered)
    in_time = sum(r["seconds"] <= LIMIT_S for r in ordered)
    loads = ", ".join(f"{r['load'][0]:.0f} to {r['load'][1]:.0f}" for r in ordered)
    revision = row.revision()
    seeds = ", ".join(f"{r['seed']}{'' if r['revision'] == revision else '*'}" for r in ordered)
    return (
        f"| {row.title} | {row.measure} | {seeds} | {each('before')} | {each('after')} "
        f"| {each('value', '{:+.2f}')} | {met} of {len(ordered)} | {each('seconds', '{:.0f}')} "
        f"| {in_time} of {len(ordered)} | {loads} |\n"
    )


def _compared(rows: list[tuple[Row, Runs]]) -> str:
    """Compares each row that has an `against` with that row: means, spread, and seeds by seed."""
    table, lines = {row.name: (row.title, runs) for row, runs in rows}, []
    for row, runs in rows:
        title, base = table.get(row.against, ("", {}))
        both = sorted(runs.keys() & base.keys())
        if not both:
            continue
        finals = [each["after"] for each in base.values()]
        mean = fmean(each["after"] for each in runs.values())
        less = fmean(runs[seed]["after"] - base[seed]["after"] for seed in both)
        verdict = "below" if mean < min(finals) else "within" if mean <= max(finals) else "above"
        lines.append(
            f"| {row.title} | {mean:.3f} | {title} | {fmean(finals):.3f} "
            f"| {min(finals):.3f} to {max(finals):.3f} | {verdict} | {less:+.3f} |\n"
        )
    head = (
        "| run | mean after | compared with | its mean | its spread over seeds | mean after is "
        "| mean difference, same seeds |\n"
    )
    return f"{head}|---|---|---|---|---|---|---|\n{''.join(lines)}" if lines else ""


def _settings(rows: list[tuple[Row, Runs]]) -> str:
    return "".join(
        f"- {row.title}: `{' '.join((f'areal run examples/{row.example}.py', *row.overrides))}`, "
        f"{_servers(row)}{_packages(row)}\n"
        for row, _ in rows
    )


def _packages(row: Row) -> str:
    """What must be done before the row's command, e.g. `; needs build/x on PYTHONPATH (…)`."""
    if not row.packages:
        return ""
    return f"; needs {row.packages} on PYTHONPATH (`{PACKAGES[row.packages]}` creates this folder)"


def _servers(row: Row) -> str:
    """How many inference servers the row's `allocation_mode` names."""
    settings = yaml.safe_load((ROOT / "examples" / f"{row.example}.yaml").read_text())
    found = re.search(r"sglang:d(\d+)", settings["allocation_mode"])
    count = found.group(1) if found else "no"
    return f"{count} server{'s' * (count != '1')}"


def _draw(rows: list[tuple[Row, Runs]], path: Path) -> None:
    """The mean curve over seeds of each row, drawn over the share of its steps."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "learning"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for row, runs in rows:
        curves = [run["curve"] for run in runs.values() if run["curve"]]
        if not curves:
            continue
        length = min(map(len, curves))
        steps = max(run["steps"] for run in runs.values())
        mean = [sum(curve[i] for curve in curves) / len(curves) for i in range(length)]
        at = [steps * (i + 0.5) / length for i in range(length)]
        axes.plot(at, mean, linewidth=1.2, label=f"{row.title} ({len(curves)})")
    axes.set_xlabel("train step")
    axes.set_ylabel("/".join(dict.fromkeys(row.measure.curve for row, _ in rows)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, title="mean of (seeds)", title_fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
