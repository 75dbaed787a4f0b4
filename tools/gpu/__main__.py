"""Measures the trainer on the first GPU; a line of JSON and a row of a table for each try.

    python -m tools.gpu                                   all cases, in at most 520 s
    python -m tools.gpu --only step,head --budget-s 120   what failed, again
    python -m tools.gpu --miniature                       the same code, tiny, on a CPU
    python -m tools.gpu --table gpu.jsonl                 writes the figures into docs/gpu.md

Run it in the root of a checkout, or in the folder that `make gpu-kit` packs: nothing has to be
installed besides torch and transformers, and the packages that carried.txt lists. A try whose
package is missing is `skipped`. Models are made from shapes/ with random weights; nothing is
downloaded. Bad arguments alone give an exit code other than 0.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from tools.gpu import plan, table
from tools.gpu.driver import Driver


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default=",".join(plan.NAMES), help="cases, separated by commas")
    parser.add_argument("--budget-s", type=float, default=plan.BUDGET_S, help="seconds for all")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="lines are appended")
    parser.add_argument("--miniature", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only write docs/gpu.md")
    given = parser.parse_args(argv)
    if given.table is not None:
        table.write(table.read(given.table))
        return
    chosen = given.only.split(",")
    if unknown := sorted(set(chosen) - set(plan.NAMES)):
        parser.error(f"--only {','.join(unknown)}: expected some of {','.join(plan.NAMES)}")
    if given.budget_s <= 0:
        parser.error(f"--budget-s {given.budget_s:g}: expected more than 0")
    driver, lines = Driver(given.out, miniature=given.miniature), []
    tries = sum(len(plan.find(name).settings) for name in chosen)
    for line in driver.run_all(chosen, time.monotonic() + given.budget_s):
        lines.append(line)
        print(table.row(line, tries), flush=True)
    print(table.count(lines), flush=True)


if __name__ == "__main__":
    main()
