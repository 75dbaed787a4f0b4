"""Runs the cases, each try in a process with a time limit; one JSON line after each.

    python -m tools.gpu                          everything, in at most 30 minutes
    python -m tools.gpu --only probe,step --budget-s 480 --out gpu.jsonl
    python -m tools.gpu --miniature              the same code on a CPU, in a minute
    python -m tools.gpu --table gpu.jsonl        writes the figures into docs/gpu.md

Nothing is downloaded: models are made from the shapes beside this file, with random weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from tools.gpu import cases, table

LAST_LINE = "RESULT "


def main(
    only: Annotated[str, typer.Option(help="Cases, separated by commas.")] = ",".join(cases.NAMES),
    budget_s: Annotated[float, typer.Option(help="Seconds for all of them.")] = 1800.0,
    limit_s: Annotated[float, typer.Option(help="Seconds for one try.")] = 240.0,
    out: Annotated[Path, typer.Option(help="Lines are appended.")] = Path("gpu.jsonl"),
    miniature: Annotated[bool, typer.Option(help="Tiny sizes, for a CPU.")] = False,
    table_of: Annotated[Path | None, typer.Option("--table", help="Only write the page.")] = None,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measures the trainer on this machine's first GPU."""
    if table_of is not None:
        table.write(table.read(table_of))
    elif one:
        run_here(**json.loads(one), miniature=miniature)
    else:
        chosen = only.split(",")
        if unknown := set(chosen) - set(cases.NAMES):
            raise typer.BadParameter(f"{sorted(unknown)}: expected {', '.join(cases.NAMES)}")
        run_all(chosen, time.monotonic() + budget_s, limit_s, out, miniature=miniature)


def run_all(chosen: list[str], end: float, limit_s: float, out: Path, *, miniature: bool) -> None:
    """Every try of the chosen cases that begins before `end`."""
    console = Console()
    for name in chosen:
        for setting in cases.find(name).settings(miniature):
            left = end - time.monotonic()
            if left <= 0:
                result: dict[str, Any] = {"outcome": "no time left"}
            else:
                result = run_apart(name, setting, min(limit_s, left), miniature=miniature)
            line = {"case": name, "setting": setting, **result, "miniature": miniature}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            console.print(f"{name} {setting}", result, soft_wrap=True, highlight=False)


def run_apart(
    name: str, setting: dict[str, Any], limit_s: float, *, miniature: bool
) -> dict[str, Any]:
    """One try in a process of its own."""
    command = [sys.executable, "-m", "tools.gpu", "--one"]
    command.append(json.dumps({"name": name, "setting": setting}))
    command += ["--miniature"] if miniature else []
    started, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    try:
        done = subprocess.run(
            command, check=False, timeout=limit_s, capture_output=True, text=True, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"longer than {limit_s:.0f} s", "at": at}
    last = [line for line in done.stdout.splitlines() if line.startswith(LAST_LINE)]
    if last:
        result = json.loads(last[-1].removeprefix(LAST_LINE))
    else:
        why = [line for line in done.stderr.splitlines() if line.strip()]
        result = {"outcome": f"exit {done.returncode}", "why": why[-1][:300] if why else ""}
    return {**result, "seconds": round(time.monotonic() - started, 1), "at": at}


def run_here(name: str, setting: dict[str, Any], *, miniature: bool) -> None:
    """One try in this process; prints its result as the last line."""
    import torch

    torch.set_num_threads(1 if miniature else 8)
    try:
        result = {"outcome": "ok", **cases.find(name).measure(setting, miniature)}
    except torch.OutOfMemoryError as error:
        result = {"outcome": "out of memory", "why": str(error).splitlines()[0][:200]}
    if torch.cuda.is_available():
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print(f"\n{LAST_LINE}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
