"""One file per kind of try: `measure(setting, miniature)` returns its figures."""

from __future__ import annotations


class Skipped(Exception):
    """What this machine lacks for a try."""
