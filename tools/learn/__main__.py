"""Starts the runs that the learning table lacks, two at a time, and writes docs/learning.md.

    python -m tools.learn [ROW ...] [--seeds 0,1,2] [--jobs 2] [--page]

Each run is `areal run` of an example in a folder of its own under runs/learn, with all its
services. A finished run is a line in docs/learning.jsonl. It is not run again unless its recipe,
settings or overrides have changed. An interrupted run resumes from its checkpoint.

| consumes | waits for | unblocked by |
|---|---|---|
| two cores per run | `areal run` | its end, or `LIMIT_S` |
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.learn import page
from tools.learn.table import PACKAGES, ROOT, ROWS, SEEDS, Row

from areal.errors import did_you_mean

RESULTS = ROOT / "docs" / "learning.jsonl"
LIMIT_S = 3600.0
POINTS = 50
"""Number of points of a curve; each is the mean of equally many steps."""


def finished() -> list[dict[str, Any]]:
    """Returns all finished runs, including those of earlier revisions."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [json.loads(line) for line in lines]


def current(results: list[dict[str, Any]], row: Row) -> dict[int, dict[str, Any]]:
    """Returns the runs of a row's current revision, by seed."""
    revision = row.revision()
    return {r["seed"]: r for r in results if (r["row"], r["revision"]) == (row.name, revision)}


def shown(results: list[dict[str, Any]], row: Row) -> dict[int, dict[str, Any]]:
    """Returns the newest run of each seed, from the current revision if it has one."""
    return {r["seed"]: r for r in results if r["row"] == row.name} | current(results, row)


def run(row: Row, seed: int, folder: Path) -> dict[str, Any]:
    """Runs once, to the end.

    Raises:
        RuntimeError: It failed, its packages are missing, or it took longer than LIMIT_S; the
            message ends with its last lines.
    """
    if row.packages and not (ROOT / row.packages).is_dir():
        raise RuntimeError(f"no folder {row.packages}: run `{PACKAGES[row.packages]}` first")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.log"
    name = f"{row.name}-s{seed}"
    recipe = ROOT / "examples" / f"{row.example}.py"
    command = [sys.executable, "-m", "areal_launch", "run", str(recipe), f"seed={seed}"]
    command += ["experiment_name=learn", f"trial_name={name}", *row.overrides]
    paths = [ROOT / each for each in ("services", row.packages) if each]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "COLUMNS": "200"}
    began, load = time.monotonic(), [os.getloadavg()[0]]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output
        )
        try:
            process.wait(LIMIT_S)
        except BaseException:
            process.terminate()  # it ends its services
            process.wait(120)
            raise
    load.append(os.getloadavg()[2])
    seconds = time.monotonic() - began
    if process.returncode:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise RuntimeError(f"{name}: exit {process.returncode}; {log} ends with\n{said}")
    run_dir = folder / "runs" / "learn" / name
    results = json.loads((run_dir / "trainer.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    measure = row.measure
    return {
        "row": row.name,
        "seed": seed,
        "revision": row.revision(),
        "commit": _commit(),
        "before": results[measure.before] if measure.before else None,
        "after": results[measure.after],
        "value": round(measure.value(results), 4),
        "steps": len(rows),
        "seconds": round(seconds),
        "step_seconds": round(sum(r["time/step"] for r in rows) / max(len(rows), 1), 3),
        "staleness": round(sum(r.get("staleness/mean", 0.0) for r in rows) / max(len(rows), 1), 2),
        "samples_per_second": round(_rate(rows), 1),
        "load": [round(each, 1) for each in load],
        "curve": _curve([r[measure.curve] for r in rows if measure.curve in r]),
    }


def _rate(rows: list[dict[str, Any]]) -> float:
    """Samples trained in a second, from the end of the first step to that of the last."""
    if len(rows) < 2:
        return 0.0
    return float(sum(r.get("samples", 0) for r in rows[1:]) / (rows[-1]["time"] - rows[0]["time"]))


def _curve(values: list[float]) -> list[float]:
    size = max(1, -(-len(values) // POINTS))
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [round(sum(part) / len(part), 4) for part in parts]


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    """Runs, records, writes the page; 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.learn", description=__doc__)
    parser.add_argument("rows", nargs="*", help="names of rows; none: all")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="only write the page")
    arguments = parser.parse_args()
    known = {row.name: row for row in ROWS}
    for name in arguments.rows:
        if name not in known:
            hint = did_you_mean(name, known)
            parser.error(f"row {name!r}: expected one of {', '.join(known)}{hint}")
    chosen = [known[name] for name in arguments.rows] or ROWS
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    done = finished()
    # One seed of all rows before the next seed, so an interrupted table has every row.
    jobs = [(row, seed) for seed in seeds for row in chosen if seed not in current(done, row)]
    writing, failures = threading.Lock(), []

    def work(job: tuple[Row, int]) -> None:
        row, seed = job
        folder = ROOT / "runs" / "learn" / f"{row.name}-s{seed}-{row.revision()}"
        try:
            result = run(row, seed, folder)
        except (RuntimeError, subprocess.TimeoutExpired, KeyError, OSError) as error:
            with writing:
                failures.append(error)
                print(f"FAILED {row.name} seed {seed}: {error}", flush=True)
            return
        with writing, RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")
            print(
                f"{row.name} seed {seed}: {row.measure}: {result['value']} "
                f"in {result['seconds']} s",
                flush=True,
            )

    if not arguments.page:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(work, jobs))
    results = finished()
    page.write([(row, shown(results, row)) for row in ROWS])
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
