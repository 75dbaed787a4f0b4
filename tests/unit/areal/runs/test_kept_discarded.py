"""Kept beside what was trained on: what was not, with its cause, times, servers and turns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from tests.unit.areal.runs.test_kept_rollouts import group, keep, kept_run, writer_of

from areal.errors import InvalidInput, NotFound, Unavailable
from areal.protocol.leases import Discarded
from areal.runs.rollouts.reader import RolloutFolder
from areal.runs.rollouts.records import discarded_name, file_name
from areal.runs.rollouts.writer import RolloutWriter
from areal_launch.commands.rollouts import export, show

EQUAL = Discarded("easy", 5, "rejected", "all samples have the same reward", group("easy", 1.0, 1))
NOTHING = Discarded("broken", 9, "dead_lettered", "workflow_error after 3 attempts: KeyError")
STALE = Discarded("slow", 3, "too_stale", "head version 1 at step 5", group("slow", 0.5))


def discard(writer: RolloutWriter, step: int, *pages: Sequence[Discarded]) -> None:
    writer.keep([], step=step, incarnation=1, advantages=None, discarded=lambda: pages)


def test_what_was_not_trained_on_when_kept_then_its_cause_is_read(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    keep(writer, 1, group("a", 1.0, 0.0))
    discard(writer, 1, [EQUAL, NOTHING], [STALE])
    writer.close()
    folder = RolloutFolder(tmp_path)
    assert {each.task_id for each in folder.read()} == {"a"}
    assert {(each.outcome, each.cause) for each in folder.read()} == {("trained", None)}
    first, second, broken, slow = folder.discarded()
    assert (first.task_id, first.outcome, first.cause) == ("easy", "rejected", EQUAL.reason)
    assert (second.reward, second.input_ids, second.advantages) == (1.0, [1, 2, 3, 66, 66], None)
    assert (broken.outcome, broken.trajectory_id, broken.reward) == (
        *("dead_lettered", "broken.9"),
        None,
    )
    assert broken.input_ids == broken.versions == []
    assert (slow.outcome, slow.reward) == ("too_stale", 0.5)
    whole = parquet.read_table(tmp_path / "rollouts")  # one table for other tools
    assert whole["outcome"].to_pylist().count("trained") == 2


def test_a_step_when_nothing_was_discarded_then_there_is_no_second_file(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.keep(
        [group("a", 1.0)], step=1, incarnation=1, advantages=None, discarded=lambda: iter(())
    )
    writer.close()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == [file_name(1, 0)]


def test_the_ledger_when_it_is_away_then_what_was_trained_on_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def away() -> Iterator[list[Discarded]]:
        yield [EQUAL]
        raise Unavailable("buffer: connection refused")

    writer = writer_of(tmp_path)
    writer.keep([group("a", 1.0)], step=1, incarnation=1, advantages=None, discarded=away)
    writer.close()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == [file_name(1, 0)]
    assert "rollouts_not_kept" in capsys.readouterr().out


def test_a_replayed_step_when_it_resumes_then_what_was_discarded_is_there_once(
    tmp_path: Path,
) -> None:
    before = writer_of(tmp_path)
    for step in (1, 2, 3):
        keep(before, step, group(f"t{step}", 1.0))
        discard(before, step, [Discarded(f"d{step}", step, "expired", "its time to live")])
    before.close()
    (tmp_path / "rollouts" / f".{discarded_name(4)}.tmp").write_bytes(b"half a file")
    after = writer_of(tmp_path)
    after.resume(2)
    assert [each.task_id for each in RolloutFolder(tmp_path).discarded()] == ["d1", "d2"]
    discard(after, 3, [Discarded("d3", 3, "expired", "its time to live")])
    after.close()
    assert [each.task_id for each in RolloutFolder(tmp_path).discarded()] == ["d1", "d2", "d3"]
    assert not list((tmp_path / "rollouts").glob(".*"))


def test_space_when_it_is_used_up_then_a_step_goes_with_what_it_did_not_train_on(
    tmp_path: Path,
) -> None:
    for step in range(1, 5):
        writer = writer_of(tmp_path, keep_bytes=1 if step == 4 else 1 << 30)
        discard(writer, step, [EQUAL])
        keep(writer, step, group("a", 1.0))
        writer.close()
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == [discarded_name(4), file_name(4, 0)]


def test_times_and_servers_when_kept_then_they_are_read(tmp_path: Path) -> None:
    one = group("a", 1.0)
    one.queued_s, one.episode_s, one.score_s = 1.5, 4.0, 0.25
    one.trajectories[0].generation_s = 3.5
    one.trajectories[0].servers = ("http://a:1", "http://b:2")
    one.trajectories[0].split = "messages[2].content"
    writer = writer_of(tmp_path)
    keep(writer, 1, one)
    writer.close()
    (read,) = RolloutFolder(tmp_path).read()
    assert (read.queued_s, read.episode_s, read.score_s, read.generation_s) == (1.5, 4, 0.25, 3.5)
    assert read.servers == ["http://a:1", "http://b:2"]
    assert read.split == "messages[2].content"


def test_turns_when_kept_then_each_stretch_has_its_text(tmp_path: Path, tiny_model: Path) -> None:
    several = group("a", 1.0, 0.0)
    for each in several.trajectories:
        each.loss_mask = np.array([False, True, False, True, True])
    writer = writer_of(tmp_path, model=str(tiny_model))
    keep(writer, 1, several)
    discard(writer, 1, [NOTHING])
    writer.close()
    folder = RolloutFolder(tmp_path)
    decode = folder.tokenizer().decode
    for index, each in enumerate(folder.read()):
        assert each.turns == [
            {"sampled": False, "tokens": 1, "text": decode([1])},
            {"sampled": True, "tokens": 1, "text": decode([2])},
            {"sampled": False, "tokens": 1, "text": decode([3])},
            {"sampled": True, "tokens": 2, "text": ["AB", "BB"][index]},
        ]
        assert folder.turns(each) == each.turns
    assert folder.discarded()[0].turns == []


def test_files_of_an_earlier_release_when_read_then_what_they_lack_has_defaults(
    tmp_path: Path, tiny_model: Path
) -> None:
    run = kept_run(tmp_path, tiny_model)
    for step in (1, 2):
        path = run / "rollouts" / file_name(step, 0)
        names = ["outcome", "cause", "split", "turns", "servers", "generation_s", "queued_s"]
        table = parquet.read_table(path, partitioning=None)
        parquet.write_table(table.drop_columns([*names, "episode_s", "score_s"]), path)
    folder = RolloutFolder(run)
    late = folder.read([2])[0]
    assert (late.outcome, late.cause, late.servers, late.queued_s) == ("trained", None, [], 0.0)
    assert late.split is None
    assert [turn["text"] for turn in folder.turns(late)][1] == "AB"
    export(str(run), tmp_path / "out.parquet", "rows", None, None)
    assert parquet.read_table(tmp_path / "out.parquet")["response"].to_pylist()[0] == "AB"


def test_show_when_groups_were_discarded_then_they_are_counted_listed_and_shown(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = kept_run(tmp_path, tiny_model)
    writer = writer_of(run, model=str(tiny_model))
    discard(writer, 2, [EQUAL, NOTHING])
    writer.close()
    show(str(run), "", None, as_json=False)
    out = capsys.readouterr().out
    assert "2 groups were discarded before this step: 1 rejected (all samples have the same" in out
    show(str(run), "", None, discarded=True, as_json=False)
    out = capsys.readouterr().out
    assert "before step 2 took its batch, 2 groups ended without being trained on" in out
    assert "workflow_error" in out
    show(str(run), "", 2, discarded=True, as_json=True)
    found = json.loads(capsys.readouterr().out)["discarded"]
    assert [(one["task_id"], one["samples"], one["reward_mean"]) for one in found] == [
        ("easy", 2, 1.0),
        ("broken", 0, None),
    ]
    show(str(run), "easy", None, as_json=False)
    out = capsys.readouterr().out
    assert "easy, rejected before step 2: all samples have the same reward" in out
    assert "BB" in out
    show(str(run), "broken", None, as_json=False)
    assert "broken, dead_lettered before step 2: workflow_error after 3" in capsys.readouterr().out
    with pytest.raises(NotFound, match="no group was discarded before step 1"):
        show(str(run), "", 1, discarded=True, as_json=False)


def test_show_when_a_conversation_split_then_the_message_and_both_texts_are_told(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = kept_run(tmp_path, tiny_model)
    several = group("talk", 1.0, 1.0)
    texts = [(b"it is 12:00, hi.", b"hello"), (b"it is 12:01, hi.hello, more?", b"no")]
    for each, (prompt, answer) in zip(several.trajectories, texts, strict=True):
        size = len(prompt) + len(answer)
        each.input_ids = np.frombuffer(prompt + answer, np.uint8).astype(np.int32)
        each.loss_mask = np.arange(size) >= len(prompt)
        each.behavior_logprobs = each.rewards = np.zeros(size, np.float32)
        each.token_versions = np.where(each.loss_mask, 1, -1).astype(np.int32)
    several.trajectories[1].split = "messages[0].content"
    writer = writer_of(run, model=str(tiny_model))
    keep(writer, 3, several)
    writer.close()
    show(str(run), "talk", None, as_json=False)
    out = capsys.readouterr().out
    assert "sample 1 continues no earlier one: messages[0].content changed before answer 0" in out
    assert "12:01, hi" in out
    assert "12:00, hi" in out
    assert out.count("continues no earlier one") == 1
    show(str(run), "talk", None, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert [one["split"] for one in shown] == ["", "messages[0].content"]


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_export_when_another_user_took_a_name_beside_it_then_neither_followed_nor_waited_for(
    tmp_path: Path, tiny_model: Path, kind: str
) -> None:
    run, victim = kept_run(tmp_path, tiny_model), tmp_path / "victim"
    victim.write_text("theirs")
    for name in ("out.parquet.tmp", ".out.parquet.tmp"):
        taken = tmp_path / name
        if kind == "link":
            taken.symlink_to(victim)
        else:
            os.mkfifo(taken)
    export(str(run), tmp_path / "out.parquet", "rows", None, None)
    assert parquet.read_table(tmp_path / "out.parquet").num_rows > 0
    assert victim.read_text() == "theirs"
    assert (tmp_path / "out.parquet.tmp").lstat()
    (tmp_path / "link.parquet").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="already exists"):
        export(str(run), tmp_path / "link.parquet", "rows", None, None)
