"""Files and folders that appear whole, and that no other user has prepared for us.

A name that can be guessed, beside a target or in a folder that all users share, can be taken by
another user first: a link leads the write to another file, a FIFO makes it wait for good. So new
files get names that cannot be guessed, and are created or not at all.

Imports the standard library only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

_LONGEST = 200  # of a name's 255 bytes


@contextmanager
def replacing(target: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yields a new file beside `target` that takes its place at the end.

    Readers see the old file or the whole new one. When the block raises, the new file is removed
    and the target stays as it was. Of a target that is a link, the link is replaced.

    Args:
        target: The file; it need not exist, its folder must.
        mode: The permissions before the umask, as for `os.open`.

    Raises:
        OSError: The folder does not exist, cannot be written to, or is full.
    """
    path = _beside(target)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode))
    try:
        yield path
        path.replace(target)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target` that gets its name at the end.

    When the block raises, nothing stays. What an earlier process left when it was killed goes.

    Raises:
        OSError: As `replacing`, or `target` exists and is not an empty folder.
    """
    remove_leftovers(target)
    path = _beside(target)
    path.mkdir()
    try:
        yield path
        path.rename(target)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def remove_leftovers(target: Path) -> None:
    """Removes what is left beside `target` of writers that were killed; call it as the only one."""
    for path in target.parent.glob(f".{escape(_begin(target))}.{'[0-9a-f]' * 16}.tmp"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # another user's
                path.unlink()


def foreign_owner(folder: Path) -> str:
    """Returns why what is in a folder may be another user's work; "" if it cannot be.

    Only our own folders are trusted, and the superuser's, which volumes are mounted as.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder}: expected a folder, not a link or a file"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{folder}: belongs to user {found.st_uid}, expected one of ours ({os.geteuid()})"
    return ""


def _beside(target: Path) -> Path:
    return target.with_name(f".{_begin(target)}.{secrets.token_hex(8)}.tmp")


def _begin(target: Path) -> str:
    return os.fsdecode(os.fsencode(target.name)[:_LONGEST])
