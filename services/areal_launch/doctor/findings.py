"""Lines of a doctor's report: what was looked at, what was found, and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from areal.errors import ArealError
from areal_launch.view.output import CheckResult


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    verdict: CheckResult
    found: str
    fix: str = ""
    """How to fix it; empty when ok."""


def ok(found: str) -> Finding:
    """Reports a check that passed; `examine` fills in its name."""
    return Finding("", CheckResult.OK, found)


def note(found: str, fix: str) -> Finding:
    """Reports that a run works, with a drawback."""
    return Finding("", CheckResult.NOTE, found, fix)


def unknown(found: str, fix: str = "nothing to fix: a run looks again") -> Finding:
    """Reports what only a run can tell."""
    return Finding("", CheckResult.UNKNOWN, found, fix)


def missing(found: str, fix: str = "see the message") -> Finding:
    """Reports that a run would fail."""
    return Finding("", CheckResult.MISSING, found, fix)


Check = Callable[[], Finding]


def examine(checks: dict[str, Check]) -> list[Finding]:
    """Runs checks; one that fails is a finding itself."""
    findings = []
    for name, check in checks.items():
        try:
            found = check()
        except ArealError as error:
            found = missing(str(error))
        findings.append(replace(found, name=name))
    return findings
