"""Which source files one trajectory passes: a run, traced, counted after its first steps.

    python tools/count_tour.py RUN_FOLDER [key=value …]

Runs examples/arithmetic_grpo.py with a profile function in every process, which notes the file of
each Python function that is called. What trainer, buffer, rollout, reward and weight-sync call
between the second step and the last is the happy path: start, resume and failures are not in it.
Generated code is not counted; housekeeping (chassis, metrics, traces, status) is, and told apart.
Prints the files by process, then their number and lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
COUNTED = ("trainer", "buffer", "rollout", "reward", "weight-sync")
HOUSEKEEPING = re.compile(
    r"areal/chassis/|(metrics|trace|autoscaling|load_watch|progress|status)\.py$"
)
# Python runs this at the start of each process.
TRACER = f"""
import json, os, sys, threading, time
from pathlib import Path

seen = set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_name != "<module>":
        seen.add(frame.f_code.co_filename)

def write(folder=Path(__file__).parent):
    while True:
        time.sleep(1.0)
        files = sorted(f for f in seen.copy() if f.startswith({str(SERVICES)!r}))
        seen.clear()
        line = json.dumps([time.time(), os.environ.get("AREAL_PROCESS", ""), files])
        with (folder / f"{{os.getpid()}}.jsonl").open("a") as file:
            file.write(line + chr(10))

threading.Thread(target=write, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
"""


def main() -> int:
    """Runs, counts, prints; returns the run's exit code."""
    run_root, *overrides = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACER)
        command = [sys.executable, "-m", "areal_launch.cli", "run", "examples/arithmetic_grpo.py"]
        code = subprocess.run(
            [*command, f"run_root={run_root}", "trial_name=tour", *overrides],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{SERVICES}:{folder}"},
            check=False,
        ).returncode
        (rows_file,) = Path(run_root).glob("*/tour/metrics.jsonl")
        rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
        begin, end = rows[1]["time"], rows[-1]["time"]
        found: dict[str, set[str]] = defaultdict(set)
        for part in folder.glob("*.jsonl"):
            for line in part.read_text().splitlines():
                when, process, files = json.loads(line)
                if begin <= when <= end and process.startswith(COUNTED):
                    names = {str(Path(f).relative_to(SERVICES)) for f in files}
                    found[process] |= {n for n in names if not n.startswith("areal/v1/")}
    for process, names in sorted(found.items()):
        print(f"{process}: {len(names)}")
        print("".join(f"  {each}\n" for each in sorted(names)), end="")
    every = set().union(*found.values())
    for what, names in (
        ("all", every),
        ("but housekeeping", {each for each in every if not HOUSEKEEPING.search(each)}),
    ):
        lines = sum(len((SERVICES / each).read_text().splitlines()) for each in names)
        print(f"{what}: {len(names)} files, {lines:,} lines")
    return code


if __name__ == "__main__":
    sys.exit(main())
