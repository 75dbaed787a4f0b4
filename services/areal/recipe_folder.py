"""A recipe that is a folder: `recipe.py`, its helper modules, prompts and small data files.

    folder ── pack ──> recipe.py, and the zip of the other files as comments at its end ──> workers
                                                                                              |
    module areal_recipe_DIGEST.recipe <── Files (imports) <── this process's copy <── unpack

So the source stays one Python text with one digest, wherever a single file is accepted. A recipe's
own modules are a package: `from .helpers import score`. `import helpers` never finds them, so no
name of theirs can hide, or be hidden by, a module of Python or of a package.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import textwrap
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from types import CodeType, ModuleType

from areal.errors import InvalidInput, Unavailable

ENTRY = "recipe.py"
_MARK = b"\n# areal recipe folder: the zip of its other files, in base64\n"
MAX_BYTES = 1024 * 1024
"""Largest size of a packed recipe; BufferService accepts no more."""
_MAX_UNPACKED = 16 * MAX_BYTES
_MAX_FILES = 500
_DAMAGED = (
    *(ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile),
    *(FileExistsError, NotADirectoryError, IsADirectoryError),
)
_LEFT_OUT = frozenset({"__pycache__", "runs"})


def pack(folder: Path) -> bytes:
    """Returns a folder as one source; the same files give the same bytes.

    Left out are hidden files, `__pycache__` and `runs`.

    Raises:
        InvalidInput: The folder has no recipe.py, a symbolic link, a name that cannot be packed, or
            too much in it.
    """
    try:
        entry = (folder / ENTRY).read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"recipe {str(folder)!r}: {ENTRY}: {error.strerror}: expected a folder with {ENTRY}"
        ) from None
    if _MARK in entry:
        raise InvalidInput(
            f"recipe {str(folder)!r}: {ENTRY} is packed already: expected its source"
        )
    if (folder / "recipe" / "__init__.py").exists():  # Python would import the package
        raise InvalidInput(
            f"recipe {str(folder)!r}: {ENTRY} and recipe/__init__.py: expected only one of them, "
            f"{ENTRY}"
        )
    files = sorted(_files(folder))
    buffer, size = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            size += file.stat().st_size
            if len(files) > _MAX_FILES or size > _MAX_UNPACKED:
                raise InvalidInput(
                    f"recipe {str(folder)!r}: {len(files)} files, {size} bytes up to "
                    f"{str(file.relative_to(folder))!r}: expected at most {_MAX_FILES} files and "
                    f"{_MAX_UNPACKED} bytes; keep datasets elsewhere (train_dataset.path)"
                )
            # A fixed time and mode: the digest is that of names and contents.
            info = zipfile.ZipInfo(file.relative_to(folder).as_posix())
            info.compress_type = zipfile.ZIP_DEFLATED
            packed.writestr(info, file.read_bytes())
    lines = textwrap.wrap(base64.b64encode(buffer.getvalue()).decode(), 96)
    source = entry + _MARK + "".join(f"# {line}\n" for line in lines).encode()
    if len(source) > MAX_BYTES:
        raise InvalidInput(
            f"recipe {str(folder)!r}: {len(source)} bytes when packed: expected at most "
            f"{MAX_BYTES}; keep datasets elsewhere (train_dataset.path)"
        )
    return source


def _files(folder: Path) -> list[Path]:
    found = []
    for each in folder.iterdir():
        if each.name.startswith(".") or each.name in _LEFT_OUT or each.suffix == ".pyc":
            continue
        if each.is_symlink():
            raise InvalidInput(f"recipe {str(each)!r}: a symbolic link: expected a file or folder")
        if not is_utf8(each.name) or "\\" in each.name:
            raise InvalidInput(
                f"recipe {str(each)!r}: its name cannot be packed: expected a name in UTF-8, "
                "without a backslash"
            )
        if each.is_dir():
            found += _files(each)
        elif each.is_file():
            found.append(each)
    return found


def is_utf8(path: str) -> bool:
    """Whether the bytes of a file's name or path are UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_packed(source: bytes) -> bool:
    """Whether a source was made by `pack`."""
    return _MARK in source


class Copy:
    """A folder of this process with a recipe's files; locked while the object lives.

    Each load has one of its own: what other processes write, or a cleaner of /tmp has removed from
    earlier copies, cannot change what it imports and reads.
    """

    def __init__(self, root: Path, digest: str) -> None:
        """Creates an empty folder, after removing those of processes that have ended."""
        for each in root.glob("*-*"):
            _remove_unlocked(each)
        fresh = Path(tempfile.mkdtemp(dir=root))
        self._lock = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
        # A forked child has the lock, too; systemd-tmpfiles leaves a locked folder alone. A file
        # system without locks raises an error here and below, so that no copy is removed there.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        # Only from here on it has a name that others remove when it is not locked.
        self.path = fresh.rename(root / f"{digest[:16]}-{fresh.name}")

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            os.close(self._lock)


def _remove_unlocked(folder: Path) -> None:
    with contextlib.suppress(OSError):  # in use, or another process was faster
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def unpack(source: bytes, digest: str) -> Copy:
    """Returns a folder with the files of a packed source, private to this process.

    Raises:
        InvalidInput: What is packed is damaged, too large, or would be written elsewhere.
        Unavailable: This machine has no place for it.
    """
    try:
        root = Path(tempfile.gettempdir()) / f"areal-recipes-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        state = root.lstat()
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or root.is_symlink():
            raise InvalidInput(f"{str(root)!r}: expected a folder that only this user can write")
        copy = Copy(root, digest)
        try:
            _extract(source.partition(_MARK)[2], copy.path)
            if not (copy.path / ENTRY).is_file():
                raise ValueError(f"it has no {ENTRY}")
        except _DAMAGED as error:
            raise InvalidInput(f"recipe {digest[:16]}: its folder is damaged: {error}") from None
    except OSError as error:  # no room, say: of this machine, not of the recipe
        raise Unavailable(f"recipe {digest[:16]}: its folder cannot be unpacked: {error}") from None
    return copy


def forget(package: str) -> None:
    """Drops a package that `Files` has made importable; nothing happens if there is none."""
    for each in [f for f in sys.meta_path if isinstance(f, Files)]:
        if each.package == package:
            sys.meta_path.remove(each)
    for name in [n for n in sys.modules if n.split(".")[0] == package]:
        del sys.modules[name]


def _extract(comments: bytes, folder: Path) -> None:
    text = b"".join(line[2:].strip() for line in comments.splitlines())
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(text, validate=True))) as packed:
        members = packed.infolist()
        if len(members) > _MAX_FILES or sum(m.file_size for m in members) > _MAX_UNPACKED:
            raise ValueError("it has too many files or bytes")
        for member in members:
            name = PurePosixPath(member.filename)
            if name.is_absolute() or ".." in name.parts or "\\" in member.filename:
                raise ValueError(f"file {member.filename!r} lies outside")
            # Damaged data of other methods raises OSError, as a disk without room does.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"file {member.filename!r} has method {member.compress_type}")
            with packed.open(member) as file:
                content = file.read(member.file_size + 1)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


class Files(importlib.abc.MetaPathFinder):
    """Finds the modules of one recipe's package, and no others.

    Code has the file names that the author knows, so that messages and tracebacks show them;
    `__file__` is the copy, next to which data files are.
    """

    def __init__(self, package: str, copy: Copy, shown: str, mark: tuple[str, object]) -> None:
        """`shown` is the author's name of the folder, `mark` an attribute of each module."""
        self.package, self._shown, self.mark = package, shown, mark
        self._copy = copy  # each module's loader has this finder, so the copy lives as long

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.package and not name.startswith(self.package + "."):
            return None
        place = self._copy.path.joinpath(*name.split(".")[1:])
        # Python's order: a package, a module, a folder (of modules, or only of data).
        package, file = place / "__init__.py", place.with_name(f"{place.name}.py")
        if package.is_file():
            file = package
        elif not file.is_file():
            if not place.is_dir():
                return None
            spec = importlib.machinery.ModuleSpec(name, _Empty(self), is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        shown = str(Path(self._shown) / file.relative_to(self._copy.path))
        packages = [str(place)] if file == package else None
        return importlib.util.spec_from_file_location(
            name,
            file,
            loader=_Source(name, str(file), shown, self),
            submodule_search_locations=packages,
        )

    def install(self) -> None:
        """Makes the package importable, afresh if it was before."""
        forget(self.package)
        sys.meta_path.insert(0, self)  # before the finder that would read the copy by itself


class _Empty(importlib.abc.Loader):
    def __init__(self, files: Files) -> None:
        self._files = files

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, *self._files.mark)


class _Source(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, file: str, shown: str, files: Files) -> None:
        super().__init__(name, file)
        self._shown, self._files = shown, files

    def get_code(self, fullname: str) -> CodeType:
        """Compiles under the name that the author knows; writes no bytecode."""
        import linecache

        source = self.get_data(self.path)
        lines = source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[self._shown] = (len(source), None, lines, self._shown)
        code: CodeType = compile(source, self._shown, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, *self._files.mark)
        super().exec_module(module)
