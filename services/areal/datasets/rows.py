"""Loads rows by address: a file, a folder of files, or a dataset on the Hub.

| address                               | rows                                                |
|---------------------------------------|-----------------------------------------------------|
| `rows.jsonl`, `rows.json`,            | all of the file's; it has no other split. A .json   |
| `rows.parquet`                        | file has one row per line, or one array of rows     |
| `folder`                              | of its files that are named after the split         |
| `hf://org/name[/config][@revision]`   | the same, of a repository of the Hub                |

A file belongs to the split `train` if it or its folder has that name: `train.jsonl`,
`main/train-00000-of-00002.parquet`, `train/0000.parquet`. If a dataset has only files of other
formats, the Hub's own conversion to Parquet is read.

A Parquet file pads: each object has the keys of all. Keys without a value are left out, so that its
rows are those of the JSON Lines file that it was made from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from areal.datasets._formats import READ, seems
from areal.datasets._shards import NUMBERED, check_shards
from areal.datasets.jsonl import load_jsonl
from areal.errors import InvalidInput, Unavailable

_ANSWER_S = 30.0  # of the Hub, to a question that is not a download
# A branch that the Hub makes itself.
_CONVERTED = "refs/convert/parquet"
# What datasets' `save_to_disk` writes beside its Arrow files.
_SAVED = ("state.json", "dataset_info.json")


def load_rows(address: str | Path, split: str = "train") -> list[dict[str, Any]]:
    """Returns the rows of a file, a folder, or a dataset on the Hugging Face Hub.

    Args:
        address: A file in a format of `READERS`, a folder of such files, or a dataset on the Hub,
            `hf://org/name[/config][@revision]`.
        split: The split to read from a folder or dataset: the files that are named after the split
            or are in a folder of that name. A single file is the split `train`, and the one that it
            is named after; `train_and_heldout` holds rows out of it.

    Returns:
        All rows, in memory. Files are read in the order of their names.

    Raises:
        InvalidInput: There is nothing at the address, the split has no files (`NoSplitError`) or no
            rows, files of a numbered set (`-of-00003`) are missing, the dataset has several configs
            and the address names none, or the Hub answers with HTTP 401, 403 or 404. A private or
            gated dataset needs a token in HF_TOKEN.
        Unavailable: The Hub cannot be reached or answers with another error.

    Example:
        >>> load_rows("hf://openai/gsm8k/main", "test")[0].keys()
        dict_keys(['question', 'answer'])
    """
    text = str(address)
    if not text.strip():  # Path("") would be the working folder
        raise InvalidInput(
            f"dataset {text!r}: expected a file, a folder or hf://org/name[/config][@revision]"
        )
    if text.startswith("hf://"):
        return _from_hub(text, split)
    place = Path(text)
    if place.is_dir():
        return _from_folder(place, split, text)
    rows = _read(place.parent, [place.name], text)
    if split != "train" and not _is_of(PurePosixPath(place.name), split):
        # All of it would be the training rows again.
        raise NoSplitError(
            f"dataset {text}: a single file has no split {split!r}: expected a folder with files "
            "of that split, or train_and_heldout(), which holds rows out of a file"
        )
    return rows


def _from_folder(place: Path, split: str, address: str) -> list[dict[str, Any]]:
    found = {each.relative_to(place).as_posix() for each in place.rglob("*") if each.is_file()}
    # Those of `Dataset.save_to_disk`; their .json files are no rows.
    saved = {
        folder
        for folder in (str(PurePosixPath(each).parent) for each in found)
        if {str(PurePosixPath(folder, name)) for name in _SAVED} <= found
    }
    others = [each for each in found if str(PurePosixPath(each).parent) not in saved]
    try:
        chosen = _of_split(others, split, address)
    except (_NoFilesError, NoSplitError) as error:
        mine = [each for each in saved if split in PurePosixPath(each).parts]
        if not (mine if isinstance(error, NoSplitError) else saved):
            raise
        raise InvalidInput(
            f"dataset {address}: a folder of datasets' save_to_disk, which is not read here: load "
            f"it with datasets.load_from_disk and write dataset.to_parquet('{split}.parquet')"
        ) from None
    return _read(place, chosen, address)


def _from_hub(address: str, split: str) -> list[dict[str, Any]]:
    form = r"hf://([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@(\S+))?"
    match = re.fullmatch(form, address)
    if match is None:
        raise InvalidInput(f"dataset {address!r}: expected hf://org/name[/config][@revision]")
    name, config, revision = match.groups()
    try:
        return _from_revision(name, config, revision, split, address)
    except _NoFilesError:
        if revision is not None:
            raise
    return _from_revision(name, config, _CONVERTED, split, address)


def _from_revision(
    name: str, config: str | None, revision: str | None, split: str, address: str
) -> list[dict[str, Any]]:
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        info = HfApi().dataset_info(name, revision=revision, timeout=_ANSWER_S)
        # .json files have many forms, so the Hub's conversion of them is read instead.
        files = [e.rfilename for e in info.siblings or [] if not e.rfilename.endswith(".json")]
        inside = [each for each in files if config is None or config in PurePosixPath(each).parts]
        chosen = _of_split(inside, split, address)
        folder = snapshot_download(
            name, repo_type="dataset", revision=info.sha, allow_patterns=chosen
        )
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403, 404):
            raise InvalidInput(
                f"dataset {address}: not found or not accessible (HTTP {code}); a private or "
                "gated one needs HF_TOKEN"
            ) from None
        raise Unavailable(f"dataset {address}: HTTP {code} from the Hub") from None
    except (httpx2.HTTPError, OSError) as error:  # huggingface_hub's own are OSErrors
        raise Unavailable(f"dataset {address}: {error or type(error).__name__}") from None
    return _read(Path(folder), chosen, address)


class _NoFilesError(InvalidInput):
    """No file in a form that is read here."""


class NoSplitError(InvalidInput):
    """There are rows at the address, but none of the split."""


def _of_split(files: Collection[str], split: str, address: str) -> list[str]:
    """The files of a split, in order: all of one form and one config."""
    known = tuple(READERS)
    # Folders have .json files that are no rows (dataset_infos.json).
    listed = sorted(
        each
        for each in files
        if each.endswith(known)
        and not _is_hidden(PurePosixPath(each))
        and (PurePosixPath(each).suffix != ".json" or _is_of(PurePosixPath(each), split))
    )
    if not listed:
        others = sorted(each for each in files if not _is_hidden(PurePosixPath(each)))
        raise _NoFilesError(
            f"dataset {address}: no {', '.join(known[:-1])} or {known[-1]} files there"
            + (f", only {_shown(others)}" if others else "")
        )
    mine = [each for each in listed if _is_of(PurePosixPath(each), split)]
    if not mine:
        raise NoSplitError(f"dataset {address}: no files of split {split!r} among {_shown(listed)}")
    form = next(form for form in READERS if any(each.endswith(form) for each in mine))
    mine = [each for each in mine if each.endswith(form)]
    configs = {
        tuple(part for part in PurePosixPath(each).parts[:-1] if part != split) for each in mine
    }
    if len(configs) > 1:
        raise InvalidInput(
            f"dataset {address}: has several configs; append one of them to the name: "
            f"{', '.join(sorted('/' + each[-1] for each in configs if each))}"
        )
    check_shards(mine, address)
    return mine


def _shown(files: Sequence[str]) -> str:
    return ", ".join(files[:5]) + (", …" if len(files) > 5 else "")


def _is_hidden(path: PurePosixPath) -> bool:
    """Whether a program keeps it for itself: `.ipynb_checkpoints/train.jsonl`."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _is_of(path: PurePosixPath, split: str) -> bool:
    """`train.jsonl`, `train-00000-of-00002.parquet`, `train/0000.parquet`; not `train_sft-…`."""
    numbered = re.fullmatch(rf"{re.escape(split)}(-\d+|-{NUMBERED})?", path.stem)
    return numbered is not None or split in path.parts[:-1]


def _read(folder: Path, files: Iterable[str], address: str) -> list[dict[str, Any]]:
    rows = [row for each in files for row in _read_file(folder / each)]
    if not rows:
        raise InvalidInput(f"dataset {address}: has no rows")
    return rows


def _read_file(file: Path) -> list[dict[str, Any]]:
    return READERS.get(file.suffix, load_jsonl)(file)


def _read_parquet(file: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        rows = parquet.read_table(file).to_pylist(maps_as_pydicts="strict")
    except (OSError, pa.ArrowException, KeyError) as error:
        said = " ".join(str(error).split())
        if file.is_file() and (kind := _seems(file)):
            said = f"seems to be {kind}: {READ}"
        raise InvalidInput(f"dataset {str(file)!r}: {said}") from None
    for number, row in enumerate(rows, 1):
        if row and all(value is None for value in row.values()):
            raise InvalidInput(
                f"{file}: row {number}: null in each column ({', '.join(row)}): expected a value"
            )
    return [_unpadded(row) for row in rows]


def _seems(file: Path) -> str:
    with file.open("rb") as opened:
        kind = seems(file.name, opened.read(64))
    return "" if kind.startswith("Parquet") else kind


def _unpadded(value: Any) -> Any:
    """The value without the keys that Parquet adds to objects that lack them."""
    if isinstance(value, dict):
        return {key: _unpadded(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_unpadded(each) for each in value]
    return value


READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".parquet": _read_parquet,
    ".jsonl": load_jsonl,
    ".json": load_jsonl,
}
"""The table of file formats. If a split has files in several formats, the first format in the table
is read."""
