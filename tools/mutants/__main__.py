"""Plants one-line bugs, one at a time, and sees which test catches each: `make mutants`.

    python -m tools.mutants                     all of tools/mutants/mutants.yaml
    python -m tools.mutants eng06 buf01         only these
    python -m tools.mutants --again             also those of which the result is known

Each bug goes into a copy of this tree. The test file that caught it before (`by` in mutants.yaml)
runs first. Then, of the tests that reach the bug's file, the nearest run first, until one fails:
those of `make test-fast` within --seconds, the others of `make test` within --seconds, then the
rest of `make test-fast`. So a bug that is not caught here is not caught by those targets either,
unless a test outside the import graph's reach sees it, or it is among the tests of the second kind
beyond --seconds. A bug that only counts for `make test` may be caught by `make test-fast` as well,
by a test that is further away.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import yaml
from tools.changed_tests import UNKNOWN_S, choose, recorded
from tools.reach import Reach

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).parent / "mutants.yaml"
RESULTS = ROOT / "build" / "mutants.json"
FAST = "not process and not long"
SLOW = "process and not long"
OWN_TEST = "tests/unit/test_mutants.py"
BATCH_S = 20.0
"""Recorded seconds of one call of pytest: the next files are imported only if all of its pass."""
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
    by: str = ""
    """The test file that caught it before."""

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


def batches(files: list[Path], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Divides test files, in their order, into calls of pytest of about `BATCH_S` each.

    Args:
        files: Absolute paths.
        seconds: Recorded wall seconds, by path relative to the repository.
    """
    batch: list[str] = []
    cost = 0.0
    for name in (str(file.relative_to(ROOT)) for file in files):
        batch.append(name)
        cost += seconds.get(name, UNKNOWN_S)
        if cost >= BATCH_S:
            yield batch
            batch, cost = [], 0.0
    if batch:
        yield batch


def _is_fast(file: Path) -> bool:
    """Whether `make test-fast` collects the file."""
    return str(file.relative_to(ROOT)).startswith(("tests/unit/", "tests/contract/test_ledger"))


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
        tests.pop(ROOT / OWN_TEST, None)
        folder = self._copies.get()
        original = (folder / mutant.file).read_text()
        began = time.monotonic()
        verdict, by = "survived", ""
        try:
            mutant.plant(folder)
            for kind, marker, files in self._calls(tests, mutant.by):
                if by := self._run(folder, marker, files):
                    verdict = kind
                    break
            (folder / mutant.file).write_text(original)
            if by and self._run(folder, "not long", [by]):
                verdict = "unsound"
        except subprocess.TimeoutExpired:
            verdict, by = "unknown", f"pytest did not end within {LONGEST_S:.0f} s"
        finally:
            (folder / mutant.file).write_text(original)
            self._copies.put(folder)
        return {
            "verdict": verdict,
            "by": by,
            "seconds": round(time.monotonic() - began, 1),
            "files": len(tests),
        }

    def _calls(self, tests: dict[Path, int], by: str) -> Iterator[tuple[str, str, list[str]]]:
        """The calls of pytest in their order: verdict of a bug that one catches, marker, files."""
        if by:
            yield "fast" if _is_fast(ROOT / by) else "test", FAST, [by]
            yield "test", SLOW, [by]
        fast = {file: distance for file, distance in tests.items() if _is_fast(file)}
        near, far = choose(fast, self._recorded, self._seconds)
        ours, _ = choose(tests, self._recorded, self._seconds)
        others = [file for file in ours if file not in fast]
        for kind, marker, files in (
            ("fast", FAST, near),
            ("test", FAST, others),
            ("test", SLOW, ours),
            ("fast", FAST, far),
        ):
            for batch in batches(files, self._recorded):
                yield kind, marker, batch

    def _run(self, folder: Path, marker: str, files: list[str]) -> str:
        """Runs test files until one test fails; returns its name, or nothing.

        Raises:
            subprocess.TimeoutExpired: Neither happened within `LONGEST_S`.
        """
        command = [str(folder / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "--tb=no"]
        # Processes that a test starts are the copy's, not those of the tree that .venv names.
        own = {"PYTHONPATH": f"{folder / 'services'}:{folder}"}
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | own
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
            trying = {pool.submit(campaign.attempt, mutant): mutant for mutant in open_ones}
            for done in as_completed(trying):
                mutant, result = trying[done], done.result()
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
