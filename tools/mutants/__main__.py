"""Plants one-line bugs, one at a time, and sees which test catches each: `make mutants`.

    python -m tools.mutants                     all of tools/mutants/mutants.yaml
    python -m tools.mutants eng06 buf01         only these
    python -m tools.mutants --again             also those of which the result is known

Each bug goes into a copy of this tree. First the tests of `make test-fast` that reach the file run,
the nearest first, until one fails; if none does, the other tests of `make test` that reach it. So
a bug that is not caught here is not caught by those targets either, unless a test outside the
import graph's reach sees it, or it is among the tests of the second half beyond --seconds.
A test that caught a bug is run once more without it, and must pass. Results are kept in
build/mutants.json, and a run continues where the last one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml
from tools.changed_tests import choose, recorded
from tools.reach import Reach

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).parent / "mutants.yaml"
RESULTS = ROOT / "build" / "mutants.json"
FAST = "not process and not long"
SLOW = "process and not long"
OWN_TEST = "tests/unit/test_mutants.py"
NEAREST = 10
"""Test files that are run before the others are imported."""
LONGEST_S = 900.0
"""Most seconds for one call of pytest."""


@dataclass(frozen=True)
class Mutant:
    """One line of one file, and what it becomes."""

    id: str
    file: str
    was: str
    now: str
    wrong: str

    def plant(self, root: Path) -> None:
        """Changes the file; raises ValueError unless the text is there exactly once."""
        file = root / self.file
        text = file.read_text()
        if text.count(self.was) != 1:
            raise ValueError(f"{self.id}: {self.file}: {text.count(self.was)} times: {self.was}")
        file.write_text(text.replace(self.was, self.now))


def mutants() -> list[Mutant]:
    """Returns every planted bug, in the file's order."""
    return [Mutant(**entry) for entry in yaml.safe_load(MUTANTS.read_text())]


def copy_tree(folder: Path) -> None:
    """Copies what git knows or would add, and links the environment."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    # Tests that ask git about the tree find a repository.
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


class Campaign:
    """Tries mutants in copies of the tree, several at a time."""

    def __init__(self, workers: int, seconds: float) -> None:
        """`seconds`: recorded seconds of tests that start processes, per mutant."""
        self._reach = Reach()
        self._recorded = recorded()
        self._seconds = seconds
        self._copies: SimpleQueue[Path] = SimpleQueue()
        shutil.rmtree(ROOT / "build" / "mutants", ignore_errors=True)
        for number in range(workers):
            folder = ROOT / "build" / "mutants" / str(number)
            copy_tree(folder)
            self._copies.put(folder)

    def attempt(self, mutant: Mutant) -> dict[str, Any]:
        """The verdict on one mutant, and the test that failed.

        fast and test name who caught it. It survived, or is unsound: the test that failed does so
        without the bug as well. It is unknown if a call of pytest did not end: a test that hangs
        fails by its own timeout, so the machine was too busy.
        """
        tests = self._reach.tests([Path(mutant.file)])
        # Not the test that looks for the mutants' own lines: it would catch all of them.
        names = [n for n in (str(f.relative_to(ROOT)) for f in tests) if n != OWN_TEST]
        fast = [n for n in names if n.startswith(("tests/unit/", "tests/contract/test_ledger"))]
        near, _ = choose(tests, self._recorded, self._seconds)
        folder = self._copies.get()
        original = (folder / mutant.file).read_text()
        began = time.monotonic()
        try:
            mutant.plant(folder)
            # Most are caught by a near test, and importing all test files takes half a minute.
            verdict, by = "fast", self._run(folder, FAST, fast[:NEAREST])
            by = by or self._run(folder, FAST, fast[NEAREST:])
            if not by:
                others = [n for n in names if n not in fast]
                ours = [str(file.relative_to(ROOT)) for file in near]
                verdict, by = "test", self._run(folder, FAST, [n for n in others if n in ours])
                by = by or self._run(folder, SLOW, ours)
            (folder / mutant.file).write_text(original)
            if by and self._run(folder, "not long", [by]):
                verdict = "unsound"
        except subprocess.TimeoutExpired:
            verdict, by = "unknown", f"pytest did not end within {LONGEST_S:.0f} s"
        finally:
            (folder / mutant.file).write_text(original)
            self._copies.put(folder)
        return {
            "verdict": verdict if by else "survived",
            "by": by,
            "seconds": round(time.monotonic() - began, 1),
            "files": len(names),
        }

    def _run(self, folder: Path, marker: str, files: list[str]) -> str:
        """Runs test files until one test fails; returns its name, or nothing.

        Raises:
            subprocess.TimeoutExpired: Neither happened within `LONGEST_S`.
        """
        if not files:
            return ""
        command = [str(folder / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "--tb=no"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, "-m", marker, "-p", "no:cacheprovider", *files],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        if done.returncode in (0, 5):
            return ""
        failed = [s for s in done.stdout.splitlines() if s.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0].partition(" ")[2] if failed else done.stdout[-300:].strip()


def main() -> int:
    """Tries the mutants; prints a row for each, then the sums and what survived."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("ids", nargs="*", help="only these")
    parser.add_argument("--again", action="store_true", help="try known ones again")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150.0, help="of slow tests, per mutant")
    options = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = {mutant: each for mutant, each in known.items() if each["verdict"] != "unknown"}
    every = [m for m in mutants() if not options.ids or m.id in options.ids]
    if unknown := set(options.ids) - {m.id for m in every}:
        parser.error(f"{', '.join(sorted(unknown))}: not in {MUTANTS.relative_to(ROOT)}")
    open_ones = [m for m in every if options.again or options.ids or m.id not in known]
    if open_ones:
        campaign = Campaign(options.workers, options.seconds)
        with ThreadPoolExecutor(options.workers) as pool:
            for mutant, result in zip(
                open_ones, pool.map(campaign.attempt, open_ones), strict=True
            ):
                known[mutant.id] = result
                RESULTS.write_text(json.dumps(known, indent=1))
                print(_row(mutant, result), flush=True)
    results = {mutant.id: known[mutant.id] for mutant in every}
    verdicts = [result["verdict"] for result in results.values()]
    fast = verdicts.count("fast")
    print(
        f"{len(results)} planted: {fast} caught by test-fast, {fast + verdicts.count('test')} by "
        f"test; {verdicts.count('survived')} survived"
    )
    for mutant in every:
        if (verdict := results[mutant.id]["verdict"]) not in ("fast", "test"):
            print(f"  {verdict}: {mutant.id} {mutant.file}: {mutant.wrong}")
    return 0


def _row(mutant: Mutant, result: dict[str, Any]) -> str:
    end = result["by"] or mutant.wrong
    return f"{mutant.id} {result['verdict']:8} {result['seconds']:6.1f} s  {end}"


if __name__ == "__main__":
    sys.exit(main())
