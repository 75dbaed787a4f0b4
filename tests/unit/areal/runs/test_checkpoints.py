import json

import pytest

from areal.errors import InvalidInput, NotFound
from areal.runs import checkpoints
from areal.runs.checkpoints import DIGESTS, CheckpointFolder, describe, removed, verify


def save(folder, step, incarnation=1, resumed_from=0, content=b"weights"):
    path = folder.begin(step, incarnation)
    (path / "model").write_bytes(content)
    return folder.finish(path, {"step": step, "resumed_from": resumed_from, "cursor": [0, step]})


def newest(folder, ranks=1):
    """What a session resumes from: all ranks must find their share of the files whole."""
    whole = (
        c
        for c in reversed(folder.list())
        if all(folder.intact(c.path, rank, ranks) for rank in range(ranks))
    )
    return next(whole, None)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints", keep=3)


def test_newest_when_nothing_was_saved_then_none(folder):
    assert newest(folder) is None


def test_newest_when_several_then_highest_step_with_its_extra(folder):
    save(folder, 20)
    save(folder, 40)
    found = newest(folder)
    assert (found.step, found.incarnation) == (40, 1)
    assert found.extra["cursor"] == [0, 40]
    assert (found.path / "model").read_bytes() == b"weights"


def test_finish_when_more_than_keep_then_oldest_are_deleted(folder):
    for step in (10, 20, 30, 40, 50):
        save(folder, step)
    assert [c.step for c in folder.list()] == [30, 40, 50]
    assert len(list(folder.root.iterdir())) == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "no_marker", "bad_marker"])
def test_newest_when_damaged_then_the_one_before_is_chosen(folder, damage, capsys):
    save(folder, 20)
    path = save(folder, 40)
    match damage:
        case "truncate":
            (path / "model").write_bytes(b"w")
        case "flip":
            (path / "model").write_bytes(b"weightt")
        case "remove":
            (path / "model").unlink()
        case "no_marker":
            (path / "done.json").unlink()
        case "bad_marker":
            (path / "done.json").write_text("{")
    assert newest(folder).step == 20
    line = capsys.readouterr().out
    assert "checkpoint_skipped" in line
    assert "step_40-inc_1" in line


def test_newest_when_half_written_then_ignored(folder):
    save(folder, 20)
    (folder.begin(40, 1) / "model").write_bytes(b"weig")
    assert newest(folder).step == 20


def test_newest_when_a_later_incarnation_resumed_below_then_the_lost_branch_is_ignored(folder):
    save(folder, 20)
    save(folder, 40)
    save(folder, 30, incarnation=2, resumed_from=20)
    assert newest(folder).step == 30
    assert [c.step for c in folder.list()] == [20, 30]


def test_begin_when_a_half_written_one_exists_then_starts_empty(folder):
    (folder.begin(5, 1) / "junk").write_bytes(b"x")
    assert list(folder.begin(5, 1).iterdir()) == []


def test_clean_when_crashes_left_half_written_ones_then_only_those_go(folder):
    path = save(folder, 20)
    (folder.begin(40, 1) / "model").write_bytes(b"weig")
    folder.clean()
    assert list(folder.root.iterdir()) == [path]


def test_finish_when_ranks_have_hashed_their_files_then_takes_their_word(folder):
    path = folder.begin(20, 1)
    described = {}
    for rank in range(3):
        file = path / f"__{rank}_0.distcp"
        file.write_bytes(bytes([rank]) * 100)
        described[file.name] = describe(file)
        (path / f"__{rank}_{DIGESTS}").write_text(json.dumps({file.name: described[file.name]}))
    (path / "__1_0.distcp").write_bytes(b"x" * 100)  # changed since its rank wrote it
    final = folder.finish(path, {})
    assert not list(final.glob(f"*{DIGESTS}"))
    files = json.loads((final / "done.json").read_text())["files"]
    assert files == described
    assert [folder.intact(final, rank, 3) for rank in range(3)] == [True, False, True]
    assert newest(folder, ranks=3) is None


def test_newest_when_a_size_differs_then_no_file_of_that_checkpoint_is_read(folder, monkeypatch):
    save(folder, 20)
    path = save(folder, 40)
    (path / "model").write_bytes(b"w")
    read = []
    digest = checkpoints.file_digest
    monkeypatch.setattr(checkpoints, "file_digest", lambda file: read.append(file) or digest(file))
    found = folder.list()
    assert [c.step for c in found] == [20]
    assert read == [], "a size is enough to tell what cannot be whole"
    assert newest(folder).step == 20
    assert read == [found[0].path / "model"]


def test_verify_when_a_file_has_other_bytes_then_the_checkpoint_and_the_file_are_named(folder):
    path = save(folder, 20)
    verify(path)
    (path / "model").write_bytes(b"weightt")
    with pytest.raises(InvalidInput, match=r"step_20-inc_1': model is not .* its digest differs"):
        verify(path)
    assert not removed(path)


@pytest.mark.parametrize("gone", ["model", "done.json"])
def test_verify_when_the_run_removes_it_then_not_called_damaged(folder, gone):
    path = save(folder, 20)
    (path / gone).unlink()
    assert removed(path)
    with pytest.raises(NotFound, match="step_20-inc_1': the run has removed it"):
        verify(path)
