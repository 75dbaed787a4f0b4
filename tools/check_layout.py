"""Every service folder has the same rooms, files stay short, tests mirror the source."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ROOT / "services"
TESTS = ROOT / "tests"
UNIT_TESTS = TESTS / "unit"

# The command starts services; it is none.
NOT_SERVICES = ("areal_launch",)
ROOMS = ("__init__.py", "__main__.py", "config.py", "server.py", "README.md")
# One idea a file: around 400 lines, and never more than this.
MAX_LINES = 600
# Longer on purpose; each with its limit and the reason.
LONGER: dict[str, tuple[int, str]] = {}


def service_folders() -> list[Path]:
    """`services/areal_*` but the command."""
    return sorted(
        p
        for p in SERVICES.glob("areal_*")
        if p.name not in NOT_SERVICES and (p / "__init__.py").exists()
    )


def missing_rooms() -> list[str]:
    """Services without one of the files that every service has."""
    return [
        f"{folder.relative_to(ROOT)}: {room} is missing"
        for folder in service_folders()
        for room in ROOMS
        if not (folder / room).is_file()
    ]


def long_files() -> list[str]:
    """Files of services and of tests over their limit."""
    problems = []
    for file in sorted([*SERVICES.rglob("*.py"), *TESTS.rglob("*.py")]):
        name = str(file.relative_to(ROOT))
        if name.startswith("services/areal/v1/"):
            continue
        limit, _ = LONGER.get(name, (MAX_LINES, ""))
        lines = len(file.read_text().splitlines())
        if lines > limit:
            problems.append(f"{name}: {lines} lines, at most {limit}")
    return problems


def stale_exceptions() -> list[str]:
    """Exceptions that are no longer needed."""
    return [
        f"tools/check_layout.py: {name} is gone or within {MAX_LINES} lines; remove it from LONGER"
        for name in LONGER
        if not (ROOT / name).is_file() or len((ROOT / name).read_text().splitlines()) <= MAX_LINES
    ]


def stray_tests() -> list[str]:
    """Folders of unit tests without a package of that name, and packages without unit tests."""
    problems = [
        f"tests/unit/{folder.relative_to(UNIT_TESTS)}: no such package under services/"
        for folder in sorted(p for p in UNIT_TESTS.rglob("*") if p.is_dir())
        if any(folder.glob("test_*.py"))
        and not (SERVICES / folder.relative_to(UNIT_TESTS)).is_dir()
    ]
    for folder in service_folders():
        tests = UNIT_TESTS / folder.name
        if not any(tests.glob("test_*.py")):
            problems.append(
                f"{folder.relative_to(ROOT)}: no unit tests in {tests.relative_to(ROOT)}"
            )
    return problems


def main() -> int:
    """Prints what is wrong; returns the exit code."""
    problems = [*missing_rooms(), *long_files(), *stale_exceptions(), *stray_tests()]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"layout: {len(service_folders())} services, all with the same rooms")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
