from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tests.unit.areal_weight_sync.weight_sync_fakes import (
    make_model,
    publish_folder,
    write_safetensors,
)

from areal.errors import InvalidInput
from areal.protocol.versions import version_from_pb, version_to_pb
from areal.v1 import policy_pb2
from areal.weights import manifest as weights
from areal.weights.manifest import (
    PolicyVersion,
    WeightTensor,
    build_manifest,
    check_same_tensors,
    from_json,
    publish_dir,
    read_manifest,
    read_tensors,
    staging_dir,
    to_json,
    version_dir,
    write_manifest,
)
from areal.weights.safetensors import digest_of
from areal_weight_sync import versions
from areal_weight_sync.versions import DigestCache, collect_garbage


def test_manifest_when_built_then_matches_safetensors_and_survives_json_and_proto(tmp_path):
    from safetensors.numpy import save_file

    folder = make_model(tmp_path / "m")
    save_file(
        {"b": np.ones((2, 3), "f4"), "a": np.ones(4, "f2"), "lm_head.weight": np.ones(2, "f4")},
        folder / "model.safetensors",
    )
    manifest = build_manifest(folder, 7, 2)
    # The output head is tied in config.json, so it is no tensor of its own.
    assert manifest.tensors == (
        WeightTensor("a", (4,), "F16", digest_of(np.ones(4, "f2").tobytes())),
        WeightTensor("b", (2, 3), "F32", digest_of(np.ones((2, 3), "f4").tobytes())),
    )
    assert [f.name for f in manifest.files] == ["config.json", "model.safetensors"]
    assert from_json(to_json(manifest)) == manifest
    assert version_from_pb(version_to_pb(manifest)) == manifest
    DigestCache().verify(manifest)


def test_manifest_when_sharded_then_covers_every_shard_and_the_index(tmp_path):
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "one.safetensors", {"a": np.ones(2)})
    write_safetensors(folder / "two.safetensors", {"b": np.ones(3)})
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    assert [t.name for t in build_manifest(folder, 0, 0).tensors] == ["a", "b"]
    index.write_text('{"weight_map": {"a": "../one.safetensors"}}')
    with pytest.raises(InvalidInput, match="not a file of this folder"):
        build_manifest(folder, 0, 0)
    index.write_text('{"weight_map": [1]}')
    with pytest.raises(InvalidInput, match="weight_map"):
        build_manifest(folder, 0, 0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], "truncated or torn"),
        (lambda raw: raw + b"x", "truncated or torn"),
        (lambda raw: raw[:4], "not a safetensors file"),
        (lambda raw: b"", "not a safetensors file"),
        (lambda raw: struct.pack("<Q", 1 << 60) + raw[8:], "header of"),
        (lambda raw: raw[:8] + b"\xff" + raw[9:], "not a safetensors file"),
        (lambda raw: raw.replace(b"[16, 4]", b"[16, 5]"), "offsets do not fit"),
        (lambda raw: raw.replace(b"F32", b"F99"), "not a safetensors file"),
    ],
)
def test_header_when_damaged_then_refused_naming_the_file(tmp_path, damage, message):
    file = make_model(tmp_path / "m") / "model.safetensors"
    assert {t.name for t in read_tensors(file)} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
    }
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(InvalidInput, match=message) as caught:
        read_tensors(file)
    assert str(file) in str(caught.value)


def test_publish_dir_when_repeated_or_different_then_idempotent_or_refused(tmp_path):
    version = publish_folder(tmp_path, 3, 1)
    assert version.path == str(version_dir(tmp_path, 3, 1))
    again = make_model(staging_dir(tmp_path, 3, 1), fill=3.0)
    write_manifest(build_manifest(again, 3, 1), again)
    publish_dir(again, Path(version.path))
    assert not again.exists()
    assert read_manifest(Path(version.path)) == version
    other = make_model(staging_dir(tmp_path, 3, 1), fill=4.0)
    write_manifest(build_manifest(other, 3, 1), other)
    with pytest.raises(InvalidInput, match="different content"):
        publish_dir(other, Path(version.path))


def test_manifest_when_broken_then_refused(tmp_path):
    with pytest.raises(InvalidInput, match="No such file"):
        read_manifest(tmp_path)
    for text in ("", "[]", '{"version": 1}', "\x00"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(InvalidInput, match="policy version"):
            read_manifest(tmp_path)


def test_verify_when_a_file_is_hashed_once_then_again_only_after_it_changed(tmp_path, monkeypatch):
    version = publish_folder(tmp_path, 1)
    hashed = []
    real = versions.file_digest
    monkeypatch.setattr(versions, "file_digest", lambda f: hashed.append(f.name) or real(f))
    cache = DigestCache()
    for _ in range(3):
        cache.verify(version)
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    file = Path(version.path) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InvalidInput, match="not the one that was published"):
        cache.verify(version)
    file.write_bytes(raw[:-1])
    with pytest.raises(InvalidInput, match="truncated"):
        cache.verify(version)
    file.unlink()
    with pytest.raises(InvalidInput, match="No such file"):
        cache.verify(version)


def test_verify_when_a_name_leaves_the_folder_then_refused(tmp_path):
    version = publish_folder(tmp_path, 1)
    outside = PolicyVersion(1, 1, version.path, (weights.WeightFile("../x", 1, "0"),))
    with pytest.raises(InvalidInput, match="file name"):
        DigestCache().verify(outside)


def test_tensors_when_they_differ_from_version_0_then_the_first_is_named():
    base = PolicyVersion(0, 0, "/m", (), (WeightTensor("a", (2,), "F32"),))
    check_same_tensors(PolicyVersion(1, 1, "/n", (), (WeightTensor("a", (2,), "BF16"),)), base)
    for tensors, message in (
        ((), "tensor a is missing"),
        ((WeightTensor("a", (3,), "F32"),), r"shape \[3\], expected \[2\]"),
        ((*base.tensors, WeightTensor("b", (1,), "F32")), "tensor b is unknown"),
    ):
        with pytest.raises(InvalidInput, match=message):
            check_same_tensors(PolicyVersion(1, 1, "/n", (), tensors), base)


def test_garbage_when_collected_then_only_old_published_folders_go(tmp_path):
    root = tmp_path / "weights"
    root.mkdir()
    for version, incarnation in ((1, 1), (2, 1), (3, 1), (3, 2), (4, 2), (6, 2)):
        publish_folder(root, version, incarnation)
    (root / "model").mkdir()
    (root / "step_00000001-inc_1").mkdir()
    (root / "v12-inc1").mkdir()  # not one of ours: eight digits at least
    staging_dir(root, 3, 1).mkdir()
    staging_dir(root, 7, 2).mkdir()
    outside = make_model(tmp_path / "outside")
    (root / "v00000000-inc0").symlink_to(outside)
    collect_garbage(root, 4, 2, [str(version_dir(root, 2, 1))])
    assert sorted(f.name for f in root.iterdir()) == [
        ".spare",
        ".staging-v00000007-inc2",
        "model",
        "step_00000001-inc_1",
        "v00000000-inc0",
        "v00000002-inc1",
        "v00000003-inc1",
        "v00000003-inc2",
        "v00000004-inc2",
        "v00000006-inc2",
        "v12-inc1",
    ]
    assert (outside / "config.json").is_file()
    assert collect_garbage(tmp_path / "missing", 4, 2) == []


def test_manifest_json_when_read_by_others_then_is_plain_json(tmp_path):
    version = publish_folder(tmp_path, 1)
    raw = json.loads((Path(version.path) / "manifest.json").read_text())
    assert (raw["version"], raw["incarnation"]) == (1, 1)


@pytest.mark.parametrize("seconds", [-(2**63), 2**63 - 1])
def test_version_when_its_time_is_none_then_refused(seconds: int) -> None:
    message = policy_pb2.PolicyVersion(version=1, path="/model")
    message.publish_time.seconds = seconds
    with pytest.raises(InvalidInput, match=r"version\.publish_time"):
        version_from_pb(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", -1), ("version", 2**21), ("version", 2**63 - 1), ("incarnation", 2**53)],
)
def test_version_when_no_ledger_could_count_it_then_refused(field: str, value: int) -> None:
    message = policy_pb2.PolicyVersion(version=1, path="/model")
    setattr(message, field, value)
    with pytest.raises(InvalidInput, match=rf"version\.{field} {value}"):
        version_from_pb(message)


@pytest.mark.parametrize("where", ["path", "file", "delta"])
def test_version_when_a_name_has_a_null_character_then_refused(where: str) -> None:
    message = policy_pb2.PolicyVersion(version=1, path="/m\0" if where == "path" else "/model")
    if where == "file":
        message.files.add(name="config\0.json")
    if where == "delta":
        message.delta.base = "/m\0"
    with pytest.raises(InvalidInput, match="no null character"):
        version_from_pb(message)


def test_digests_when_versions_go_then_forgotten_though_the_root_is_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's folder is relative by default, and a manifest's path never is."""
    monkeypatch.chdir(tmp_path)
    cache, root = DigestCache(), Path("runs/weights")
    for version in range(1, 8):
        folder = make_model(tmp_path / "runs" / "weights" / f"v{version:08}-inc1")
        cache.verify(build_manifest(folder, version, 1))
        for gone in collect_garbage(root, version, 2):
            cache.forget(gone)
    kept = {file.parent.name for file in cache._digests}
    assert kept == {"v00000006-inc1", "v00000007-inc1"}
