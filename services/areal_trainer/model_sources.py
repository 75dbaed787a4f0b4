"""Where a model of the user's comes from: the Hub, another folder, or a person who copies it.

| source                     | the next try                      | checked by                     |
|----------------------------|-----------------------------------|--------------------------------|
| `hf://org/name[@revision]` | keeps files that are whole        | the Hub's digests              |
| `s3://bucket/folder`       | keeps files of the same length    | the lengths in safetensors     |
| `/folder`                  | keeps files that are whole        | the same                       |
| "": copied by hand         | is a person's                     | the same, and files at rest    |
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from areal.chassis.files import remove_leftovers, replacing
from areal.config.model_origin import HUB
from areal.errors import ArealError, InvalidInput, Unavailable, WaitTimeout
from areal_trainer.model_folder import lacks, size_of

Say = Callable[[str], None]

# Weights in other forms than safetensors, and what other programs need.
_NOT_NEEDED = [
    *("*.gguf", "*.onnx", "*.onnx_data", "*.h5", "*.msgpack", "*.pth", "*.tflite", "*.ot"),
    *("original/*", "onnx/*"),
]
_PROGRESS_S = 10.0
_ANSWER_S = 30.0  # of the Hub, to a question that is not a download
# A Hub that was never reached: no network, or a folder was meant.
_UNREACHABLE_S = 300.0
_REMIND_S = 60.0
# A volume in a network does not tell what has changed on it: it is looked at.
_LOOK_S = 2.0
# Files are not whole while they still change; between two of them a copy may pause.
_QUIET_S = 10.0
_GIB = 2**30
_PIECE = 16 * 2**20


class Unreachable(Unavailable):
    """Nothing answers at the source's address."""


def fetch(source: str, model: Path, *, say: Say) -> None:
    """Fetches a repository of the Hub; whole files of an earlier try are kept.

    `HF_TOKEN`, `HF_ENDPOINT` and proxies are read from the environment by huggingface_hub.

    Args:
        source: `hf://org/name[@revision]`.
        model: The folder.
        say: Told what is done.

    Raises:
        InvalidInput: The repository or revision does not exist, or the token may not read it.
        Unreachable: There is no connection to the Hub.
        Unavailable: The Hub stopped answering, or what it sent is damaged: try again.
    """
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    for half in (model / ".cache").rglob("*.incomplete"):
        half.unlink(missing_ok=True)  # of a process that was killed; only whole files are kept
    name, _, revision = source.removeprefix(HUB).partition("@")
    try:
        # The commit first: without it a Hub that is away would pass for one that has nothing new.
        try:
            info = HfApi().model_info(
                name, revision=revision or None, files_metadata=True, timeout=_ANSWER_S
            )
        except (httpx2.TransportError, ConnectionError) as error:
            raise Unreachable(_no_hub(source, name, error)) from None
        files = {each.rfilename: each.size or 0 for each in info.siblings or []}
        unneeded = [*_NOT_NEEDED, *(["*.bin"] if _has_safetensors(files) else [])]
        wanted = {file for file in files if not any(fnmatch(file, each) for each in unneeded)}
        total = sum(files[each] for each in wanted)
        say(f"{source}: commit {info.sha}, {len(wanted)} files, {total / _GIB:.2f} GiB")
        snapshot_download(name, revision=info.sha, local_dir=model, ignore_patterns=unneeded)
        say("comparing with the Hub's digests")
        found = HfApi().verify_repo_checksums(name, revision=info.sha, local_dir=model)
    except HfHubHTTPError as error:
        raise _refused(source, error) from None
    except HFValidationError as error:
        raise InvalidInput(f"{source}: {error}") from None
    except (httpx2.HTTPError, OSError) as error:  # huggingface_hub's own are OSErrors
        raise Unavailable(f"{source}: {error or type(error).__name__}") from None
    damaged = [each["path"] for each in found.mismatches]
    for path in damaged:
        (model / path).unlink()
    absent = sorted(wanted.intersection(found.missing_paths))
    if damaged or absent:
        raise Unavailable(f"{source}: damaged or missing: {', '.join(damaged + absent)}")
    shutil.rmtree(model / ".cache", ignore_errors=True)  # the notes that a resume needs


def fetch_objects(source: str, model: Path, *, say: Say) -> None:
    """Fetches a folder of an object store; credentials come from the environment.

    Args:
        source: `{s3,gs,az}://bucket/folder`.
        model: The folder.
        say: Told what is done.

    Raises:
        InvalidInput: There is nothing below that address.
        Unavailable: The store does not answer, or refuses: try again.
    """
    from areal.weights.objects import ObjectStore
    from areal.weights.publisher import TransportError

    url, _, name = source.rstrip("/").rpartition("/")
    try:
        store = ObjectStore(url)
        files = store.sizes(name)
        if not files:
            raise InvalidInput(f"{source}: is empty; expected a model's files")
        say(f"{source}: {len(files)} files, {sum(files.values()) / _GIB:.2f} GiB")
        for file, size in files.items():
            target = model / file
            if target.is_file() and target.stat().st_size == size:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target)
            with replacing(target) as half, half.open("wb") as out:
                for begin in range(0, size, _PIECE):
                    piece = bytearray(min(_PIECE, size - begin))
                    store.read_into(name, file, begin, memoryview(piece))
                    out.write(piece)
    except TransportError as error:
        raise Unavailable(str(error)) from None
    except OSError as error:
        raise Unavailable(f"{error.filename}: {error.strerror}") from None


def copy(source: Path, model: Path) -> None:
    """Copies a folder's files; each appears under its name when it is whole.

    Raises:
        InvalidInput: There is no such folder.
        Unavailable: The volume is full, or another failure of a disk: try again.
    """
    if not source.is_dir():
        raise InvalidInput(f"prepare.source: no folder {source.name!r} on that claim's volume")
    try:
        for file in sorted(source.rglob("*")):  # links, as in the Hub's cache, are followed
            relative = file.relative_to(source)
            if file.is_file() and not any(part.startswith(".") for part in relative.parts):
                _copy_file(file, model / relative)
    except OSError as error:
        raise Unavailable(f"{error.filename}: {error.strerror}") from None


def _copy_file(file: Path, target: Path) -> None:
    there = file.stat()
    if target.is_file():
        here = target.stat()
        if (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    with replacing(target) as half:
        shutil.copy2(file, half)


def wait_for_copy(model: Path, *, how: str, deadline: float, say: Say) -> None:
    """Waits until a whole model is in the folder, or in one folder in it, and no longer changes.

    `kubectl cp FOLDER POD:MODEL` copies into MODEL/FOLDER when MODEL is there; it always is, so
    that the same command can be given again.

    Args:
        model: The folder; made if missing.
        how: Advice for the user.
        deadline: `time.monotonic()`.
        say: Told what is lacking, each minute.

    Raises:
        WaitTimeout: The model did not arrive.
    """
    model.mkdir(parents=True, exist_ok=True)
    began, reminded, rest = time.monotonic(), float("-inf"), _Rest()
    while True:
        now = time.monotonic()
        folder, problem = _found(model)
        if rest.since(model, now) >= _QUIET_S and not problem:
            break
        if now >= deadline:
            raise WaitTimeout(f"a model in {model}", since=began, hint=f"{problem}; {how}")
        if now - reminded >= _REMIND_S:
            reminded = now
            there = f"{size_of(model) / _GIB:.2f} GiB there, {problem or 'still changing'}"
            say(f"waiting for a model in {model} ({there}): {how}")
        time.sleep(_LOOK_S)
    if folder != model:
        for path in sorted(folder.iterdir()):
            target = model / path.name
            if target.is_dir():
                shutil.rmtree(target)
            path.replace(target)
        folder.rmdir()
    say(f"{model}: copied")


def until_deadline(work: Callable[[], None], model: Path, deadline: float, say: Say) -> None:
    """Does what may fail for a while, again and again; says how far it is.

    A source that was never reached is given up after 300 s.

    Args:
        work: Raises Unavailable for what may be tried again.
        model: The model whose size shows the progress.
        deadline: `time.monotonic()`.
        say: Told each 10 s.

    Raises:
        WaitTimeout: The deadline passed.
        InvalidInput: The source was never reached.
        ArealError: `work` raised it.
    """
    began, pause, last, reached = time.monotonic(), 1.0, "", False
    while True:
        done = threading.Event()
        failed: list[BaseException] = []
        # A library's download cannot be interrupted, only left behind.
        threading.Thread(target=_attempt, args=(work, failed, done), daemon=True).start()
        while not done.wait(min(_PROGRESS_S, max(deadline - time.monotonic(), 0.0))):
            size = f"{size_of(model) / _GIB:.2f} GiB in {model}"
            if time.monotonic() >= deadline:
                raise WaitTimeout("the model", since=began, hint=f"{size}; {last}".rstrip("; "))
            say(size)
        if not failed:
            return
        if not isinstance(failed[0], Unavailable):
            raise failed[0]
        last = str(failed[0])
        reached = reached or not isinstance(failed[0], Unreachable)
        end = deadline if reached else min(deadline, began + _UNREACHABLE_S)
        if time.monotonic() + pause >= end:
            if end < deadline:  # a person's to fix: not started again
                raise InvalidInput(f"{last} (tried for {time.monotonic() - began:.0f} s)")
            raise WaitTimeout("the model", since=began, hint=last)
        say(f"{last}; trying again in {pause:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 60.0)


def _attempt(work: Callable[[], None], failed: list[BaseException], done: threading.Event) -> None:
    try:
        work()
    except BaseException as error:  # raised again by the waiting thread
        failed.append(error)
    finally:
        done.set()


class _Rest:
    """How long a folder's files have been the same."""

    def __init__(self) -> None:
        self._state: dict[str, tuple[int, int]] = {}
        self._since = float("-inf")

    def since(self, folder: Path, now: float) -> float:
        """Returns the seconds since something changed; 0 at the first look."""
        state = {}
        for path in folder.rglob("*"):
            try:
                found = path.stat()
            except OSError:
                continue
            state[str(path)] = (found.st_size, found.st_mtime_ns)
        if state != self._state or self._since == float("-inf"):
            self._state, self._since = state, now
        return now - self._since


def _found(model: Path) -> tuple[Path, str]:
    """The model's folder or the newest one that was copied into it, and what that one lacks.

    Models have folders of their own with a config.json, so theirs is asked first.
    """
    problem = lacks(model)
    inside = [each for each in model.iterdir() if each.is_dir() and _has_config(each)]
    if not problem or not inside:
        return model, problem
    newest = max(inside, key=lambda each: each.stat().st_mtime)
    if deeper := lacks(newest):
        return model, problem if _has_config(model) else f"{newest.name}: {deeper}"
    return newest, ""


def _has_config(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() or config.is_symlink()


def _has_safetensors(files: dict[str, int]) -> bool:
    return any(each.endswith(".safetensors") and "/" not in each for each in files)


def _no_hub(source: str, name: str, error: Exception) -> str:
    why = f"{source}: the Hub cannot be reached: {error or type(error).__name__}"
    if Path(name).exists():
        return why
    # model.path `lab/tiny` and `hf://lab/tiny` are the same here.
    return f"{why}; if a folder was meant, there is no {name!r} here: create it, or write ./{name}"


def _refused(source: str, error: Any) -> ArealError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    mend = "set HF_TOKEN (on Kubernetes in prepare.extraEnv, from a Secret)"
    if isinstance(error, GatedRepoError):
        return InvalidInput(f"{source}: its terms must be accepted on the Hub first; then {mend}")
    if isinstance(error, RepositoryNotFoundError):
        return InvalidInput(f"{source}: no such repository, or a private one: {mend}")
    if isinstance(error, RevisionNotFoundError):
        return InvalidInput(f"{source}: no such revision")
    code = error.response.status_code
    if code in (401, 403):
        return InvalidInput(f"{source}: refused (HTTP {code}): {mend}")
    return Unavailable(f"{source}: HTTP {code} from the Hub")
