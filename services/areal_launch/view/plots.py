"""reward.png: what the policy learned, at a glance.

Run as `python -m areal_launch.view.plots RUN_DIR` in a process of its own: matplotlib is slow to
import and a launcher has no other use for it.
"""

from __future__ import annotations

import sys
from itertools import cycle
from pathlib import Path
from typing import Any

from areal.config.learning_rules import WINDOW
from areal.runs.run_files import EVALUATIONS, last_evaluations, over_rows
from areal_launch.view.rows import column, moving_mean, read_rows
from areal_launch.view.summary import read_results

_INK = "#1f2430"
_MUTED = "#8a93a6"
_GRID = "#e7eaf0"
_POLICY = "#2b6cb0"
_HELDOUT = "#d9622b"
_OTHERS = ("#2f855a", "#805ad5", "#b7791f", "#c53030")
_ENDS = ("heldout_before", "heldout_after")


def plot_rewards(run_dir: Path, target: Path) -> bool:
    """Draws the reward curve of a run.

    Args:
        run_dir: Folder with metrics.jsonl and trainer.json.
        target: The PNG.

    Returns:
        False when there is no step to draw.
    """
    rows = [r for r in read_rows(run_dir / "metrics.jsonl") if column([r], "reward/mean")]
    if not rows:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row["step"] for row in rows]
    rewards = column(rows, "reward/mean")
    results = read_results(run_dir / "trainer.json")

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8.6, 5.2), dpi=150, sharex=True, height_ratios=(4, 1)
    )
    for axes in (top, bottom):
        _style(axes)
    top.plot(steps, rewards, color=_POLICY, alpha=0.28, linewidth=1.2, label="each step")
    smooth = moving_mean(rewards)
    top.plot(steps, smooth, color=_POLICY, linewidth=2.4, label=f"mean of {WINDOW} steps")
    _label(top, (steps[-1], smooth[-1]), f"{smooth[-1]:.2f}", _POLICY)
    _heldout(top, results, steps)
    for (name, points), color in zip(other_evaluations(results).items(), cycle(_OTHERS)):
        x, y = zip(*points, strict=True)
        top.plot(x, y, color=color, linewidth=1.2, marker="o", markersize=4, label=name)
    top.set_ylabel("reward", color=_INK)
    top.set_title(
        f"{run_dir.parent.name} / {run_dir.name}",
        loc="left",
        color=_INK,
        fontweight="bold",
        fontsize=12,
    )
    top.legend(frameon=False, loc="best", labelcolor=_INK, fontsize=9)
    staleness = [
        (r["step"], r["staleness/mean"], r["staleness/max"])
        for r in rows
        if column([r], "staleness/mean") and column([r], "staleness/max")
    ]
    if staleness:
        at, average, worst = zip(*staleness, strict=True)
        bottom.step(at, worst, where="mid", color=_MUTED, linewidth=1.0)
        bottom.plot(at, average, color=_INK, linewidth=1.4)
        bottom.set_ylim(-0.2, max(worst) + 0.4)
        # Apart, because both often end at the bound.
        _label(bottom, (at[-1], worst[-1]), "max", _MUTED, up=6)
        _label(bottom, (at[-1], average[-1]), "mean", _INK, up=-6)
    bottom.set_ylabel("staleness", color=_INK)
    bottom.set_xlabel("train step", color=_INK)
    figure.tight_layout()
    figure.savefig(target, facecolor="white")
    plt.close(figure)
    return True


def other_evaluations(results: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Returns the (step, mean) points of each evaluation that is not at the ends of the run."""
    series: dict[str, dict[int, float]] = {}
    for each in results.get(EVALUATIONS) or ():
        if each["name"] not in _ENDS:
            series.setdefault(str(each["name"]), {})[int(each["step"])] = float(each["mean"])
    return {name: sorted(points.items()) for name, points in series.items()}


def _heldout(axes: Any, results: dict[str, Any], steps: list[int]) -> None:
    """The recipe's evaluations, at the ends of the run; the legend has room for their figures."""
    found = [
        (name, (position, float(results[name])))
        for name, position in zip(_ENDS, (steps[0] - 1, steps[-1]), strict=True)
        if isinstance(results.get(name), int | float)
    ]
    if not found:
        return
    measured = last_evaluations(results)
    rows = [over_rows(measured.get(name, {})) for name, _ in found]
    figures = [f"{mean:.2f}" for _, (_, mean) in found]
    if len(set(rows)) > 1:
        figures, rows = [f"{a} {b}".rstrip() for a, b in zip(figures, rows, strict=True)], [""]
    text = f"held-out {' → '.join(figures)} {rows[0]}".rstrip()
    if len(found) == 1:
        text += ", before training" if found[0][0] == _ENDS[0] else ", after training"
    x, y = zip(*(point for _, point in found), strict=True)
    axes.plot(x, y, color=_HELDOUT, linewidth=1.2, linestyle=(0, (4, 3)), alpha=0.7)
    axes.scatter(x, y, color=_HELDOUT, s=46, zorder=5, label=text, edgecolor="white")


def _label(axes: Any, point: tuple[float, float], text: str, color: str, up: int = 0) -> None:
    """Draws bold text to the right of a line's end, `up` points above it."""
    at = {"xytext": (8, up), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, point, color=color, fontweight="bold", fontsize=9, **at)


def _style(axes: Any) -> None:
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_MUTED, length=0, labelsize=9)
    axes.margins(x=0.03)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plot_rewards(folder, folder / "reward.png")
