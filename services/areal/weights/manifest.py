"""A policy version on disk: its folder, its manifest, and how both are checked. No torch here.

    trainer                                              weight-sync
    ───────                                              ───────────
    staging_dir() ── save_file, copy config ──>
    build_manifest() ── write_manifest() ──>
    publish_dir(staging, final)  (atomic rename)  ──>  DigestCache.verify(folder, manifest)
                                                       check_same_tensors(manifest, version 0)

    <weights_root>/v00000012-inc3/{model.safetensors, config.json, tokenizer.json, …, manifest.json}

Published weights are not fsynced: they can be made again from the checkpoint, and a file torn by a
power loss fails its digest. Syncing 500 MB would cost more than writing them.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from areal.errors import InvalidInput
from areal.weights.safetensors import digest_of, file_digest, read_layout, tensor_digests

MANIFEST = "manifest.json"
# The ledger orders groups by version and submission in one double: 21 bits are left for versions.
MAX_POLICY_VERSION = 2**21
_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
SPARE = ".spare"
"""A retired folder whose files the next version may overwrite."""
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_HEADS = frozenset(("lm_head.weight", "embed_out.weight"))
_FOLDER = re.compile(r"v(\d{8,})-inc(\d+)")


@dataclass(frozen=True)
class WeightFile:
    """One file of a version.

    Example:
        >>> WeightFile("model.safetensors", 5_312_648, "9f86d081884c7d65…")
    """

    name: str
    """File name relative to the version's folder, without directories."""
    size_bytes: int
    digest: str
    """xxh3-128, hex; see `areal.weights.safetensors.file_digest`."""


@dataclass(frozen=True)
class WeightTensor:
    """One tensor, as the safetensors header names it.

    Example:
        >>> WeightTensor("model.norm.weight", (128,), "F32")
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name: F32, BF16, F16, F64."""
    digest: str = ""
    """xxh3-128 of its bytes, hex."""


@dataclass(frozen=True)
class DeltaFile:
    """What changed since an earlier version; see `weights.delta`.

    Example:
        >>> DeltaFile(base="v00000011-inc3", base_digest="9f86…", size_bytes=31_204, digest="41a0…")
    """

    base: str
    """Folder name of the version it starts from."""
    base_digest: str
    """`PolicyVersion.digest` of the base."""
    size_bytes: int
    digest: str
    """xxh3-128 of the file, hex."""


@dataclass(frozen=True)
class AdapterInfo:
    """What a version of adapters (LoRA) adds to version 0; see `weights.adapters`.

    Example:
        >>> AdapterInfo(rank=16, alpha=32, base_digest="9f86…", size=2e-4)
    """

    rank: int
    """Rank of the product B A."""
    alpha: int
    """Servers compute with W + alpha / rank * B A."""
    base_digest: str
    """`PolicyVersion.digest` of version 0, which has the weights W."""
    size: float = 0.0
    """The largest |alpha / rank * B|; 0: the adapter changes nothing."""
    before: str = ""
    """Folder name of the version that the trainer published before; empty: none."""
    change: float = 0.0
    """The largest difference of alpha / rank * B from that version."""


@dataclass(frozen=True)
class PolicyVersion:
    """One published set of weights, with its manifest.

    Example:
        >>> PolicyVersion(version=12, incarnation=3, path="runs/a/b/weights/v00000012-inc3")
    """

    version: int
    """Finished train steps; 0 = initial weights."""
    incarnation: int
    """Incarnation of the trainer that published it; 0 for the configured model."""
    path: str
    """A Hugging Face model directory that every inference server can read."""
    files: tuple[WeightFile, ...] = ()
    tensors: tuple[WeightTensor, ...] = ()
    delta: DeltaFile | None = None
    """The delta, stored with the files or instead of files that can be made from it."""
    adapter: AdapterInfo | None = None
    """The files hold an adapter, in the form that peft reads; None: whole weights."""
    publish_time: float = field(default=0.0, compare=False)
    """Unix seconds."""

    @property
    def name(self) -> str:
        """The name that servers are told as `weight_version`."""
        return str(self.version)

    @property
    def folder_name(self) -> str:
        """The name of its folder; `parse_version_dir` reads it back."""
        return version_name(self.version, self.incarnation)

    @cached_property
    def digest(self) -> str:
        """The digest of what servers compute with: every tensor's name, type, shape and bytes."""
        lines = sorted(f"{t.name} {t.dtype} {t.shape} {t.digest}\n" for t in self.tensors)
        if self.adapter is not None:
            own = self.adapter
            lines.append(f"adapter {own.rank} {own.alpha} {own.base_digest}\n")
        return digest_of("".join(lines).encode())

    @property
    def adapter_name(self) -> str:
        """The name by which requests ask for it: one for each version; "" for whole weights."""
        return self.folder_name if self.adapter is not None else ""

    @property
    def stored(self) -> bool:
        """Whether it has files; a version that is being broadcast has none yet."""
        return bool(self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)


def version_dir(root: Path, version: int, incarnation: int) -> Path:
    """Returns where a version is published."""
    return root / version_name(version, incarnation)


def version_name(version: int, incarnation: int) -> str:
    """Returns the name of a published folder; `parse_version_dir` reads it back."""
    return f"v{version:08d}-inc{incarnation}"


def staging_dir(root: Path, version: int, incarnation: int) -> Path:
    """Returns where a version is written before a rename publishes it: on the same volume."""
    return root / f".staging-v{version:08d}-inc{incarnation}"


def open_staging(root: Path, version: int, incarnation: int, *, reuse: bool = True) -> Path:
    """Returns an empty staging folder, or one with a retired version's weight file to overwrite.

    Args:
        root: The weights root.
        version: Finished train steps.
        incarnation: The trainer's.
        reuse: False: always an empty one.

    Raises:
        OSError: The volume is full, read-only or not available.
    """
    staging = staging_dir(root, version, incarnation)
    shutil.rmtree(staging, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    try:
        if not reuse:
            raise FileNotFoundError
        (root / SPARE).rename(staging)
    except OSError:
        staging.mkdir()
    for file in staging.iterdir():
        if file.name != SINGLE_FILE:
            file.unlink()
    return staging


def parse_version_dir(name: str) -> tuple[int, int] | None:
    """Returns (version, incarnation) of a published folder's name; None for any other name."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a model folder: a single file, or the shards of an index.

    A single file beside an index of shards that are gone is the model: a sharded model was
    overwritten by a smaller one. If the shards are there, too, transformers reads the single file
    and SGLang reads the shards, so that trainer and servers might have different weights.

    Raises:
        InvalidInput: There are none, the index does not map to files of this folder, or there are
            both a single file and all shards of the index.
    """
    index, single = folder / _INDEX, folder / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise InvalidInput(f"{folder}: no {SINGLE_FILE} and no {_INDEX}")
        return [single]
    try:
        shards = _shards(index)
    except InvalidInput:
        if single.is_file():
            return [single]
        raise
    if single.is_file() and shards != [single]:
        raise InvalidInput(
            f"{folder}: expected {SINGLE_FILE} or the shards of {_INDEX}, got both: transformers "
            f"reads the first, SGLang the second; delete {SINGLE_FILE}, or {_INDEX} and its shards"
        )
    return shards


def _shards(index: Path) -> list[Path]:
    """The files that an index maps to; raises InvalidInput if one is not there."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InvalidInput(f"{index}: expected a JSON object with a weight_map") from None
    if not names:
        raise InvalidInput(f"{index}: weight_map is empty: expected names of shards")
    for name in names:
        inside = isinstance(name, str) and Path(name).name == name
        if not inside or not (index.parent / name).is_file():
            raise InvalidInput(f"{index}: shard {name!r} is not a file of this folder")
    return [index.parent / name for name in names]


def read_tensors(file: Path) -> list[WeightTensor]:
    """Reads the tensor list of a safetensors header; checks that the file holds all their bytes.

    Raises:
        InvalidInput: Not safetensors, an unknown dtype, or a truncated or padded file.
    """
    return [WeightTensor(p.name, p.shape, p.dtype) for p in read_layout(file).places]


def build_manifest(folder: Path, version: int, incarnation: int) -> PolicyVersion:
    """Reads headers and digests of everything a server loads from a folder.

    Files that do not change what a server computes (tokenizer, README) are left out, and so are
    tensors that follow from others: a tied output head, rotary frequencies.

    Args:
        folder: A Hugging Face model directory.
        version: Finished train steps.
        incarnation: The trainer's.

    Raises:
        InvalidInput: The folder is not a complete model.
    """
    shards = weight_files(folder)
    digests: dict[str, str] = {}
    files, tensors = [], list[WeightTensor]()
    for shard in shards:
        layout = read_layout(shard)
        found = tensor_digests(shard, layout)
        twice = digests.keys() & found.keys()
        if twice:
            raise InvalidInput(f"{shard}: tensor {min(twice)} is in two files")
        digests.update(found)
        tensors += [WeightTensor(p.name, p.shape, p.dtype, found[p.name]) for p in layout.places]
        files.append(WeightFile(shard.name, layout.size_bytes, layout.file_digest(found)))
    return assemble_manifest(folder, version, incarnation, files, tensors)


def assemble_manifest(
    folder: Path,
    version: int,
    incarnation: int,
    weight_files: Sequence[WeightFile],
    tensors: Sequence[WeightTensor],
) -> PolicyVersion:
    """Returns the manifest of a folder whose safetensors files are already described.

    Raises:
        InvalidInput: Its config.json or its index cannot be read.
    """
    second = _second_names(folder, tensors)
    small = [folder / "config.json"]
    if (folder / _INDEX).is_file() and [f.name for f in weight_files] != [SINGLE_FILE]:
        small.append(folder / _INDEX)
    described = [WeightFile(f.name, f.stat().st_size, file_digest(f)) for f in small]
    return PolicyVersion(
        version=version,
        incarnation=incarnation,
        path=str(folder),
        files=(described[0], *weight_files, *described[1:]),
        tensors=tuple(
            tensor
            for tensor in sorted(tensors, key=lambda t: t.name)
            if not tensor.name.endswith("rotary_emb.inv_freq") and tensor.name not in second
        ),
        publish_time=time.time(),
    )


def _second_names(folder: Path, tensors: Sequence[WeightTensor]) -> set[str]:
    """Returns the names of output heads that are the embedding: some directories list both names.

    Hugging Face's default differs by family, and older configs leave it out: then a head is tied if
    it has the digest of another tensor.
    """
    file = folder / "config.json"
    try:
        tied = json.loads(file.read_bytes()).get("tie_word_embeddings")
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
    except (ValueError, AttributeError) as error:
        raise InvalidInput(f"{file}: expected a JSON object ({error})") from None
    heads = {tensor.name: tensor for tensor in tensors if tensor.name in _HEADS}
    if tied is not None:
        return set(heads) if tied else set()
    others = {(t.shape, t.digest) for t in tensors if t.name not in heads}
    return {name for name, head in heads.items() if (head.shape, head.digest) in others}


@cache
def _adapter() -> TypeAdapter[PolicyVersion]:
    return TypeAdapter(PolicyVersion)


def to_json(version: PolicyVersion) -> str:
    """Returns one line of JSON; `from_json` reads it back."""
    return _adapter().dump_json(version).decode()


def from_json(text: str | bytes) -> PolicyVersion:
    """Reads what `to_json` wrote; raises InvalidInput."""
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        what = ".".join(map(str, first["loc"])) + f": {first['msg']}"
        raise InvalidInput(f"manifest: expected a policy version in JSON ({what})") from None


def write_manifest(manifest: PolicyVersion, folder: Path) -> None:
    """Writes `manifest.json` into a (staging) folder."""
    (folder / MANIFEST).write_text(to_json(manifest), "utf-8")


def read_manifest(folder: Path) -> PolicyVersion:
    """Reads a published folder's `manifest.json`; `path` is where it was found.

    Raises:
        InvalidInput: Missing or not a manifest.
    """
    file = folder / MANIFEST
    try:
        manifest = from_json(file.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}") from None
    return at_path(manifest, folder)


def stored_versions(root: Path) -> list[PolicyVersion]:
    """Returns each published version below `root`, oldest first; skips those without manifest."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        if parse_version_dir(folder.name) and (folder / MANIFEST).is_file():
            found.append(read_manifest(folder))
    return sorted(found, key=lambda version: (version.version, version.incarnation))


def at_path(manifest: PolicyVersion, folder: Path) -> PolicyVersion:
    """Returns the same manifest, found in `folder`."""
    return replace(manifest, path=str(folder))


def publish_dir(staging: Path, final: Path) -> None:
    """Makes a finished folder visible under its final name, atomically.

    Publishing the same content again (a trainer that restarted between rename and announcement)
    succeeds and drops the staging folder.

    Raises:
        InvalidInput: `final` exists with different content, or `staging` has no manifest.
    """
    wanted = read_manifest(staging)
    if final.exists():
        if read_manifest(final).files != wanted.files:
            raise InvalidInput(f"{final}: already exists with different content")
        shutil.rmtree(staging)
        return
    staging.rename(final)


def check_same_tensors(manifest: PolicyVersion, base: PolicyVersion) -> None:
    """Checks names and shapes against version 0: servers ignore unknown names, die of wrong shapes.

    A dtype may differ within its kind, because servers convert floats.

    Raises:
        InvalidInput: Names the first tensor that is missing, unknown, of another shape or kind.
    """
    have = {t.name: t for t in manifest.tensors}
    want = {t.name: t for t in base.tensors}
    for name, wanted in want.items():
        if name not in have:
            raise InvalidInput(
                f"version {manifest.version}: tensor {name} is missing, expected "
                f"{list(wanted.shape)} as in version {base.version}"
            )
        found = have[name]
        if found.shape != wanted.shape:
            raise InvalidInput(
                f"version {manifest.version}: tensor {name} has shape {list(found.shape)}, "
                f"expected {list(wanted.shape)} as in version {base.version}"
            )
        if (found.dtype in _FLOATS) != (wanted.dtype in _FLOATS):
            raise InvalidInput(
                f"version {manifest.version}: tensor {name} has dtype {found.dtype}, "
                f"expected one like {wanted.dtype} as in version {base.version}"
            )
    for name in have:
        if name not in want:
            raise InvalidInput(
                f"version {manifest.version}: tensor {name} is unknown to version {base.version}"
            )
