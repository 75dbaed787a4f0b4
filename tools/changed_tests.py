"""Runs the tests that a change can reach, the nearest first, as many as fit into a minute.

    python tools/changed_tests.py                     what differs from HEAD, new files included
    python tools/changed_tests.py --since main        what differs from a revision
    python tools/changed_tests.py --list              prints the files and runs nothing
    python tools/changed_tests.py -- -x -k ledger     arguments for pytest

Tests of the same distance go by their recorded seconds (tests/durations.json), the quickest first.
What does not fit is counted: `make test` runs it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.reach import Reach  # noqa: E402 - the repository's root is not on the path before

WORKERS = 2
BUDGET_S = 45.0
"""Recorded seconds of both workers together; the start of pytest and imports are added to them."""
UNKNOWN_S = 2.0
"""Seconds assumed for a file that has not been recorded yet."""


def changed(since: str) -> list[Path]:
    """Files that differ from a revision, and those that git does not track yet."""
    listings = (
        ("git", "diff", "--name-only", "--no-renames", since),
        ("git", "ls-files", "--others", "--exclude-standard"),
    )
    names: set[str] = set()
    for command in listings:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"--since {since}: {done.stderr.strip().splitlines()[0]}")
        names |= set(done.stdout.splitlines())
    return sorted(Path(name) for name in names)


def choose(
    distances: dict[Path, int], seconds: dict[str, float], budget_s: float = BUDGET_S
) -> tuple[list[Path], list[Path]]:
    """Divides test files into those that fit into the budget and those that are left out.

    Args:
        distances: Test file -> arrows to the change.
        seconds: Recorded wall seconds, by path relative to the repository.
        budget_s: Seconds of all workers together.
    """

    def cost(file: Path) -> float:
        return seconds.get(str(file.relative_to(ROOT)), UNKNOWN_S)

    chosen, left, total = [], [], 0.0
    for file in sorted(distances, key=lambda each: (distances[each], cost(each))):
        if total + cost(file) <= budget_s:
            chosen.append(file)
            total += cost(file)
        else:
            left.append(file)
    return chosen, left


def recorded() -> dict[str, float]:
    """The content of tests/durations.json."""
    found: dict[str, float] = json.loads((ROOT / "tests" / "durations.json").read_text())
    return found


def main() -> int:
    """Chooses, says what was chosen, runs pytest; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--since", default="HEAD", metavar="REV")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args()
    files = changed(options.since)
    distances = Reach().tests(files)
    chosen, left = choose(distances, recorded())
    names = [str(file.relative_to(ROOT)) for file in chosen]
    if options.list:
        print("\n".join(names))
        return 0
    print(
        f"{len(files)} changed files reach {len(distances)} test files: {len(chosen)} run, "
        f"{len(left)} do not fit into a minute" + (" (`make test` runs them)" if left else "")
    )
    if not names:
        return 0
    command = [sys.executable, "-m", "pytest", "-m", "not long", "-q"]
    if len(names) > 1:
        command += ["-n", str(WORKERS), "--dist", "loadfile", "--no-loadscope-reorder"]
    sys.stdout.flush()  # before what pytest prints
    return subprocess.run([*command, *options.arguments, *names], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
