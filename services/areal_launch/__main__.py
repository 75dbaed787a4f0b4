"""Entry of the `areal` command: one line where an installation cannot run it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path


def installation_problem(folders: Iterable[str] = tuple(sys.path)) -> str:
    """Returns why the installed packages cannot run the command; "" when they can.

    Args:
        folders: Where packages are; looked at as files, since importlib.metadata would make
            `areal --help` a third slower.
    """
    for folder in folders:
        for found in sorted(Path(folder or ".").glob("areal-[0-9]*.dist-info")):
            if "areal-buffer" not in _text(found / "entry_points.txt"):
                return (
                    f"{found}: the distribution areal is another project with the same import "
                    "package, and one overwrote files of the other; install areal-services in an "
                    "environment of its own"
                )
    if importlib.util.find_spec("typer") is None:
        return "this installation has only services; pip install 'areal-services[launch]'"
    return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def main() -> None:
    """Runs the console script."""
    if problem := installation_problem():
        sys.exit(f"areal: {problem}")
    from areal_launch.cli import main as command

    command()


if __name__ == "__main__":
    main()
