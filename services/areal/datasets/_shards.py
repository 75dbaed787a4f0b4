"""Notices that files of a numbered set (`train-00001-of-00003.parquet`) are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import PurePosixPath

from areal.errors import InvalidInput

# Earlier releases of datasets put a hash behind: `train-00000-of-00001-a09b74b3ef9c3b56.parquet`.
NUMBERED = r"(?P<number>\d+)-of-(?P<total>\d+)(-[0-9a-f]{16})?"
_SHARD = re.compile(rf"(?P<name>.*?){NUMBERED}")
_SHOWN = 3


def check_shards(files: Iterable[str], address: str) -> None:
    """Raises an error unless files that say how many they are are all there, once each.

    Args:
        files: Paths in the dataset. Those of one folder and name are a set; other files are
            passed over.
        address: What the error calls the dataset.

    Raises:
        InvalidInput: A set lacks files, has too many, or has files of two sets.
    """
    sets: dict[tuple[str, str], list[re.Match[str]]] = {}
    for each in files:
        path = PurePosixPath(each)
        if match := _SHARD.fullmatch(path.stem):
            sets.setdefault((str(path.parent), match["name"]), []).append(match)
    for shards in sets.values():
        if fault := _fault(shards):
            raise InvalidInput(f"dataset {address}: {fault}")


def _fault(shards: Sequence[re.Match[str]]) -> str:
    """Says what is wrong with a set; "": nothing."""
    totals = {int(each["total"]): each["total"] for each in shards}
    if len(totals) > 1:
        said = " and ".join(f"-of-{totals[total]}" for total in sorted(totals))
        return f"the files {shards[0]['name']}* say {said}: expected the files of one set"
    [(total, digits)] = totals.items()
    numbers = {int(each["number"]) for each in shards}
    # Most tools count from 0, a few from 1.
    first = 1 if 0 not in numbers and total in numbers else 0
    lost = (number for number in range(first, first + total) if number not in numbers)
    if missing := list(islice(lost, _SHOWN + 1)):
        name, width = shards[0]["name"], len(shards[0]["number"])
        named = [f"{name}{number:0{width}}-of-{digits}" for number in missing[:_SHOWN]]
        more = ", …" if len(missing) > _SHOWN else ""
        verb = "is" if len(missing) == 1 else "are"
        return f"{', '.join(named)}{more} {verb} missing, expected {total} files of that name"
    if len(shards) > total:
        return f"{len(shards)} files {shards[0]['name']}* say -of-{digits}, expected {total}"
    return ""
