"""Which checkpoints exist, which one to resume from, which to delete. No torch here.

A checkpoint is a folder `step_<k>-inc_<i>` with a `done.json` written last. It is made as
`.tmp-step_<k>-inc_<i>` and renamed when every rank has finished, so a folder with the final name
is whole; `done.json` lists the files with size and digest (xxh3-128), so one that was damaged later
is noticed. Each rank hashes the file it has written, and a share of all before a resume; an export
hashes them all.

Folders above the step from which a later incarnation resumed belong to a lost branch: `newest`
ignores them (design rule: a resume never jumps onto weights the ledger has replaced).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.chassis.logging import get_logger
from areal.errors import InvalidInput, NotFound
from areal.weights.safetensors import file_digest

DIGESTS = "digests.json"
"""Suffix of a file in which a rank describes what it has written."""
_THREADS = 4
_NAME = re.compile(r"step_(\d+)-inc_(\d+)")
_DAMAGED = (OSError, ValueError, KeyError, TypeError, InvalidInput)
"""What the check of a damaged checkpoint raises."""


@dataclass(frozen=True)
class Checkpoint:
    """One finished checkpoint of a run."""

    step: int
    incarnation: int
    path: Path
    extra: dict[str, Any]
    """What the trainer stored beside the tensors: ledger step, dataset cursor, …"""


class CheckpointFolder:
    """The `checkpoints/` folder of a run."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self.keep = keep
        self.find_best: Callable[[Sequence[int]], int | None] = lambda _: None
        """Which of these steps has the best held-out reward: its checkpoint is kept, too."""
        self._log = get_logger(__name__)

    def begin(self, step: int, incarnation: int) -> Path:
        """Creates an empty temporary folder for a new checkpoint."""
        path = self.root / f".tmp-step_{step}-inc_{incarnation}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def finish(self, temporary: Path, extra: dict[str, Any]) -> Path:
        """Makes a written checkpoint durable and visible, then deletes surplus ones.

        Returns:
            Its final path.
        """
        described: dict[str, Any] = {}
        for each in temporary.glob(f"*{DIGESTS}"):
            described |= json.loads(each.read_text("utf-8"))
            each.unlink()
        files = sorted(p for p in temporary.rglob("*") if p.is_file())
        names = {str(p.relative_to(temporary)): p for p in files}
        done = {
            "files": {name: described.get(name) or describe(p) for name, p in names.items()},
            "extra": extra,
        }
        (temporary / "done.json").write_text(json.dumps(done, indent=1), "utf-8")
        for path in [*files, temporary / "done.json", temporary]:
            _fsync(path)
        final = self.root / temporary.name.removeprefix(".tmp-")
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _fsync(self.root)
        listed = self.list()
        best = self.find_best([each.step for each in listed])
        for surplus in listed[: -self.keep]:
            if surplus.step != best:
                shutil.rmtree(surplus.path, ignore_errors=True)
        return final

    def list(self) -> list[Checkpoint]:
        """Returns valid checkpoints of the live branch, oldest first; logs damaged ones."""
        if not self.root.is_dir():
            return []
        found: list[Checkpoint] = []
        for path in self.root.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            extra = self._valid(path)
            if extra is not None:
                found.append(Checkpoint(int(match[1]), int(match[2]), path, extra))
        # An incarnation that resumed from step r makes everything above r of earlier ones void.
        live: list[Checkpoint] = []
        for candidate in found:
            later = [
                c.extra.get("resumed_from", 0)
                for c in found
                if c.incarnation > candidate.incarnation
            ]
            if all(candidate.step <= resumed_from for resumed_from in later):
                live.append(candidate)
        return sorted(live, key=lambda c: (c.step, c.incarnation))

    def intact(self, path: Path, rank: int = 0, ranks: int = 1) -> bool:
        """Whether a checkpoint's files hold what was written; reads every `ranks`-th of them."""
        return self._valid(path, read=lambda number: number % ranks == rank) is not None

    def clean(self) -> None:
        """Removes what crashes left half-written; only when no other trainer writes here."""
        for path in self.root.glob(".tmp-*"):
            self._log.info("half_written_checkpoint_removed", path=str(path))
            shutil.rmtree(path, ignore_errors=True)

    def _valid(
        self, path: Path, *, read: Callable[[int], bool] = lambda _: False
    ) -> dict[str, Any] | None:
        """Returns what `_check` does; None of a damaged one, with a line in the log."""
        try:
            return _check(path, read)
        except _DAMAGED as error:
            self._log.warning("checkpoint_skipped", path=str(path), cause=str(error))
            return None


def verify(path: Path) -> None:
    """Reads all files of a checkpoint and compares them with what its trainer wrote.

    Raises:
        NotFound: The run has removed it.
        InvalidInput: A file is not what was written; the message names it.
    """
    try:
        _check(path, lambda _: True)
    except _DAMAGED as error:
        if removed(path):
            raise NotFound(f"checkpoint {str(path)!r}: the run has removed it") from None
        raise InvalidInput(
            f"checkpoint {str(path)!r}: {error}; expected the files as the trainer wrote them"
        ) from None


def removed(path: Path) -> bool:
    """Returns whether a checkpoint, or the first of its files, is no longer there."""
    try:
        _check(path, lambda _: False)
    except FileNotFoundError:
        return True
    except _DAMAGED:
        pass
    return False


def _check(path: Path, read: Callable[[int], bool]) -> dict[str, Any]:
    """Returns `extra` if every file has its size and, if `read` picks it, its digest."""
    done = json.loads((path / "done.json").read_text("utf-8"))
    for name, expected in done["files"].items():
        size = (path / name).stat().st_size
        if size != expected["size"]:
            raise ValueError(f"{name} has {size} bytes, expected {expected['size']}")
    chosen = [n for number, n in enumerate(sorted(done["files"])) if read(number)]
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing releases the interpreter
        found = pool.map(lambda name: describe(path / name), chosen)
        for name, each in zip(chosen, found, strict=True):
            if each != done["files"][name]:
                raise ValueError(f"{name} is not what was written: its digest differs")
    return dict(done["extra"])


def describe(path: Path) -> dict[str, Any]:
    """Returns the size and digest of a file."""
    return {"size": path.stat().st_size, "xxh3": file_digest(path)}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
